#include "grid_peers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "io/text_file.h"

namespace sluice::cli {

namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxFileBytes = std::uint64_t{64} << 20;
constexpr double kSameRunSeconds = 3600;
constexpr std::size_t kMaxNameLength = 40;

// A value as the refusal quotes it.
std::string quoted(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  constexpr std::size_t kMax = 60;
  return text.size() <= kMax ? text : text.substr(0, kMax) + "...";
}

// One object of a file, which knows where it stands.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  Status refuse(std::string_view text) const { return {StatusCode::kBadData, where_ + ": " + std::string(text)}; }
  Result<std::string> text(const char* key) const {
    SLUICE_TRY(present(key));
    const Json& value = object_[key];
    if (!value.is_string()) return refuse(fmt::format("{} is {}, wanted a text", key, quoted(value)));
    return value.get<std::string>();
  }
  // A name goes into tables, pictures and JSON: letters that need no care anywhere.
  Result<std::string> name(const char* key) const {
    Result<std::string> value = text(key);
    if (!value) return value;
    const bool plain = std::all_of(value->begin(), value->end(), [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             std::string_view("_.+-/() ").find(c) != std::string_view::npos;
    });
    if (value->empty() || value->size() > kMaxNameLength || !plain) {
      return refuse(fmt::format("{} is {}, wanted 1 to {} letters, digits, spaces or any of _.+-/()", key,
                                quoted(object_[key]), kMaxNameLength));
    }
    return value;
  }
  Result<double> positive(const char* key) const {
    SLUICE_TRY(present(key));
    const Json& value = object_[key];
    if (!value.is_number() || !(value.get<double>() > 0) || !std::isfinite(value.get<double>()))
      return refuse(fmt::format("{} is {}, wanted a number above 0", key, quoted(value)));
    return value.get<double>();
  }
  Result<std::int64_t> count(const char* key) const {
    SLUICE_TRY(present(key));
    const Json& value = object_[key];
    if (!value.is_number_integer() || value.get<std::int64_t>() < 1)
      return refuse(fmt::format("{} is {}, wanted a whole number of 1 or more", key, quoted(value)));
    return value.get<std::int64_t>();
  }
  Result<bool> flag(const char* key) const {
    SLUICE_TRY(present(key));
    const Json& value = object_[key];
    if (!value.is_boolean()) return refuse(fmt::format("{} is {}, wanted true or false", key, quoted(value)));
    return value.get<bool>();
  }
  // "2026-12-01T05:52:00Z", in `seconds` too.
  Result<std::string> date(const char* key, std::time_t& seconds) const {
    Result<std::string> value = text(key);
    if (!value) return value;
    std::tm parts = {};
    const char* end = strptime(value->c_str(), "%Y-%m-%dT%H:%M:%SZ", &parts);
    if (end == nullptr || *end != '\0' || value->size() != std::string_view("2026-12-01T05:52:00Z").size())
      return refuse(fmt::format("{} is {}, wanted a date as 2026-12-01T05:52:00Z", key, quoted(object_[key])));
    seconds = timegm(&parts);
    return value;
  }

 private:
  Status present(const char* key) const {
    return object_.is_object() && object_.contains(key) ? Status::ok() : refuse(fmt::format("{} is missing", key));
  }
  const Json& object_;
  std::string where_;
};

// What one file adds, judged against what was known before.
class Reader {
 public:
  Reader(Peers& peers, const std::map<std::string, bool>& rows, std::time_t now, const std::string& device)
      : peers_(peers), rows_(rows), now_(now), device_(device) {}

  Status read(const std::string& file) {
    Result<std::string> text = io::read_text(file, kMaxFileBytes);
    if (!text) return text.status();
    Json root;
    try {
      root = Json::parse(*text);
    } catch (const Json::parse_error& error) {
      return {StatusCode::kBadData, fmt::format("{}: no JSON: {}", file, error.what())};
    }
    source_ = {file, {}, {}, {}, false, false};
    if (root.is_object() && root.contains("form")) return peers_file(root);
    if (root.is_object() && root.contains("schema")) return record(root);
    return Fields(root, file)
        .refuse("neither a peers file (it has no \"form\") nor a record of scripts/gpu-check (no \"schema\")");
  }

 private:
  Status head(const Fields& fields, const Fields& with_device, const char* device_key, bool is_record) {
    std::time_t seconds = 0;
    Result<std::string> date = fields.date("date", seconds);
    if (!date) return date.status();
    Result<std::string> device = with_device.name(device_key);
    if (!device) return device.status();
    source_.date = *date;
    source_.device = *device;
    source_.another_device = *device != device_;
    const double age = std::difftime(now_, seconds);
    source_.another_run = is_record || source_.another_device || age > kSameRunSeconds || age < -kSameRunSeconds;
    peers_.sources.push_back(source_);
    return {};
  }

  Status add(const Fields& fields, PeerFigure figure) {
    figure.source = peers_.sources.size() - 1;
    const auto [known, is_new] = seen_.emplace(std::tuple(figure.row, figure.peer, figure.covers), source_.file);
    if (!is_new) {
      return fields.refuse(
          fmt::format("peer {} has a figure for row {} already, from {}", figure.peer, figure.row, known->second));
    }
    peers_.figures.push_back(std::move(figure));
    return {};
  }

