// From a warpgroup's accumulators, 64 keys x (rows * heads), to logits: the sum over the heads.
//
// The four lanes of a quad hold, for two keys, every fourth pair of columns. Each lane sums its own
// heads, then the quad adds up, ((part 0 + part 1) + (part 2 + part 3)), by halves: in each of two
// exchanges a lane gives away half of its values and keeps the sums of the other half, so that no
// sum is made twice.
#pragma once

#include <math.h>

#include "common/host_device.h"

namespace indexcache::indexer {

// A lane's partial sums: value 2 * row + i is for query row `row` and the lane's key i (0 or 1).
//
// `registers` are accumulators (layout.h), `weights` those of the lane's columns in their order.
template <int kHeads, int kRows>
IC_HD void sum_own_heads(const float* registers, const float* weights, float* values) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    float first = 0.0f;
    float second = 0.0f;
#pragma unroll
    for (int pair = 0; pair < kHeads / 8; ++pair) {
      const int j = row * (kHeads / 8) + pair;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float weight = weights[2 * j + e];
        first = fmaf(weight, fmaxf(registers[4 * j + e], 0.0f), first);
        second = fmaf(weight, fmaxf(registers[4 * j + 2 + e], 0.0f), second);
      }
    }
    values[2 * row] = first;
    values[2 * row + 1] = second;
  }
}

// What a lane keeps and what it sends of `kCount` values; `high` lanes keep the upper half.
template <int kCount>
IC_HD float kept(const float* values, int x, bool high) {
  return high ? values[x + kCount / 2] : values[x];
}

template <int kCount>
IC_HD float sent(const float* values, int x, bool high) {
  return high ? values[x] : values[x + kCount / 2];
}

// Which of the quad's `kValues` sums a lane ends with, as its number `slot`.
template <int kValues>
struct QuadShare {
  static constexpr int kOwned = kValues >= 4 ? kValues / 4 : 1;

  IC_HD static int value(int lane, int slot) {
    if (kValues == 2) return lane & 1;
    return (lane & 1) * (kValues / 2) + ((lane >> 1) & 1) * (kValues / 4) + slot;
  }

  // Where they are at most two, they are of one query row, and of the lane's keys from this one on.
  IC_HD static int row(int lane) { return value(lane, 0) / 2; }
  IC_HD static int key(int lane) { return value(lane, 0) & 1; }

  // With two values only, two lanes end with the same one.
  IC_HD static bool owns(int lane) { return kValues >= 4 || (lane & 2) == 0; }
};

}  // namespace indexcache::indexer
