// The vocabulary every other header is written in: dtypes, axes, tensor specs and views, errors as values,
// the per-call context, and the implementation table with its selection rule.
//
// Letters (the same everywhere): T tokens, S slots (top-k per token), E experts, L local experts, H hidden,
// I intermediate, R routed rows, P ranks, Hb/Ib = ceil(H/128), ceil(I/128). A scale is always a multiplier:
// real = q * scale. All sizes, strides and offsets are 64-bit.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace sluice {

// ---------------------------------------------------------------------------------------------------------
// Errors as values
// ---------------------------------------------------------------------------------------------------------

enum class StatusCode : std::uint8_t {
  kOk = 0,
  kInvalidArgument,    // the caller's shapes, dtypes, strides, pointers or values
  kUnsupported,        // a legal request that no implementation on this machine serves; the text says why
  kNotFound,           // a file, layer or tensor that is not there
  kBadData,            // a file whose content is wrong
  kIoError,            // the operating system refused
  kWorkspaceTooSmall,  // the text gives both byte counts
  kInternal,           // our fault
  kOutOfMemory,        // of a device; the text names the tensor, the bytes it needs and the bytes that are free
  kPeerFailure,  // another rank is dead, late, or was made for another layer; the text names rank, stage and numbers
};

std::string_view to_string(StatusCode code);

// Success, or a code and a sentence with names and numbers in it. Cheap to return when ok (a null pointer).
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message);

  static Status ok() { return {}; }
  bool is_ok() const { return error_ == nullptr; }
  explicit operator bool() const { return is_ok(); }
  StatusCode code() const;
  const std::string& message() const;  // "" when ok
  // The same code, with `where` and ": " put before the message. Ok stays ok.
  Status with_context(std::string_view where) const;

 private:
  struct Error {
    StatusCode code;
    std::string message;
  };
  std::shared_ptr<const Error> error_;
};

// A value or the Status that explains its absence. Ask is_ok() first: reaching for the value of a failed Result throws
// std::bad_variant_access, the one exception the library knows, and only for that mistake of the caller.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT: implicit by design
  Result(Status status) : state_(std::move(status)) {}  // NOLINT: implicit by design; must not be ok
  bool is_ok() const { return state_.index() == 0; }
  explicit operator bool() const { return is_ok(); }
  Status status() const { return is_ok() ? Status::ok() : std::get<1>(state_); }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &std::get<0>(state_); }
  const T* operator->() const { return &std::get<0>(state_); }
  T& operator*() & { return std::get<0>(state_); }
  const T& operator*() const& { return std::get<0>(state_); }

 private:
  std::variant<T, Status> state_;
};

// Returns the Status of `expr` from the enclosing function unless it is ok.
#define SLUICE_TRY(expr)                                                     \
  do {                                                                       \
    if (::sluice::Status sluice_status_ = (expr); !sluice_status_.is_ok()) { \
      return sluice_status_;                                                 \
    }                                                                        \
  } while (false)

// ---------------------------------------------------------------------------------------------------------
// Element types
// ---------------------------------------------------------------------------------------------------------

enum class DType : std::uint8_t {
  kF32,
  kBF16,
  kF16,
  kF64,
  kE4M3,  // OCP e4m3fn: 1-4-3, bias 7, largest 448, NaN 0x7F/0xFF, no infinity
  kE5M2,
  kE8M0,  // a power of two, 2^(byte-127); 255 is NaN
  kI8,
  kU8,
  kI16,
  kU16,
  kI32,
  kU32,
  kI64,
  kU64,
  kBool,
};
inline constexpr int kNumDTypes = 16;

std::string_view to_string(DType dtype);
std::int64_t size_bytes(DType dtype);
// Eight-bit values that mean something only together with their scales.
constexpr bool is_quantised(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kI8; }

// A set of dtypes a tensor may have.
class DTypeSet {
 public:
  constexpr DTypeSet() = default;
  constexpr DTypeSet(DType one) : bits_(1u << static_cast<unsigned>(one)) {}  // NOLINT: implicit by design
  constexpr DTypeSet(std::initializer_list<DType> many) {
    for (DType d : many) bits_ |= 1u << static_cast<unsigned>(d);
  }
  constexpr bool has(DType d) const { return (bits_ >> static_cast<unsigned>(d)) & 1u; }
  std::string to_string() const;  // "bf16 or f32"

 private:
  std::uint32_t bits_ = 0;
};

// ---------------------------------------------------------------------------------------------------------
// Axes, specs and views
// ---------------------------------------------------------------------------------------------------------

