// What both indexer kernels share: keys stream through a ring of pages in shared memory, and two
// warpgroups multiply them, every second page each, with a tile of queries that stays.
//
//   block = 2 math warpgroups (each 64 keys x kColumns a step) + 1 warpgroup of which one warp loads
//   A = a page of keys [64, 128], B = the tile's queries [kRows * kHeads, 128], both e4m3, K-major
//
// One warpgroup's epilogue runs while the other's product occupies the tensor cores.
#pragma once

#include "common/block.cuh"
#include "common/layout.h"
#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "indexer/inputs.h"
#include "indexer/reduce.h"
#include "indexer/schedule.h"

namespace indexcache::indexer {

constexpr int kMathGroups = 2;
constexpr int kMathThreads = kMathGroups * 128;
constexpr int kMathWarps = kMathThreads / 32;
constexpr int kThreads = kMathThreads + 128;
constexpr int kMathBarrier = 1;
constexpr int kStages = 6;

// Registers after the roles part, where a math thread needs more than an even share.
constexpr int kMathRegisters = 232;
constexpr int kLoadRegisters = 40;

template <int kHeads_, int kRows_>
struct Tile {
  static constexpr int kHeads = kHeads_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kHeads * kRows;
  static constexpr int kQueryBytes = kColumns * kIndexDim;
  static constexpr int kAccumulators = kColumns / 2;
  static constexpr int kWeights = kColumns / 4;
  static constexpr int kValues = 2 * kRows;
  using Share = QuadShare<kValues>;
  static constexpr bool kWide = kAccumulators + kWeights > 128;
  static_assert(kHeads % 8 == 0 && kColumns <= 256);
};

template <class T>
struct Ring {
  alignas(kSwizzlePeriod) unsigned char queries[T::kQueryBytes];
  alignas(kSwizzlePeriod) unsigned char keys[kStages][kKeyBytes];
  alignas(16) float scales[kStages][kPageTokens];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t queries_full;
  uint64_t queries_empty;
};

template <class T>
__device__ __forceinline__ void init_ring(Ring<T>& ring) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&ring.full[stage], 1);
      mbarrier_init(&ring.empty[stage], kMathWarps / kMathGroups);
    }
    mbarrier_init(&ring.queries_full, 1);
    mbarrier_init(&ring.queries_empty, kMathWarps);
    fence_barrier_init();
  }
  __syncthreads();
}

__device__ __forceinline__ int ring_stage(int n) { return n % kStages; }
__device__ __forceinline__ int ring_parity(int n) { return (n / kStages) & 1; }

// -- the loading warp --------------------------------------------------------------------------

// One lane. `n` counts the tiles of this block.
template <class T>
__device__ __forceinline__ void load_queries(Ring<T>& ring, const CUtensorMap* queries, int row,
                                             int n) {
  mbarrier_wait(&ring.queries_empty, (n & 1) ^ 1);
  mbarrier_arrive_expect(&ring.queries_full, T::kQueryBytes);
  tma_load_2d(ring.queries, queries, &ring.queries_full, 0, row * T::kHeads);
}

// The whole warp. Pages page_at(0), ..., page_at(count - 1) of a request; `n` is the number of
// pages that went through the ring before.
template <class T, class PageAt>
__device__ __forceinline__ void load_pages(Ring<T>& ring, const CUtensorMap* keys,
                                           const Inputs& inputs, int request, int count, int n,
                                           PageAt page_at) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < count; base += 32) {
    const int own = base + lane < count ? inputs.table.page(request, page_at(base + lane)) : 0;
    const int here = smaller(32, count - base);
    for (int j = 0; j < here; ++j) {
      const int page = __shfl_sync(~0u, own, j);
      if (lane == 0) {
        const int stage = ring_stage(n + base + j);
        mbarrier_wait(&ring.empty[stage], ring_parity(n + base + j) ^ 1);
        mbarrier_arrive_expect(&ring.full[stage], kPageBytes);
        tma_load_3d(ring.keys[stage], keys, &ring.full[stage], 0, 0, page);
        bulk_load(ring.scales[stage], inputs.pages + int64_t(page) * kPageBytes + kKeyBytes,
                  kScaleBytes, &ring.full[stage]);
      }
      __syncwarp();
    }
  }
}

