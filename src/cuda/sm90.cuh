// Hopper's asynchronous machinery as functions: mbarriers, TMA loads, wgmma operands and register budgets. PTX ISA 8.0;
// names follow the instructions. Only for sources compiled for sm_90a.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace sluice::cuda::sm90 {

constexpr int kWarpgroupThreads = 128;
// Operand tiles in shared memory are rows of 128 bytes in the 128-byte swizzle, 8 rows an atom; TMA writes and wgmma
// reads this layout, so that no thread ever computes a swizzled address.
constexpr int kSwizzleBytes = 128;
constexpr int kAtomBytes = 8 * kSwizzleBytes;

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---------------------------------------------------------------------------------------------------------
// mbarriers
// ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// How long a waiting warp may sleep before it asks again, in nanoseconds: longer than any wait. Without it a warp asks every
// few dozen cycles, and four waiting producer warps took 6 % of a multiprocessor's instructions, and their power.
constexpr std::uint32_t kSleepNs = 10'000'000;

__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity), "r"(kSleepNs)
      : "memory");
}

// The same with a shared-memory address that was computed once: in a hot loop the conversion costs a read of the block's
// rank and a wait for it.
__device__ __forceinline__ void barrier_arrive(std::uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint32_t address, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(address),
      "r"(parity), "r"(kSleepNs)
      : "memory");
}
// Whether the phase is over, without waiting.
__device__ __forceinline__ bool barrier_test(std::uint32_t address, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(address), "r"(parity)
      : "memory");
  return done != 0;
}

// Position in a ring of stages: the parity flips at each wrap.
struct RingPosition {
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void advance(std::uint32_t num_stages) {
    stage += 1;
    if (stage >= num_stages) {
      stage -= num_stages;
      parity ^= 1u;
    }
  }
};

// ---------------------------------------------------------------------------------------------------------
// TMA
// ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tma_load_2d(const CUtensorMap* map, std::uint64_t* barrier, void* to, std::int32_t c0,
                                            std::int32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(const CUtensorMap* map, std::uint64_t* barrier, void* to, std::int32_t c0,
                                            std::int32_t c1, std::int32_t c2, std::int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// A box out of shared memory; parts outside the tensor are not written. Fences as for bulk_store.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, const void* from, std::int32_t c0, std::int32_t c1,
                                             std::int32_t c2, std::int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Four bytes of global memory to shared memory, asynchronously; the barrier gets an arrival of the calling thread when
// all its copies so far are there.
__device__ __forceinline__ void copy_word(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void arrive_with_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit values, rows of 16 bytes: lane i of 8m..8m+7 gives the address of row i of matrix m, lane l
// of the warp holds columns 2(l%4) and the next of row l/4 in word[m].
__device__ __forceinline__ void store_matrices(std::uint32_t row, const std::uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}
__device__ __forceinline__ float load_shared(std::uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_pair(std::uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// Global memory to shared, both on 16-byte boundaries, by the copy engine.
__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Shared memory to global, both on 16-byte boundaries, by the copy engine: the caller goes on. What ordinary stores wrote
// must be fenced first by the thread that wrote it.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// The calling thread's bulk stores have read their source; have arrived.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------------
// Warpgroups and clusters
// ---------------------------------------------------------------------------------------------------------

// Of `threads` threads, whole warps, that all call; barrier 0 is __syncthreads.
template <int kBarrier>
__device__ __forceinline__ void named_barrier(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}
// The part of one that does not wait for the others.
template <int kBarrier>
__device__ __forceinline__ void named_arrive(int threads) {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The value of lane 0. Values from memory are the same in every lane, but only a shuffle tells the compiler: descriptors
// then stay in uniform registers, where wgmma wants them.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(0xFFFFFFFFu, value, 0);
}

// Every thread of the cluster that still runs arrives and waits; what each wrote before, to any block's shared memory, is
// visible behind it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}
__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// The address of this block's shared variable in another block of the cluster.
__device__ __forceinline__ std::uint32_t address_in(const void* variable, std::uint32_t rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(variable)), "r"(rank));
  return address;
}
__device__ __forceinline__ void raise_in_cluster(std::uint32_t address, std::uint32_t value) {
  asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Descriptor of a K-major operand tile in the 128-byte swizzle: start address and stride between atoms in units of 16
// bytes, layout type 1 in bits 62-63. The next 32 bytes of K are two units further.
__device__ __forceinline__ std::uint64_t operand_descriptor(const void* tile) {
  const std::uint64_t start = (shared_address(tile) & 0x3FFFFu) >> 4;
  return start | (std::uint64_t{1} << 16) | (std::uint64_t{kAtomBytes >> 4} << 32) | (std::uint64_t{1} << 62);
}
constexpr std::uint64_t kDescriptorStep = 32 >> 4;
// The same in halves: only the lower one moves from tile to tile.
constexpr std::uint32_t kDescriptorHigh = std::uint32_t{kAtomBytes >> 4} | std::uint32_t{1} << 30;
__device__ __forceinline__ std::uint32_t descriptor_low(std::uint32_t address) {
  return (address & 0x3FFFFu) >> 4 | std::uint32_t{1} << 16;
}
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t low) {
  return static_cast<std::uint64_t>(kDescriptorHigh) << 32 | low;
}

// Eight by eight 16-bit values across a warp, transposed: lane 4i+j holds row i, columns 2j and 2j+1, before and after.
__device__ __forceinline__ std::uint32_t transpose_8x8(std::uint32_t packed) {
  std::uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(packed));
  return result;
}

}  // namespace sluice::cuda::sm90
