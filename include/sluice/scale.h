// What one MoE layer under expert parallelism should take: time by phase, bytes on every link, memory of a GPU. A model
// and no measurement: from constants of a machine, exact expectations of the routing and stated assumptions
// (docs/scaling.md). Pure host functions, no I/O, no GPU.
//
// Units: microseconds, bytes; GB = 10^9 bytes. Counts are expectations, hence not whole. N physical expert slots, G
// GPUs of one tensor-parallel group; the other letters are those of sluice/core.h. T is per rank.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sluice/config.h"

namespace sluice::scale {

// A grouped GEMM out[R,n] = a[R,k] w[n,k] of one precision, as fitted to measurements:
//   memory  = bytes / (stream_share * hbm)
//   compute = 2 R n k (1 + depth_k / k) / (peak * share(R / experts with rows)) + output_share * bytes of out / hbm
//   time    = fixed_us + (memory^4 + compute^4)^(1/4)
// Bytes: weights and weight scales of the experts that have rows, a with its scales, out. share is linear in the
// logarithm of the rows between the points, constant outside.
struct GemmRates {
  double peak_tflops = 0;
  double fixed_us = 0;
  double stream_share = 0;  // (0,1]
  double depth_k = 0;       // the K an output tile costs beside its own
  double output_share = 0;  // of the stores, that nothing hides
  std::vector<double> rows_per_expert;
  std::vector<double> share_of_peak;  // (0,1], one a point
};

struct Hardware {
  std::string name;
  double memory_gb = 0;            // of a GPU
  double hbm_gb_per_s = 0;         // a read-only stream
  double glue_share = 0;           // of it, that stages without a GEMM reach
  double launch_us = 0;            // a kernel in a graph
  GemmRates fp8, bf16;             // fp8: e4m3 and i8
  std::int64_t nvlink_domain = 0;  // GPUs that reach each other by load and store
  double nvlink_gb_per_s = 0;      // each way, a GPU
  double nvlink_flag_us = 0;       // a flag to a peer, one way
  double nic_gb_per_s = 0;         // each way, a GPU
  double nic_latency_us = 0;       // a message to another domain, one way
  double nic_setup_us = 0;         // counts exchanged and read by the host before rows leave
};
Status validate(const Hardware& hardware);

struct Request {
  MoeConfig config;                        // experts [0,E): first_expert and num_local are refused
  Precision precision = Precision::kW8A8;  // w8a8 or bf16: what the constants are known for
  DType weight = DType::kE4M3;             // of the experts and the shared expert
  bool row_scales = false;                 // one weight scale a row instead of 128x128
  std::int64_t tokens = 0;                 // T, per rank
  std::int64_t num_ranks = 1;              // P
  std::int64_t tensor_parallel = 1;        // G: every rank is G GPUs, each with I / G of every expert
  std::int64_t num_slots = 0;              // N >= E: replicas make slots of equal load; 0: E
};
Status validate(const Request& request);

// Bytes a GPU sends or receives over a link in one move.
struct Links {
  double gpu = 0;     // to itself: no link
  double nvlink = 0;  // inside its NVLink domain
  double nic = 0;     // InfiniBand
};
// Expectations for one rank, whose GPUs each carry them.
struct Traffic {
  Links out, in;
};

struct Phase {
  std::string_view name;
  double us = 0;
  std::string_view limit;  // "HBM", "tensor cores", "NVLink", "InfiniBand", "latency", "-"
};

// Rows of tokens, or of their results, between ranks.
struct Move {
  double us = 0;
  std::string_view limit;
  Traffic mean;  // over the ranks
};

struct Memory {
  double weights = 0;    // experts, shared expert, router
  double receive = 0;    // P * T rows of dispatch
  double returned = 0;   // T * S rows of combine
  double workspace = 0;  // rows, h, a and y for the bound P * T * S
  double total() const { return weights + receive + returned + workspace; }
};

struct Prediction {
  std::int64_t row_bytes = 0;    // of a token in dispatch
  double ranks_per_token = 0;    // distinct ranks, its own included
  double domains_per_token = 0;  // distinct NVLink domains, its own included
  double rows_mean = 0;          // R in the mean over the ranks: T * S
  double rows_max = 0;           // the largest over the ranks, expected at most
  double active_experts = 0;     // slots with rows, of the fullest rank
  Move dispatch;                 // one row for each (token, rank)
  Move dispatch_forwarded;       // instead: one row for each (token, domain) over InfiniBand, spread over NVLink there
  Move combine;                  // one bf16 row for each (token, slot): bits of one rank's sum
  Move combine_partial;          // instead: one partial sum for each (token, rank), other bits
  // Instead: those sums added up in a domain over NVLink, one for each (token, domain) over InfiniBand.
  Move combine_forwarded;
  std::vector<Phase> phases;  // in order; their sum is serial_us
  double gemm_us = 0;         // the expert GEMMs of them, up and down
  double serial_us = 0;
  double overlapped_us = 0;        // two chunks of tokens, one's moves behind the other's GEMMs, nothing lost
  double tokens_per_s = 0;         // per GPU, at the smaller of the two
  Memory memory;                   // of a GPU
  bool fits = false;               // in Hardware::memory_gb
  std::int64_t largest_round = 0;  // tokens per rank whose buffers fit beside the weights; 0: not even the weights do
};
// kInvalidArgument names the field, its value and what is wanted.
Result<Prediction> predict(const Hardware& hardware, const Request& request);

// The expert GEMM of the model above, out[rows,n], over `active` experts; for `precision` w8a8 or bf16.
double grouped_gemm_us(const Hardware& hardware, Precision precision, bool row_scales, double rows, double active,
                       double n, double k);

// Expectations for one rank; over all ranks as much is sent as is received, on every link. The request must be valid.
Traffic dispatch_traffic(const Hardware& hardware, const Request& request, std::int64_t rank);
Traffic combine_traffic(const Hardware& hardware, const Request& request, std::int64_t rank);

}  // namespace sluice::scale
