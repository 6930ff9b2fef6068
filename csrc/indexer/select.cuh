// Logits and selection in one: the streaming gate (gate.h) takes the place of the logits matrix.
//
// A persistent block takes every gridDim.x-th tile of kRows query rows. Its lists live in global
// memory, everything else in shared memory. A row that sees at most k tokens needs no logits.
#pragma once

#include "indexer/gate.h"
#include "indexer/pipeline.cuh"

namespace indexcache::indexer {

// Four math warpgroups: two pages, each by two halves of the tile's columns.
template <int kHeads, int kRows>
using SelectTile = Tile<kHeads, kRows, 2>;

constexpr int kShortList = 8192;  // entries that fit into shared memory

struct SelectParams {
  Inputs inputs;
  int k;
  int* out;      // [rows, k]
  Entry* lists;  // [blocks, T::kRows, kListCapacity]
  bool as_slots;
};

// Where a block is in its tiles and their segments; both roles walk them alike.
struct Walk {
  int tile;   // how many came before
  int first;  // row of the tile
  int end;    // of its rows
  Segment segment;
};

template <class T>
struct SelectShared {
  Ring<T> ring;
  Gate<T::kRows> gate;
  BlockScratch block;
  union {  // the histograms of a segment, then one row's list at a time
    int hists[T::kRows * kGateBins];
    Entry list[kShortList];
  };
  AscendingScratch ascending;
  int collected;
  Walk walk;
};

template <class T>
using MathBlock = DeviceBlock<T::kMathThreads, kMathBarrier>;

// To the first segment from {-1, ...}, then to the next; false after the last.
template <class T>
__device__ __forceinline__ bool advance(Walk& walk, const Inputs& inputs) {
  if (walk.tile < 0 || walk.segment.end == walk.end) {
    ++walk.tile;
    walk.first = (walk.tile * int(gridDim.x) + int(blockIdx.x)) * T::kRows;
    walk.end = smaller(walk.first + T::kRows, inputs.rows);
    walk.segment.end = walk.first;
  }
  if (walk.first >= inputs.rows) return false;
  walk.segment = segment_at(inputs.requests, walk.segment.end, walk.end);
  return true;
}

// What may still be selected of a row's list goes to shared memory; returns how much it is.
template <class T>
__device__ __forceinline__ int collect_row(MathBlock<T>& block, SelectShared<T>& shared,
                                           const Entry* list, int row, int k) {
  const int count = shared.gate.counts[row];
  const auto collect = [&](Entry bound) {
    return block.collect(list, count, bound, shared.list, kShortList, &shared.collected);
  };
  const int found = collect(floor_entry(shared.gate.floors[row]));
  if (found <= kShortList) return found;
  return collect(kth_bound(block, list, count, k, shared.gate.digit_hist));
}

template <class T>
__device__ __forceinline__ void finish_segment(MathBlock<T>& block, SelectShared<T>& shared,
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
    const int count = collect_row(block, shared, list, row - first, params.k);
    write_topk(block, shared.list, count, params.k, visible, shared.gate.digit_hist,
               shared.ascending, out, map);
  }
}

// What a lane needs to know of the row that its logits are of.
struct OwnRow {
  int row;        // of the tile
  int key;        // of a page, the first that is this lane's
  int limit;      // tokens that the row may reach
  unsigned list;  // first place of its list
};

// A page through the ring, number `n`, and this lane's logits of it to the gate.
template <class T>
__device__ __forceinline__ void gate_page(MathBlock<T>& block, SelectShared<T>& shared,
                                          Entry* lists, const float (&weights)[T::kWeights],
                                          int part, const OwnRow& own, int n) {
  constexpr int kOwned = T::Share::kOwned;
  float logits[kOwned];
  int positions[kOwned];
  score_page(logits, positions, shared.ring, weights, part, own.key, n);
  const float floor = shared.gate.floors[own.row];
  bool passes[kOwned];
#pragma unroll
  for (int slot = 0; slot < kOwned; ++slot) {
    passes[slot] = reaches(logits[slot], floor) && positions[slot] < own.limit;
  }
  offer(block, &shared.gate.counts[own.row], lists, own.list, shared.hists + own.row * kGateBins,
        logits, positions, passes);
}

