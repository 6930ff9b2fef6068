// The PTX instructions that CUDA C++ has no spelling for, one function each.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/host_device.h"

namespace indexcache {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

template <class T>
__device__ __forceinline__ T uniform(T value);

// Dynamic shared memory from its first multiple of 1024 bytes, the period of the 128-byte swizzle;
// launch with 1024 bytes more.
template <class Shared>
__device__ __forceinline__ Shared& dynamic_shared() {
  extern __shared__ unsigned char raw[];
  // The same in all lanes, and not computed anew at each use: the compiler cannot see through it.
  const uint32_t misplaced = uniform(shared_address(raw) % 1024);
  return *reinterpret_cast<Shared*>(raw + (misplaced ? 1024 - misplaced : 0));
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}

__device__ __forceinline__ float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// -- barriers ------------------------------------------------------------------------------------

// Barrier `id` (0 is __syncthreads') among `threads` threads, whole warps.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrive there without waiting: `threads` counts those that wait, too. Now means that no arithmetic is
// moved before it, as ptxas does within a block of code: it is a loop of its own, of one iteration.
__device__ __forceinline__ void named_barrier_arrive_now(int id, int threads) {
  asm volatile(
      "{\n"
      ".reg .pred again;\n"
      "setp.lt.s32 again, %0, 0;\n"
      "AGAIN:\n"
      "bar.arrive %0, %1;\n"
      "@again bra AGAIN;\n"
      "}\n" ::"r"(id),
      "r"(threads)
      : "memory");
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Make initialised barriers visible to the async proxy (TMA signals them) and to the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrive, and let the phase wait for `bytes` more bytes of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Wait until the phase of the given parity has completed; the phase before the first one counts as
// completed with parity 1.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// -- asynchronous copies -------------------------------------------------------------------------

__device__ __forceinline__ void tma_load_2d(void* destination, const CUtensorMap* map,
                                            uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void tma_load_3d(void* destination, const CUtensorMap* map,
                                            uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// `bytes`, source and destination are multiples of 16.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, int bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Copy 16 bytes, or write 16 zero bytes where `valid` is false (the source is then not read).
__device__ __forceinline__ void copy16(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Order this thread's ordinary shared-memory accesses before later ones of the async proxy.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// -- arithmetic ----------------------------------------------------------------------------------

// 2^x in one instruction, its error below 2^-22 of it; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// What the launch before may still be writing: not before wait_for_previous_launch, which the emulated
// GPU sees to.
__device__ __forceinline__ float load_dependent(const float* source) { return *source; }

// Four at a multiple of 16 bytes.
__device__ __forceinline__ float4 load_dependent4(const float* source) {
  return *reinterpret_cast<const float4*>(source);
}

// -- launches that overlap -----------------------------------------------------------------------

// The launch behind this one may begin as soon as all blocks of this one have said so. It waits for
// what this one writes.
__device__ __forceinline__ void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Until the launch before has ended and what it wrote can be read; at once where launches do not
// overlap.
__device__ __forceinline__ void wait_for_previous_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// -- registers -----------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The same value, but what follows from it is computed after this point, each time: a loop whose
// registers are all taken does better to compute than to keep.
template <class T>
__device__ __forceinline__ T fresh(T value) {
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(value));
  return value;
}

// A value that is the same in all lanes: the compiler then knows it, and has other registers for it.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}

// -- clusters ------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// All threads of all blocks of the cluster; orders shared memory among them.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// All threads of the cluster: no block ends while another may read its shared memory. What was read is
// in registers by then, so that nothing has to be ordered, and no store to be waited for.
__device__ __forceinline__ void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// The address of this block's `address` in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, uint32_t rank) {
  uint32_t peer;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

__device__ __forceinline__ float load_peer(uint32_t address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_peer_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float4 load_peer4(uint32_t address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

}  // namespace indexcache
