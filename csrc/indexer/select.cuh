// Logits and selection in one: the streaming gate (gate.h) takes the place of the logits matrix.
//
// A persistent block takes one tile of kRows query rows after the other (tile_scheduler.cuh). Its lists live in
// global memory, everything else in shared memory. A row that sees at most k tokens needs no logits.
//
//   warp 16       fetches tiles, loads pages        ring.empty -> ring.full
//   warps 0-15    multiply, and sum over the heads  ring.full -> scored
//   warps 17-19   the gate                          scored -> ring.empty
//
// Nobody else waits in the page loop, and the gate's upkeep costs the tensor cores nothing. At a
// segment's end all but the loader synchronise, and the math warps write its rows.
//
// Meanwhile the tensor cores have nothing to do: by the compiled loops' clocks for 6 % of a tile's clocks
// behind 190K tokens, and for up to 26 % behind 32K. The next tile's first eight pages come then, but
// its products do not begin, because
//   - they would need histograms of their own, while a row's list lies where the old ones did: 65,536
//     bytes, and 220,160 and the swizzle's 1,024 of 232,448 are taken (32 heads);
//   - other warps than those that multiply would have to write the rows: 640 threads of 96 registers
//     leave 32 a thread for a sixth warpgroup, and writing takes place where a thread has 104 and uses
//     102. The gate's three warps would take five times as long, and the ring lets the math warps only
//     eight pages ahead of them.
#pragma once

#include "indexer/gate.h"
#include "indexer/pipeline.cuh"
#include "indexer/scores.h"
#include "indexer/tile_scheduler.cuh"

namespace indexcache::indexer {

// Four math warpgroups: two pages, each by two halves of the tile's columns.
template <int kHeads, int kRows>
using SelectTile = Tile<kHeads, kRows, 2>;

constexpr int kShortList = 8192;  // entries that fit into shared memory
constexpr int kGateWarps = 3;
constexpr int kGateThreads = kGateWarps * 32;

// Named barriers, beside kMathBarrier.
constexpr int kGateBarrier = 2;
constexpr int kSegmentBarrier = 3;
constexpr int kOrderBarrier = 4;  // and one more for each further math warpgroup

struct SelectParams {
  Inputs inputs;
  int k;
  int* out;           // [rows, k]
  Entry* lists;       // [blocks, T::kRows, kListCapacity]
  unsigned* counter;  // of tile_scheduler.cuh: zero
  bool as_slots;
};

// Where a block is in its tiles and their segments; all roles go through them alike.
struct TileCursor {
  int tile;   // how many the block had before
  int first;  // row of the tile; negative behind the last
  int end;    // of its rows
  Segment segment;
};

template <class T>
struct SelectShared {
  Ring<T> ring;
  alignas(256) float scores[kStages][T::kRows * kPageScores];
  uint64_t scored[kStages];
  TileScheduler scheduler;
  uint32_t offsets[T::kMathThreads];
  Gate<T::kRows> gate;
  BlockScratch block;
  BlockScratch gate_block;
  union {  // the histograms of a segment, then one row's list at a time
    int hists[T::kRows * kGateBins];
    Entry list[kShortList];
  };
  AscendingScratch ascending;
  int copied;
  TileCursor cursor;
};

template <class T>
using MathBlock = DeviceBlock<T::kMathThreads, kMathBarrier>;
template <class T>
using GateBlock = DeviceBlock<kGateThreads, kGateBarrier, T::kMathThreads + 32>;

// To the first segment from {-1, ...}, then to the next; false after the last. `tile_at` gives the
// block's tiles by their number among them.
template <class T, class TileAt>
__device__ __forceinline__ bool advance(TileCursor& cursor, const Inputs& inputs, TileAt tile_at) {
  if (cursor.tile < 0 || cursor.segment.end == cursor.end) {
    ++cursor.tile;
    cursor.first = tile_at(cursor.tile) * T::kRows;
    cursor.end = smaller(cursor.first + T::kRows, inputs.rows);
    cursor.segment.end = cursor.first;
  }
  if (cursor.first < 0) return false;
  cursor.segment = segment_at(inputs.requests, cursor.segment.end, cursor.end);
  return true;
}

// What may still be selected of a row's list goes to shared memory; returns how much it is.
template <class T>
__device__ __forceinline__ int gather_row(MathBlock<T>& block, SelectShared<T>& shared,
                                           const Entry* list, int row, int k) {
  const int count = shared.gate.counts[row];
  const auto copy = [&](Entry bound) {
    return block.copy_if(list, count, bound, shared.list, kShortList, &shared.copied);
  };
  const int found = copy(floor_entry(shared.gate.floors[row]));
  if (found <= kShortList) return found;
  // Entries are distinct: these are k.
  return copy(kth_bound(block, list, count, k, shared.gate.digit_hist));
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
    const int count = gather_row(block, shared, list, row - first, params.k);
    write_topk(block, shared.list, count, params.k, visible, shared.gate.digit_hist,
               shared.ascending, out, map);
  }
}

