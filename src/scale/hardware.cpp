#include "scale/hardware.h"

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <set>

#include "io/json_text.h"

namespace sluice::scale {

namespace {

using io::shorten;
using nlohmann::json;

// One constant: where it lives and what it may be.
struct Field {
  std::string name;
  double* number = nullptr;
  std::vector<double>* list = nullptr;
  std::int64_t* count = nullptr;
  double low = 0, high = 0;  // of every value
  bool open_low = true;      // low itself is refused
  bool ascending = false;    // a list, strictly

  std::string wanted() const {
    const std::string range =
        fmt::format("{} {} {} {:g}", open_low ? "above" : "from", low, open_low ? "and at most" : "to", high);
    if (count != nullptr) return "a whole number " + range;
    if (list == nullptr) return "a number " + range;
    return fmt::format("a list of {}numbers {}", ascending ? "ascending " : "", range);
  }
  bool takes(double v) const { return std::isfinite(v) && (open_low ? v > low : v >= low) && v <= high; }
};

std::vector<Field> fields_of(Hardware& h) {
  constexpr double kMuch = 1e6;
  std::vector<Field> fields = {
      {.name = "memory_gb", .number = &h.memory_gb, .high = kMuch},
      {.name = "hbm_gb_per_s", .number = &h.hbm_gb_per_s, .high = kMuch},
      {.name = "glue_share", .number = &h.glue_share, .high = 1},
      {.name = "launch_us", .number = &h.launch_us, .high = kMuch, .open_low = false},
      {.name = "nvlink_domain", .count = &h.nvlink_domain, .low = 1, .high = 4096, .open_low = false},
      {.name = "nvlink_gb_per_s", .number = &h.nvlink_gb_per_s, .high = kMuch},
      {.name = "nvlink_flag_us", .number = &h.nvlink_flag_us, .high = kMuch, .open_low = false},
      {.name = "nic_gb_per_s", .number = &h.nic_gb_per_s, .high = kMuch},
      {.name = "nic_latency_us", .number = &h.nic_latency_us, .high = kMuch, .open_low = false},
      {.name = "nic_setup_us", .number = &h.nic_setup_us, .high = kMuch, .open_low = false},
  };
  const auto rates = [&](const std::string& name, GemmRates& r) {
    fields.push_back({.name = name + ".peak_tflops", .number = &r.peak_tflops, .high = kMuch});
    fields.push_back({.name = name + ".fixed_us", .number = &r.fixed_us, .high = kMuch, .open_low = false});
    fields.push_back({.name = name + ".stream_share", .number = &r.stream_share, .high = 1});
    fields.push_back({.name = name + ".depth_k", .number = &r.depth_k, .high = kMuch, .open_low = false});
    fields.push_back({.name = name + ".output_share", .number = &r.output_share, .high = 10, .open_low = false});
    fields.push_back({.name = name + ".rows_per_expert", .list = &r.rows_per_expert, .high = kMuch, .ascending = true});
    fields.push_back({.name = name + ".share_of_peak", .list = &r.share_of_peak, .high = 1});
  };
  rates("fp8", h.fp8);
  rates("bf16", h.bf16);
  return fields;
}

Status bad(const std::string& where, std::string_view field, const json& value, std::string_view wanted) {
  return {StatusCode::kBadData, fmt::format("{}: {} = {}, wanted {}", where, field, shorten(value), wanted)};
}

// The first key of `object` that is none of `known`.
Status check_keys(const std::string& where, std::string_view parent, const json& object,
                  const std::set<std::string>& known) {
  for (const auto& [key, value] : object.items()) {
    if (known.count(key) != 0) continue;
    return {StatusCode::kBadData, fmt::format("{}: {}{} = {} is no field of a hardware file; there are {}", where,
                                              parent, key, shorten(value), fmt::join(known, ", "))};
  }
  return Status::ok();
}

Status read_value(const std::string& where, const Field& field, const json& value) {
  const auto refuse = [&] { return bad(where, field.name, value, field.wanted()); };
  if (field.list == nullptr) {
    if (!value.is_number() || !field.takes(value.get<double>())) return refuse();
    if (field.number != nullptr) {
      *field.number = value.get<double>();
    } else if (value.is_number_integer()) {
      *field.count = value.get<std::int64_t>();
    } else {
      return refuse();
    }
    return Status::ok();
  }
  if (!value.is_array() || value.empty()) return refuse();
  for (const json& one : value) {
    if (!one.is_number() || !field.takes(one.get<double>())) return refuse();
    if (field.ascending && !field.list->empty() && one.get<double>() <= field.list->back()) return refuse();
    field.list->push_back(one.get<double>());
  }
  return Status::ok();
}

bool names_its_kind(const std::string& source) {
  for (const std::string_view kind : {"measured: ", "published: ", "assumed: "}) {
    if (source.starts_with(kind) && source.size() > kind.size()) return true;
  }
  return false;
}

}  // namespace

Status validate(const Hardware& hardware) {
  Hardware copy = hardware;
  const auto refuse = [&](const std::string& name, const std::string& value, std::string_view wanted) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("hardware '{}': {} = {}, wanted {}", hardware.name, name, value, wanted));
  };
  for (const Field& f : fields_of(copy)) {
    const double one = f.number != nullptr ? *f.number : f.count != nullptr ? static_cast<double>(*f.count) : 0;
    if (f.list == nullptr && !f.takes(one)) return refuse(f.name, fmt::format("{}", one), f.wanted());
    if (f.list == nullptr) continue;
    double before = -INFINITY;
    for (const double v : *f.list) {
      if (!f.takes(v) || (f.ascending && v <= before)) return refuse(f.name, fmt::format("{}", v), f.wanted());
      before = v;
    }
    if (f.list->empty()) return refuse(f.name, "[]", f.wanted());
  }
  for (const auto& [name, r] : {std::pair{"fp8", &hardware.fp8}, {"bf16", &hardware.bf16}}) {
    if (r->rows_per_expert.size() == r->share_of_peak.size()) continue;
    return refuse(fmt::format("{}.share_of_peak", name), fmt::format("{} values", r->share_of_peak.size()),
                  fmt::format("one for each of the {} rows_per_expert", r->rows_per_expert.size()));
  }
  return Status::ok();
}

