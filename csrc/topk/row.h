// Exact top-k of one row of logits, with memory that does not depend on the row's length.
//
// 1. Histogram of the entries' top 11 bits. The bin of the k-th largest splits the row into entries
//    that are in, entries that are out, and the bin.
// 2. While "in" plus "the bin" do not fit the list, histogram the next 11 bits inside the bin. The
//    last digits are the position's: even a row of equal values ends, with k entries.
// 3. Collect what is left into the list, in any order, and select from it exactly (select.h).
//
// Two reads of the row where values differ at all; each further digit is one more read.
#pragma once

#include "common/select.h"

namespace indexcache::topk {

constexpr int kMaxTopk = 2048;
constexpr int kRowBits = 11;
constexpr int kRowBins = 1 << kRowBits;
constexpr int kListCapacity = 8192;

struct Scratch {
  Entry list[kListCapacity];
  union {  // never needed at the same time
    int hist[kRowBins];
    AscendingScratch ascending;
  };
  int digit_hist[kDigitBins];
  int count;
};

// The smallest entry worth collecting: at least k and at most kListCapacity entries reach it.
template <class Block>
IC_HD Entry collecting_bound(Block& block, const float* row, int n, int k, int* hist) {
  Entry prefix = 0;
  Entry fixed = 0;
  int wanted = k;
  for (int shift = 64 - kRowBits;; shift = larger(shift - kRowBits, 0)) {
    block.each(kRowBins, [&](int i) { hist[i] = 0; });
    block.each_value(row, n, [&](int i, float value) {
      const Entry entry = make_entry(order_key(value), i);
      if ((entry & fixed) == prefix) block.add(&hist[(entry >> shift) & (kRowBins - 1)], 1);
    });
    const Bin bin = block.template find_from_top<kRowBins>(hist, wanted);
    // The last digit overlaps the one before it, whose bits are fixed: or-ing them in again is idle.
    prefix |= Entry(bin.index) << shift;
    fixed |= Entry(kRowBins - 1) << shift;
    wanted -= bin.above;
    if (k - wanted + bin.count <= kListCapacity) return prefix;
  }
}

// `out` receives k positions, through `map`, ascending, padded with -1.
template <class Block, class Map>
IC_HD void select_row(Block& block, const float* row, int n, int k, Scratch& scratch, int* out,
                      Map map) {
  if (n <= k) {
    block.each(k, [&](int i) { out[i] = i < n ? map(i) : -1; });
    return;
  }
  Entry bound = 0;
  if (n > kListCapacity) bound = collecting_bound(block, row, n, k, scratch.hist);
  block.each(1, [&](int) { scratch.count = 0; });
  block.each_value(row, n, [&](int i, float value) {
    const Entry entry = make_entry(order_key(value), i);
    if (entry >= bound) scratch.list[block.next(&scratch.count)] = entry;
  });
  write_topk(block, scratch.list, scratch.count, k, n, scratch.digit_hist, scratch.ascending, out,
             map);
}

}  // namespace indexcache::topk
