// The transport over MPI processes, and a layer over it: run by mpirun with 1, 2, 3, 4 and 8 ranks. Every rank runs every
// test; a failure on any of them fails the program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "expert_parallel/ranks.h"
#include "sluice/mpi.h"

namespace sluice::test {
namespace {

using testing::HasSubstr;

std::shared_ptr<Transport> ranks_of_world(double timeout_seconds = 60) {
  Result<std::shared_ptr<Transport>> transport = mpi_transport(MPI_COMM_WORLD, {timeout_seconds});
  EXPECT_TRUE(transport.is_ok()) << transport.status().message();
  return transport.value();
}

TEST(MpiTransport, CountsGoToEveryRank) {
  const auto transport = ranks_of_world();
  const std::int64_t P = transport->num_ranks(), rank = transport->rank();
  for (std::int64_t width : {1, 4, 12}) {
    std::vector<std::int64_t> send(static_cast<std::size_t>(P * width)), received(send.size(), -1);
    for (std::int64_t i = 0; i < P * width; ++i) send[static_cast<std::size_t>(i)] = rank * 1000 + i;
    ASSERT_TRUE(transport->exchange_counts(send, received).is_ok());
    for (std::int64_t from = 0; from < P; ++from) {
      for (std::int64_t i = 0; i < width; ++i)
        EXPECT_EQ(received[static_cast<std::size_t>(from * width + i)], from * 1000 + rank * width + i);
    }
  }
}

// Rows stamped with (from, to, number): each arrives once, at its place, with two moves of each kind on their way.
TEST(MpiTransport, Case113_StampedRowsArriveInTheirPlaces) {
  const auto transport = ranks_of_world();
  const std::int64_t P = transport->num_ranks(), rank = transport->rank();
  const auto rows_between = [](std::int64_t from, std::int64_t to, int move) {
    return (from * 7 + to * 3 + move * 5) % 17;  // uneven, and none for some
  };
  struct Side {
    std::vector<std::int32_t> send, receive;
    std::vector<RowSpan> send_rows, receive_rows;
  };
  for (const std::int64_t width : {1, 4, 1000}) {
    std::vector<Side> sides(4);
    std::vector<Transport::Ticket> tickets;
    for (int move = 0; move < 4; ++move) {
      Side& side = sides[static_cast<std::size_t>(move)];
      std::int64_t sent = 0, received = 0;
      for (std::int64_t p = 0; p < P; ++p) {
        side.send_rows.push_back({sent, rows_between(rank, p, move)});
        sent += side.send_rows.back().count;
        side.receive_rows.push_back({received, rows_between(p, rank, move)});
        received += side.receive_rows.back().count;
        for (std::int64_t i = 0; i < side.send_rows.back().count * width; ++i)
          side.send.push_back(static_cast<std::int32_t>(rank * 1'000'000 + p * 100'000 + i));
      }
      side.receive.assign(static_cast<std::size_t>(received * width), -1);
      const RowMove rows{width * 4, std::as_bytes(std::span(side.send)).data(), side.send_rows,
                         std::as_writable_bytes(std::span(side.receive)).data(), side.receive_rows};
      Result<Transport::Ticket> ticket = move % 2 == 0 ? transport->scatter(rows) : transport->gather(rows);
      ASSERT_TRUE(ticket.is_ok()) << ticket.status().message();
      tickets.push_back(*ticket);
    }
    for (int move : {2, 0, 3, 1}) {
      Side& side = sides[static_cast<std::size_t>(move)];
      const Status status = transport->wait(tickets[static_cast<std::size_t>(move)]);
      ASSERT_TRUE(status.is_ok()) << status.message();
      for (std::int64_t p = 0; p < P; ++p) {
        const RowSpan& rows = side.receive_rows[static_cast<std::size_t>(p)];
        for (std::int64_t i = 0; i < rows.count * width; ++i)
          ASSERT_EQ(side.receive[static_cast<std::size_t>(rows.begin * width + i)], p * 1'000'000 + rank * 100'000 + i);
      }
    }
  }
}

TEST(MpiTransport, ALayerHasTheBitsOfOneRank) {
  const auto transport = ranks_of_world();
  const std::int64_t P = transport->num_ranks(), rank = transport->rank();
  const RandomLayer whole =
      random_layer(small_config(), {.expert_dtype = DType::kE4M3, .shared_dtype = DType::kE4M3, .seed = 3});
  const Placement placement = balanced_placement(16, P);
  const RankLayer part = part_of(whole, placement, rank);
  for (std::int64_t round : {0, 3}) {
    LayerOptions options = options_for(Precision::kW8A8, 19, 1);
    LayerOptions mine = options;
    mine.max_round_tokens = round;
    mine.transport = transport;
    Result<Layer> layer = Layer::create(part.config, part.weights, mine);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    for (int repeat = 0; repeat < 3; ++repeat) {
      const std::int64_t tokens = (rank * 11 + repeat * 5) % 20;  // also none
      const RankCall call = call_of(tokens, static_cast<std::uint64_t>(100 * rank + repeat));
      const RankResult result = forward_once(*layer, call);
      ASSERT_TRUE(result.status.is_ok()) << result.status.message();
      EXPECT_TRUE(same_bits(result.out->view(), forward_alone(whole, options, call).out->view()));
    }
  }
}

TEST(MpiTransport, RefusesWhatItCannotDo) {
  for (const double wrong : {0.0, -1.0, 1e6}) {
    const Status status = mpi_transport(MPI_COMM_WORLD, {wrong}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("timeout_seconds"));
  }
  const auto transport = ranks_of_world();
  EXPECT_EQ(transport->wait({0}).code(), StatusCode::kInvalidArgument);
  std::vector<std::int64_t> three(static_cast<std::size_t>(transport->num_ranks()) * 3), two(2);
  EXPECT_EQ(transport->exchange_counts(three, two).code(), StatusCode::kInvalidArgument);
}

// A rank that comes late, for longer than the others wait. Last, as its transport is dead afterwards.
TEST(MpiTransportLast, Case120_ALateRankIsNamedWithinTheTimeOut) {
  const auto transport = ranks_of_world(0.5);
  const std::int64_t P = transport->num_ranks(), rank = transport->rank();
  if (P == 1) {
    std::vector<std::int64_t> one = {5}, got = {0};
    EXPECT_TRUE(transport->exchange_counts(one, got).is_ok());
    EXPECT_EQ(got[0], 5);
    return;
  }
  std::vector<std::int64_t> counts(static_cast<std::size_t>(P)), heard(counts.size());
  ASSERT_TRUE(transport->exchange_counts(counts, heard).is_ok());
  if (rank == P - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  } else {
    const Status status = transport->exchange_counts(counts, heard);
    EXPECT_EQ(status.code(), StatusCode::kPeerFailure);
    EXPECT_THAT(status.message(), HasSubstr(fmt::format("mpi: rank {} waited 0.5 s in exchange_counts: 1 rows of 8 "
                                                        "bytes from rank {} have not come",
                                                        rank, P - 1)));
    // Dead from here on, at once.
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(transport->exchange_counts(counts, heard).message(), status.message());
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(400));
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace sluice::test

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  testing::InitGoogleTest(&argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  // Rank 0 tells the story; the others speak of failures only, which go to the same output.
  if (rank != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    class FailuresOnly final : public testing::EmptyTestEventListener {
     public:
      explicit FailuresOnly(int rank) : rank_(rank) {}
      void OnTestPartResult(const testing::TestPartResult& result) override {
        if (result.failed())
          fmt::print("rank {}: {}:{}: {}\n", rank_, result.file_name(), result.line_number(), result.message());
      }

     private:
      int rank_;
    };
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly(rank));
  }
  int failed = RUN_ALL_TESTS();
  int any = 0;
  MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return any;
}