template <class T>
__device__ __forceinline__ void select_math(SelectShared<T>& shared, const SelectParams& params) {
  const Inputs& inputs = params.inputs;
  Ring<T>& ring = shared.ring;
  MathBlock<T> block(shared.block);
  const unsigned own_lists = blockIdx.x * T::kRows * kListCapacity;
  const int part = own_part<T>();
  OwnRow own = {part * T::kPartRows + own_row<T>(), own_key<T>(), 0, 0};
  own.list = fresh(own_lists + own.row * kListCapacity);
  float weights[T::kWeights];
  int begin = 0;            // number of a segment's first page in the ring
  int next = own_page<T>();  // and of the page that is this warpgroup's next

  for (Walk walk = {-1}; advance<T>(walk, inputs);) {
    if (walk.segment.first == walk.first) {
      load_weights<T>(weights, inputs, walk.first + part * T::kPartRows);
      mbarrier_wait(&ring.queries_full, walk.tile & 1);
    }
    const int pages = pages_of(walk.segment, inputs.visible, params.k);
    if (pages > 0) {
      own.limit = limit_of(inputs, walk.first + own.row, walk.segment);
      if (threadIdx.x == 0) shared.walk = walk;  // the page loop needs its registers
      reset(block, shared.gate, shared.hists);
      const int end = begin + pages;
      for (int stop = begin, keys = kFirstCheck;;) {
        stop = smaller(stop + keys / kPageTokens, end);
        for (; next < stop; next += kPagesAtOnce) {
          gate_page<T>(block, shared, params.lists, weights, part, own, next);
        }
        if (stop == end) break;
        keys = check(block, shared.gate, params.lists + own_lists, shared.hists, params.k,
                     (stop - begin) * kPageTokens);
      }
      begin = end;
      walk = shared.walk;
    }
    block.sync();  // every offer has arrived, every product is done
    if (walk.segment.end == walk.end && threadIdx.x % 32 == 0) mbarrier_arrive(&ring.queries_empty);
    if (pages > 0) raise_floors(block, shared.gate, shared.hists, params.k);
    finish_segment(block, shared, params, params.lists + own_lists, walk.first, walk.segment);
    block.sync();
  }
}

template <int kHeads, int kRows>
__global__ void __launch_bounds__(SelectTile<kHeads, kRows>::kThreads, 1)
    select_kernel(const __grid_constant__ CUtensorMap queries,
                  const __grid_constant__ CUtensorMap keys, const SelectParams params) {
  using T = SelectTile<kHeads, kRows>;
  SelectShared<T>& shared = dynamic_shared<SelectShared<T>>();
  init_ring(shared.ring);

  if (threadIdx.x >= T::kMathThreads) {
    if constexpr (T::kWide) lower_registers<T::kLoadRegisters>();
    if (threadIdx.x < T::kMathThreads + 32) {
      int n = 0;
      for (Walk walk = {-1}; advance<T>(walk, params.inputs);) {
        if (walk.segment.first == walk.first) {
          if (threadIdx.x == T::kMathThreads) {
            load_queries(shared.ring, &queries, walk.first, walk.tile);
          }
          __syncwarp();
        }
        const int pages = pages_of(walk.segment, params.inputs.visible, params.k);
        const int step = pages > 0 ? page_step(pages) : 0;
        load_pages(shared.ring, &keys, params.inputs, walk.segment.request, pages, n,
                   [&](int i) { return spread_page(i, step, pages); });
        n += pages;
      }
    }
  } else {
    if constexpr (T::kWide) raise_registers<T::kMathRegisters>();
    select_math<T>(shared, params);
  }
}

}  // namespace indexcache::indexer
