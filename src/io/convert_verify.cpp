// Reads a converted checkpoint back and holds it against its source. Plain loops over the loader's decoding: nothing
// here is shared with what quantised.
#include <fmt/format.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/parallel.h"
#include "io/convert_plan.h"
#include "io/layer_files.h"
#include "io/text_file.h"
#include "io/unpack.h"

namespace sluice::io {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kPieceBytes = std::int64_t{8} << 20;
constexpr std::int64_t kMaxNamed = 8;  // violations that are put into words

// A part's sums; parts are added in order, so that no figure depends on the threads.
struct Sums {
  double error2 = 0, norm2 = 0, share = 0;
  std::int64_t share_row = 0, share_col = 0;
  std::vector<std::string> violations;
  std::int64_t num_violations = 0;

  template <class Text>
  void violate(const Text& text) {
    if (num_violations++ < kMaxNamed) violations.push_back(text());
  }
};

class Verifier {
 public:
  Verifier(const ConvertPlan& plan, const fs::path& folder, const ConvertRequest& request, ConvertReport& report)
      : plan_(plan), folder_(folder), request_(request), report_(report) {}

  Status run() {
    auto catalog = Catalog::open(folder_);
    if (!catalog) return catalog.status();
    catalog_ = std::move(*catalog);
    if (catalog_.num_tensors() != plan_.tensors.size()) {
      violate(fmt::format("{} tensors are there, expected {}", catalog_.num_tensors(), plan_.tensors.size()));
    }
    SLUICE_TRY(check_layers());
    for (const ConvertStep& step : plan_.steps) SLUICE_TRY(step.is_copy() ? check_copy(step) : check_matrix(step));
    if (report_.num_quantised > 0) report_.mean_error /= static_cast<double>(report_.num_quantised);
    for (const fs::path& file : plan_.files) SLUICE_TRY(check_file(file));
    return Status::ok();
  }

 private:
  void violate(std::string text) {
    if (report_.num_violations++ < kMaxNamed) report_.violations.push_back(std::move(text));
  }

  // The loader itself must see what was meant: config.json, names, shapes, the list of what is not quantised.
  Status check_layers() {
    const auto config = read_hf_config(folder_ / "config.json");
    if (!config) return config.status();
    const StoredFormat wanted = plan_.format == WeightFormat::kFp8Block     ? StoredFormat::kE4M3Block
                                : plan_.format == WeightFormat::kFp8Channel ? StoredFormat::kE4M3Channel
                                                                            : StoredFormat::kInt8Channel;
    for (const auto& [layer, moe] : config->moe_layers) {
      const bool converted = std::binary_search(plan_.layers.begin(), plan_.layers.end(), layer);
      const auto files = find_layer(catalog_, *config, layer);
      if (!files) {
        // A layer that was left alone may lack tensors; the source's own fault is no violation.
        if (converted) violate(files.status().message());
        continue;
      }
      for (const StoredFfn* ffn : {&files->experts, &files->shared}) {
        if (ffn->present && (ffn->format == wanted) != converted)
          violate(fmt::format("layer {} is read as {}", layer, ffn->text));
      }
    }
    return Status::ok();
  }

  // The tensor a step wrote, when it is what was planned.
  TensorRef find(std::size_t out) {
    const PlannedTensor& planned = plan_.tensors[out];
    const TensorRef ref = catalog_.find(planned.name);
    if (ref && ref.entry->dtype == planned.dtype && ref.entry->shape == planned.shape) return ref;
    violate(
        fmt::format("{} is {}, expected {}{}", planned.name,
                    ref ? fmt::format("{}{}", to_string(ref.entry->dtype), shape_text(ref.entry->shape)) : "not there",
                    to_string(planned.dtype), shape_text(planned.shape)));
    return {};
  }

  Status check_copy(const ConvertStep& step) {
    ++report_.num_copied;
    const TensorRef got = find(step.out);
    if (!got) return Status::ok();
    const std::int64_t bytes = step.copy.num_bytes();
    for (std::int64_t at = 0; at < bytes; at += kPieceBytes) {
      const std::int64_t count = std::min(kPieceBytes, bytes - at);
      const std::byte *a = step.copy.data() + at, *b = got.data() + at;
      const std::int64_t same = std::mismatch(a, a + count, b).first - a;
      if (same != count) {
        violate(fmt::format("byte {} of the copied tensor {} differs", at + same, step.copy.entry->name));
        return Status::ok();
      }
      step.copy.file->drop(*step.copy.entry, at, at + count);
      got.file->drop(*got.entry, at, at + count);
      SLUICE_TRY(advance(count));
    }
    return Status::ok();
  }

