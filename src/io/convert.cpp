// Carries out a plan: shard by shard into a temporary folder, then the check, then one rename.
#include "io/convert.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <nlohmann/json.hpp>

#include "io/convert_plan.h"
#include "io/output_folder.h"
#include "io/text_file.h"

namespace sluice::io {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kPieceBytes = std::int64_t{8} << 20;

class Converter {
 public:
  Converter(const ConvertPlan& plan, const ConvertRequest& request, const fs::path& folder)
      : plan_(plan), request_(request), folder_(folder) {}

  Status run() {
    std::size_t next = 0;
    for (std::size_t shard = 0; shard < plan_.num_shards; ++shard) SLUICE_TRY(write_shard(shard, next));
    if (plan_.num_shards > 1) SLUICE_TRY(write_index());
    SLUICE_TRY(write_bytes("config.json", plan_.config_json));
    for (const fs::path& file : plan_.files) SLUICE_TRY(copy_file(file));
    return Status::ok();
  }

 private:
  Status write_shard(std::size_t shard, std::size_t& next) {
    std::vector<TensorSlot> slots;
    for (const PlannedTensor& tensor : plan_.tensors) {
      if (tensor.shard == shard) slots.push_back({tensor.name, tensor.dtype, tensor.shape});
    }
    auto output = SafetensorsOutput::create(folder_ / plan_.shard_name(shard), std::move(slots), {{"format", "pt"}});
    if (!output) return output.status();
    for (; next < plan_.steps.size() && plan_.tensors[plan_.steps[next].out].shard == shard; ++next) {
      const ConvertStep& step = plan_.steps[next];
      SLUICE_TRY(step.is_copy() ? copy(step, *output) : quantise(step, *output));
    }
    return output->commit(true);
  }

  Status copy(const ConvertStep& step, SafetensorsOutput& output) {
    const std::size_t slot = plan_.tensors[step.out].slot;
    const std::int64_t bytes = step.copy.num_bytes();
    for (std::int64_t at = 0; at < bytes; at += kPieceBytes) {
      const std::int64_t count = std::min(kPieceBytes, bytes - at);
      SLUICE_TRY(output.write(slot, at, {step.copy.data() + at, static_cast<std::size_t>(count)}));
      step.copy.file->drop(*step.copy.entry, at, at + count);
      SLUICE_TRY(advance(count));
    }
    return Status::ok();
  }

  // Strips of whole blocks of rows: each is quantised as it would be in the whole matrix.
  Status quantise(const ConvertStep& step, SafetensorsOutput& output) {
    const StoredMatrix& m = step.matrix;
    const PlannedTensor &weight = plan_.tensors[step.out], &scale = plan_.tensors[step.out + 1];
    const std::int64_t strip = rows_per_strip(m);
    for (std::int64_t begin = 0; begin < m.rows; begin += strip) {
      const std::int64_t rows = std::min(strip, m.rows - begin);
      const TensorView w = rows_of(m, begin, rows, gathered_);
      const auto [scale_rows, scale_cols] = scale_shape(plan_.format, rows, m.cols);
      const std::int64_t scale_begin = plan_.format == WeightFormat::kFp8Block ? begin / kScaleBlock : begin;
      bytes_.resize(static_cast<std::size_t>(rows * m.cols));
      scales_.resize(static_cast<std::size_t>(scale_rows * scale_cols));
      const auto found = quantize_weight(
          plan_.format, w, TensorView::dense(bytes_.data(), weight.dtype, {rows, m.cols}),
          TensorView::dense(scales_.data(), DType::kF32, {scale_rows, scale_cols}), request_.num_threads);
      if (!found) return found.status().with_context(m.ref.entry->name);
      if (found->count > 0) {
        return {StatusCode::kBadData,
                fmt::format("convert: {} is {}: no scale stands for weights that are not finite ({} of them among the "
                            "{} next rows)",
                            m.element(begin + found->row, found->col), value_text(w, found->row, found->col),
                            found->count, rows)};
      }
      SLUICE_TRY(output.write(weight.slot, begin * m.cols, std::as_bytes(std::span(bytes_))));
      SLUICE_TRY(output.write(scale.slot, scale_begin * scale_cols * 4, std::as_bytes(std::span(scales_))));
      drop_rows(m, begin, rows);
      SLUICE_TRY(advance(rows * m.cols * size_bytes(m.ref.entry->dtype)));
    }
    return Status::ok();
  }

  static std::string_view value_text(const TensorView& w, std::int64_t row, std::int64_t col) {
    const std::byte* const at = w.row(row) + col * size_bytes(w.dtype);
    const float value = w.dtype == DType::kF32 ? decode_f32(at) : decode_bf16(at);
    return value != value ? "NaN" : value > 0 ? "+Inf" : "-Inf";
  }

