// Loads and placements as files.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <map>
#include <numeric>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "io/hf_config.h"
#include "io/json_text.h"
#include "io/npy.h"
#include "io/temporary_file.h"
#include "io/text_file.h"
#include "sluice/placement_plan.h"

namespace sluice {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kLoadFormat = "sluice-expert-load";
constexpr std::string_view kPlacementFormat = "sluice-placement";
constexpr int kVersion = 1;
constexpr std::int64_t kMaxLayerNumber = INT32_MAX;

// A JSON object with known fields. `where` is the file and the way to the object: "FILE: layers[2]".
class Fields {
 public:
  static Result<Fields> of(const json& value, std::string where, std::initializer_list<std::string_view> names) {
    if (!value.is_object()) return bad(fmt::format("{}: expected an object, found {}", where, value.type_name()));
    for (const auto& [key, field] : value.items()) {
      if (std::find(names.begin(), names.end(), key) == names.end())
        return bad(fmt::format("{}: the field '{}' is not known", where, key));
    }
    for (const std::string_view name : names) {
      if (!value.contains(name)) return bad(fmt::format("{}: the field '{}' is missing", where, name));
    }
    return Fields(value, std::move(where));
  }

  Result<std::int64_t> integer(std::string_view name, std::int64_t low, std::int64_t high) const {
    return integer_of(value_->at(name), path(name), low, high);
  }
  static Result<std::int64_t> integer_of(const json& value, const std::string& where, std::int64_t low,
                                         std::int64_t high) {
    // A number above 2^63 is unsigned here, and negative after a cast.
    const bool fits =
        value.is_number_integer() && !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX);
    if (!fits || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high)
      return bad(fmt::format("{}: expected a whole number from {} to {}, found {}", where, low, high, shorten(value)));
    return value.get<std::int64_t>();
  }
  Result<const json*> array(std::string_view name, std::int64_t low, std::int64_t high) const {
    return array_of(value_->at(name), path(name), low, high);
  }
  static Result<const json*> array_of(const json& value, const std::string& where, std::int64_t low,
                                      std::int64_t high) {
    if (!value.is_array()) return bad(fmt::format("{}: expected a list, found {}", where, value.type_name()));
    const auto size = static_cast<std::int64_t>(value.size());
    if (size < low || size > high) {
      return bad(low == high ? fmt::format("{}: expected {} values, found {}", where, low, size)
                             : fmt::format("{}: expected {} to {} values, found {}", where, low, high, size));
    }
    return &value;
  }
  std::string path(std::string_view name) const {
    return where_.ends_with(']') ? fmt::format("{}.{}", where_, name) : fmt::format("{}: {}", where_, name);
  }

  static Status bad(std::string text) { return {StatusCode::kBadData, std::move(text)}; }

 private:
  Fields(const json& value, std::string where) : value_(&value), where_(std::move(where)) {}
  static std::string shorten(const json& value) {
    return value.is_structured() ? std::string(value.type_name()) : io::shorten(value);
  }
  const json* value_;
  std::string where_;
};

// What kind of file it is comes first: of another kind of JSON file every field would be unknown.
Result<Fields> open_fields(const json& root, const std::string& where, std::string_view format,
                           std::initializer_list<std::string_view> names) {
  const auto found = root.is_object() ? root.find("format") : root.end();
  if (found == root.end() || *found != format)
    return Fields::bad(fmt::format("{}: this is no JSON object with \"format\": \"{}\"", where, format));
  Result<Fields> fields = Fields::of(root, where, names);
  if (fields) SLUICE_TRY(fields->integer("version", kVersion, kVersion).status());
  return fields;
}

Result<ExpertLoads> parse_loads(const json& root, const std::string& where) {
  const Result<Fields> file = open_fields(root, where, kLoadFormat, {"format", "version", "num_experts", "layers"});
  if (!file) return file.status();
  const Result<std::int64_t> E = file->integer("num_experts", 1, kMaxPlacementSlots);
  if (!E) return E.status();
  const Result<const json*> layers = file->array("layers", 1, kMaxPlacementLayers);
  if (!layers) return layers.status();
  std::map<std::int64_t, std::vector<double>> by_layer;
  for (std::size_t i = 0; i < (*layers)->size(); ++i) {
    const std::string path = fmt::format("{}: layers[{}]", where, i);
    const Result<Fields> fields = Fields::of((**layers)[i], path, {"layer", "tokens"});
    if (!fields) return fields.status();
    const Result<std::int64_t> layer = fields->integer("layer", 0, kMaxLayerNumber);
    if (!layer) return layer.status();
    const Result<const json*> tokens = fields->array("tokens", *E, *E);
    if (!tokens) return tokens.status();
    std::vector<double>& values = by_layer[*layer];
    if (!values.empty()) return Fields::bad(fmt::format("{}: layer {} is there twice", path, *layer));
    for (std::size_t e = 0; e < (*tokens)->size(); ++e) {
      const json& value = (**tokens)[e];
      if (!value.is_number()) {
        return Fields::bad(
            fmt::format("{}[{}]: expected a number, found {}", fields->path("tokens"), e, value.type_name()));
      }
      values.push_back(value.get<double>());
    }
  }
  ExpertLoads loads;
  loads.num_experts = *E;
  for (const auto& [layer, values] : by_layer) {
    loads.layers.push_back(layer);
    loads.tokens.insert(loads.tokens.end(), values.begin(), values.end());
  }
  if (const Status status = validate(loads); !status.is_ok()) return Fields::bad(status.with_context(where).message());
  return loads;
}

