// The router GEMM on tensor cores: exact on integers, within the derived bound on real values, the same bits for a row
// whatever the batch, the tile and the split, run after run; what it declines goes to the row with the CPU's bits.
#include <cmath>
#include <limits>

#include "gate/cuda.h"
#include "gpu/device_mirror.h"
#include "harness/buffer.h"
#include "harness/compare.h"
#include "sluice/stage/gate.h"

namespace sluice::test {
namespace {

using gate::LogitsArgs;

class GateLogitsWgmmaCuda : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && first_gpu().gpu.capability != Version{9, 0})
      GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }
};

// Units of 2^-24 of the magnitudes it adds up by which one instruction may fall short, and those of a chunk's 32.
constexpr std::int64_t kInstructionUnits = 10;
constexpr std::int64_t kTensorCount = kInstructionUnits * gate::kChunkColumns / 16;

const Impl<LogitsArgs>& wgmma() { return gate::logits_impls()[0]; }

struct Problem {
  std::int64_t num_tokens, hidden, num_experts;
  bool has_bias = false;
  std::int64_t gap = 0;  // of the rows of x and w, in steps of 8
};

std::string to_string(const Problem& p) {
  return "T=" + std::to_string(p.num_tokens) + " H=" + std::to_string(p.hidden) +
         " E=" + std::to_string(p.num_experts) + (p.has_bias ? " biased" : "");
}

struct Tensors {
  explicit Tensors(const Problem& p)
      : x(DType::kBF16, {p.num_tokens, p.hidden}, {.row_pitch_elems = ceil_div(p.hidden, 8) * 8 + 8 * p.gap}),
        w(DType::kBF16, {p.num_experts, p.hidden}, {.row_pitch_elems = ceil_div(p.hidden, 8) * 8 + 16 * p.gap}),
        bias(DType::kF32, {p.num_experts}, {.offset_elems = 1}),
        logits(DType::kF32, {p.num_tokens, p.num_experts},
               {.row_pitch_elems = p.num_experts + (p.gap > 0 ? 5 : 0), .offset_elems = p.gap > 0 ? 1 : 0}),
        has_bias(p.has_bias) {}
  LogitsArgs args() const { return {x.view(), w.view(), has_bias ? bias.view() : TensorView{}, logits.view()}; }
  void run() {
    logits.poison();
    const auto x_before = x.bytes();
    const auto w_before = w.bytes();
    const LogitsArgs a = args();
    ASSERT_TRUE(gate::check(a)) << gate::check(a).message();
    const Status status = run_mirrored(wgmma(), a, [](LogitsArgs& v) {
      return std::vector<TensorView*>{&v.x, &v.w_gate, &v.router_bias, &v.logits};
    });
    ASSERT_TRUE(status) << status.message();
    EXPECT_TRUE(logits.guards_intact());
    EXPECT_TRUE(x.unchanged_since(x_before));
    EXPECT_TRUE(w.unchanged_since(w_before));
  }
  Buffer x, w, bias, logits;
  bool has_bias;
};

Product exact(const Tensors& in) {
  Product product = exact_product(in.x.to_doubles(), in.w.to_doubles(), in.x.view().shape[0], in.w.view().shape[0],
                                  in.x.view().shape[1]);
  for (std::size_t i = 0; in.has_bias && i < product.value.size(); ++i) {
    const double bias = in.bias.at(static_cast<std::int64_t>(i) % in.w.view().shape[0]);
    product.value[i] += bias;
    product.magnitude[i] += std::fabs(bias);
  }
  return product;
}

// Every kernel and the edges of its tiles; H around the chunk of 512 and the step of 64; E around the tiles of experts.
const Problem kProblems[] = {
    {1, 8, 1},
    {1, 7168, 1, true},
    {3, 1, 2},
    {5, 64, 8, true},
    {64, 65, 9, true, 1},
    {65, 512, 16},
    {63, 513, 17, true, 2},
    {128, 511, 31, true},
    {129, 1000, 32, false, 1},
    {17, 2048, 33, true},
    {8, 2880, 128, true},
    {100, 1024, 63},
    {191, 1536, 64, true},
    {256, 576, 65, true, 1},
    {33, 7168, 256},
    {2, 7168, 384, true},
    {511, 640, 128},
    {512, 704, 160, true},
    {513, 704, 160, true},
    {600, 1100, 72, true, 1},
    {1025, 520, 129, true},
    {1100, 512, 8, true},
    {2100, 264, 257},
    {4100, 200, 384, true},
    {70, 300, 1024, true},
    {8200, 136, 256, true},
};

