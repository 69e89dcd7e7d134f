#include "io/load_jobs.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "cpu/parallel.h"
#include "io/unpack.h"

namespace sluice::io {
namespace {

constexpr std::size_t kHugePageWorth = std::size_t{16} << 20;
constexpr std::uintptr_t kViewAlignment = 64;  // what owned memory has at least
constexpr int kMaxLoadThreads = 8;             // beyond this the disk or the page table lock is the limit

}  // namespace

Done convert_scales(const TensorRef& ref, const std::byte* src, std::int64_t count, float* dst) {
  Done done{to_f32(ref.entry->dtype, src, count, dst), Status::ok()};
  for (std::int64_t i = 0; i < count; ++i) {
    if (dst[i] < 0.0f || std::isinf(dst[i])) {
      done.status = {StatusCode::kBadData,
                     fmt::format("scale not loaded: {} holds {}, which is no scale", ref.entry->name, dst[i])};
      break;
    }
  }
  return done;
}

Done MatrixScales::read(StoredFormat format, const TensorRef& scale, std::int64_t index, std::int64_t rows,
                        std::int64_t cols) {
  per_row = is_per_channel(format);
  row_blocks = per_row ? 1 : ceil_div(cols, kScaleBlock);
  const std::int64_t count = per_row ? rows : ceil_div(rows, kScaleBlock) * row_blocks;
  const std::int64_t stored = format == StoredFormat::kE4M3Tensor ? 1 : count;
  values.resize(static_cast<std::size_t>(count));
  const std::byte* const begin = scale.data() + index * stored * size_bytes(scale.entry->dtype);
  Done done = convert_scales(scale, begin, stored, values.data());
  if (stored < count) std::fill(values.begin(), values.end(), values[0]);
  return done;
}
Status LoadJobs::allocate(DType dtype, std::initializer_list<std::int64_t> shape, TensorView& view) {
  view = TensorView::dense(nullptr, dtype, shape);
  const auto bytes = static_cast<std::size_t>(view.num_bytes());
  if (view.shape[0] == 0) return Status::ok();  // a rank without experts
  if (bytes == 0) return {StatusCode::kInternal, fmt::format("load: an empty destination {}", view.to_string())};
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    return {StatusCode::kIoError, fmt::format("load: no memory for {} ({} bytes)", view.to_string(), bytes)};
  if (bytes >= kHugePageWorth) ::madvise(memory, bytes, MADV_HUGEPAGE);
  if (poison_) std::memset(memory, 0xFF, bytes);
  view.data = memory;
  loaded_.weights.owners.emplace_back(memory, [bytes](const void* p) { ::munmap(const_cast<void*>(p), bytes); });
  destinations_.push_back({view.as<std::byte>(), static_cast<std::int64_t>(bytes)});
  return Status::ok();
}

bool LoadJobs::take_view(const TensorRef& ref, DType dtype, std::initializer_list<std::int64_t> shape,
                         std::int64_t first, std::int64_t count, TensorView& view) {
  if (reinterpret_cast<std::uintptr_t>(ref.data()) % kViewAlignment != 0) return false;
  view = TensorView::dense(ref.data(), dtype, shape).slice(first, count);
  loaded_.weights.owners.push_back(ref.file->shared_from_this());
  constexpr std::int64_t kPiece = std::int64_t{8} << 20;
  const std::int64_t begin = view.as<std::byte>() - ref.data(), end = begin + view.num_bytes();
  for (std::int64_t at = begin; at < end; at += kPiece) {
    const std::int64_t bytes = std::min(kPiece, end - at);
    jobs_.push_back({nullptr, 0, ref, at, bytes, [=](const std::byte* src) {
                       return Done{count_nan(dtype, src, bytes / size_bytes(dtype)), Status::ok()};
                     }});
  }
  return true;
}

void LoadJobs::note_conversion(std::string_view from, DType to, std::string_view how) {
  const std::string note = fmt::format("{} tensors were {} to {}", from, how, to_string(to));
  auto& notes = loaded_.notes;
  if (std::find(notes.begin(), notes.end(), note) == notes.end()) notes.push_back(note);
}

Status LoadJobs::check_ledger() const {
  std::vector<Range> claimed;
  for (const Job& job : jobs_) {
    if (job.dst_bytes > 0) claimed.push_back({job.dst, job.dst_bytes});
  }
  const auto by_address = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  std::sort(claimed.begin(), claimed.end(), by_address);
  auto wanted = destinations_;
  std::sort(wanted.begin(), wanted.end(), by_address);
  std::size_t i = 0;
  for (const Range& destination : wanted) {
    const std::byte* at = destination.begin;
    const std::byte* end = destination.begin + destination.bytes;
    for (; i < claimed.size() && claimed[i].begin == at && at < end; ++i) at += claimed[i].bytes;
    if (at != end)
      return {StatusCode::kInternal, fmt::format("load: byte {} of a destination of {} is not filled exactly once",
                                                 at - destination.begin, destination.bytes)};
  }
  if (i != claimed.size()) return {StatusCode::kInternal, "load: a destination is filled twice"};
  return Status::ok();
}

Status LoadJobs::run() {
  std::int64_t total = 0, finished = 0;
  for (const Job& job : jobs_) total += job.src_bytes;
  std::vector<Done> results(jobs_.size());
  std::mutex mutex;
  bool stopped = false;
  const int threads = std::min(Machine::detect_cpu().num_threads, kMaxLoadThreads);
  cpu::parallel_for(static_cast<std::int64_t>(jobs_.size()), threads, [&](std::int64_t index, int) {
    const Job& job = jobs_[static_cast<std::size_t>(index)];
    Done& done = results[static_cast<std::size_t>(index)];
    if (options_.stop) {
      const std::lock_guard<std::mutex> lock(mutex);
      stopped = stopped || options_.stop();
      if (stopped) return;
    }
    try {
      done = job.run(job.source.data() + job.src_begin);
    } catch (const std::exception& e) {  // an allocation inside a job
      done.status = {StatusCode::kInternal, fmt::format("load: {}: {}", job.source.entry->name, e.what())};
    }
    if (job.dst_bytes > 0) job.source.file->drop(*job.source.entry, job.src_begin, job.src_begin + job.src_bytes);
    if (options_.progress) {
      const std::lock_guard<std::mutex> lock(mutex);
      finished += job.src_bytes;
      options_.progress(finished, total);
    }
  });
  if (stopped) return {StatusCode::kIoError, "load: stopped when asked to"};
  // Per tensor, in the order of the jobs: what is reported does not depend on the threads.
  std::vector<std::pair<const TensorEntry*, std::int64_t>> nan;
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    if (!results[i].status.is_ok()) return results[i].status;
    if (results[i].num_nan == 0) continue;
    loaded_.num_nan += results[i].num_nan;
    const auto same = [&](const auto& p) { return p.first == jobs_[i].source.entry; };
    const auto it = std::find_if(nan.begin(), nan.end(), same);
    if (it != nan.end()) {
      it->second += results[i].num_nan;
    } else {
      nan.emplace_back(jobs_[i].source.entry, results[i].num_nan);
    }
  }
  constexpr std::size_t kMaxNamed = 8;
  for (std::size_t i = 0; i < nan.size() && i < kMaxNamed; ++i) {
    loaded_.nan_tensors.push_back(fmt::format("{}: {} NaN", nan[i].first->name, nan[i].second));
  }
  if (nan.size() > kMaxNamed) loaded_.nan_tensors.push_back(fmt::format("and {} more tensors", nan.size() - kMaxNamed));
  return Status::ok();
}

}  // namespace sluice::io