// The extent an axis of a tensor stands for. N, K and their blocks belong to the GEMM stage alone.
enum class Axis : std::uint8_t {
  kOne,
  kT,
  kS,
  kE,
  kL,
  kL1 /* L+1 */,
  kH,
  kI,
  kI2 /* 2I */,
  kR,
  kHb /* ceil(H/128) */,
  kIb /* ceil(I/128) */,
  kN,
  kK,
  kNb /* scale rows of N */,
  kKb /* ceil(K/128) */,
  kCounters,
};
inline constexpr int kNumAxes = 17;
std::string_view to_string(Axis axis);

inline constexpr int kMaxRank = 3;
inline constexpr std::int64_t kScaleBlock =
    128;  // rows and columns that share one weight scale; columns of one activation scale

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

enum class DeviceKind : std::uint8_t { kCpu, kCuda };
std::string_view to_string(DeviceKind kind);
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// What a stage says about one of its tensors, once; checks, messages, explain and docs are made from it.
struct TensorSpec {
  std::string_view name;
  DTypeSet dtypes;
  std::array<Axis, kMaxRank> axes{};
  int rank = 0;
  bool optional = false;    // may be absent (TensorView::is_present() false)
  bool any_stride = false;  // scales: both orders of [Hb,R] are legal and told apart by stride
  bool repeats = false;     // scales that are only read: a stride of 0 gives every element of the axis the same one

  constexpr TensorSpec(std::string_view n, DTypeSet d, std::initializer_list<Axis> a) : name(n), dtypes(d) {
    for (Axis axis : a) axes[static_cast<std::size_t>(rank++)] = axis;
  }
  constexpr TensorSpec opt() const {
    TensorSpec s = *this;
    s.optional = true;
    return s;
  }
  constexpr TensorSpec strided() const {
    TensorSpec s = *this;
    s.any_stride = true;
    return s;
  }
  // Strided, and a stride of 0 is legal too: a scale of the whole tensor is one value seen as many.
  constexpr TensorSpec repeated() const {
    TensorSpec s = strided();
    s.repeats = true;
    return s;
  }
  std::string to_string() const;  // "x[T,H] bf16 or f32"
};

// A borrowed, typed, strided window on memory of one device. Strides count elements. Whoever fills a stage's
// Args decides what is written: stages write only the tensors their contract names as outputs.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;  // 0: absent
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};
  Device device{};

  // A dense row-major view.
  static TensorView dense(const void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});

  bool is_present() const { return rank > 0; }
  std::int64_t num_elements() const;
  std::int64_t num_bytes() const;  // of the elements, not of the span they are strided over
  bool is_dense() const;           // row-major without gaps
  // Rows [begin, begin+count) of axis 0.
  TensorView slice(std::int64_t begin, std::int64_t count) const;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  // Address of element (i, 0, ...).
  std::byte* row(std::int64_t i) const { return static_cast<std::byte*>(data) + i * stride[0] * size_bytes(dtype); }
  std::string to_string() const;  // "bf16[256,7168]"
};

// Expert ids and expert offsets are both i32 arrays; as types they cannot be exchanged.
struct ExpertIds {
  TensorView view;
};  // [T,S] i32, -1: not routed
struct ExpertOffsets {
  TensorView view;
};  // [L+1] i32, first row of each expert, then the row count

// Whether pointers are judged too (kRun), or only shapes, dtypes and strides (kPlan, data may be null).
enum class Phase : std::uint8_t { kPlan, kRun };

// Binds the extents of specs to the shapes of views and compares each later occurrence with the first:
// "grouped_gemm: w[L,N,K] axis 2 (K) is 2048, but a[R,K] has K = 7168".
class AxisBinder {
 public:
  explicit AxisBinder(std::string_view stage) : stage_(stage) {}
  Status bind(const TensorSpec& spec, const TensorView& view, Phase phase);
  // For a tensor that may come in two shapes, told apart by the extents bound so far: as `second` where that fits, else
  // as `first`. The refusal of a shape that is neither names both.
  Status bind_either(const TensorSpec& first, const TensorSpec& second, const TensorView& view, Phase phase);
  // Whether the rank and the extents are what has been bound so far.
  bool fits(const TensorSpec& spec, const TensorView& view) const;
  // Fixes an extent the caller knows by another way; `from` is quoted when something disagrees with it and must outlive
  // the binder.
  void set(Axis axis, std::int64_t extent, std::string_view from);
  std::optional<std::int64_t> extent(Axis axis) const;

 private:
  // Kept as values and put into words only when something disagrees: binding allocates nothing.
  struct Bound {
    std::int64_t extent = -1;
    std::string_view from;
    std::optional<TensorSpec> spec;
    TensorView view;
    std::string to_string() const;
  };
  std::string_view stage_;
  std::array<Bound, kNumAxes> bound_{};
};

// ---------------------------------------------------------------------------------------------------------
// Calls and implementations
// ---------------------------------------------------------------------------------------------------------