TEST_F(GateLogitsWgmmaCuda, IntegersAreExact) {
  for (const Problem& p : kProblems) {
    SCOPED_TRACE(to_string(p));
    Tensors in(p);
    in.x.fill_integers(1, -8, 8);
    in.w.fill_integers(2, -8, 8);
    in.bias.fill_integers(3, -100, 100);
    in.run();
    Buffer want(DType::kF32, {p.num_tokens, p.num_experts});
    want.fill_values(exact(in).value);
    EXPECT_TRUE(same_bits(in.logits.view(), want.view()));
    if (HasFailure()) return;
  }
}

TEST_F(GateLogitsWgmmaCuda, RealValuesAreWithinTheBound) {
  for (const Problem& p : kProblems) {
    SCOPED_TRACE(to_string(p));
    Tensors in(p);
    in.x.fill_normal(21, 1.0);
    in.w.fill_normal(22, 0.1);
    in.bias.fill_normal(23, 1.0);
    in.run();
    const Product want = exact(in);
    // docs/numerics.md, "The router GEMM on tensor cores": a chunk's instructions, the chunks, the bias.
    const std::int64_t roundings = kTensorCount + ceil_div(p.hidden, gate::kChunkColumns) + 1;
    EXPECT_TRUE(rows_within(in.logits.view(), want.value,
                            rounding_bounds(want.value, want.magnitude, p.num_experts, roundings, DType::kF32)));
    if (HasFailure()) return;
  }
}

// One matrix of tokens, run in batches of many sizes from many first rows: a row's bits are those of the whole batch.
TEST_F(GateLogitsWgmmaCuda, ARowIsTheSameInEveryBatch) {
  struct Case {
    std::int64_t hidden, num_experts;
  };
  for (const Case& c : {Case{7168, 256}, Case{2048, 128}, Case{4096, 8}, Case{1544, 384}}) {
    constexpr std::int64_t kTokens = 4096;
    Tensors all({kTokens, c.hidden, c.num_experts, true});
    all.x.fill_normal(41);
    all.w.fill_normal(42, 0.1);
    all.bias.fill_normal(43);
    all.run();
    const Buffer want(DType::kF32, {kTokens, c.num_experts});
    std::memcpy(want.view().data, all.logits.view().data, static_cast<std::size_t>(kTokens * c.num_experts * 4));

    DeviceMirror mirror;
    LogitsArgs device = all.args();
    for (TensorView* v : {&device.x, &device.w_gate, &device.router_bias, &device.logits}) mirror.add(*v);
    const std::int64_t bytes = wgmma().scratch_bytes(all.args(), first_gpu());
    void* scratch = nullptr;
    ASSERT_EQ(cudaMalloc(&scratch, static_cast<std::size_t>(bytes)), cudaSuccess);
    const Ctx ctx{nullptr, {static_cast<std::byte*>(scratch), static_cast<std::size_t>(bytes)}, 1};
    std::vector<float> got;
    for (std::int64_t count = 1; count <= kTokens; count += count < 200 ? 1 : count < 1100 ? 31 : 333) {
      const std::int64_t first = (count * 97) % (kTokens - count + 1);
      LogitsArgs part = device;
      part.x = device.x.slice(first, count);
      part.logits = device.logits.slice(0, count);
      ASSERT_EQ(cudaMemset(device.logits.data, 0xEE, static_cast<std::size_t>(count * c.num_experts * 4)), cudaSuccess);
      const Status status = wgmma().run(part, ctx);
      ASSERT_TRUE(status) << status.message();
      got.resize(static_cast<std::size_t>(count * c.num_experts));
      ASSERT_EQ(cudaMemcpy(got.data(), part.logits.data, got.size() * 4, cudaMemcpyDeviceToHost), cudaSuccess);
      ASSERT_EQ(std::memcmp(got.data(), want.view().row(first), got.size() * 4), 0)
          << "tokens " << first << "+" << count << " of H=" << c.hidden << " E=" << c.num_experts;
    }
    cudaFree(scratch);
  }
}

