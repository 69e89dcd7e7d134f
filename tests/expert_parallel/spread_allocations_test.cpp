// A forward over several ranks allocates nothing of its own either: counted by operator new in this program.
#include <gtest/gtest.h>

#include "expert_parallel/ranks.h"
#include "harness/allocations.h"

namespace sluice::test {
namespace {

// Two ranks, the second of which agrees to everything, brings no tokens and lets rows come and go unseen: what this rank
// does can be watched on one thread.
class SilentPeer final : public Transport {
 public:
  std::string_view name() const override { return "silent"; }
  std::int64_t num_ranks() const override { return 2; }
  std::int64_t rank() const override { return 0; }
  Status exchange_counts(std::span<const std::int64_t> send, std::span<std::int64_t> received) override {
    const std::size_t width = send.size() / 2;
    std::copy_n(send.begin(), width, received.begin());
    // A layer is compared with itself; in a round, of which four numbers are told, the peer has nothing.
    for (std::size_t i = 0; i < width; ++i) received[width + i] = width == 4 ? 0 : send[i];
    return Status::ok();
  }
  Result<Ticket> scatter(const RowMove& move) override { return keep(move); }
  Result<Ticket> gather(const RowMove& move) override { return keep(move); }
  Status wait(Ticket) override { return Status::ok(); }
  void abandon(const Status&) override {}

 private:
  // Rows for and from the peer are lost: those of the peer stay what they were, zeros.
  static Result<Ticket> keep(const RowMove& move) {
    const auto bytes = static_cast<std::size_t>(move.send_rows[0].count * move.row_bytes);
    if (bytes > 0) {
      std::memmove(move.receive + move.receive_rows[0].begin * move.row_bytes,
                   move.send + move.send_rows[0].begin * move.row_bytes, bytes);
    }
    return Ticket{0};
  }
};

std::int64_t allocations_of_forward(const LayerOptions& options, const RankLayer& part) {
  Result<Layer> layer = Layer::create(part.config, part.weights, options);
  EXPECT_TRUE(layer.is_ok()) << layer.status().message();
  const Buffer x = random_x(16, part.config.hidden);
  const Buffer out(DType::kF32, {16, part.config.hidden});
  std::vector<std::byte> workspace(static_cast<std::size_t>(layer->workspace_bytes()));
  Ctx ctx;
  ctx.workspace = workspace;
  const std::int64_t before = g_num_allocations;
  const Status status = layer->forward(x.view(), out.view(), ctx);
  const std::int64_t count = g_num_allocations - before;
  EXPECT_TRUE(status.is_ok()) << status.message();
  return count;
}

TEST(SpreadAllocations, AForwardMakesNone) {
  const RandomLayer whole =
      random_layer(small_config(), {.expert_dtype = DType::kE4M3, .shared_dtype = DType::kE4M3, .seed = 3});
  const auto transport = std::make_shared<SilentPeer>();
  for (const std::int64_t round : {0, 3}) {
    LayerOptions options = options_for(Precision::kW8A8, 16, 1);
    options.max_round_tokens = round;
    options.transport = transport;
    EXPECT_EQ(allocations_of_forward(options, part_of(whole, balanced_placement(16, 2), 0)), 0);
  }
  LayerOptions options = options_for(Precision::kW8A8, 16, 1);
  options.tensor_transport = transport;
  EXPECT_EQ(allocations_of_forward(options, RankLayer{whole.config, whole.weights, {}}), 0);
}

TEST(SpreadAllocations, TheyWouldBeCounted) {
  const std::int64_t before = g_num_allocations;
  const std::string text(1000, 'x');
  EXPECT_GT(g_num_allocations - before, 0) << text.size();
}

}  // namespace
}  // namespace sluice::test
