// What both indexer kernels share: keys stream through a ring of pages in shared memory, and math
// warpgroups multiply them, two pages at a time, with a tile of queries that stays.
//
//   block = 2 * kParts math warpgroups + 1 warpgroup of which the first warp loads
//   A = a page of keys [64, 128], B = a part of the tile's queries, both e4m3, K-major
//
// One warpgroup's epilogue runs while another's product occupies the tensor cores. Four of them hide
// it better than two with twice the columns each, and leave a scheduler more warps to choose from.
#pragma once

#include "common/block.cuh"
#include "common/layout.h"
#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "indexer/inputs.h"
#include "indexer/reduce.h"
#include "indexer/schedule.h"

namespace indexcache::indexer {

constexpr int kPagesAtOnce = 2;
constexpr int kKeysApart = 8;  // a thread's two keys of a page (layout.h)
constexpr int kMathBarrier = 1;
constexpr int kStages = 8;
static_assert((kStages & (kStages - 1)) == 0, "stage and phase are bits of a page's number");

// kRows query rows, in kParts parts of a warpgroup's width.
template <int kHeads_, int kRows_, int kParts_ = 1>
struct Tile {
  static constexpr int kHeads = kHeads_;
  static constexpr int kRows = kRows_;
  static constexpr int kParts = kParts_;
  static constexpr int kColumns = kHeads * kRows;
  static constexpr int kQueryBytes = kColumns * kIndexDim;

  // A part.
  static constexpr int kPartRows = kRows / kParts;
  static constexpr int kPartColumns = kHeads * kPartRows;
  static constexpr int kAccumulators = kPartColumns / 2;
  static constexpr int kWeights = kPartColumns / 4;
  static constexpr int kValues = 2 * kPartRows;
  using Share = QuadShare<kValues>;
  static_assert(Share::kOwned <= 2, "a lane's logits are of one row");
  static_assert(kHeads % 8 == 0 && kColumns <= 256 && kRows % kParts == 0);

  static constexpr int kMathGroups = kPagesAtOnce * kParts;
  static constexpr int kMathThreads = kMathGroups * 128;
  static constexpr int kMathWarps = kMathThreads / 32;
  static constexpr int kThreads = kMathThreads + 128;

  // Registers after the roles part, where a math thread needs more than an even share.
  static constexpr int kMathRegisters = kParts == 1 ? 232 : 104;
  static constexpr int kLoadRegisters = kParts == 1 ? 40 : 64;
  static constexpr bool kWide = kAccumulators + kWeights > (kParts == 1 ? 128 : 64);
};

template <class T>
struct Ring {
  alignas(kSwizzlePeriod) unsigned char queries[T::kQueryBytes];
  alignas(kSwizzlePeriod) unsigned char keys[kStages][kKeyBytes];
  alignas(16) float scales[kStages][kPageTokens];
  int starts[kStages];  // positions of the pages' first tokens
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t queries_full;
  uint64_t queries_empty;
};

// `readers` warps say of each page that they need it no more.
template <class T>
__device__ __forceinline__ void init_ring(Ring<T>& ring, int readers) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&ring.full[stage], 1);
      mbarrier_init(&ring.empty[stage], readers);
    }
    mbarrier_init(&ring.queries_full, 1);
    mbarrier_init(&ring.queries_empty, T::kMathWarps);
    fence_barrier_init();
  }
  __syncthreads();
}

__device__ __forceinline__ unsigned ring_stage(unsigned n) { return n % kStages; }
__device__ __forceinline__ unsigned ring_parity(unsigned n) { return n / kStages & 1; }

// -- the loading warp --------------------------------------------------------------------------

// One lane. `n` counts the tiles of this block.
template <class T>
__device__ __forceinline__ void load_queries(Ring<T>& ring, const CUtensorMap* queries, int row,
                                             int n) {
  mbarrier_wait(&ring.queries_empty, (n & 1) ^ 1);
  mbarrier_arrive_expect(&ring.queries_full, T::kQueryBytes);
  tma_load_2d(ring.queries, queries, &ring.queries_full, 0, row * T::kHeads);
}