  Status known_row(const Fields& fields, const std::string& row) const {
    if (rows_.count(row) != 0) return {};
    return fields.refuse(fmt::format("row {} is neither in the grid nor in this run", quoted(Json(row))));
  }

  static Result<const Json*> list(const Json& holder, const std::string& where) {
    if (!holder.is_object() || !holder.contains("figures")) return Fields(holder, where).refuse("figures is missing");
    const Json& figures = holder["figures"];
    if (!figures.is_array())
      return Fields(holder, where).refuse(fmt::format("figures is {}, wanted a list", quoted(figures)));
    return &figures;
  }

  Status peers_file(const Json& root) {
    const Fields fields(root, source_.file);
    Result<std::string> form = fields.text("form");
    if (!form) return form.status();
    if (*form != "sluice-peers")
      return fields.refuse(fmt::format("form is {}, wanted \"sluice-peers\"", quoted(root["form"])));
    Result<std::int64_t> version = fields.count("version");
    if (!version) return version.status();
    if (*version != 1) return fields.refuse(fmt::format("version is {}, this command reads version 1", *version));
    SLUICE_TRY(head(fields, fields, "device", false));
    const Result<const Json*> figures = list(root, source_.file);
    if (!figures) return figures.status();
    for (std::size_t i = 0; i < (*figures)->size(); ++i) {
      const Fields one((**figures)[i], fmt::format("{}: figures[{}]", source_.file, i));
      Result<std::string> row = one.text("row"), peer = one.name("peer"), covers = one.text("covers");
      Result<double> us = one.positive("us");
      Result<bool> checked = one.flag("checked");
      for (const Status& status : {row.status(), peer.status(), covers.status(), us.status(), checked.status()})
        SLUICE_TRY(status);
      SLUICE_TRY(known_row(one, *row));
      if (*covers != "layer" && *covers != "gemms")
        return one.refuse(fmt::format("covers is {}, wanted \"layer\" or \"gemms\"", quoted(Json(*covers))));
      SLUICE_TRY(add(one, {*row, *peer, *covers == "layer" ? Covers::kLayer : Covers::kGemms, *us, *checked, 0}));
    }
    return {};
  }

  // Lines of the peers' programs as gpu_check.py collected them. The fastest of a peer's configurations counts.
  Status record(const Json& root) {
    const Fields fields(root, source_.file);
    Result<std::int64_t> schema = fields.count("schema");
    if (!schema) return schema.status();
    if (*schema != 1) return fields.refuse(fmt::format("schema is {}, this command reads schema 1", *schema));
    Result<std::string> commit = fields.name("commit");
    if (!commit) return commit.status();
    source_.commit = *commit;
    static const Json kNothing;
    const Json& gpu = root.contains("gpu") ? root["gpu"] : kNothing;
    SLUICE_TRY(head(fields, Fields(gpu, source_.file + ": gpu"), "name", true));
    if (!root.contains("peers")) return fields.refuse("peers is missing: the record was made without them");
    const std::string where = source_.file + ": peers";
    const Result<const Json*> figures = list(root["peers"], where);
    if (!figures) return figures.status();
    struct Best {
      double up = HUGE_VAL, down = HUGE_VAL;
      bool checked = true;
    };
    std::map<std::pair<std::string, std::string>, Best> best;
    for (std::size_t i = 0; i < (*figures)->size(); ++i) {
      const Json& line = (**figures)[i];
      const Fields one(line, fmt::format("{}.figures[{}]", where, i));
      Result<std::string> bench = one.text("bench");
      if (!bench) return bench.status();
      if (*bench != "grouped_gemm" || line.contains("error")) continue;
      Result<std::string> shape = one.text("shape"), peer = one.name("impl"), gemm = one.text("gemm");
      Result<std::int64_t> tokens = one.count("tokens");
      Result<double> us = one.positive("us");
      for (const Status& status : {shape.status(), peer.status(), gemm.status(), tokens.status(), us.status()})
        SLUICE_TRY(status);
      const std::string row = fmt::format("{}:{}", *shape, *tokens);
      SLUICE_TRY(known_row(one, row));
      if (*gemm != "up" && *gemm != "down")
        return one.refuse(fmt::format("gemm is {}, wanted \"up\" or \"down\"", quoted(Json(*gemm))));
      if (peer->ends_with("bf16") != rows_.at(row)) continue;
      const Json error = line.value("worst_error", Json());
      Best& entry = best[{row, *peer}];
      double& time = *gemm == "up" ? entry.up : entry.down;
      time = std::min(time, *us);
      entry.checked = entry.checked && error.is_number() && error.get<double>() >= 0 && error.get<double>() < 1;
    }
    for (const auto& [key, entry] : best) {
      const double us = entry.up + entry.down;
      if (std::isfinite(us)) SLUICE_TRY(add(fields, {key.first, key.second, Covers::kGemms, us, entry.checked, 0}));
    }
    return {};
  }

  Peers& peers_;
  const std::map<std::string, bool>& rows_;
  std::time_t now_;
  const std::string& device_;
  PeerSource source_;
  std::map<std::tuple<std::string, std::string, Covers>, std::string> seen_;
};

}  // namespace

Result<Peers> read_peers(const std::vector<std::string>& files, const std::map<std::string, bool>& rows,
                         std::time_t now, const std::string& device) {
  Peers peers;
  Reader reader(peers, rows, now, device);
  for (const std::string& file : files) SLUICE_TRY(reader.read(file));
  return peers;
}

}  // namespace sluice::cli