  Status check_matrix(const ConvertStep& step) {
    ++report_.num_quantised;
    const StoredMatrix& m = step.matrix;
    const TensorRef weight = find(step.out), scale = find(step.out + 1);
    if (!weight || !scale) return Status::ok();
    Sums all;
    const std::int64_t strip = rows_per_strip(m);
    for (std::int64_t begin = 0; begin < m.rows; begin += strip) {
      const std::int64_t rows = std::min(strip, m.rows - begin), parts = ceil_div(rows, kScaleBlock);
      const TensorView w = rows_of(m, begin, rows, gathered_);
      std::vector<Sums> sums(static_cast<std::size_t>(parts));
      const int threads = request_.num_threads > 0 ? request_.num_threads : Machine::detect_cpu().num_threads;
      cpu::parallel_for(parts, threads, [&](std::int64_t part, int) {
        const std::int64_t first = part * kScaleBlock, count = std::min(kScaleBlock, rows - first);
        check_rows(step, w.slice(first, count), begin + first, weight, scale, sums[static_cast<std::size_t>(part)]);
      });
      for (Sums& part : sums) add(part, all);
      weight.file->drop(*weight.entry, begin * m.cols, (begin + rows) * m.cols);
      drop_rows(m, begin, rows);
      SLUICE_TRY(advance(rows * m.cols * size_bytes(m.ref.entry->dtype)));
    }
    const double error = all.norm2 > 0 ? std::sqrt(all.error2 / all.norm2) : std::sqrt(all.error2);
    report_.mean_error += error;
    const std::string& name = plan_.tensors[step.out].name;
    if (report_.worst_tensor.empty() || error > report_.worst_error) {
      report_.worst_error = error;
      report_.worst_tensor = name;
    }
    if (report_.worst_share_at.empty() || all.share > report_.worst_share) {
      report_.worst_share = all.share;
      report_.worst_share_at = fmt::format("{}[{},{}]", name, all.share_row, all.share_col);
    }
    report_.num_violations += all.num_violations;
    for (std::string& text : all.violations) {
      if (static_cast<std::int64_t>(report_.violations.size()) < kMaxNamed)
        report_.violations.push_back(std::move(text));
    }
    return Status::ok();
  }

  static void add(Sums& part, Sums& all) {
    all.error2 += part.error2;
    all.norm2 += part.norm2;
    if (part.share > all.share) {
      all.share = part.share;
      all.share_row = part.share_row;
      all.share_col = part.share_col;
    }
    all.num_violations += part.num_violations;
    for (std::string& text : part.violations) all.violations.push_back(std::move(text));
  }

