// How the math warps of the fused kernel hand a page's logits to its gate warps: through shared
// memory, [rows][64] float32 in 16 quads a row.
//
// A math lane writes its two keys of a row, 8 apart (layout.h), at once; a gate lane reads quads of
// its own row. A row's quads are turned by the row, so that neither meets a bank conflict.
#pragma once

#include "common/host_device.h"

namespace indexcache::indexer {

constexpr int kPageScores = 64;  // of a row

// Bits that are changed in the place of a logit; `kRows` are written by two halves of the warps.
template <int kRows>
IC_HD int row_turn(int row) {
  constexpr int kHalf = kRows / 2;
  return (row % kHalf * (8 / kHalf) + row / kHalf) * 4;
}

// Where a row's logit of a key lies among the page's.
template <int kRows>
IC_HD int score_place(int row, int key) {
  const int place = key / 16 * 16 + key % 8 * 2 + key / 8 % 2;
  return row * kPageScores + (place ^ row_turn<kRows>(row));
}

// What a gate lane reads: kCount places of one row from place first(lane) on, turned like them.
template <int kRows>
struct GateShare {
  static constexpr int kLanes = 32 / kRows;
  static constexpr int kCount = kPageScores / kLanes;

  IC_HD static int row(int lane) { return unsigned(lane) % kRows; }
  IC_HD static int first(int lane) { return unsigned(lane) / kRows * kCount; }

  // A place, turned.
  IC_HD static int place(int lane, int i) {
    return row(lane) * kPageScores + ((first(lane) + i) ^ row_turn<kRows>(row(lane)));
  }

  // Bits of those whose keys are below `end`. Even places hold the first half of the keys, in order,
  // and odd ones those 8 behind them.
  IC_HD static uint32_t below(int lane, int end) {
    const int even = smaller(larger(end - key(lane, 0), 0), kCount / 2);
    const int odd = smaller(larger(end - key(lane, 1), 0), kCount / 2);
    return (0x55555555u & ((1u << 2 * even) - 1)) | (0xAAAAAAAAu & ((1u << 2 * odd) - 1));
  }

  // The key whose logit lies there.
  IC_HD static int key(int lane, unsigned i) {
    const unsigned place = first(lane) + i;
    return int(place / 16 * 16 + place % 16 / 2 + place % 2 * 8);
  }
};

}  // namespace indexcache::indexer
