// Logits and selection in one: the streaming gate (gate.h) takes the place of the logits matrix.
//
// A persistent block takes every gridDim.x-th tile of kRows query rows. Its lists live in global
// memory (they stay in L2), everything else in shared memory. A row that sees at most k tokens needs
// no logits.
#pragma once

#include "indexer/gate.h"
#include "indexer/pipeline.cuh"

namespace indexcache::indexer {

struct SelectParams {
  Inputs inputs;
  int k;
  int* out;      // [rows, k]
  Entry* lists;  // [blocks, T::kRows, kListCapacity]
  bool as_slots;
};

template <class T>
struct SelectShared {
  Ring<T> ring;
  Gate<T::kRows> gate;
  BlockScratch block;
  union {  // the histograms of a segment, then one row's list at a time
    int hists[T::kRows * kGateBins];
    Entry list[kListCapacity];
  };
  AscendingScratch ascending;
};

using MathBlock = DeviceBlock<kMathThreads, kMathBarrier>;

// Tiles and segments of one block, as both roles walk them.
template <class T, class OnTile, class OnSegment>
__device__ __forceinline__ void for_each_tile(const SelectParams& params, OnTile on_tile,
                                              OnSegment on_segment) {
  const int rows = params.inputs.rows;
  int n = 0;
  for (int first = blockIdx.x * T::kRows; first < rows; first += gridDim.x * T::kRows, ++n) {
    on_tile(first, n);
    const int end = smaller(first + T::kRows, rows);
    for (int row = first; row < end;) {
      const Segment segment = segment_at(params.inputs.requests, row, end);
      on_segment(first, segment, pages_of(segment, params.inputs.visible, params.k));
      row = segment.end;
    }
  }
}

template <class T>
__device__ __forceinline__ void finish_segment(MathBlock& block, SelectShared<T>& shared,
                                               const SelectParams& params, const Entry* lists,
                                               int first, const Segment& segment) {
  const BlockTable table = params.as_slots ? params.inputs.table : BlockTable{nullptr, 0};
  for (int row = segment.first; row < segment.end; ++row) {
    int* out = params.out + int64_t(row) * params.k;
    const int visible = segment.request < 0 ? 0 : params.inputs.visible[row];
    const auto map = [&](int position) { return table.slot_or_position(segment.request, position); };
    if (visible <= params.k) {
      block.each(params.k, [&](int i) { out[i] = i < visible ? map(i) : -1; });
      continue;
    }
    const Entry* list = lists + (row - first) * kListCapacity;
    const int count = shared.gate.counts[row - first];
    block.each(count, [&](int i) { shared.list[i] = list[i]; });
    write_topk(block, shared.list, count, params.k, visible, shared.gate.digit_hist,
               shared.ascending, out, map);
  }
}

// This lane's logits of the page that starts at position `start`, to the gate.
template <class T>
__device__ __forceinline__ void offer_share(MathBlock& block, SelectShared<T>& shared, Entry* lists,
                                            const float (&logits)[T::Share::kOwned],
                                            const int (&limits)[T::Share::kOwned], int start) {
  int rows[T::Share::kOwned];
  Entry entries[T::Share::kOwned];
  bool seen[T::Share::kOwned];
#pragma unroll
  for (int slot = 0; slot < T::Share::kOwned; ++slot) {
    const int position = start + key_of_slot<T>(slot);
    rows[slot] = row_of_slot<T>(slot);
    entries[slot] = make_entry(order_key(logits[slot]), position);
    seen[slot] = position < limits[slot];
  }
  offer(block, shared.gate, lists, shared.hists, rows, entries, seen);
}

template <class T>
__device__ __forceinline__ void select_math(SelectShared<T>& shared, const SelectParams& params) {
  const Inputs& inputs = params.inputs;
  Ring<T>& ring = shared.ring;
  MathBlock block(shared.block);
  Entry* lists = params.lists + int64_t(blockIdx.x) * T::kRows * kListCapacity;
  const int group = threadIdx.x / 128;
  float weights[T::kWeights];
  int n = 0;  // pages that went through the ring

  for_each_tile<T>(
      params,
      [&](int first, int tile) {
        load_weights<T>(weights, inputs, first);
        mbarrier_wait(&ring.queries_full, tile & 1);
      },
      [&](int first, const Segment& segment, int pages) {
        if (pages > 0) {
          const int step = page_step(pages);
          int limits[T::Share::kOwned];
          load_limits<T>(limits, inputs, first, segment);
          reset(block, shared.gate, shared.hists);
          for (int done = 0; done < pages; done += kCheckKeys / kPageTokens) {
            if (done > 0) check(block, shared.gate, lists, shared.hists, params.k);
            const int stop = smaller(done + kCheckKeys / kPageTokens, pages);
            for (int i = done + ((group - n - done) & 1); i < stop; i += kMathGroups) {
              const int start = spread_page(i, step, pages) * kPageTokens;
              float logits[T::Share::kOwned];
              score_page(logits, ring, weights, n + i);
              offer_share<T>(block, shared, lists, logits, limits, start);
            }
          }
          n += pages;
        }
        block.sync();  // every offer has arrived, every product is done
        const bool last = segment.end == smaller(first + T::kRows, inputs.rows);
        if (last && threadIdx.x % 32 == 0) mbarrier_arrive(&ring.queries_empty);
        finish_segment(block, shared, params, lists, first, segment);
        block.sync();
      });
}

template <int kHeads, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    select_kernel(const __grid_constant__ CUtensorMap queries,
                  const __grid_constant__ CUtensorMap keys, const SelectParams params) {
  using T = Tile<kHeads, kRows>;
  SelectShared<T>& shared = dynamic_shared<SelectShared<T>>();
  init_ring(shared.ring);

  if (threadIdx.x >= kMathThreads) {
    if constexpr (T::kWide) lower_registers<kLoadRegisters>();
    if (threadIdx.x < kMathThreads + 32) {
      int n = 0;
      for_each_tile<T>(
          params,
          [&](int first, int tile) {
            if (threadIdx.x == kMathThreads) load_queries(shared.ring, &queries, first, tile);
            __syncwarp();
          },
          [&](int, const Segment& segment, int pages) {
            const int step = pages > 0 ? page_step(pages) : 0;
            load_pages(shared.ring, &keys, params.inputs, segment.request, pages, n,
                       [&](int i) { return spread_page(i, step, pages); });
            n += pages;
          });
    }
  } else {
    if constexpr (T::kWide) raise_registers<kMathRegisters>();
    select_math<T>(shared, params);
  }
}

}  // namespace indexcache::indexer
