// Into how many blocks the keys of a row are split where the logits are written out.
#pragma once

#include "common/host_device.h"

namespace indexcache::indexer {

constexpr int kMostRounds = 4;  // of blocks: lengths differ, and only the device knows them
constexpr int kLeastPages = 8;  // of a block: it takes as long to begin as some pages

// So many that the last round of blocks is as full as can be; `resident` blocks are a round.
IC_HD int split_count(int tiles, int pages, int resident) {
  int best = 1;
  double fullest = 0;
  for (int splits = 1; splits <= ceil_div(pages, kLeastPages); ++splits) {
    const int blocks = tiles * splits;
    if (splits > 1 && blocks > kMostRounds * resident) break;
    const double full = double(blocks) / (ceil_div(blocks, resident) * resident);
    if (full >= fullest) best = splits;
    fullest = larger(full, fullest);
  }
  return best;
}

}  // namespace indexcache::indexer