// Math and gate: a segment's lists begin, or have ended.
template <class T>
__device__ __forceinline__ void sync_segment() {
  named_barrier_sync(kSegmentBarrier, T::kMathThreads + kGateThreads);
}

// -- the math warpgroups -------------------------------------------------------------------------

// The two warpgroups of a part of the columns alternate (ping-pong), so that they cannot fall in step: one
// begins a product when the other's, of the page before, has ended. Two products are under way at
// any time, one a part, and the tensor cores wait only while one hands them to the other.
//
// A warpgroup acquires them at a barrier of its own, at which the other arrives.
__device__ __forceinline__ void acquire_tensor_cores(int order) { named_barrier_sync(order, 2 * 128); }
__device__ __forceinline__ void release_tensor_cores(int order) { named_barrier_arrive_now(order, 2 * 128); }

// What a math warp keeps over its pages: descriptors of the ring's first page of keys and of its own
// part of the queries; and the barriers of its own warpgroup and of the one with the other page.
struct Operand {
  uint32_t keys;
  uint32_t queries;
  int own_order;
  int other_order;
};

// Only the low words of descriptors differ.
__device__ __forceinline__ uint64_t with_high_word(uint32_t low) {
  return uint64_t(k_major_descriptor(0) >> 32) << 32 | low;
}

// Bytes from the beginning of a page's scales and logits to a thread's own; it has no register left
// in which to keep them.
template <class T>
__device__ __forceinline__ uint32_t own_offsets() {
  const int row = own_part<T>() * T::kPartRows + own_row<T>();
  return 4 * (score_place<T::kRows>(row, own_key<T>()) << 16 | own_key<T>());
}

template <class T>
__device__ __forceinline__ Operand operand_of(const SelectShared<T>& shared) {
  const Ring<T>& ring = shared.ring;
  const uint32_t queries =
      shared_address(ring.queries) + own_part<T>() * (T::kPartColumns * kIndexDim);
  return {uniform(uint32_t(k_major_descriptor(shared_address(ring.keys)))),
          uniform(uint32_t(k_major_descriptor(queries))),
          kOrderBarrier + own_group(),
          kOrderBarrier + (own_group() ^ T::kParts)};
}

// A page through the ring, number `n`: this lane's logits go to the gate.
template <class T>
__device__ __forceinline__ void score_page(SelectShared<T>& shared, const Operand& operand,
                                           const float (&weights)[T::kWeights], int n) {
  const unsigned stage = ring_stage(n);
  const uint64_t keys = with_high_word(operand.keys + stage * (kKeyBytes >> 4));
  float registers[T::kAccumulators];

  mbarrier_wait(&shared.ring.full[stage], ring_parity(n));
  acquire_tensor_cores(operand.own_order);
  multiply<T>(registers, keys, with_high_word(operand.queries));
  wgmma_wait(registers);
  release_tensor_cores(operand.other_order);

  float values[T::kValues];
  sum_heads<T>(values, registers, weights);
  const uint32_t offsets = shared.offsets[threadIdx.x];
  const uint32_t scales = shared_address(shared.ring.scales[stage]) + (offsets & 0xFFFF);
  const uint32_t scores = shared_address(shared.scores[stage]) + (offsets >> 16);
  if constexpr (T::Share::kOwned == 2) {
    store_shared(scores, values[0] * load_shared(scales),
                 values[1] * load_shared(scales + 4 * kKeysApart));
  } else {
    store_shared(scores, float_bits(values[0] * load_shared(scales)));
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.scored[stage]);
}

