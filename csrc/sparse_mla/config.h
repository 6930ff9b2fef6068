// Shapes and shared memory of the sparse MLA kernel, and which row of a tile is which query head.
#pragma once

#include <cstddef>

#include "common/layout.h"

namespace indexcache::sparse_mla {

constexpr int kDim = 576;  // of q and of a key: 512 latent, 64 rotary
constexpr int kValueDim = 512;
constexpr int kRows = 64;  // M of WGMMA: query heads of a tile
constexpr int kKeys = 64;  // keys of a step

constexpr int kTileElements = 64;  // bfloat16 in a 128-byte tile row
constexpr int kTiles = kDim / kTileElements;
constexpr int kTileBytes = kRows * kTileRowBytes;  // 64 rows (queries or keys) of 128 bytes
constexpr int kOperandBytes = kTiles * kTileBytes;

constexpr int kFp8RowBytes = 656;  // 512 e4m3, 4 float32 scales, 64 bfloat16
constexpr int kFp8Groups = 4;
constexpr int kFp8GroupValues = kValueDim / kFp8Groups;

constexpr int kStages = 2;
constexpr int kMathGroups = 2;
constexpr int kMathThreads = kMathGroups * 128;
constexpr int kLoadThreads = 128;
constexpr int kThreads = kMathThreads + kLoadThreads;
constexpr int kBf16Loaders = kLoadThreads / kStages;  // threads that fill one stage
constexpr int kFp8Together = kLoadThreads / 8;        // FP8 keys that are under way with one instruction
constexpr int kFp8KeysOfThread = kKeys / kFp8Together;
constexpr int kMathBarrier = 1;
constexpr int kGroupBarrier = 2;  // and 3: one of each math warpgroup
constexpr int kMathRegisters = 208;
constexpr int kLoadRegisters = 88;
constexpr int kMaxCluster = 16;  // beyond 8 a launch has to allow it, and the card to have room

constexpr int kMaxQueries = 8;              // of a tile: the bits of a key's mask
constexpr int kNoQuery = kMaxQueries;       // a tile row without a head
constexpr int kMaskRows = kNoQuery + 1;
constexpr int kRotaryTile = kTiles - 1;     // probabilities take its place once there are scores
constexpr float kSlack = 8;                 // in powers of two, that a peak may be behind

// Row stride of the partial outputs, in floats: eight more than 512, so that the eight rows that a
// warp stores at once begin on different banks.
constexpr int kPartialStride = kValueDim + 8;

struct Shared {
  alignas(kSwizzlePeriod) unsigned char queries[kOperandBytes];
  union {
    alignas(kSwizzlePeriod) unsigned char keys[kStages][kOperandBytes];
    struct {  // once the keys are done with
      float partial[kRows * kPartialStride];  // sum of 2^(s - peak) * value
      float peer_peaks[kMaxCluster][kRows];   // every block's
      float peer_sums[kMaxCluster][kRows];
    };
  };
  alignas(16) float scales[kStages][kKeys][kFp8Groups];
  float weights[kMaxCluster][kRows];  // of every block's partial in the output, apart: racecheck
  float peaks[kStages][kRows];
  float sums[kMathGroups][kRows];
  uint32_t selected[kStages][kMaskRows][2];  // bit i of word w: the query wants key 32w + i
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// What a block asks for: up to the last member, without the padding to whole periods behind it, and
// what aligning the first may take.
constexpr int kSharedBytes = offsetof(Shared, empty) + sizeof(Shared::empty) + kSwizzlePeriod;
static_assert(kSharedBytes + 512 <= 227 * 1024, "room for what a toolkit may reserve in a block");

// A tile's rows: `heads` heads of each of its query rows, one query row after the other.
struct TileRows {
  int first_row;
  int rows;        // query rows, those beyond the batch not counted
  int first_head;
  int heads;

  IC_HD int used() const { return rows * heads; }
  IC_HD int query_of(int m) const { return m / heads; }  // within the tile
  // The bit of a key's mask that row m obeys: its query's, or one that is never set.
  IC_HD int mask_bit_of(int m) const { return m < used() ? query_of(m) : kNoQuery; }
  IC_HD int head_of(int m) const { return first_head + m % heads; }
};

// Heads of one block: what 64 rows can hold, split evenly.
IC_HD constexpr int head_blocks(int heads) { return ceil_div(heads, kRows); }
IC_HD constexpr int heads_per_block(int heads) { return ceil_div(heads, head_blocks(heads)); }

// Steps (or columns) [begin, end) of split `rank` of `splits`.
IC_HD int split_begin(int steps, int rank, int splits) { return int(int64_t(steps) * rank / splits); }

}  // namespace indexcache::sparse_mla
