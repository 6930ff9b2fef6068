// The indexer's launches for one head count; each head count is instantiated in a file of its own.
#pragma once

#include "common/launch.h"
#include "indexer/gate.h"
#include "indexer/inputs.h"
#include "indexer/schedule.h"

namespace indexcache::indexer {

struct Operands {
  TensorView queries;  // [rows, heads, 128] e4m3
  TensorView pages;    // [P, 8448] bytes
  Inputs inputs;
};

struct LogitsOutput {
  float* data;
  int64_t stride;
  int width;  // columns; bounds the pages of a row
};

struct SelectOutput {
  int* data;  // [rows, k]
  int k;
  bool as_slots;
  Entry* lists;  // [blocks, select_rows, kListCapacity]
  int blocks;
  unsigned* counter;  // zero
};

constexpr int kLogitsRows = 4;  // of one tile where logits are written out

// Query rows of one tile of the fused kernel: as many as fill 256 columns, at most 8.
constexpr int select_rows(int heads) { return heads <= 32 ? 8 : 4; }

// `rows_per_tile` is at most kLogitsRows; a tile of decode has rows of one request only.
template <int kHeads>
void run_logits(const Operands& operands, int rows_per_tile, const LogitsOutput& output,
                const Place& place);

template <int kHeads>
void run_select(const Operands& operands, const SelectOutput& output, const Place& place);

}  // namespace indexcache::indexer
