// Which rows of the gate's tables a test runs, and where. A program of tests/gpu that defines SLUICE_TEST_ON_GPU before it
// includes a test of this folder runs the same cases on the CUDA rows: tensors are mirrored with guards, and come back.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "harness/targets.h"
#include "sluice/stage/gate.h"
#ifdef SLUICE_TEST_ON_GPU
#include "gpu/stage_bits.h"
#endif

namespace sluice::test {

#ifdef SLUICE_TEST_ON_GPU
using GateTestBase = GpuTest;
#else
using GateTestBase = testing::Test;
#endif
class GateTest : public GateTestBase {};

// The rows under test, then the reference.
template <class Args>
std::vector<Impl<Args>> rows_of(std::span<const Impl<Args>> table) {
  std::vector<Impl<Args>> rows;
#ifdef SLUICE_TEST_ON_GPU
  constexpr DeviceKind kKind = DeviceKind::kCuda;
#else
  constexpr DeviceKind kKind = DeviceKind::kCpu;
#endif
  for (const Impl<Args>& impl : table) {
    if (impl.device == kKind && impl.name != "reference") rows.push_back(impl);
  }
  rows.push_back(table.back());
  return rows;
}
inline std::vector<Impl<gate::SelectArgs>> select_rows() { return rows_of(gate::select_impls()); }
// Logits with the CPU's bits; the rows on tensor cores have their own order and tests.
inline std::vector<Impl<gate::LogitsArgs>> logits_rows() {
  std::vector<Impl<gate::LogitsArgs>> rows = rows_of(gate::logits_impls());
  std::erase_if(rows, [](const Impl<gate::LogitsArgs>& impl) { return impl.name == "cuda-wgmma"; });
  return rows;
}

// SIMD targets the rows are run for.
inline std::vector<std::int64_t> targets_under_test() {
  std::vector<std::int64_t> targets = simd_targets();
#ifdef SLUICE_TEST_ON_GPU
  targets.resize(1);  // they are nothing to a GPU
#endif
  return targets;
}

template <class Args>
Status run_row(const Impl<Args>& impl, const Args& args, int num_threads) {
#ifdef SLUICE_TEST_ON_GPU
  if (impl.device == DeviceKind::kCuda) return run_mirrored(impl, args, [](Args& a) { return views_of(a); });
#endif
  return impl.run(args, Ctx{.num_threads = num_threads});
}

}  // namespace sluice::test