  // At most 128 rows, all of one row of blocks: scales against their amax, then elements against their bound.
  void check_rows(const ConvertStep& step, const TensorView& w, std::int64_t first_row, const TensorRef& weight,
                  const TensorRef& scale, Sums& sums) const {
    const bool blocks = plan_.format == WeightFormat::kFp8Block, int8 = plan_.format == WeightFormat::kInt8Channel;
    const std::string& name = plan_.tensors[step.out].name;
    const std::int64_t rows = w.shape[0], cols = w.shape[1];
    const std::int64_t scale_cols = blocks ? ceil_div(cols, kScaleBlock) : 1;
    const std::int64_t scale_rows = blocks ? 1 : rows, first_scale = blocks ? first_row / kScaleBlock : first_row;
    std::vector<float> amax(static_cast<std::size_t>(scale_rows * scale_cols)), scales(amax.size());
    // Groups of 128 columns, or of the whole row.
    const std::int64_t width = blocks ? kScaleBlock : std::max<std::int64_t>(cols, 1);
    const auto group_of = [&](std::int64_t r, std::int64_t begin) {
      return static_cast<std::size_t>(blocks ? begin / width : r);
    };
    std::vector<float> values(static_cast<std::size_t>(width));
    const auto decode = [&](std::int64_t r, std::int64_t begin, std::int64_t count) {
      float* const to = values.data();
      if (w.dtype == DType::kF32) {
        std::memcpy(to, reinterpret_cast<const float*>(w.row(r)) + begin,
                    static_cast<std::size_t>(count) * sizeof(float));
        return;
      }
      const auto* const from = reinterpret_cast<const std::uint16_t*>(w.row(r)) + begin;
      for (std::int64_t c = 0; c < count; ++c) to[c] = std::bit_cast<float>(static_cast<std::uint32_t>(from[c]) << 16);
    };
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t begin = 0; begin < cols; begin += width) {
        const std::int64_t count = std::min(width, cols - begin);
        decode(r, begin, count);
        float a = amax[group_of(r, begin)];
        const float* const from = values.data();
        for (std::int64_t c = 0; c < count; ++c) a = std::max(a, std::fabs(from[c]));
        amax[group_of(r, begin)] = a;
      }
    }
    for (std::size_t i = 0; i < scales.size(); ++i) {
      const auto at = first_scale * scale_cols + static_cast<std::int64_t>(i);
      scales[i] = decode_f32(scale.data() + at * 4);
      const float want = std::max(amax[i], 1e-10f) / (int8 ? 127.0f : 448.0f);
      if (!(scales[i] == want)) {
        sums.violate([&] {
          return fmt::format("{}[{},{}] is {}, expected {} (amax {})", plan_.tensors[step.out + 1].name,
                             at / scale_cols, at % scale_cols, scales[i], want, amax[i]);
        });
      }
    }
    std::array<double, 256> codes{};
    for (int byte = 0; byte < 256; ++byte) {
      const auto code = static_cast<std::uint8_t>(byte);
      codes[static_cast<std::size_t>(byte)] =
          int8 ? static_cast<double>(static_cast<std::int8_t>(code)) : static_cast<double>(e4m3_value(code));
    }
    // docs/numerics.md, weight quantisation: half a step of the format, and the rounding of the quotient.
    const double relative = int8 ? 0.0 : 0x1p-4, absolute = int8 ? 0.5 : 0x1p-10;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::byte* const q = weight.data() + (first_row + r) * cols;
      for (std::int64_t begin = 0; begin < cols; begin += width) {
        const std::int64_t count = std::min(width, cols - begin);
        decode(r, begin, count);
        const double s = static_cast<double>(scales[group_of(r, begin)]);
        const float* const from = values.data();
        double error2 = 0, norm2 = 0;
        for (std::int64_t i = 0; i < count; ++i) {
          const double v = static_cast<double>(from[i]);
          const double got = s * codes[std::to_integer<std::size_t>(q[begin + i])];
          double error = std::fabs(got - v);
          if (std::isnan(error)) error = HUGE_VAL;
          const double bound = std::max(relative * std::fabs(v), absolute * s) + 0x1p-22 * std::fabs(v);
          error2 += error * error;
          norm2 += v * v;
          if (error <= std::min(sums.share, 1.0) * bound) continue;  // of nearly all: no division
          if (error > sums.share * bound) {
            sums.share = error / bound;
            sums.share_row = first_row + r;
            sums.share_col = begin + i;
          }
          if (error > bound) {
            sums.violate([&] {
              return fmt::format("{}[{},{}] stands for {}, and {} is {}: off by {}, the bound is {}", name,
                                 first_row + r, begin + i, got, step.matrix.element(first_row + r, begin + i), v, error,
                                 bound);
            });
          }
        }
        sums.error2 += error2;
        sums.norm2 += norm2;
      }
    }
  }

  Status check_file(const fs::path& relative) {
    auto a = RegularFile::open(plan_.folder / relative), b = RegularFile::open(folder_ / relative);
    if (!a) return a.status();
    if (!b) return b.status();
    std::vector<char> x(static_cast<std::size_t>(kPieceBytes)), y(x.size());
    const auto fill = [](int fd, std::vector<char>& piece) {
      std::size_t got = 0;
      while (got < piece.size()) {
        const ssize_t n = ::read(fd, piece.data() + got, piece.size() - got);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        got += static_cast<std::size_t>(n);
      }
      return got;
    };
    while (true) {
      const std::size_t n = fill(a->fd(), x), m = fill(b->fd(), y);
      if (n != m || std::memcmp(x.data(), y.data(), n) != 0) {
        violate(fmt::format("the copied file {} differs", relative.string()));
        return Status::ok();
      }
      if (n == 0) return Status::ok();
    }
  }

  Status advance(std::int64_t bytes) {
    if (request_.stop && request_.stop()) return {StatusCode::kIoError, "convert: stopped when asked to"};
    done_ += bytes;
    if (request_.progress) request_.progress("checking", done_, plan_.source_bytes);
    return Status::ok();
  }

  const ConvertPlan& plan_;
  const fs::path& folder_;
  const ConvertRequest& request_;
  ConvertReport& report_;
  Catalog catalog_;
  std::vector<std::byte> gathered_;
  std::int64_t done_ = 0;
};

}  // namespace

Status verify_converted(const ConvertPlan& plan, const fs::path& folder, const ConvertRequest& request,
                        ConvertReport& report) {
  return Verifier(plan, folder, request, report).run();
}

}  // namespace sluice::io
