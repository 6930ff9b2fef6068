// Which rows and pages a block works on, in which order.
#pragma once

#include "common/requests.h"

namespace indexcache::indexer {

// Rows [first, end) of a tile that belong to one request (-1: padding).
struct Segment {
  int request;
  int first;
  int end;
};

IC_HD Segment segment_at(const Requests& requests, int row, int tile_end) {
  const int request = requests.of_row(row);
  if (request < 0) return {-1, row, tile_end};
  return {request, row, smaller(tile_end, requests.end_of(request))};
}

// Rows [first, end) of a tile.
struct RowRange {
  int first;
  int end;
};

// Tiles of at most `most` rows. In decode none has rows of two requests, whose keys would go by one
// after the other: six verified rows are tiles of four and two.
IC_HD int tiles_of(const Requests& requests, int rows, int most) {
  if (requests.query_starts != nullptr) return ceil_div(rows, most);
  return rows / requests.rows_per_request * ceil_div(requests.rows_per_request, most);
}

IC_HD RowRange tile_rows(const Requests& requests, int rows, int most, int tile) {
  const int together = requests.query_starts != nullptr ? rows : requests.rows_per_request;
  const int tiles = ceil_div(together, most);
  const int first = tile / tiles * together + tile % tiles * most;
  return {first, smaller(first + most, (tile / tiles + 1) * together)};
}

// Pages that the rows of a segment may see, those that see at most `trivial` tokens aside.
IC_HD int pages_of(const Segment& segment, const int* visible, int trivial) {
  if (segment.request < 0) return 0;
  int most = 0;
#pragma unroll 1  // loads in flight would take more registers than the loading warp has
  for (int row = segment.first; row < segment.end; ++row) {
    if (visible[row] > trivial) most = larger(most, visible[row]);
  }
  return ceil_div(most, kPageTokens);
}

// The pages of a segment in an order that is spread evenly over it at every moment, so that the
// threshold found so far is a sample's: golden-section steps around the circle of pages.
IC_HD int page_step(int pages) {
  int step = larger(int(pages * 0.6180339887), 1);
  for (;; ++step) {
    int a = pages;
    int b = step;
    while (b != 0) {
      const int rest = a % b;
      a = b;
      b = rest;
    }
    if (a == 1) return step;
  }
}

// 32 bits are enough for kMaxPages pages, which is all that the host lets through.
constexpr int kMaxPages = 1 << 16;
IC_HD int spread_page(int i, int step, int pages) {
  return int(uint32_t(i) * uint32_t(step) % uint32_t(pages));
}

}  // namespace indexcache::indexer
