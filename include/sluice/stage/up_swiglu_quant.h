// Stages 5 and 6 in one: the up GEMM, the activation and the quantisation the down GEMM reads. h never reaches memory.
//
//   h = grouped_gemm(up), a and a_scale = swiglu_quant(act), with act.h in place of up.out
//
// Bit for bit what the two stages give one after another, h rounded to its dtype included: the GEMM is that of "cuda-wgmma",
// the activation that of "cuda". up.out and act.h say of what dtype and shape h would be; their memory is not touched.
// Rows no group owns are neither read nor written.
//
// Where a layer takes no row of this table it runs the two stages ("composed" in its report).
#pragma once

#include "sluice/stage/grouped_gemm.h"
#include "sluice/stage/swiglu_quant.h"

namespace sluice::up_swiglu_quant {

inline constexpr std::string_view kStage = "up_swiglu_quant";

struct Args {
  grouped_gemm::Args up;   // two stacked matrices: part_rows is I
  swiglu_quant::Args act;  // groups as in up
};
Status check(const Args& args, Phase phase = Phase::kRun);
std::span<const Impl<Args>> impls();

// Whether the rows of impls() have the bits of these two implementations, one after another.
bool replaces(std::string_view gemm, std::string_view activation);
// Up to how many rows the fused form is the faster one; a layer asks at every call. Of args that can run.
std::int64_t most_rows(const Args& args);

}  // namespace sluice::up_swiglu_quant