// Whatever choose_logits_tile chooses on another GPU, the bits are these.
TEST_F(GateLogitsWgmmaCuda, EveryTileAndSplitHasTheSameBits) {
  Tensors in({300, 3000, 200, true});
  in.x.fill_normal(61);
  in.w.fill_normal(62);
  in.bias.fill_normal(63);
  in.run();
  int num_tiles = 0;
  for (const int tokens : {64, 128}) {
    for (const int experts : {8, 16, 32, 64, 128}) {
      for (const int split : {1, 2, 5, 6}) {
        DeviceMirror mirror;
        LogitsArgs device = in.args();
        for (TensorView* v : {&device.x, &device.w_gate, &device.router_bias, &device.logits}) mirror.add(*v);
        std::vector<std::byte> junk(static_cast<std::size_t>(wgmma().scratch_bytes(in.args(), first_gpu())));
        TensorView scratch = TensorView::dense(junk.data(), DType::kU8, {static_cast<std::int64_t>(junk.size())});
        DeviceMirror scratch_mirror;
        scratch_mirror.add(scratch);
        ASSERT_EQ(cudaMemset(device.logits.data, 0x11, 300 * 200 * 4), cudaSuccess);
        const Status status = gate::logits_wgmma_tile(
            device, {nullptr, {static_cast<std::byte*>(scratch.data), junk.size()}, 1}, {tokens, experts, split});
        if (status.code() == StatusCode::kInternal) continue;  // not compiled
        ASSERT_TRUE(status) << status.message();
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        EXPECT_TRUE(mirror.equals_host()) << tokens << "x" << experts << " split " << split;
        ++num_tiles;
      }
    }
  }
  EXPECT_GE(num_tiles, 20);
}

// 384 experts, few tokens, short and long K; the workspace is what the run before left there.
TEST_F(GateLogitsWgmmaCuda, AThousandRunsHaveTheSameBits) {
  for (const Problem& p : {Problem{5, 7168, 384}, Problem{64, 128, 384}, Problem{130, 1536, 384}}) {
    Tensors in(p);
    in.x.fill_normal(51);
    in.w.fill_normal(52);
    in.run();
    DeviceMirror mirror;
    LogitsArgs device = in.args();
    for (TensorView* v : {&device.x, &device.w_gate, &device.logits}) mirror.add(*v);
    const std::int64_t bytes = wgmma().scratch_bytes(in.args(), first_gpu());
    void* scratch = nullptr;
    ASSERT_EQ(cudaMalloc(&scratch, static_cast<std::size_t>(bytes) + 1), cudaSuccess);
    const Ctx ctx{nullptr, {static_cast<std::byte*>(scratch), static_cast<std::size_t>(bytes)}, 1};
    const std::size_t out_bytes = static_cast<std::size_t>(p.num_tokens * p.num_experts * 4);
    std::vector<std::byte> got(out_bytes);
    for (int run = 0; run < 1000; ++run) {
      ASSERT_EQ(cudaMemsetAsync(device.logits.data, run % 256, out_bytes), cudaSuccess);
      ASSERT_TRUE(wgmma().run(device, ctx));
      ASSERT_EQ(cudaMemcpy(got.data(), device.logits.data, out_bytes, cudaMemcpyDeviceToHost), cudaSuccess);
      ASSERT_EQ(std::memcmp(got.data(), in.logits.view().data, out_bytes), 0)
          << "run " << run << " of " << to_string(p);
    }
    cudaFree(scratch);
  }
}

TEST_F(GateLogitsWgmmaCuda, NonFiniteValuesStayInTheirRowAndColumn) {
  for (const std::int64_t num_tokens : {8, 700}) {
    Tensors in({num_tokens, 1150, 40});
    in.x.fill_integers(1, 1, 3);
    in.w.fill_integers(2, 1, 3);
    in.x.set(2 * 1150 + 1149, std::nan(""));
    in.x.set(5 * 1150 + 3, std::numeric_limits<double>::infinity());
    in.w.set(33 * 1150 + 130, -std::numeric_limits<double>::infinity());
    in.run();
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      for (std::int64_t e = 0; e < 40; ++e) {
        const double got = in.logits.at(t * 40 + e);
        if (t == 2 || (t == 5 && e == 33)) {
          EXPECT_TRUE(std::isnan(got)) << t << "," << e;
        } else if (t == 5 || e == 33) {
          EXPECT_EQ(got, (t == 5 ? 1 : -1) * std::numeric_limits<double>::infinity()) << t << "," << e;
        } else {
          EXPECT_TRUE(std::isfinite(got)) << t << "," << e;
        }
      }
    }
  }
}