// Things worth counting that are not errors. A stage that is given a counters tensor adds to it.
enum class Counter : std::uint8_t {
  kNonFiniteTokens,  // tokens with fewer than S experts of finite score
  kInvalidIds,       // expert ids >= E or < -1, treated as -1
};
inline constexpr int kNumCounters = 2;

// What one call may use. Nothing here outlives the call.
struct Ctx {
  void* stream = nullptr;            // cudaStream_t on a GPU; unused on the CPU
  std::span<std::byte> workspace{};  // scratch; the needed size comes from the query of the thing that is called
  int num_threads = 0;  // CPU worker threads; 0: as many as the layer was planned for (never more); a stage alone: 1
};

// A version or a compute capability. Compared as numbers: 12.10 is newer than 12.3, and 13.0 is newer than 12.4.
struct Version {
  int major = 0;
  int minor = 0;
  friend auto operator<=>(const Version&, const Version&) = default;
};
std::string to_string(Version version);  // "12.3"

// What is known of a GPU; all zero for a CPU.
struct Gpu {
  std::string name;  // "NVIDIA H200"
  Version capability;
  int num_sms = 0;
  std::int64_t shared_bytes_per_block = 0;  // the most a block may ask for (opt-in)
  std::int64_t memory_bytes = 0;
  Version driver;   // newest CUDA the driver serves
  Version runtime;  // CUDA this library was built with
};

// The machine implementations are chosen for.
struct Machine {
  Device device{};
  int num_threads = 1;
  std::string simd;                                // name of the best compiled and supported SIMD target, e.g. "AVX3"
  Gpu gpu;                                         // of `device` where it is a GPU
  static Machine detect_cpu(int num_threads = 0);  // 0: one thread per usable core
  // GPU `index`, or why it cannot be used, with what was found and what is needed: a library without CUDA, no driver, a
  // driver older than the library's CUDA, no device, no device of that index. Any generation of GPU is accepted here; what
  // an implementation needs of one is said by its can_run.
  static Result<Machine> detect_cuda(int index = 0);
};

// One row of a stage's table. Plain function pointers: what was chosen is resolved once and then only called.
template <class Args>
struct Impl {
  std::string_view name;
  DeviceKind device = DeviceKind::kCpu;
  Status (*can_run)(const Args&, const Machine&) = nullptr;              // ok, or why not
  std::int64_t (*scratch_bytes)(const Args&, const Machine&) = nullptr;  // Ctx::workspace it needs; null: none
  std::string (*describe)(const Args&, const Machine&) = nullptr;        // its configuration, for explain; null: none
  Status (*run)(const Args&, const Ctx&) = nullptr;                      // Args were checked before
};

struct Declined {
  std::string name;
  std::string reason;
};

template <class Args>
struct Choice {
  const Impl<Args>* impl = nullptr;
  std::vector<Declined> declined;
};

// The caller's say in the choice.
struct Selection {
  std::string forced;                 // an implementation's name; "" for the first that can run
  std::vector<std::string> disabled;  // names never chosen
};

namespace detail {
Status no_implementation(std::string_view stage, const Selection& selection, const std::vector<Declined>& declined);
bool is_disabled(const Selection& selection, std::string_view name);
}  // namespace detail

// The first row of `table` that can run, with the reasons of all that were passed over. A reason that holds whatever else
// is in the table (disabled, another device) is given before one that names a row that was taken instead. There is no
// silent fallback: a forced name that declines is an error with its reason.
template <class Args>
Result<Choice<Args>> choose(std::string_view stage, std::span<const Impl<Args>> table, const Args& args,
                            const Machine& machine, const Selection& selection) {
  Choice<Args> choice;
  for (const Impl<Args>& impl : table) {
    std::string reason;
    if (detail::is_disabled(selection, impl.name)) {
      reason = "disabled by the caller or by SLUICE_DISABLE";
    } else if (impl.device != machine.device.kind) {
      reason = "runs on " + std::string(to_string(impl.device)) + ", the layer is on " +
               std::string(to_string(machine.device.kind));
    } else if (!selection.forced.empty() && impl.name != selection.forced) {
      reason = "not asked: " + selection.forced + " was forced";
    } else if (choice.impl != nullptr) {
      reason = "not asked: " + std::string(choice.impl->name) + " comes first";
    } else if (Status s = impl.can_run(args, machine); !s.is_ok()) {
      reason = s.message();
    } else {
      choice.impl = &impl;
      continue;
    }
    choice.declined.push_back({std::string(impl.name), std::move(reason)});
  }
  if (choice.impl == nullptr) return detail::no_implementation(stage, selection, choice.declined);
  return choice;
}

}  // namespace sluice
