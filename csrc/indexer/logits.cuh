// Logits of paged keys, written out: the first of two launches in decode and in short prefills.
//
// Grid (tiles of rows, splits): a block takes every splits-th page of its rows' requests, so that
// any length spreads evenly and a block beyond the end leaves at once.
#pragma once

#include "indexer/pipeline.cuh"

namespace indexcache::indexer {

struct LogitsParams {
  Inputs inputs;
  int rows_per_tile;  // at most T::kRows
  float* out;
  int64_t stride;
};

__device__ __forceinline__ RowRange rows_of_block(const LogitsParams& params) {
  return tile_rows(params.inputs.requests, params.inputs.rows, params.rows_per_tile, blockIdx.x);
}

// Rows and pages of one block, as both roles walk them.
template <class Visit>
__device__ __forceinline__ void for_each_share(const LogitsParams& params, Visit visit) {
  const RowRange tile = rows_of_block(params);
  const int split = blockIdx.y;
  const int splits = gridDim.y;
  for (int row = tile.first; row < tile.end;) {
    const Segment segment = segment_at(params.inputs.requests, row, tile.end);
    const int pages = pages_of(segment, params.inputs.visible, 0);
    if (pages > split) visit(segment, ceil_div(pages - split, splits), split, splits);
    row = segment.end;
  }
}

// One page through the ring, number `n`: this lane's share of its logits, and their positions; its
// first key is `own`.
template <class T>
__device__ __forceinline__ void score_page(float (&logits)[T::Share::kOwned],
                                           int (&positions)[T::Share::kOwned], Ring<T>& ring,
                                           const float (&weights)[T::kWeights], int own, int n) {
  const unsigned stage = ring_stage(n);
  const uint64_t keys = advance(k_major_descriptor(shared_address(ring.keys)), stage * kKeyBytes);
  const uint64_t queries = k_major_descriptor(shared_address(ring.queries));
  float registers[T::kAccumulators];

  mbarrier_wait(&ring.full[stage], ring_parity(n));
  multiply<T>(registers, keys, queries);
  wgmma_wait(registers);

  // What else the stage holds is read now, when accumulators make room for it, and not before.
  const int start = ring.starts[stage];
  float scales[T::Share::kOwned];
#pragma unroll
  for (int slot = 0; slot < T::Share::kOwned; ++slot) {
    const int key = own + slot * kKeysApart;
    scales[slot] = ring.scales[stage][key];
    positions[slot] = start + key;
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[stage]);

  float values[T::kValues];
  sum_heads<T>(values, registers, weights);
#pragma unroll
  for (int slot = 0; slot < T::Share::kOwned; ++slot) logits[slot] = values[slot] * scales[slot];
}

template <int kHeads, int kRows>
__global__ void __launch_bounds__(Tile<kHeads, kRows>::kThreads,
                                  Tile<kHeads, kRows>::kColumns <= 64 ? 2 : 1)
    logits_kernel(const __grid_constant__ CUtensorMap queries,
                  const __grid_constant__ CUtensorMap keys, const LogitsParams params) {
  using T = Tile<kHeads, kRows>;
  Ring<T>& ring = dynamic_shared<Ring<T>>();
  const Inputs& inputs = params.inputs;
  const int first_row = rows_of_block(params).first;
  init_ring(ring, T::kMathWarps / kPagesAtOnce);
  let_next_launch_begin();  // top-k, which waits for these logits

  if (threadIdx.x >= T::kMathThreads) {
    if constexpr (T::kWide) lower_registers<T::kLoadRegisters>();
    if (threadIdx.x < T::kMathThreads + 32) {
      if (threadIdx.x == T::kMathThreads) load_queries(ring, &queries, first_row, 0);
      __syncwarp();
      int n = 0;
      for_each_share(params, [&](const Segment& segment, int count, int split, int splits) {
        load_pages(ring, &keys, inputs, segment.request, count, n,
                   [&](int i) { return split + i * splits; });
        n += count;
      });
    }
  } else {
    if constexpr (T::kWide) raise_registers<T::kMathRegisters>();
    const int group = own_page<T>();
    float weights[T::kWeights];
    load_weights<T>(weights, inputs, first_row);
    mbarrier_wait(&ring.queries_full, 0);
    const int key = own_key<T>();
    const int row = first_row + own_row<T>();
    int n = 0;
    for_each_share(params, [&](const Segment& segment, int count, int, int) {
      const int limit = T::Share::owns(threadIdx.x) ? limit_of(inputs, row, segment) : 0;
      for (int i = (group - n) & 1; i < count; i += kPagesAtOnce) {
        float logits[T::Share::kOwned];
        int positions[T::Share::kOwned];
        score_page(logits, positions, ring, weights, key, n + i);
#pragma unroll
        for (int slot = 0; slot < T::Share::kOwned; ++slot) {
          if (positions[slot] < limit) {
            params.out[row * params.stride + positions[slot]] = logits[slot];
          }
        }
      }
      n += count;
    });
  }
}

}  // namespace indexcache::indexer
