// run.h, implemented: tensor maps, grids, and which kernel a tile needs.
#pragma once

#include "indexer/logits.cuh"
#include "indexer/run.h"
#include "indexer/select.cuh"
#include "indexer/splits.h"

namespace indexcache::indexer {

template <class T>
CUtensorMap queries_map(const Operands& operands) {
  const uint64_t columns = uint64_t(operands.inputs.rows) * T::kHeads;
  return byte_tensor_map(operands.queries.data_ptr(), {kIndexDim, columns}, {kIndexDim},
                         {kIndexDim, T::kColumns});
}

inline CUtensorMap keys_map(const Operands& operands) {
  const uint64_t pages = operands.pages.size(0);
  return byte_tensor_map(operands.pages.data_ptr(), {kIndexDim, kPageTokens, pages},
                         {kIndexDim, kPageBytes}, {kIndexDim, kPageTokens, 1});
}

template <int kHeads, int kRows>
void launch_logits(const Operands& operands, int rows_per_tile, const LogitsOutput& output,
                   const Place& place) {
  using T = Tile<kHeads, kRows>;
  constexpr size_t kShared = sizeof(Ring<T>) + kSwizzlePeriod;
  static const int resident =  // the same on all Hoppers of a machine
      resident_blocks(logits_kernel<kHeads, kRows>, T::kThreads, kShared, place);
  const int tiles = tiles_of(operands.inputs.requests, operands.inputs.rows, rows_per_tile);
  const int splits = split_count(tiles, ceil_div(output.width, kPageTokens), resident);
  const LogitsParams params = {operands.inputs, rows_per_tile, output.data, output.stride};
  launch(logits_kernel<kHeads, kRows>, ::dim3(tiles, splits), T::kThreads, kShared, 1,
         place, queries_map<T>(operands), keys_map(operands), params);
}

template <int kHeads>
void run_logits(const Operands& operands, int rows_per_tile, const LogitsOutput& output,
                const Place& place) {
  if constexpr (kHeads >= 32) {
    if (rows_per_tile == 1) return launch_logits<kHeads, 1>(operands, 1, output, place);
    if (rows_per_tile == 2) return launch_logits<kHeads, 2>(operands, 2, output, place);
  }
  launch_logits<kHeads, 4>(operands, rows_per_tile, output, place);
}

template <int kHeads>
void run_select(const Operands& operands, const SelectOutput& output, const Place& place) {
  constexpr int kRows = select_rows(kHeads);
  using T = SelectTile<kHeads, kRows>;
  constexpr size_t kShared = sizeof(SelectShared<T>) + kSwizzlePeriod;
  static_assert(kShared <= 227 * 1024, "shared memory of a block");
  const SelectParams params = {operands.inputs, output.k,       output.data,
                               output.lists,    output.counter, output.as_slots};
  launch(select_kernel<kHeads, kRows>, ::dim3(output.blocks), T::kThreads, kShared, 1, place,
         queries_map<T>(operands), keys_map(operands), params);
}

}  // namespace indexcache::indexer