Result<HardwareFile> parse_hardware(const json& root, const std::string& where) {
  if (!root.is_object()) return bad(where, "the file", root, "an object");
  SLUICE_TRY(check_keys(where, "", root, {"schema", "name", "constants"}));
  const auto at = [](const json& object, const std::string& key) {
    const auto found = object.find(key);
    return found == object.end() ? json() : *found;
  };
  HardwareFile file;
  if (at(root, "schema") != 1) return bad(where, "schema", at(root, "schema"), "1");
  const json name = at(root, "name"), constants = at(root, "constants");
  if (!name.is_string() || name.get<std::string>().empty()) return bad(where, "name", name, "a text");
  if (!constants.is_object()) return bad(where, "constants", constants, "an object");
  file.hardware.name = name.get<std::string>();
  const std::vector<Field> fields = fields_of(file.hardware);
  std::set<std::string> known;
  for (const Field& field : fields) known.insert(field.name);
  SLUICE_TRY(check_keys(where, "constants.", constants, known));
  for (const Field& field : fields) {
    const json constant = at(constants, field.name);
    if (!constant.is_object()) return bad(where, field.name, constant, "an object with value and source");
    SLUICE_TRY(check_keys(where, field.name + ".", constant, {"value", "source"}));
    SLUICE_TRY(read_value(where, field, at(constant, "value")));
    const json source = at(constant, "source");
    if (!source.is_string() || !names_its_kind(source.get<std::string>())) {
      return bad(where, field.name + ".source", source,
                 "a text that begins with \"measured: \", \"published: \" or \"assumed: \"");
    }
    file.sources.push_back({field.name, at(constant, "value").dump(), source.get<std::string>()});
  }
  if (const Status ok = validate(file.hardware); !ok.is_ok())
    return Status(StatusCode::kBadData, ok.message()).with_context(where);
  return file;
}

}  // namespace sluice::scale