template <class T>
__device__ __forceinline__ void select_math(SelectShared<T>& shared, const SelectParams& params) {
  const Inputs& inputs = params.inputs;
  Ring<T>& ring = shared.ring;
  MathBlock<T> block(shared.block);
  const unsigned own_lists = blockIdx.x * T::kRows * kListCapacity;
  const Operand operand = operand_of(shared);
  shared.offsets[threadIdx.x] = own_offsets<T>();
  float weights[T::kWeights];
  int begin = 0;             // number of a segment's first page in the ring
  int next = own_page<T>();  // and of the page that is this warpgroup's next
  if (next != 0) release_tensor_cores(operand.other_order);

  const auto tile_at = [&](int n) { return consume_tile(shared.scheduler, n); };
  for (TileCursor cursor = {-1}; advance<T>(cursor, inputs, tile_at);) {
    if (cursor.segment.first == cursor.first) {
      load_weights<T>(weights, inputs, cursor.first + own_part<T>() * T::kPartRows);
      mbarrier_wait(&ring.queries_full, cursor.tile & 1);
    }
    const int pages = pages_of(cursor.segment, inputs.visible, params.k);
    if (pages > 0) {
      if (threadIdx.x == 0) shared.cursor = cursor;  // the page loop needs its registers
      reset(block, shared.gate, shared.hists);
      sync_segment<T>();
      begin += pages;
      for (; next < begin; next += kPagesAtOnce) score_page(shared, operand, weights, next);
      sync_segment<T>();  // everything is appended
      cursor = shared.cursor;
    }
    if (cursor.segment.end == cursor.end && threadIdx.x % 32 == 0) mbarrier_arrive(&ring.queries_empty);
    if (pages > 0) raise_floors(block, shared.gate, shared.hists, params.k);
    finish_segment(block, shared, params, params.lists + own_lists, cursor.first, cursor.segment);
    block.sync();
  }
  if (next == begin) acquire_tensor_cores(operand.own_order);  // nobody leaves a barrier that is half full
}

// -- the gate warps ------------------------------------------------------------------------------

// What a gate lane knows of its row.
struct GateRow {
  int row;        // of the tile
  int limit;      // tokens that it may reach
  unsigned list;  // first place of its list
};

// Page number `n` from the math warps to the lists.
template <class T>
__device__ __forceinline__ void gate_page(GateBlock<T>& block, SelectShared<T>& shared,
                                          Entry* lists, const GateRow& own, int n) {
  using Share = GateShare<T::kRows>;
  const int lane = threadIdx.x % 32;
  const unsigned stage = ring_stage(n);
  mbarrier_wait(&shared.scored[stage], ring_parity(n));

  const float* scores = shared.scores[stage];
  const int start = shared.ring.starts[stage];
  const float floor = shared.gate.floors[own.row];
  uint32_t below = 0;
#pragma unroll
  for (int i = Share::kCount - 4; i >= 0; i -= 4) {
    const float4 quad = *reinterpret_cast<const float4*>(scores + Share::place(lane, i));
    const float logits[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int j = 3; j >= 0; --j) below = push_below(below, logits[j], floor);
  }
  uint32_t passes = floor == -INFINITY ? ~0u : ~below;
  passes &= Share::below(lane, own.limit - start);
  append(block, &shared.gate.counts[own.row], lists, own.list, shared.hists + own.row * kGateBins,
        passes, [&](int i) -> Scored {
          return {scores[Share::place(lane, i)], start + Share::key(lane, i)};
        });
  __syncwarp();
  if (lane == 0) mbarrier_arrive(&shared.ring.empty[stage]);
}

