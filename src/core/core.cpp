// Names, statuses, views and the axis binder.
#include "sluice/core.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace sluice {

std::string_view to_string(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "ok";
    case StatusCode::kInvalidArgument: return "invalid argument";
    case StatusCode::kUnsupported: return "unsupported";
    case StatusCode::kNotFound: return "not found";
    case StatusCode::kBadData: return "bad data";
    case StatusCode::kIoError: return "i/o error";
    case StatusCode::kWorkspaceTooSmall: return "workspace too small";
    case StatusCode::kInternal: return "internal error";
    case StatusCode::kOutOfMemory: return "out of memory";
    case StatusCode::kPeerFailure: return "peer failure";
  }
  return "unknown status";
}

Status::Status(StatusCode code, std::string message) {
  if (code != StatusCode::kOk) error_ = std::make_shared<const Error>(Error{code, std::move(message)});
}

StatusCode Status::code() const { return error_ ? error_->code : StatusCode::kOk; }

const std::string& Status::message() const {
  static const std::string kEmpty;
  return error_ ? error_->message : kEmpty;
}

Status Status::with_context(std::string_view where) const {
  if (is_ok()) return *this;
  // What already says where it happened needs no second word for it.
  const std::string prefix = fmt::format("{}: ", where);
  return message().starts_with(prefix) ? *this : Status(code(), prefix + message());
}

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kF64: return "f64";
    case DType::kE4M3: return "e4m3";
    case DType::kE5M2: return "e5m2";
    case DType::kE8M0: return "e8m0";
    case DType::kI8: return "i8";
    case DType::kU8: return "u8";
    case DType::kI16: return "i16";
    case DType::kU16: return "u16";
    case DType::kI32: return "i32";
    case DType::kU32: return "u32";
    case DType::kI64: return "i64";
    case DType::kU64: return "u64";
    case DType::kBool: return "bool";
  }
  return "unknown dtype";
}

std::int64_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kE8M0:
    case DType::kI8:
    case DType::kU8:
    case DType::kBool: return 1;
    case DType::kBF16:
    case DType::kF16:
    case DType::kI16:
    case DType::kU16: return 2;
    case DType::kF32:
    case DType::kI32:
    case DType::kU32: return 4;
    case DType::kF64:
    case DType::kI64:
    case DType::kU64: return 8;
  }
  return 0;
}

std::string DTypeSet::to_string() const {
  std::string text;
  for (int i = 0; i < kNumDTypes; ++i) {
    const DType dtype = static_cast<DType>(i);
    if (!has(dtype)) continue;
    if (!text.empty()) text += " or ";
    text += sluice::to_string(dtype);
  }
  return text;
}

std::string_view to_string(Axis axis) {
  static constexpr std::array<std::string_view, kNumAxes> kNames = {
      "1", "T", "S", "E", "L", "L+1", "H", "I", "2I", "R", "Hb", "Ib", "N", "K", "Nb", "Kb", "counters"};
  return kNames[static_cast<std::size_t>(axis)];
}

std::string to_string(Version version) { return fmt::format("{}.{}", version.major, version.minor); }

std::string_view to_string(DeviceKind kind) { return kind == DeviceKind::kCpu ? "cpu" : "cuda"; }

std::string TensorSpec::to_string() const {
  std::string text(name);
  text += '[';
  for (int i = 0; i < rank; ++i) {
    if (i > 0) text += ',';
    text += sluice::to_string(axes[static_cast<std::size_t>(i)]);
  }
  return text + "] " + dtypes.to_string();
}

// Extents come from callers and files: any product of them must stay defined.
static std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}

TensorView TensorView::dense(const void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.device = device;
  for (std::int64_t extent : shape) view.shape[static_cast<std::size_t>(view.rank++)] = extent;
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.stride[static_cast<std::size_t>(i)] = stride;
    stride = saturating_product(stride, std::max<std::int64_t>(view.shape[static_cast<std::size_t>(i)], 1));
  }
  return view;
}

std::int64_t TensorView::num_elements() const {
  if (rank == 0) return 0;
  std::int64_t n = 1;
  for (int i = 0; i < rank; ++i) n = saturating_product(n, shape[static_cast<std::size_t>(i)]);
  return n;
}

std::int64_t TensorView::num_bytes() const { return saturating_product(num_elements(), size_bytes(dtype)); }

bool TensorView::is_dense() const {
  std::int64_t expected = 1;
  for (int i = rank - 1; i >= 0; --i) {
    const std::size_t axis = static_cast<std::size_t>(i);
    if (shape[axis] > 1 && stride[axis] != expected) return false;
    expected = saturating_product(expected, std::max<std::int64_t>(shape[axis], 1));
  }
  return true;
}

TensorView TensorView::slice(std::int64_t begin, std::int64_t count) const {
  TensorView view = *this;
  if (view.data != nullptr) view.data = row(begin);
  view.shape[0] = count;
  return view;
}

