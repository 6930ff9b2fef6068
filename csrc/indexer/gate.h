// The streaming selection of one query tile: a row's logits go by once, in any order, and only those
// that may still be among its k largest are kept.
//
// Every row has a list, a histogram of what the list was given, and a floor.
// Certificate: the floor is never above the k-th largest logit seen, because it is only ever set to
//   - the lower edge of a histogram bin such that k entries were given in this and higher bins, or
//   - the value of the exact k-th largest entry of the list, which holds every entry seen that
//     reaches the floor.
// So a logit below the floor is none of the k largest, whatever comes, and the k largest of the
// list are the k largest of the row. Nothing is estimated and nothing has to be redone. A logit that
// equals the floor is listed: its position decides at the end.
//
// Memory: a list has room for kListCapacity entries. `check` says how many keys may go by until it
// is called again: at most as many as the fullest list has room for. If that gets short it drops
// what is below the floor, and if that is not enough (values that crowd in one bin, ties) all but
// the k largest.
#pragma once

#include <math.h>

#include "common/select.h"

namespace indexcache::indexer {

constexpr int kMaxTopk = 2048;
constexpr int kListCapacity = 16384;
constexpr int kFirstCheck = 4096;  // keys before the first check: until then a floor says little
constexpr int kCheckKeys = 2048;   // at least, between two checks
constexpr int kCheckPart = 4;      // of the keys seen, between two checks: so old a floor may get
static_assert(kMaxTopk + kCheckKeys <= kListCapacity, "after a cut there is room again");
static_assert(kFirstCheck <= kListCapacity);

// -- bins ----------------------------------------------------------------------------------------

// A float's top 13 bits tell sign, exponent and 4 bits of mantissa: 16 bins an octave. The histogram
// has those of 2^-40 to 2^24 and of their negatives; what lies beyond is in the nearest bin of its
// sign.
constexpr int kGateBins = 2048;
constexpr int kSignBins = kGateBins / 2;
constexpr int kMantissaBits = 4;
constexpr int kBinShift = 23 - kMantissaBits;
constexpr int kLeastMagnitude = (127 - 40) << kMantissaBits;

// Bins order as the floats do.
IC_HD int gate_bin(float value) {
  const uint32_t bits = float_bits(value);
  const int magnitude = int(bits << 1 >> (kBinShift + 1)) - kLeastMagnitude;
  const int clamped = smaller(larger(magnitude, 0), kSignBins - 1);
  return kSignBins + (clamped ^ (int32_t(bits) >> 31));  // a negative's complement: -1, -2, ...
}

// No float in this bin or a higher one is below it.
IC_HD float gate_edge(int bin) {
  if (bin <= 0) return -INFINITY;
  if (bin == kSignBins) return -0.0f;  // not 0.0f: push_below
  const bool positive = bin > kSignBins;
  const int magnitude = positive ? bin - kSignBins : kSignBins - bin;  // the latter's upper edge
  const uint32_t edge = uint32_t(magnitude + kLeastMagnitude) << kBinShift;
  return float_of_bits(positive ? edge : (edge - 1) | 0x80000000u);
}

// -- the gate ------------------------------------------------------------------------------------

// The state of a tile's rows; `lists` and `hists` have kListCapacity and kGateBins a row.
template <int kRows>
struct Gate {
  float floors[kRows];
  int counts[kRows];
  int digit_hist[kDigitBins];
};

// `bits` one to the left, and into the lowest whether a logit does not reach a floor above -infinity;
// one that is not a number always does.
//
// That is the sign of the difference. Of subnormals it is right, of equal ones too because a floor of
// zero is -0.0, from which neither zero differs by a sign; and what is not a number has none on the
// device (PTX: 0x7FFFFFFF).
IC_HD uint32_t push_below(uint32_t bits, float logit, float floor) {
  const float above = logit - floor;
#ifdef __CUDA_ARCH__
  return __funnelshift_l(__float_as_uint(above), bits, 1);
#else
  return bits << 1 | (above == above ? float_bits(above) >> 31 : 0u);
#endif
}

// The floor that an entry's key proves.
IC_HD float floor_of_key(uint32_t key) {
  const float floor = float_of_key(key);
  return floor == 0.0f ? -0.0f : floor;
}

template <int kRows, class Block>
IC_HD void reset(Block& block, Gate<kRows>& gate, int* hists) {
  block.each(kRows, [&](int row) {
    gate.floors[row] = -INFINITY;
    gate.counts[row] = 0;
  });
  block.each(kRows * kGateBins, [&](int i) { hists[i] = 0; });
}

// A logit and its position.
struct Scored {
  float logit;
  int position;
};

// List those of one thread's logits that pass, a bit each; `at` gives them. They are of one row, whose
// list begins at place `list` of the lists, and whose histogram this is.
template <class Block, class At>
IC_HD void append(Block& block, int* count, Entry* lists, unsigned list, int* hist, uint32_t passes,
                 At at) {
  if (passes == 0) return;
  unsigned place = list + block.fetch_add(count, popcount(passes));
#pragma unroll 1
  do {
    const int i = highest_bit(passes);
    passes ^= 1u << i;
    const Scored scored = at(i);
    lists[place++] = make_entry(order_key(scored.logit), scored.position);
    block.add(&hist[gate_bin(scored.logit)], 1);
  } while (passes != 0);
}

// Once everything is appended: the highest floors that the histograms prove.
template <int kRows, class Block>
IC_HD void raise_floors(Block& block, Gate<kRows>& gate, const int* hists, int k) {
  block.template find_in_rows<kGateBins>(kRows, hists, k, [&](int row, Bin bin) {
    const float edge = gate_edge(bin.index);
    if (gate.floors[row] < edge) gate.floors[row] = edge;
  });
}

// The least entry that reaches a floor.
IC_HD Entry floor_entry(float floor) { return Entry(order_key(floor)) << 32; }

// Room for kCheckKeys more entries in a row's list.
template <int kRows, class Block>
IC_HD void make_room(Block& block, Gate<kRows>& gate, int row, Entry* list, int k) {
  int* count = &gate.counts[row];
  const int left = block.compact(list, *count, floor_entry(gate.floors[row]), count);
  if (left <= kListCapacity - kCheckKeys) return;
  const Entry bound = kth_bound(block, list, left, k, gate.digit_hist);
  block.each(1, [&](int) { gate.floors[row] = floor_of_key(key_of(bound)); });
  block.compact(list, left, bound, count);
}

// After `seen` keys: raise the floors, and return how many keys may go by until the next check.
template <int kRows, class Block>
IC_HD int check(Block& block, Gate<kRows>& gate, Entry* lists, int* hists, int k, int seen) {
  block.sync();  // everything is appended
  int most = 0;
#pragma unroll
  for (int row = 0; row < kRows; ++row) most = larger(most, gate.counts[row]);
  raise_floors(block, gate, hists, k);
  if (most > kListCapacity - kCheckKeys) {
    for (int row = 0; row < kRows; ++row) {
      if (gate.counts[row] > kListCapacity - kCheckKeys) {
        make_room(block, gate, row, lists + row * kListCapacity, k);
      }
    }
    most = kListCapacity - kCheckKeys;
    block.sync();  // all have read the counts
  }
  return smaller(kListCapacity - most, larger(kCheckKeys, seen / kCheckPart));
}

}  // namespace indexcache::indexer
