// The executor of select.h on a group of warps: a whole block, or the warps behind one barrier.
#pragma once

#include "common/ptx.cuh"
#include "common/select.h"

namespace indexcache {

// This thread's index. Addresses that follow from it are made where they are used: kept over the
// whole of a persistent kernel, they would take the registers of its inner loop.
__device__ __forceinline__ unsigned own_thread() { return fresh(threadIdx.x); }

// One warp's share of find_from_top: the lanes split the bins into runs, and the run that holds the
// wanted item again, down to one bin. A lane reads its run rotated by its number, so that the warp
// touches 32 banks. All lanes return the same.
template <int kBins>
__device__ __forceinline__ Bin warp_find_from_top(const int* hist, int wanted, int first = 0,
                                                  int above = 0) {
  constexpr int kLanes = smaller(kBins, 32);
  constexpr int kRun = kBins / kLanes;
  static_assert((kBins & (kBins - 1)) == 0);
  const int lane = own_thread() % 32;
  const int* run = hist + first + lane * kRun;
  int sum = 0;
  if (lane < kLanes) {
#pragma unroll 8
    for (int j = 0; j < kRun; ++j) sum += run[(j + lane) & (kRun - 1)];
  }
  int from_here = sum;  // items in this lane's bins and in all higher ones
#pragma unroll
  for (int d = 1; d < kLanes; d *= 2) {
    const int other = __shfl_down_sync(~0u, from_here, d);
    if (lane + d < 32) from_here += other;
  }
  // The highest lane that reaches it; they all stay with what is above its run.
  const uint32_t reached = __ballot_sync(~0u, above + from_here >= wanted);
  if (reached == 0) return {-1, 0, 0};
  const int owner = 31 - __clz(reached);
  above += __shfl_sync(~0u, from_here - sum, owner);
  first += owner * kRun;
  if constexpr (kRun > 1) {
    return warp_find_from_top<kRun>(hist, wanted, first, above);
  } else {
    return {first, above, __shfl_sync(~0u, sum, owner)};
  }
}

// Shared memory of a DeviceBlock.
struct BlockScratch {
  Bin bin;
  int warp_sums[32];
  int total;
};

// kThreads threads, from thread kFirst of the block on, that synchronise at barrier kBarrier.
// `scratch` may be reused once another barrier of the group has passed, as every method ensures.
template <int kThreads, int kBarrier, int kFirst = 0>
class DeviceBlock {
  // This thread's index in the group; kFirst is a multiple of 32.
  __device__ __forceinline__ static unsigned own_thread() { return indexcache::own_thread() - kFirst; }

 public:
  __device__ __forceinline__ explicit DeviceBlock(BlockScratch& scratch) : scratch_(scratch) {}

  __device__ __forceinline__ void sync() { named_barrier_sync(kBarrier, kThreads); }

  template <class F>
  __device__ __forceinline__ void each(int n, F f) {
    for (int i = own_thread(); i < n; i += kThreads) f(i);
    sync();
  }

  __device__ __forceinline__ void add(int* address, int value) { atomicAdd(address, value); }

  __device__ __forceinline__ int fetch_add(int* counter, int n) { return atomicAdd(counter, n); }

  __device__ __forceinline__ uint32_t set_bits(uint32_t* address, uint32_t bits) {
    return atomicOr(address, bits);
  }

  __device__ __forceinline__ int replace(int* address, int expected, int desired) {
    return atomicCAS(address, expected, desired);
  }

  template <int kBins>
  __device__ __forceinline__ Bin find_from_top(const int* hist, int wanted) {
    if (own_thread() < 32) {
      const Bin bin = warp_find_from_top<kBins>(hist, wanted);
      if (own_thread() == 0) scratch_.bin = bin;
    }
    sync();
    return scratch_.bin;
  }

  template <int kBins, class F>
  __device__ __forceinline__ void find_in_rows(int rows, const int* hists, int wanted, F f) {
    for (int row = own_thread() / 32; row < rows; row += kThreads / 32) {
      const Bin bin = warp_find_from_top<kBins>(hists + row * kBins, wanted);
      if (own_thread() % 32 == 0) f(row, bin);
    }
    sync();
  }

  // In place: a chunk is read before any of it is overwritten, and what one chunk writes lies below
  // what the next one reads.
  __device__ __forceinline__ int compact(Entry* list, int n, Entry bound, int* counter) {
    sync();  // everybody has read what is replaced here
    if (own_thread() == 0) *counter = 0;
    for (int base = 0; base < n; base += kThreads * kInFlight) {
      Entry own[kInFlight];
      read(own, list, n, base);
      sync();
      place(own, bound, list, n, counter);
    }
    sync();
    return *counter;  // to be changed after another barrier only
  }

  __device__ __forceinline__ int copy_if(const Entry* list, int n, Entry bound, Entry* out,
                                         int room, int* counter) {
    if (own_thread() == 0) *counter = 0;
    sync();
    for (int base = 0; base < n; base += kThreads * kInFlight) {
      Entry own[kInFlight];
      read(own, list, n, base);
      place(own, bound, out, room, counter);
    }
    sync();
    return *counter;  // to be changed after another barrier only
  }

  // Every thread scans a run of its own; an odd run length keeps the lanes on different banks.
  __device__ __forceinline__ int exclusive_scan(int* data, int n) {
    const int run = ceil_div(n, kThreads) | 1;
    const int begin = smaller(int(own_thread()) * run, n);
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
  static constexpr int kInFlight = 8;

  // A chunk of a list, several loads at once; 0, which is below every entry, beyond its end.
  __device__ __forceinline__ static void read(Entry (&own)[kInFlight], const Entry* list, int n,
                                              int base) {
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int i = base + j * kThreads + int(own_thread());
      own[j] = i < n ? list[i] : 0;
    }
  }

  // The entries >= bound, behind those that `counter` counts; a warp counts them at once.
  __device__ __forceinline__ static void place(const Entry (&own)[kInFlight], Entry bound,
                                               Entry* out, int room, int* counter) {
    const int lane = own_thread() % 32;
    uint32_t masks[kInFlight];
    int found = 0;
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      masks[j] = __ballot_sync(~0u, own[j] != 0 && own[j] >= bound);
      found += __popc(masks[j]);
    }
    int next = 0;
    if (lane == 0 && found > 0) next = atomicAdd(counter, found);
    next = __shfl_sync(~0u, next, 0);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int at = next + __popc(masks[j] & ((1u << lane) - 1));
      if ((masks[j] >> lane & 1) && at < room) out[at] = own[j];
      next += __popc(masks[j]);
    }
  }

  // The sum of `value` over the threads before this one; leaves the whole sum in scratch_.total.
  __device__ __forceinline__ int exclusive_sum(int value) {
    const int lane = own_thread() % 32;
    const int warp = own_thread() / 32;
    int inclusive = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    if (lane == 31) scratch_.warp_sums[warp] = inclusive;
    sync();
    if (own_thread() == 0) {
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