std::string TensorView::to_string() const {
  if (!is_present()) return "absent";
  std::string text(sluice::to_string(dtype));
  text += '[';
  for (int i = 0; i < rank; ++i) text += (i > 0 ? "," : "") + std::to_string(shape[static_cast<std::size_t>(i)]);
  return text + "]";
}

// ---------------------------------------------------------------------------------------------------------

namespace {

// An axis whose extent follows from another one.
struct Derived {
  Axis base;
  std::int64_t (*extent)(std::int64_t);
};

std::optional<Derived> derivation(Axis axis) {
  switch (axis) {
    case Axis::kI2: return Derived{Axis::kI, [](std::int64_t i) { return 2 * i; }};
    case Axis::kL1: return Derived{Axis::kL, [](std::int64_t l) { return l + 1; }};
    case Axis::kHb: return Derived{Axis::kH, [](std::int64_t h) { return ceil_div(h, kScaleBlock); }};
    case Axis::kIb: return Derived{Axis::kI, [](std::int64_t i) { return ceil_div(i, kScaleBlock); }};
    case Axis::kKb: return Derived{Axis::kK, [](std::int64_t k) { return ceil_div(k, kScaleBlock); }};
    default: return std::nullopt;
  }
}

// The extent of the base axis, where the derived one determines it.
std::optional<std::int64_t> invert(Axis axis, std::int64_t extent) {
  if (axis == Axis::kI2 && extent % 2 == 0) return extent / 2;
  if (axis == Axis::kL1 && extent >= 1) return extent - 1;
  return std::nullopt;
}

}  // namespace

void AxisBinder::set(Axis axis, std::int64_t extent, std::string_view from) {
  bound_[static_cast<std::size_t>(axis)] = {extent, from, std::nullopt, {}};
}

std::string AxisBinder::Bound::to_string() const {
  if (spec) return fmt::format("{} = {}", spec->to_string(), view.to_string());
  return std::string(from);
}

std::optional<std::int64_t> AxisBinder::extent(Axis axis) const {
  if (axis == Axis::kOne) return 1;
  if (axis == Axis::kCounters) return kNumCounters;
  if (const Bound& bound = bound_[static_cast<std::size_t>(axis)]; bound.extent >= 0) return bound.extent;
  if (auto derived = derivation(axis)) {
    if (const Bound& base = bound_[static_cast<std::size_t>(derived->base)]; base.extent >= 0)
      return derived->extent(base.extent);
  }
  return std::nullopt;
}