// -- the math warpgroups -------------------------------------------------------------------------

// The gates of the columns that this thread's accumulators hold, in their order; 0 beyond the rows.
template <class T>
__device__ __forceinline__ void load_weights(float (&weights)[T::kWeights], const Inputs& inputs,
                                             int row) {
  const float* first = inputs.weights + int64_t(row) * T::kHeads;
  const int left = (inputs.rows - row) * T::kHeads;
#pragma unroll
  for (int j = 0; j < T::kWeights; ++j) {
    const int column = accumulator_column(threadIdx.x, j / 2 * 4 + j % 2);
    weights[j] = column < left ? first[column] : 0.0f;
  }
}

// One exchange: the first kCount values are added to those of the lane that differs in `bit`.
template <int kCount>
__device__ __forceinline__ void exchange(float* values, int bit) {
  if constexpr (kCount == 1) {
    values[0] += __shfl_xor_sync(~0u, values[0], bit);
  } else {
    const bool high = threadIdx.x & bit;
#pragma unroll
    for (int x = 0; x < kCount / 2; ++x) {
      const float other = __shfl_xor_sync(~0u, sent<kCount>(values, x, high), bit);
      values[x] = kept<kCount>(values, x, high) + other;
    }
  }
}

// The key of a page that logit `slot` of this lane's share belongs to.
template <class T>
__device__ __forceinline__ int key_of_slot(int slot) {
  return accumulator_row(threadIdx.x % 128, 0) + 8 * (T::Share::value(threadIdx.x, slot) & 1);
}

// The row of the tile that it belongs to.
template <class T>
__device__ __forceinline__ int row_of_slot(int slot) {
  return T::Share::value(threadIdx.x, slot) / 2;
}

// The tokens that each logit of this lane's share may reach; 0 for rows outside the segment, and in
// lanes whose share another lane owns.
template <class T>
__device__ __forceinline__ void load_limits(int (&limits)[T::Share::kOwned], const Inputs& inputs,
                                            int tile_row, const Segment& segment) {
#pragma unroll
  for (int slot = 0; slot < T::Share::kOwned; ++slot) {
    const int row = tile_row + row_of_slot<T>(slot);
    const bool inside =
        row >= segment.first && row < segment.end && T::Share::owns(threadIdx.x);
    limits[slot] = inside ? inputs.visible[row] : 0;
  }
}

// One page through the ring, number `n`: this lane's share of its logits.
template <class T>
__device__ __forceinline__ void score_page(float (&logits)[T::Share::kOwned], Ring<T>& ring,
                                           const float (&weights)[T::kWeights], int n) {
  const int stage = ring_stage(n);
  const uint64_t keys = k_major_descriptor(shared_address(ring.keys[stage]));
  const uint64_t queries = k_major_descriptor(shared_address(ring.queries));
  float registers[T::kAccumulators];

  mbarrier_wait(&ring.full[stage], ring_parity(n));
  wgmma_fence();
#pragma unroll
  for (int byte = 0; byte < kIndexDim; byte += 32) {
    Fp8Wgmma<T::kColumns>::step(registers, advance(keys, byte), advance(queries, byte), byte > 0);
  }
  wgmma_commit();

  const int key = accumulator_row(threadIdx.x % 128, 0);
  const float scales[2] = {ring.scales[stage][key], ring.scales[stage][key + 8]};
  wgmma_wait(registers);
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[stage]);

  float values[T::kValues];
  sum_own_heads<T::kHeads, T::kRows>(registers, weights, values);
  exchange<T::kValues>(values, 1);
  exchange<T::kValues / 2>(values, 2);
#pragma unroll
  for (int slot = 0; slot < T::Share::kOwned; ++slot) {
    const bool second = T::Share::value(threadIdx.x, slot) & 1;
    logits[slot] = values[slot] * (second ? scales[1] : scales[0]);
  }
}

}  // namespace indexcache::indexer