  Status write_index() {
    nlohmann::json map = nlohmann::json::object();
    for (const PlannedTensor& tensor : plan_.tensors) map[tensor.name] = plan_.shard_name(tensor.shard);
    const nlohmann::json index = {{"metadata", {{"total_size", plan_.total_bytes}}}, {"weight_map", std::move(map)}};
    return write_bytes("model.safetensors.index.json", index.dump(2) + "\n");
  }

  // ---- other files ----

  class File {
   public:
    explicit File(const fs::path& path)
        : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)), error_(errno) {}
    ~File() {
      if (fd_ >= 0) ::close(fd_);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    Status write(const char* bytes, std::size_t count) const {
      if (fd_ < 0) return failed("cannot create the file", error_);
      while (count > 0) {
        const ssize_t n = ::write(fd_, bytes, count);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return failed("write failed", errno);
        bytes += n;
        count -= static_cast<std::size_t>(n);
      }
      return Status::ok();
    }
    Status flush() const {
      if (fd_ < 0) return failed("cannot create the file", error_);
      return ::fsync(fd_) == 0 ? Status::ok() : failed("fsync failed", errno);
    }

   private:
    Status failed(std::string_view what, int code) const {
      return {StatusCode::kIoError, fmt::format("{}: {}: {}", path_.string(), what, std::strerror(code))};
    }
    fs::path path_;
    int fd_, error_;
  };

  Status write_bytes(const std::string& name, const std::string& text) const {
    const File file(folder_ / name);
    SLUICE_TRY(file.write(text.data(), text.size()));
    return file.flush();
  }

  Status copy_file(const fs::path& relative) const {
    auto from = RegularFile::open(plan_.folder / relative);
    if (!from) return from.status();
    std::error_code error;
    fs::create_directories((folder_ / relative).parent_path(), error);
    const File to(folder_ / relative);
    std::vector<char> piece(static_cast<std::size_t>(kPieceBytes));
    while (true) {
      if (request_.stop && request_.stop()) return stopped();
      const ssize_t n = ::read(from->fd(), piece.data(), piece.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        return {StatusCode::kIoError, fmt::format("{}: {}", (plan_.folder / relative).string(), std::strerror(errno))};
      }
      if (n == 0) return to.flush();
      SLUICE_TRY(to.write(piece.data(), static_cast<std::size_t>(n)));
    }
  }

  static Status stopped() { return {StatusCode::kIoError, "convert: stopped when asked to"}; }

  Status advance(std::int64_t bytes) {
    if (request_.stop && request_.stop()) return stopped();
    done_ += bytes;
    if (request_.progress) request_.progress("writing", done_, plan_.source_bytes);
    return Status::ok();
  }

  const ConvertPlan& plan_;
  const ConvertRequest& request_;
  const fs::path& folder_;
  std::int64_t done_ = 0;
  std::vector<std::byte> gathered_, bytes_;
  std::vector<float> scales_;
};

// A disk that is too small is better known before the work. Folders on file systems that do not say are tried.
Status check_room(const ConvertPlan& plan, const fs::path& folder) {
  std::error_code error;
  std::int64_t needed = plan.total_bytes;
  for (const fs::path& file : plan.files) {
    const auto bytes = fs::file_size(plan.folder / file, error);
    if (!error) needed += static_cast<std::int64_t>(bytes);
  }
  const fs::space_info space = fs::space(folder, error);
  if (error || space.capacity == 0 || space.available == static_cast<std::uintmax_t>(-1)) return Status::ok();
  if (static_cast<std::uintmax_t>(needed) <= space.available) return Status::ok();
  return {StatusCode::kIoError, fmt::format("convert: the checkpoint takes {} bytes, and {} are free in {}", needed,
                                            space.available, folder.parent_path().string())};
}

Result<ConvertReport> convert_checked(const ConvertRequest& request) {
  auto plan = plan_convert(request);
  if (!plan) return plan.status();
  auto output = OutputFolder::create(request.out, request.replace);
  if (!output) return output.status().with_context("convert");
  SLUICE_TRY(check_room(*plan, output->path()));
  SLUICE_TRY(Converter(*plan, request, output->path()).run());

  ConvertReport report;
  report.family = plan->config.model_type;
  report.layers = plan->layers;
  report.num_shards = static_cast<std::int64_t>(plan->num_shards);
  report.source_bytes = plan->source_bytes;
  report.written_bytes = plan->total_bytes;
  for (const fs::path& file : plan->files) report.copied_files.push_back(file.string());
  report.left_out_files = plan->left_out_files;
  SLUICE_TRY(verify_converted(*plan, output->path(), request, report));
  if (report.num_violations > 0) return report;
  SLUICE_TRY(output->commit());
  return report;
}

}  // namespace

Result<ConvertReport> convert(const ConvertRequest& request) {
  try {
    return convert_checked(request);
  } catch (const std::exception& e) {  // the JSON and file system libraries, or memory
    return Status(StatusCode::kInternal, fmt::format("convert: {}", e.what()));
  }
}

}  // namespace sluice::io
