// The union of a few neighbouring rows' lists, so that their attention shares one gather.
//
// Neighbouring queries share many of their keys. A tile of `rows` queries reads every key of the
// union once; a mask says which of the queries selected it.
//
// The order is that of the lists, first row first, each slot where it occurs first: a function of
// the lists alone. If a row repeats a slot (a slot counts as often as it occurs) the tile takes the
// lists one after the other instead.
#pragma once

#include "common/select.h"
#include "sparse_mla/config.h"

namespace indexcache::sparse_mla {

constexpr int kMaxPackedRows = kMaxQueries;
constexpr int kMaxPackedSlots = 16384;  // rows * k
constexpr int kTableBits = 15;
constexpr int kTable = 1 << kTableBits;  // at most half full

struct PackScratch {
  int keys[kTable];            // -1: free
  uint32_t masks[kTable / 4];  // a byte each, of which bit g: row g selected the slot
  int ranks[kMaxPackedSlots];
  uint32_t repeated;
};

IC_HD uint32_t first_probe(int slot) { return (uint32_t(slot) * 2654435769u) >> (32 - kTableBits); }

// Where `slot` is in the table.
IC_HD int probe(const PackScratch& scratch, int slot) {
  uint32_t at = first_probe(slot);
  while (scratch.keys[at] != slot) at = (at + 1) % kTable;
  return int(at);
}

template <class Block>
IC_HD void insert(Block& block, PackScratch& scratch, int slot, int row) {
  uint32_t at = first_probe(slot);
  for (;; at = (at + 1) % kTable) {
    const int there = block.replace(&scratch.keys[at], -1, slot);
    if (there == -1 || there == slot) break;
  }
  const uint32_t bit = at % 4 * 8 + row;
  if (block.set_bits(&scratch.masks[at / 4], 1u << bit) >> bit & 1u) {
    block.set_bits(&scratch.repeated, 1u);
  }
}

// `slots` is [rows, k], -1 for none; returns the length of the union, whose slots and masks it
// writes. rows <= kMaxPackedRows, rows * k <= kMaxPackedSlots.
template <class Block>
IC_HD int pack_rows(Block& block, const int* slots, int rows, int k, PackScratch& scratch,
                    int* packed, unsigned char* masks) {
  block.each(kTable, [&](int i) {
    scratch.keys[i] = -1;
    if (i % 4 == 0) scratch.masks[i / 4] = 0;
    if (i == 0) scratch.repeated = 0;
  });
  block.each(rows * k, [&](int i) {
    if (slots[i] >= 0) insert(block, scratch, slots[i], i / k);
  });
  const bool repeated = scratch.repeated != 0;
  const auto mask_of = [&](int i) -> uint32_t {  // 0: not here
    if (slots[i] < 0) return 0;
    const uint32_t own = 1u << (i / k);
    if (repeated) return own;
    const int at = probe(scratch, slots[i]);
    const uint32_t mask = scratch.masks[at / 4] >> at % 4 * 8 & 0xFF;
    return (mask & (own - 1)) == 0 ? mask : 0;
  };
  block.each(rows * k, [&](int i) { scratch.ranks[i] = mask_of(i) != 0; });
  const int count = block.exclusive_scan(scratch.ranks, rows * k);
  block.each(rows * k, [&](int i) {
    const uint32_t mask = mask_of(i);
    if (mask == 0) return;
    packed[scratch.ranks[i]] = slots[i];
    masks[scratch.ranks[i]] = (unsigned char)(mask);
  });
  return count;
}

}  // namespace indexcache::sparse_mla
