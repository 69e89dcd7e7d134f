// Stage 2, route: a counting sort in two passes over chunks of consecutive tokens.
//
// Pass 1 counts each chunk's slots per local expert. The counts become first rows, expert by expert and chunk by
// chunk, and pass 2 deals the rows out in token order. So the result is the same for any number of chunks.
#include <fmt/format.h>

#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "sluice/stage/route.h"

namespace sluice::route {
namespace {

// Below this a second thread costs more than it saves: a slot takes about a nanosecond.
constexpr std::int64_t kMinSlotsPerChunk = 16384;
constexpr std::int64_t kCountersPerLine = 64 / sizeof(std::int32_t);

// What a chunk finds, besides its counts.
struct Finding {
  std::int64_t num_invalid = 0;
  std::int64_t first_invalid = -1;  // flat slot
};

struct Sizes {
  std::int64_t num_tokens;
  std::int64_t num_slots;
  std::int64_t num_local;
  std::int64_t num_chunks;
  std::int64_t counts_pitch;  // i32 per chunk; whole cache lines, as each chunk is written by its own thread

  Sizes(const Args& args, int num_threads)
      : num_tokens(args.topk_idx.view.shape[0]),
        num_slots(args.topk_idx.view.shape[1]),
        num_local(args.plan.expert_offset.view.shape[0] - 1),
        num_chunks(std::clamp<std::int64_t>(num_tokens * num_slots / kMinSlotsPerChunk, 1, std::max(num_threads, 1))),
        counts_pitch(ceil_div(num_local + 1, kCountersPerLine) * kCountersPerLine) {}

  std::int64_t findings_bytes() const { return ceil_div(num_chunks * std::int64_t{sizeof(Finding)}, 64) * 64; }
  std::int64_t scratch_bytes() const {
    return findings_bytes() + num_chunks * counts_pitch * std::int64_t{sizeof(std::int32_t)};
  }
  std::int64_t first_token(std::int64_t chunk) const { return num_tokens * chunk / num_chunks; }
};

}  // namespace

std::int64_t scratch_bytes_cpu(const Args& args, const Machine& machine) {
  return cpu::scratch_to_book(Sizes(args, machine.num_threads).scratch_bytes());
}

std::string describe_cpu(const Args& args, const Machine& machine) {
  return fmt::format("counting sort, {} chunks of tokens", Sizes(args, machine.num_threads).num_chunks);
}

Status run_cpu(const Args& args, const Ctx& ctx) {
  Sizes sizes(args, ctx.num_threads);
  // The workspace may have been booked for fewer threads than the call brings.
  while (sizes.num_chunks > 1 && cpu::scratch_to_book(sizes.scratch_bytes()) > std::ssize(ctx.workspace))
    --sizes.num_chunks;
  Result<std::byte*> scratch = cpu::take_scratch("route", ctx.workspace, sizes.scratch_bytes());
  if (!scratch) return scratch.status();
  auto* const findings = reinterpret_cast<Finding*>(scratch.value());                              // [chunks]
  auto* const counts = reinterpret_cast<std::int32_t*>(scratch.value() + sizes.findings_bytes());  // [chunks,L]

  const RoutePlan& plan = args.plan;
  const std::int32_t* const ids = args.topk_idx.view.as<const std::int32_t>();  // [T,S]
  const std::int64_t ids_pitch = args.topk_idx.view.stride[0];
  std::int32_t* const slot_row = plan.slot_row.as<std::int32_t>();  // [T,S]
  const std::int64_t slot_row_pitch = plan.slot_row.stride[0];
  const std::int64_t num_slots = sizes.num_slots;
  const std::uint64_t num_local = static_cast<std::uint64_t>(sizes.num_local);

  cpu::parallel_for(sizes.num_chunks, ctx.num_threads, [&](std::int64_t chunk, int) {
    std::int32_t* const count = counts + chunk * sizes.counts_pitch;
    std::fill_n(count, sizes.counts_pitch, 0);
    Finding found;
    for (std::int64_t t = sizes.first_token(chunk); t < sizes.first_token(chunk + 1); ++t) {
      for (std::int64_t s = 0; s < num_slots; ++s) {
        const std::int64_t id = ids[t * ids_pitch + s];
        // One unsigned comparison rules out both sides; an id that is local is valid.
        const std::uint64_t local = static_cast<std::uint64_t>(id - args.first_expert);
        if (local < num_local) {
          ++count[local];
        } else if (id < -1 || id >= args.num_experts) {
          if (found.num_invalid++ == 0) found.first_invalid = t * num_slots + s;
        }
      }
    }
    findings[chunk] = found;
  });

  std::int64_t num_invalid = 0;
  for (std::int64_t chunk = 0; chunk < sizes.num_chunks; ++chunk) {
    num_invalid += findings[chunk].num_invalid;
    if (args.checked && findings[chunk].num_invalid > 0) {
      const std::int64_t t = findings[chunk].first_invalid / num_slots;
      const std::int64_t s = findings[chunk].first_invalid % num_slots;
      return {StatusCode::kInvalidArgument,
              fmt::format("route: topk_idx of token {}, slot {} is {}, expected -1 or 0 to {}", t, s,
                          ids[t * ids_pitch + s], args.num_experts - 1)};
    }
  }
  if (args.counters.is_present()) {
    args.counters.as<std::int64_t>()[static_cast<int>(Counter::kInvalidIds)] += num_invalid;
  }

  std::int32_t row = 0;
  std::int32_t* const expert_offset = plan.expert_offset.view.as<std::int32_t>();  // [L+1]
  for (std::int64_t e = 0; e < sizes.num_local; ++e) {
    expert_offset[e] = row;
    for (std::int64_t chunk = 0; chunk < sizes.num_chunks; ++chunk) {
      std::int32_t& count = counts[chunk * sizes.counts_pitch + e];
      const std::int32_t first_row = row;
      row += count;
      count = first_row;
    }
  }
  expert_offset[sizes.num_local] = row;
  plan.num_rows.as<std::int32_t>()[0] = row;

  std::int32_t* const row_token = plan.row_token.as<std::int32_t>();  // [R]
  std::int32_t* const row_slot = plan.row_slot.as<std::int32_t>();    // [R]
  cpu::parallel_for(sizes.num_chunks, ctx.num_threads, [&](std::int64_t chunk, int) {
    std::int32_t* const next_row = counts + chunk * sizes.counts_pitch;
    for (std::int64_t t = sizes.first_token(chunk); t < sizes.first_token(chunk + 1); ++t) {
      for (std::int64_t s = 0; s < num_slots; ++s) {
        const std::uint64_t local = static_cast<std::uint64_t>(ids[t * ids_pitch + s] - args.first_expert);
        std::int32_t to = -1;
        if (local < num_local) {
          to = next_row[local]++;
          row_token[to] = static_cast<std::int32_t>(t);
          row_slot[to] = static_cast<std::int32_t>(t * num_slots + s);
        }
        slot_row[t * slot_row_pitch + s] = to;
      }
    }
  });
  return Status::ok();
}

}  // namespace sluice::route