template <class T>
void append(std::vector<double>& values, const io::NpyArray& array) {
  for (std::size_t at = 0; at < array.data.size(); at += sizeof(T)) {
    T value;
    std::memcpy(&value, array.data.data() + at, sizeof(T));
    values.push_back(static_cast<double>(value));
  }
}

Result<ExpertLoads> read_npy_loads(const std::filesystem::path& path) {
  const std::string where = path.string();
  // A pipe under the name of a file would be waited for.
  SLUICE_TRY(io::RegularFile::open(path).status());
  const Result<io::NpyHeader> header = io::read_npy_header(path);
  if (!header) return header.status();
  const std::vector<std::int64_t>& shape = header->shape;
  if (shape.empty() || shape.size() > 2)
    return Fields::bad(fmt::format("{}: loads are [layers, experts] or [experts], found {} axes", where, shape.size()));
  const std::int64_t E = shape.back(), n = shape.size() == 2 ? shape.front() : 1;
  if (E < 1 || E > kMaxPlacementSlots || n < 1 || n > kMaxPlacementLayers) {
    return Fields::bad(fmt::format("{}: {} layers of {} experts, expected 1 to {} of 1 to {}", where, n, E,
                                   kMaxPlacementLayers, kMaxPlacementSlots));
  }
  const Result<io::NpyArray> array = io::read_npy(path);
  if (!array) return array.status();
  ExpertLoads loads;
  loads.num_experts = E;
  loads.layers.resize(static_cast<std::size_t>(n));
  std::iota(loads.layers.begin(), loads.layers.end(), std::int64_t{0});
  switch (array->dtype) {
    case DType::kF32: append<float>(loads.tokens, *array); break;
    case DType::kF64: append<double>(loads.tokens, *array); break;
    case DType::kI8: append<std::int8_t>(loads.tokens, *array); break;
    case DType::kU8: append<std::uint8_t>(loads.tokens, *array); break;
    case DType::kI16: append<std::int16_t>(loads.tokens, *array); break;
    case DType::kU16: append<std::uint16_t>(loads.tokens, *array); break;
    case DType::kI32: append<std::int32_t>(loads.tokens, *array); break;
    case DType::kU32: append<std::uint32_t>(loads.tokens, *array); break;
    case DType::kI64: append<std::int64_t>(loads.tokens, *array); break;
    case DType::kU64: append<std::uint64_t>(loads.tokens, *array); break;
    default:
      return Fields::bad(fmt::format("{}: loads are integers, f32 or f64, found {}", where, to_string(array->dtype)));
  }
  if (const Status status = validate(loads); !status.is_ok()) return Fields::bad(status.with_context(where).message());
  return loads;
}

