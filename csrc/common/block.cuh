// The executor of select.h on a group of warps: a whole block, or the warps behind one barrier.
#pragma once

#include "common/ptx.cuh"
#include "common/select.h"

namespace indexcache {

// One warp's share of find_from_top. Lane l owns a run of bins; it reads them rotated by l, so that
// the warp touches 32 banks. All lanes return the same.
template <int kBins>
__device__ __forceinline__ Bin warp_find_from_top(const int* hist, int wanted) {
  constexpr int kRun = kBins / 32;
  static_assert(kBins % 32 == 0 && (kRun & (kRun - 1)) == 0);
  const int lane = threadIdx.x % 32;
  const int* run = hist + lane * kRun;
  int sum = 0;
#pragma unroll 8
  for (int j = 0; j < kRun; ++j) sum += run[(j + lane) & (kRun - 1)];
  int from_here = sum;  // items in this lane's bins and in all higher ones
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_down_sync(~0u, from_here, d);
    if (lane + d < 32) from_here += other;
  }
  int above = from_here - sum;
  const bool mine = above < wanted && from_here >= wanted;
  int index = -1;
  int count = 0;
  if (mine) {
    for (int j = kRun - 1; j >= 0; --j) {
      count = run[j];
      index = lane * kRun + j;
      if (above + count >= wanted) break;
      above += count;
    }
  }
  const uint32_t owner = __ballot_sync(~0u, mine);
  const int source = owner ? __ffs(owner) - 1 : 0;
  return {__shfl_sync(~0u, index, source), __shfl_sync(~0u, above, source),
          __shfl_sync(~0u, count, source)};
}

// Increment a counter for every thread that arrives here together: one atomic for all of them.
__device__ __forceinline__ int warp_next(int* counter) {
  const uint32_t together = __activemask();
  const int leader = __ffs(together) - 1;
  const int lane = threadIdx.x % 32;
  int first = 0;
  if (lane == leader) first = atomicAdd(counter, __popc(together));
  return __shfl_sync(together, first, leader) + __popc(together & ((1u << lane) - 1));
}

// Shared memory of a DeviceBlock.
struct BlockScratch {
  Bin bin;
  int warp_sums[32];
  int total;
};

// kThreads threads, thread indices 0 to kThreads - 1 of the block, that meet at barrier kBarrier.
// `scratch` may be reused once another barrier of the group has passed, as every method ensures.
template <int kThreads, int kBarrier>
class DeviceBlock {
 public:
  __device__ __forceinline__ explicit DeviceBlock(BlockScratch& scratch) : scratch_(scratch) {}

  __device__ __forceinline__ void sync() { named_barrier_sync(kBarrier, kThreads); }

  template <class F>
  __device__ __forceinline__ void each(int n, F f) {
    for (int i = threadIdx.x; i < n; i += kThreads) f(i);
    sync();
  }

  // each() over values in global memory, with several loads in flight before the first use.
  template <class F>
  __device__ __forceinline__ void each_value(const float* row, int n, F f) {
    constexpr int kInFlight = 8;
    for (int base = threadIdx.x; base < n; base += kThreads * kInFlight) {
      float values[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int i = base + j * kThreads;
        values[j] = i < n ? row[i] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int i = base + j * kThreads;
        if (i < n) f(i, values[j]);
      }
    }
    sync();
  }

  __device__ __forceinline__ void add(int* address, int value) { atomicAdd(address, value); }

  __device__ __forceinline__ int take(int* counter) { return atomicAdd(counter, 1); }

  __device__ __forceinline__ int next(int* counter) { return warp_next(counter); }

  __device__ __forceinline__ uint32_t set_bits(uint32_t* address, uint32_t bits) {
    return atomicOr(address, bits);
  }

  __device__ __forceinline__ int replace(int* address, int expected, int desired) {
    return atomicCAS(address, expected, desired);
  }

  template <int kBins>
  __device__ __forceinline__ Bin find_from_top(const int* hist, int wanted) {
    if (threadIdx.x < 32) {
      const Bin bin = warp_find_from_top<kBins>(hist, wanted);
      if (threadIdx.x == 0) scratch_.bin = bin;
    }
    sync();
    return scratch_.bin;
  }

  template <int kBins, class F>
  __device__ __forceinline__ void find_in_rows(int rows, const int* hists, int wanted, F f) {
    for (int row = threadIdx.x / 32; row < rows; row += kThreads / 32) {
      const Bin bin = warp_find_from_top<kBins>(hists + row * kBins, wanted);
      if (threadIdx.x % 32 == 0) f(row, bin);
    }
    sync();
  }

  // In place: a chunk is read before any of it is overwritten, and what one chunk writes lies below
  // what the next one reads.
  __device__ __forceinline__ int keep(Entry* list, int n, Entry bound, int* counter) {
    constexpr int kEach = 4;
    sync();  // everybody has read what is replaced here
    if (threadIdx.x == 0) *counter = 0;
    for (int base = 0; base < n; base += kThreads * kEach) {
      Entry own[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int i = base + j * kThreads + int(threadIdx.x);
        own[j] = i < n ? list[i] : 0;  // 0 is below every entry
      }
      sync();
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (own[j] != 0 && own[j] >= bound) list[warp_next(counter)] = own[j];
      }
    }
    sync();
    return *counter;  // to be changed after another barrier only
  }

  // Every thread scans a run of its own; an odd run length keeps the lanes on different banks.
  __device__ __forceinline__ int exclusive_scan(int* data, int n) {
    const int run = ceil_div(n, kThreads) | 1;
    const int begin = smaller(int(threadIdx.x) * run, n);
    const int end = smaller(begin + run, n);
    int sum = 0;
    for (int i = begin; i < end; ++i) sum += data[i];
    int before = exclusive_sum(sum);
    for (int i = begin; i < end; ++i) {
      const int value = data[i];
      data[i] = before;
      before += value;
    }
    sync();
    return scratch_.total;
  }

 private:
  // The sum of `value` over the threads before this one; leaves the whole sum in scratch_.total.
  __device__ __forceinline__ int exclusive_sum(int value) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    int inclusive = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    if (lane == 31) scratch_.warp_sums[warp] = inclusive;
    sync();
    if (threadIdx.x == 0) {
      int total = 0;
      for (int w = 0; w < kThreads / 32; ++w) {
        const int own = scratch_.warp_sums[w];
        scratch_.warp_sums[w] = total;
        total += own;
      }
      scratch_.total = total;
    }
    sync();
    return scratch_.warp_sums[warp] + inclusive - value;
  }

  BlockScratch& scratch_;
};

}  // namespace indexcache