// What the bound counts on: addends down to two bits below the last of the largest take part, and a sum is cut, never off
// by more than the units it is allowed.
TEST_F(GateLogitsWgmmaCuda, TensorCoresKeepTheBitsTheBoundCounts) {
  for (const bool same_instruction : {false, true}) {
    for (const double sign : {1.0, -1.0}) {
      for (int exponent = 20; exponent <= 34; ++exponent) {
        Tensors in({3, 32, 8});
        in.x.fill_constant(1);
        const std::int64_t first = same_instruction ? 1 : 16;
        const std::int64_t end = same_instruction ? 16 : 32;
        in.w.fill_with([&](std::int64_t i) {
          const std::int64_t k = i % 32;
          return k == 0 ? 1.0 : k >= first && k < end ? sign * std::ldexp(1.0, -exponent) : 0.0;
        });
        in.run();
        const double small = static_cast<double>(end - first) * std::ldexp(1.0, -exponent);
        const double error_units = std::fabs(in.logits.at(8) - (1 + sign * small)) * std::ldexp(1.0, 24);
        EXPECT_LE(error_units, static_cast<double>(kInstructionUnits)) << "2^-" << exponent;
        if (exponent <= 25) {
          EXPECT_LE(error_units, 2.0) << "2^-" << exponent << " did not take part";
        }
      }
    }
  }
}

TEST_F(GateLogitsWgmmaCuda, NoTokens) {
  Tensors in({0, 128, 8});
  in.run();
}

TEST_F(GateLogitsWgmmaCuda, WhatItCannotLoadIsDeclinedWithTheReason) {
  Tensors in({4, 128, 8});
  const auto reason = [&](const auto& spoil) {
    LogitsArgs args = in.args();
    spoil(args);
    return wgmma().can_run(args, first_gpu()).message();
  };
  EXPECT_EQ(reason([](LogitsArgs&) {}), "");
  EXPECT_NE(reason([](LogitsArgs& a) { a.x.dtype = DType::kF32; }).find("x is f32"), std::string::npos);
  EXPECT_NE(reason([](LogitsArgs& a) { a.w_gate.dtype = DType::kF32; }).find("w_gate is f32"), std::string::npos);
  EXPECT_NE(reason([](LogitsArgs& a) { a.x.stride[0] = 130; }).find("x has rows of 130 elements"), std::string::npos);
  EXPECT_NE(reason([](LogitsArgs& a) {
              a.w_gate.data = static_cast<std::byte*>(a.w_gate.data) + 2;
            }).find("w_gate does not start on a multiple of 16 bytes"),
            std::string::npos);
  // A layer resolves on shapes; the addresses of the call are judged by the call.
  DeviceMirror mirror;
  LogitsArgs device = in.args();
  for (TensorView* v : {&device.x, &device.w_gate, &device.logits}) mirror.add(*v);
  device.x.data = static_cast<std::byte*>(device.x.data) + 2;
  EXPECT_EQ(wgmma().run(device, {}).code(), StatusCode::kInvalidArgument);
}

// Needs no GPU: a choice without a kernel would fail at the first call.
TEST(GateLogitsTiles, EveryChoiceIsCompiled) {
  for (int num_sms : {16, 78, 114, 132, 148}) {
    for (std::int64_t num_experts : {1, 2, 8, 9, 16, 31, 33, 64, 65, 128, 160, 256, 384, 1024}) {
      for (std::int64_t hidden : {1, 64, 512, 513, 2048, 4096, 7168, 16384}) {
        for (std::int64_t t = 1; t < 40000; t = t < 20 ? t + 1 : t * 9 / 8) {
          const gate::LogitsTile tile = gate::choose_logits_tile(t, hidden, num_experts, num_sms);
          ASSERT_TRUE(gate::has_logits_kernel(tile)) << tile.to_string() << " for T=" << t << " E=" << num_experts;
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice::test
