// The streaming selection of one query tile: a row's logits go by once, in any order, and only those
// that may still be among its k largest are kept.
//
// Every row has a list, a histogram of what the list was given (its entries' top bits), and a floor.
// Certificate: the floor is never above the k-th largest entry seen, because it is only ever set to
//   - the lower edge of a histogram bin such that k entries were given in this and higher bins, or
//   - the exact k-th largest entry of the list, which holds every entry seen that is >= the floor.
// So an entry below the floor is none of the k largest, whatever comes, and the k largest of the
// list are the k largest of the row. Nothing is estimated and nothing has to be redone.
//
// Memory: a list has room for kListCapacity entries. `check` runs before each kCheckKeys keys and
// leaves room for all of them, by dropping what is below the floor, and if that is not enough
// (values that crowd in one bin, ties) all but the k largest.
#pragma once

#include "common/select.h"

namespace indexcache::indexer {

constexpr int kMaxTopk = 2048;
constexpr int kGateBits = 11;
constexpr int kGateBins = 1 << kGateBits;
constexpr int kListCapacity = 8192;
constexpr int kCheckKeys = 2048;
static_assert(kMaxTopk + kCheckKeys <= kListCapacity, "after a cut there is room again");

// The state of a tile's rows; `lists` and `hists` have kListCapacity and kGateBins a row.
template <int kRows>
struct Gate {
  Entry floors[kRows];
  int counts[kRows];
  int digit_hist[kDigitBins];
};

template <int kRows, class Block>
IC_HD void reset(Block& block, Gate<kRows>& gate, int* hists) {
  block.each(kRows, [&](int row) {
    gate.floors[row] = 0;
    gate.counts[row] = 0;
  });
  block.each(kRows * kGateBins, [&](int i) { hists[i] = 0; });
}

// Offer one thread's entries, those that are `seen`. The counters are asked for all of them before
// the first answer is needed: the waits overlap.
template <int kCount, int kRows, class Block>
IC_HD void offer(Block& block, Gate<kRows>& gate, Entry* lists, int* hists,
                 const int (&rows)[kCount], const Entry (&entries)[kCount],
                 const bool (&seen)[kCount]) {
  bool passes[kCount];
  int places[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) passes[i] = seen[i] && entries[i] >= gate.floors[rows[i]];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    places[i] = passes[i] ? block.take(&gate.counts[rows[i]]) : 0;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!passes[i]) continue;
    lists[rows[i] * kListCapacity + places[i]] = entries[i];
    block.add(&hists[rows[i] * kGateBins + int(entries[i] >> (64 - kGateBits))], 1);
  }
}

// Raise the floors, and make room for kCheckKeys more entries in every list.
template <int kRows, class Block>
IC_HD void check(Block& block, Gate<kRows>& gate, Entry* lists, int* hists, int k) {
  block.sync();  // every offer has arrived
  block.template find_in_rows<kGateBins>(kRows, hists, k, [&](int row, Bin bin) {
    const Entry edge = bin.index < 0 ? 0 : Entry(bin.index) << (64 - kGateBits);
    gate.floors[row] = larger(gate.floors[row], edge);
  });
  for (int row = 0; row < kRows; ++row) {
    int count = gate.counts[row];
    if (count <= kListCapacity - kCheckKeys) continue;
    Entry* list = lists + row * kListCapacity;
    count = block.keep(list, count, gate.floors[row], &gate.counts[row]);
    if (count <= kListCapacity - kCheckKeys) continue;
    const Entry bound = kth_bound(block, list, count, k, gate.digit_hist);
    block.each(1, [&](int) { gate.floors[row] = larger(gate.floors[row], bound); });
    block.keep(list, count, bound, &gate.counts[row]);
  }
  block.sync();
}

}  // namespace indexcache::indexer
