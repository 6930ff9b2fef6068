// Exact selection from a list of entries, and the ascending order of what was selected.
//
// Every function here is a sequence of parallel loops over an executor `Block` (block.cuh on the
// device, tests/kernels/emulator/serial_block.h in the tests):
//
//   each(n, f)                    f(0) ... f(n - 1) in any order, then a barrier
//   add(address, value)           atomic
//   fetch_add(counter, n)         atomic addition; returns the old value
//   set_bits(address, bits)       atomic or; returns the old value
//   replace(address, old, new)    atomic compare and swap; returns the old value
//   find_from_top<bins>(hist, k)  see Bin
//   find_in_rows<bins>(rows, hists, k, f)   f(row, bin) for each of several histograms, then a barrier
//   compact(list, n, bound, counter)   moves the entries >= bound to the front; returns how many
//   copy_if(list, n, bound, out, room, counter)   copies them, as many as there is room for;
//                                 returns how many there are
//   exclusive_scan(data, n)       in place, then a barrier; returns the sum
//
// Nothing may depend on the order in which a loop's iterations run: the host executor shuffles it.
#pragma once

#include "common/entry.h"

namespace indexcache {

// The bin that holds the k-th largest of a histogram's items; index is -1 if there are fewer.
struct Bin {
  int index;
  int above;  // items in higher bins, fewer than k
  int count;  // items in this bin; above + count >= k
};

constexpr int kDigitBits = 8;
constexpr int kDigitBins = 1 << kDigitBits;

// A bound that exactly k of n distinct entries reach, 1 <= k <= n. Radix select from the top
// digit; it ends as soon as the whole bin is wanted, which is when ties are not in play.
template <class Block>
IC_HD Entry kth_bound(Block& block, const Entry* list, int n, int k, int* hist) {
  Entry prefix = 0;
  Entry fixed = 0;  // mask of the digits that are known
  for (int shift = 64 - kDigitBits;; shift -= kDigitBits) {
    block.each(kDigitBins, [&](int i) { hist[i] = 0; });
    block.each(n, [&](int i) {
      const Entry entry = list[i];
      if ((entry & fixed) == prefix) block.add(&hist[(entry >> shift) & (kDigitBins - 1)], 1);
    });
    const Bin bin = block.template find_from_top<kDigitBins>(hist, k);
    prefix |= Entry(bin.index) << shift;
    fixed |= Entry(kDigitBins - 1) << shift;
    k -= bin.above;
    if (bin.count == k || shift == 0) return prefix;
  }
}

// Scratch of write_ascending: one bit a position, a window of the row at a time.
constexpr int kWindowWords = 4096;
constexpr int kWindow = kWindowWords * 32;

struct AscendingScratch {
  uint32_t bits[kWindowWords];
  int ranks[kWindowWords];
};

// Write map(position) of every entry >= bound of the list, by ascending position, to out[0], ...
// Positions are below `limit`. Returns how many were written.
template <class Block, class Map>
IC_HD int write_ascending(Block& block, const Entry* list, int n, Entry bound, int limit,
                          AscendingScratch& scratch, int* out, Map map) {
  int written = 0;
  for (int base = 0; base < limit; base += kWindow) {
    const int words = smaller(kWindowWords, ceil_div(limit - base, 32));
    block.each(words, [&](int i) { scratch.bits[i] = 0; });
    block.each(n, [&](int i) {
      const int at = position_of(list[i]) - base;
      if (list[i] >= bound && at >= 0 && at < kWindow) {
        block.set_bits(&scratch.bits[at >> 5], 1u << (at & 31));
      }
    });
    block.each(words, [&](int i) { scratch.ranks[i] = popcount(scratch.bits[i]); });
    const int found = block.exclusive_scan(scratch.ranks, words);
    block.each(n, [&](int i) {
      const int at = position_of(list[i]) - base;
      if (list[i] >= bound && at >= 0 && at < kWindow) {
        const uint32_t before = scratch.bits[at >> 5] & ((1u << (at & 31)) - 1);
        out[written + scratch.ranks[at >> 5] + popcount(before)] = map(at + base);
      }
    });
    written += found;
  }
  return written;
}

// The k best entries of a list, ascending by position, padded with -1.
template <class Block, class Map>
IC_HD void write_topk(Block& block, const Entry* list, int n, int k, int limit, int* hist,
                      AscendingScratch& scratch, int* out, Map map) {
  const Entry bound = n > k ? kth_bound(block, list, n, k, hist) : 0;
  const int written = write_ascending(block, list, n, bound, limit, scratch, out, map);
  block.each(k - written, [&](int i) { out[written + i] = -1; });
}

}  // namespace indexcache