template <class T>
__device__ __forceinline__ void select_gate(SelectShared<T>& shared, const SelectParams& params) {
  const Inputs& inputs = params.inputs;
  GateBlock<T> block(shared.gate_block);
  const unsigned own_lists = blockIdx.x * T::kRows * kListCapacity;
  GateRow own = {GateShare<T::kRows>::row(threadIdx.x % 32), 0, 0};
  own.list = own_lists + own.row * kListCapacity;
  int end = 0;                                             // number of a segment's first page
  int next = int(threadIdx.x - T::kMathThreads) / 32 - 1;  // and of this warp's next

  const auto tile_at = [&](int n) { return consume_tile(shared.scheduler, n); };
  for (TileCursor cursor = {-1}; advance<T>(cursor, inputs, tile_at);) {
    const int pages = pages_of(cursor.segment, inputs.visible, params.k);
    if (pages == 0) continue;
    own.limit = limit_of(inputs, cursor.first + own.row, cursor.segment);
    sync_segment<T>();
    int stop = end;
    end += pages;
    for (int keys = kFirstCheck, begin = stop;;) {
      stop = smaller(stop + keys / kPageTokens, end);
      for (; next < stop; next += kGateWarps) gate_page(block, shared, params.lists, own, next);
      if (stop == end) break;
      keys = check(block, shared.gate, params.lists + own_lists, shared.hists, params.k,
                   (stop - begin) * kPageTokens);
    }
    sync_segment<T>();
  }
}

// -- the loading warp ----------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void select_load(SelectShared<T>& shared, const CUtensorMap* queries,
                                            const CUtensorMap* keys, const SelectParams& params) {
  const int tiles = ceil_div(params.inputs.rows, T::kRows);
  const auto tile_at = [&](int n) { return produce_tile(shared.scheduler, params.counter, tiles, n); };
  int n = 0;
  for (TileCursor cursor = {-1}; advance<T>(cursor, params.inputs, tile_at);) {
    if (cursor.segment.first == cursor.first) {
      if (threadIdx.x % 32 == 0) load_queries(shared.ring, queries, cursor.first, cursor.tile);
      __syncwarp();
    }
    const int pages = pages_of(cursor.segment, params.inputs.visible, params.k);
    const int step = pages > 0 ? page_step(pages) : 0;
    load_pages(shared.ring, keys, params.inputs, cursor.segment.request, pages, n,
               [&](int i) { return spread_page(i, step, pages); });
    n += pages;
  }
}

template <int kHeads, int kRows>
__global__ void __launch_bounds__(SelectTile<kHeads, kRows>::kThreads, 1)
    select_kernel(const __grid_constant__ CUtensorMap queries,
                  const __grid_constant__ CUtensorMap keys, const SelectParams params) {
  using T = SelectTile<kHeads, kRows>;
  static_assert(T::kThreads == T::kMathThreads + 32 + kGateThreads);
  SelectShared<T>& shared = dynamic_shared<SelectShared<T>>();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&shared.scored[stage], T::kMathWarps / kPagesAtOnce);
    }
    init_scheduler(shared.scheduler, T::kMathWarps + kGateWarps);
  }
  init_ring(shared.ring, 1);

  if (threadIdx.x < T::kMathThreads) {
    if constexpr (T::kWide) raise_registers<T::kMathRegisters>();
    select_math<T>(shared, params);
  } else {
    if constexpr (T::kWide) lower_registers<T::kLoadRegisters>();
    if (threadIdx.x < T::kMathThreads + 32) {
      select_load<T>(shared, &queries, &keys, params);
    } else {
      select_gate<T>(shared, params);
    }
  }
}

}  // namespace indexcache::indexer