Result<std::vector<LayerPlacement>> parse_placements(const json& root, const std::string& where) {
  const Result<Fields> file = open_fields(root, where, kPlacementFormat,
                                          {"format", "version", "num_experts", "num_ranks", "num_slots", "layers"});
  if (!file) return file.status();
  const Result<std::int64_t> E = file->integer("num_experts", 1, kMaxPlacementSlots);
  if (!E) return E.status();
  const Result<std::int64_t> P = file->integer("num_ranks", 1, kMaxPlacementSlots);
  if (!P) return P.status();
  const Result<std::int64_t> N = file->integer("num_slots", *E, kMaxPlacementSlots);
  if (!N) return N.status();
  const Result<const json*> layers = file->array("layers", 1, kMaxPlacementLayers);
  if (!layers) return layers.status();
  std::vector<LayerPlacement> placements;
  std::set<std::int64_t> seen;
  for (std::size_t i = 0; i < (*layers)->size(); ++i) {
    const std::string path = fmt::format("{}: layers[{}]", where, i);
    const Result<Fields> fields = Fields::of((**layers)[i], path, {"layer", "ranks"});
    if (!fields) return fields.status();
    const Result<std::int64_t> layer = fields->integer("layer", 0, kMaxLayerNumber);
    if (!layer) return layer.status();
    if (!seen.insert(*layer).second) return Fields::bad(fmt::format("{}: layer {} is there twice", path, *layer));
    const Result<const json*> ranks = fields->array("ranks", *P, *P);
    if (!ranks) return ranks.status();
    Placement placement;
    placement.num_experts = *E;
    placement.rank_begin.push_back(0);
    for (std::size_t rank = 0; rank < (*ranks)->size(); ++rank) {
      const std::string slots_path = fmt::format("{}[{}]", fields->path("ranks"), rank);
      const Result<const json*> slots = Fields::array_of((**ranks)[rank], slots_path, 0, *N);
      if (!slots) return slots.status();
      for (std::size_t slot = 0; slot < (*slots)->size(); ++slot) {
        const Result<std::int64_t> expert =
            Fields::integer_of((**slots)[slot], fmt::format("{}[{}]", slots_path, slot), 0, *E - 1);
        if (!expert) return expert.status();
        placement.slot_expert.push_back(static_cast<std::int32_t>(*expert));
      }
      placement.rank_begin.push_back(static_cast<std::int32_t>(placement.num_slots()));
    }
    // Two counts of the slots that disagree: one of them would size the weights, the other the loop that loads them.
    if (placement.num_slots() != *N) {
      return Fields::bad(fmt::format("{}: the ranks hold {} slots, but num_slots is {}", fields->path("ranks"),
                                     placement.num_slots(), *N));
    }
    if (const Status status = validate(placement); !status.is_ok())
      return Fields::bad(status.with_context(path).message());
    placements.push_back({*layer, std::move(placement)});
  }
  return placements;
}

}  // namespace

Status write_loads(const std::filesystem::path& path, const ExpertLoads& loads) {
  SLUICE_TRY(validate(loads).with_context(path.string()));
  ordered_json root = {{"format", kLoadFormat}, {"version", kVersion}, {"num_experts", loads.num_experts}};
  ordered_json& layers = root["layers"] = ordered_json::array();
  for (std::size_t i = 0; i < loads.layers.size(); ++i) {
    ordered_json tokens = ordered_json::array();
    for (const double value : loads.of(i)) {
      const auto whole = static_cast<std::int64_t>(value);  // at most 2^53
      if (static_cast<double>(whole) == value) {
        tokens.push_back(whole);
      } else {
        tokens.push_back(value);
      }
    }
    layers.push_back({{"layer", loads.layers[i]}, {"tokens", std::move(tokens)}});
  }
  return io::write_text(path, root.dump() + "\n");
}

Result<ExpertLoads> read_loads(const std::filesystem::path& path) {
  if (path.extension() == ".npy") return read_npy_loads(path);
  const Result<json> root = io::read_json(path);
  if (!root) return root.status();
  return parse_loads(*root, path.string());
}

Status write_placements(const std::filesystem::path& path, const std::vector<LayerPlacement>& placements) {
  const auto refuse = [&](std::string text) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: {}", path.string(), text));
  };
  if (placements.empty()) return refuse("there is no placement to write");
  const Placement& first = placements.front().placement;
  ordered_json root = {{"format", kPlacementFormat},
                       {"version", kVersion},
                       {"num_experts", first.num_experts},
                       {"num_ranks", first.num_ranks()},
                       {"num_slots", first.num_slots()}};
  ordered_json& layers = root["layers"] = ordered_json::array();
  std::set<std::int64_t> seen;
  for (const auto& [layer, placement] : placements) {
    SLUICE_TRY(validate(placement).with_context(fmt::format("{}: layer {}", path.string(), layer)));
    if (layer < 0 || layer > kMaxLayerNumber) return refuse(fmt::format("a layer has the number {}", layer));
    if (!seen.insert(layer).second) return refuse(fmt::format("layer {} is there twice", layer));
    if (placement.num_experts != first.num_experts || placement.num_ranks() != first.num_ranks() ||
        placement.num_slots() != first.num_slots()) {
      return refuse(fmt::format("layer {} has {} experts, {} ranks and {} slots, layer {} has {}, {} and {}", layer,
                                placement.num_experts, placement.num_ranks(), placement.num_slots(),
                                placements.front().layer, first.num_experts, first.num_ranks(), first.num_slots()));
    }
    ordered_json ranks = ordered_json::array();
    for (std::int64_t rank = 0; rank < placement.num_ranks(); ++rank) ranks.push_back(placement.experts_of(rank));
    layers.push_back({{"layer", layer}, {"ranks", std::move(ranks)}});
  }
  return io::write_text(path, root.dump() + "\n");
}

Result<std::vector<LayerPlacement>> read_placements(const std::filesystem::path& path) {
  const Result<json> root = io::read_json(path);
  if (!root) return root.status();
  return parse_placements(*root, path.string());
}

}  // namespace sluice