Status AxisBinder::bind(const TensorSpec& spec, const TensorView& view, Phase phase) {
  const auto fail = [&](std::string text) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: {}", stage_, text));
  };
  if (!view.is_present()) {
    if (spec.optional) return Status::ok();
    return fail(fmt::format("{} is missing", spec.to_string()));
  }
  if (!spec.dtypes.has(view.dtype)) {
    return fail(fmt::format("{} must be {}, got {}", spec.name, spec.dtypes.to_string(), view.to_string()));
  }
  if (view.rank != spec.rank) {
    return fail(fmt::format("{} has {} axes, got {}", spec.to_string(), spec.rank, view.to_string()));
  }
  for (int i = 0; i < spec.rank; ++i) {
    const std::size_t a = static_cast<std::size_t>(i);
    const Axis axis = spec.axes[a];
    const std::int64_t got = view.shape[a];
    if (got < 0) return fail(fmt::format("{} axis {} has the negative extent {}", spec.to_string(), i, got));
    if (const auto known = extent(axis)) {
      if (*known != got) {
        const auto derived = derivation(axis);
        const Bound& own = bound_[static_cast<std::size_t>(axis)];
        const Bound& base = own.extent >= 0 || !derived ? own : bound_[static_cast<std::size_t>(derived->base)];
        return fail(fmt::format("{} axis {} ({}) is {}, expected {}{}", spec.to_string(), i, sluice::to_string(axis),
                                got, *known, base.extent < 0 ? "" : fmt::format(" from {}", base.to_string())));
      }
      continue;
    }
    if (const auto derived = derivation(axis)) {
      const auto base = invert(axis, got);
      if (!base && axis == Axis::kI2)
        return fail(fmt::format("{} axis {} (2I) is {}, which is odd", spec.to_string(), i, got));
      if (base) {
        bound_[static_cast<std::size_t>(derived->base)] = {*base, {}, spec, view};
        continue;
      }
    }
    bound_[static_cast<std::size_t>(axis)] = {got, {}, spec, view};
  }
  if (view.num_elements() == 0) return Status::ok();
  std::int64_t span_bytes = 0;
  for (int i = 0; i < spec.rank; ++i) {
    const std::size_t a = static_cast<std::size_t>(i);
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(view.shape[a], view.stride[a], &bytes) ||
        __builtin_mul_overflow(bytes, size_bytes(view.dtype), &bytes) ||
        __builtin_add_overflow(span_bytes, bytes, &span_bytes)) {
      return fail(fmt::format("{} axis {} is {} times a stride of {} elements, more bytes than can be addressed",
                              spec.to_string(), i, view.shape[a], view.stride[a]));
    }
  }
  // Rows may be pitched, but an inner axis may not be strided and rows may not overlap: a view of every other
  // column, a transpose or a broadcast is refused instead of read as if it were dense.
  if (!spec.any_stride) {
    std::int64_t inner = 1;
    for (int i = spec.rank - 1; i >= 0; --i) {
      const std::size_t a = static_cast<std::size_t>(i);
      if (view.shape[a] > 1) {
        const bool innermost = i == spec.rank - 1;
        if (innermost ? view.stride[a] != 1 : view.stride[a] < inner) {
          return fail(fmt::format("{} axis {} has stride {} elements, expected {}{}", spec.to_string(), i,
                                  view.stride[a], innermost ? "" : "at least ", inner));
        }
      }
      inner = view.shape[a] > 1 ? view.shape[a] * view.stride[a] : inner;
    }
  } else {
    for (int i = 0; i < spec.rank; ++i) {
      const std::size_t a = static_cast<std::size_t>(i);
      const std::int64_t least = spec.repeats ? 0 : 1;
      if (view.shape[a] > 1 && view.stride[a] < least) {
        return fail(fmt::format("{} axis {} has stride {} elements, expected at least {}", spec.to_string(), i,
                                view.stride[a], least));
      }
    }
    // Any order of the axes, but each element at an address of its own, apart from axes that repeat one.
    for (int i = 0; i < spec.rank; ++i) {
      for (int j = 0; j < spec.rank; ++j) {
        const std::size_t outer = static_cast<std::size_t>(i);
        const std::size_t inner = static_cast<std::size_t>(j);
        if (i == j || view.shape[outer] <= 1 || view.shape[inner] <= 1) continue;
        if (spec.repeats && (view.stride[outer] == 0 || view.stride[inner] == 0)) continue;
        if (view.stride[outer] < view.stride[inner] || (view.stride[outer] == view.stride[inner] && i > j)) continue;
        if (view.stride[outer] <= (view.shape[inner] - 1) * view.stride[inner]) {
          return fail(fmt::format("{} = {} has strides {} and {} for axes {} and {}, so that elements overlap",
                                  spec.to_string(), view.to_string(), view.stride[outer], view.stride[inner], i, j));
        }
      }
    }
  }
  if (phase == Phase::kRun) {
    if (view.data == nullptr)
      return fail(fmt::format("{} is a null pointer, but has {} elements", spec.name, view.num_elements()));
    const auto address = reinterpret_cast<std::uintptr_t>(view.data);
    const auto alignment = static_cast<std::uintptr_t>(size_bytes(view.dtype));
    if (address % alignment != 0) {
      return fail(fmt::format("{} is at an address that is {} bytes off the {} bytes a {} needs", spec.name,
                              address % alignment, alignment, sluice::to_string(view.dtype)));
    }
  }
  return Status::ok();
}

bool AxisBinder::fits(const TensorSpec& spec, const TensorView& view) const {
  if (view.rank != spec.rank) return false;
  for (int i = 0; i < spec.rank; ++i) {
    const std::size_t a = static_cast<std::size_t>(i);
    const auto known = extent(spec.axes[a]);
    if (known && *known != view.shape[a]) return false;
  }
  return true;
}

Status AxisBinder::bind_either(const TensorSpec& first, const TensorSpec& second, const TensorView& view, Phase phase) {
  if (!view.is_present()) return bind(first, view, phase);
  if (fits(second, view)) return bind(second, view, phase);
  const Status status = bind(first, view, phase);
  if (status.is_ok() || fits(first, view)) return status;
  return {status.code(), fmt::format("{}; nor is it {}", status.message(), second.to_string())};
}

namespace detail {

bool is_disabled(const Selection& selection, std::string_view name) {
  return std::find(selection.disabled.begin(), selection.disabled.end(), name) != selection.disabled.end();
}

Status no_implementation(std::string_view stage, const Selection& selection, const std::vector<Declined>& declined) {
  std::string reasons;
  for (const Declined& d : declined) {
    if (d.name == selection.forced) {
      return {StatusCode::kUnsupported, fmt::format("{}: {} was forced and cannot run: {}", stage, d.name, d.reason)};
    }
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", d.name, d.reason);
  }
  if (!selection.forced.empty()) {
    std::string names;
    for (const Declined& d : declined) names += (names.empty() ? "" : ", ") + d.name;
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: there is no implementation '{}'; there are: {}", stage, selection.forced, names)};
  }
  return {StatusCode::kUnsupported, fmt::format("{}: no implementation can run ({})", stage, reasons)};
}

}  // namespace detail
}  // namespace sluice