// One lane. Page `page` of the pool, whose first token has position `start`, is number `n` of those
// that go through the ring.
template <class T>
__device__ __forceinline__ void load_page(Ring<T>& ring, const CUtensorMap* keys,
                                          const Inputs& inputs, int page, int start, int n) {
  const int stage = ring_stage(n);
  mbarrier_wait(&ring.empty[stage], ring_parity(n) ^ 1);
  ring.starts[stage] = start;
  mbarrier_arrive_expect(&ring.full[stage], kPageBytes);
  tma_load_3d(ring.keys[stage], keys, &ring.full[stage], 0, 0, page);
  bulk_load(ring.scales[stage], inputs.pages + int64_t(page) * kPageBytes + kKeyBytes, kScaleBytes,
            &ring.full[stage]);
}

// The whole warp. Pages page_at(0), ..., page_at(count - 1) of a request; `n` is the number of
// pages that went through the ring before.
template <class T, class PageAt>
__device__ __forceinline__ void load_pages(Ring<T>& ring, const CUtensorMap* keys,
                                           const Inputs& inputs, int request, int count, int n,
                                           PageAt page_at) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < count; base += 32) {
    const int index = base + lane < count ? page_at(base + lane) : 0;
    const int own = base + lane < count ? inputs.table.page(request, index) : 0;
    const int here = smaller(32, count - base);
    for (int j = 0; j < here; ++j) {
      const int page = __shfl_sync(~0u, own, j);
      const int start = __shfl_sync(~0u, index, j) * kPageTokens;
      if (lane == 0) load_page(ring, keys, inputs, page, start, n + base + j);
      __syncwarp();
    }
  }
}

// -- the math warpgroups -------------------------------------------------------------------------

// The page of each pair that this warpgroup multiplies, and the part of the columns.
__device__ __forceinline__ int own_group() { return uniform(int(threadIdx.x) / 128); }

template <class T>
__device__ __forceinline__ int own_page() {
  return own_group() / T::kParts;
}

template <class T>
__device__ __forceinline__ int own_part() {
  return own_group() % T::kParts;
}

// The gates of the columns that this thread's accumulators hold, in their order; 0 beyond the rows.
// `row` is the first of the part.
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

// This lane's share of a page's logits: `kOwned` keys, 8 apart, of one row of the part. The first
// key, and the row.
template <class T>
__device__ __forceinline__ int own_key() {
  return accumulator_row(threadIdx.x % 128, 0) + kKeysApart * T::Share::key(threadIdx.x);
}

template <class T>
__device__ __forceinline__ int own_row() {
  return T::Share::row(threadIdx.x);
}

// The tokens that a row may reach; 0 outside the segment.
__device__ __forceinline__ int limit_of(const Inputs& inputs, int row, const Segment& segment) {
  return row >= segment.first && row < segment.end ? inputs.visible[row] : 0;
}

// Begin the product of a page and a part of the queries; wgmma_wait ends it.
template <class T>
__device__ __forceinline__ void multiply(float (&registers)[T::kAccumulators], uint64_t keys,
                                         uint64_t queries) {
  wgmma_fence();
#pragma unroll
  for (int byte = 0; byte < kIndexDim; byte += 32) {
    Fp8Wgmma<T::kPartColumns>::step(registers, advance(keys, byte), advance(queries, byte),
                                    byte > 0);
  }
  wgmma_commit();
}

// The sums over the heads that are this lane's share of a product.
template <class T>
__device__ __forceinline__ void sum_heads(float (&values)[T::kValues],
                                          const float (&registers)[T::kAccumulators],
                                          const float (&weights)[T::kWeights]) {
  sum_own_heads<T::kHeads, T::kPartRows>(registers, weights, values);
  exchange<T::kValues>(values, 1);
  exchange<T::kValues / 2>(values, 2);
}

}  // namespace indexcache::indexer
