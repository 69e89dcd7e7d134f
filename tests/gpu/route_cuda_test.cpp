// The route plan on a GPU: the reference's bits at every size where the work is cut differently, under strong skew, run
// after run in a dirty workspace, and replayed with other ids.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "gpu/stage_bits.h"

namespace sluice::test {
namespace {

using route::Args;

class RouteCuda : public GpuTest {};

const Impl<Args>& cuda_row() { return route::impls()[0]; }

enum class Ids { kUniform, kOneExpert, kTwoExperts, kWild, kNobody, kAscending, kTokenRuns };

struct Problem {
  std::int64_t tokens, slots, experts;
  std::int64_t first = 0;
  std::int64_t local = -1;  // all
  Ids ids = Ids::kUniform;
  std::int64_t gap = 0;  // of the rows of topk_idx and slot_row
};

struct Tensors {
  explicit Tensors(const Problem& p)
      : ids(DType::kI32, {p.tokens, p.slots}, {.row_pitch_elems = p.slots + p.gap}),
        offset(DType::kI32, {local_of(p) + 1}),
        row_token(DType::kI32, {p.tokens * p.slots + 3}),
        row_slot(DType::kI32, {p.tokens * p.slots + 3}),
        slot_row(DType::kI32, {p.tokens, p.slots}, {.row_pitch_elems = p.slots + p.gap}),
        num_rows(DType::kI32, {1}),
        counters(DType::kI64, {kNumCounters}) {
    counters.fill_constant(7);
    args.topk_idx = {ids.view()};
    args.num_experts = p.experts;
    args.first_expert = p.first;
    args.plan = {{offset.view()}, row_token.view(), row_slot.view(), slot_row.view(), num_rows.view()};
    args.counters = counters.view();
    fill(p, 1);
  }
  static std::int64_t local_of(const Problem& p) { return p.local < 0 ? p.experts : p.local; }
  void fill(const Problem& p, std::uint64_t seed) {
    Rng rng(seed * 7919 + static_cast<std::uint64_t>(p.tokens));
    ids.fill_with([&](std::int64_t i) -> double {
      switch (p.ids) {
        case Ids::kUniform: break;
        case Ids::kOneExpert: return static_cast<double>(p.experts - 1);
        case Ids::kTwoExperts: return static_cast<double>(rng.integer(0, 99) == 0 ? 0 : p.experts / 2);
        case Ids::kWild: {
          const double wild[] = {-1, -2, -2147483648.0, static_cast<double>(p.experts), 2147483647.0, 1073741824.0};
          if (rng.integer(0, 2) == 0) return wild[rng.integer(0, 5)];
          break;
        }
        case Ids::kNobody: return -1;
        case Ids::kAscending: return static_cast<double>(i * p.experts / std::max<std::int64_t>(p.tokens * p.slots, 1));
        case Ids::kTokenRuns: return static_cast<double>(i / p.slots % p.experts);
      }
      return static_cast<double>(rng.integer(0, p.experts - 1));
    });
  }
  Buffer ids, offset, row_token, row_slot, slot_row, num_rows, counters;
  Args args;
};

std::string to_string(const Problem& p) {
  return "T=" + std::to_string(p.tokens) + " S=" + std::to_string(p.slots) + " E=" + std::to_string(p.experts) +
         " L=" + std::to_string(Tensors::local_of(p)) + " ids " + std::to_string(static_cast<int>(p.ids));
}

void expect_reference_plan(const Problem& p) {
  SCOPED_TRACE(to_string(p));
  Tensors t(p);
  expect_reference_bits(route::impls(), t.args, "the plan");
}

TEST_F(RouteCuda, EverySizeHasTheReferencesPlan) {
  for (const Ids ids :
       {Ids::kUniform, Ids::kOneExpert, Ids::kTwoExperts, Ids::kWild, Ids::kNobody, Ids::kAscending, Ids::kTokenRuns}) {
    for (const Problem& p :
         {Problem{0, 8, 16}, Problem{4, 0, 16}, Problem{1, 1, 1}, Problem{1, 8, 256}, Problem{31, 3, 9},
          Problem{128, 8, 384}, Problem{1023, 8, 256}, Problem{1024, 8, 256}, Problem{1025, 8, 256},
          Problem{8192, 8, 256}, Problem{8193, 8, 384}, Problem{4097, 6, 160, 20, 20}, Problem{9001, 9, 7, 3, 4},
          Problem{2000, 32, 512, 1, 2}, Problem{5000, 10, 1024}, Problem{3000, 4, 1600}, Problem{40000, 10, 512},
          Problem{70, 5, 8, 8, 0}}) {
      Problem q = p;
      q.ids = ids;
      q.gap = p.tokens % 2;
      if (q.ids == Ids::kNobody && p.tokens > 10000) continue;
      expect_reference_plan(q);
      if (HasFailure()) return;
    }
  }
}

TEST_F(RouteCuda, AroundTheSizesWhereTheWorkIsCut) {
  for (const std::int64_t items :
       {31, 32, 33, 1023, 1024, 1025, 8191, 8192, 8193, 65535, 65536, 65537, 262143, 262144, 262145}) {
    expect_reference_plan({items, 1, 384, 0, -1, Ids::kUniform});
    expect_reference_plan({items, 1, 384, 383, 1, Ids::kOneExpert});
    if (HasFailure()) return;
  }
}

TEST_F(RouteCuda, MoreThan65536SlotsOfOneToken) { expect_reference_plan({1, 70001, 64, 0, -1, Ids::kWild}); }

// Case 25 and 81: what ran before in the same workspace, or a longer plan in the same outputs, cannot be seen; and a
// captured graph follows the ids that lie in memory when it is replayed.
TEST_F(RouteCuda, Case81_ReplayFollowsTheIdsFromManyToFewToNone) {
  const Problem p{2048, 8, 384};
  Tensors t(p);
  DeviceMirror mirror;
  Args device = t.args;
  for (TensorView* v : views_of(device)) mirror.add(*v);
  JunkScratch workspace(cuda_row(), t.args);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_TRUE(cuda_row().run(device, workspace.ctx(stream)));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  std::uint64_t seed = 1;
  for (const Ids ids : {Ids::kUniform, Ids::kOneExpert, Ids::kWild, Ids::kNobody, Ids::kUniform}) {
    Problem q = p;
    q.ids = ids;
    t.fill(q, ++seed);
    // In the stream: from pageable memory a plain copy may return before its last bytes are there, and another stream does
    // not wait for them.
    ASSERT_EQ(cudaMemcpyAsync(device.topk_idx.view.data, t.ids.view().data,
                              static_cast<std::size_t>(p.tokens * p.slots * 4), cudaMemcpyHostToDevice, stream),
              cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    // The reference writes over its own last plan as the GPU does over its.
    ASSERT_TRUE(route::impls().back().run(t.args, {}));
    EXPECT_TRUE(mirror.equals_host()) << "replay " << seed;
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(RouteCuda, AThousandRunsHaveTheSameBits) {
  for (const Problem& p : {Problem{64, 8, 384}, Problem{1500, 8, 384, 0, -1, Ids::kTwoExperts}}) {
    SCOPED_TRACE(to_string(p));
    Tensors t(p);
    t.args.counters = {};
    DeviceMirror mirror;
    Args device = t.args;
    for (TensorView* v : views_of(device)) mirror.add(*v);
    JunkScratch workspace(cuda_row(), t.args);
    ASSERT_TRUE(route::impls().back().run(t.args, {}));
    for (int run = 0; run < 1000; ++run) {
      for (TensorView* v : {&device.plan.row_token, &device.plan.row_slot}) {
        ASSERT_EQ(cudaMemsetAsync(v->data, 0xC3, static_cast<std::size_t>(p.tokens * p.slots * 4)), cudaSuccess);
      }
      ASSERT_TRUE(cuda_row().run(device, workspace.ctx()));
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ASSERT_TRUE(mirror.equals_host()) << "run " << run;
    }
  }
}

TEST_F(RouteCuda, TooLittleWorkspaceAndTooManyExpertsAreRefused) {
  Tensors t({9000, 8, 64});
  JunkScratch workspace(cuda_row(), t.args);
  DeviceMirror mirror;
  Args device = t.args;
  for (TensorView* v : views_of(device)) mirror.add(*v);
  Ctx ctx = workspace.ctx();
  ctx.workspace = ctx.workspace.first(ctx.workspace.size() - 1);
  const Status status = cuda_row().run(device, ctx);
  EXPECT_EQ(status.code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_NE(status.message().find(std::to_string(ctx.workspace.size())), std::string::npos) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(mirror.equals_host());  // nothing was written

  Tensors many({1, 1, 2000});
  const Status declined = cuda_row().can_run(many.args, first_gpu());
  EXPECT_EQ(declined.code(), StatusCode::kUnsupported);
  EXPECT_NE(declined.message().find("L = 2000"), std::string::npos) << declined.message();
}

// A layer books the workspace of its planned T.
TEST(RouteCudaWorkspace, GrowsWithTheTokens) {
  std::int64_t before = 0;
  for (std::int64_t tokens : {0, 1, 128, 1023, 1024, 1025, 8192, 32767, 32768, 40000}) {
    const Tensors t({tokens, 8, 256, 0, -1, Ids::kNobody});
    const std::int64_t bytes = cuda_row().scratch_bytes(t.args, {});
    EXPECT_GE(bytes, before) << tokens;
    before = bytes;
  }
}

}  // namespace
}  // namespace sluice::test
