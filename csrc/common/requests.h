// Which request a query row belongs to, and where that request's tokens lie.
#pragma once

#include "common/host_device.h"

namespace indexcache {

constexpr int kPageTokens = 64;

struct Requests {
  const int* query_starts;  // [count + 1] in prefill; null in decode
  int count;
  int rows_per_request;  // decode

  // The request of a row; -1 for a row of padding.
  IC_HD int of_row(int row) const {
    if (query_starts == nullptr) return row / rows_per_request;
    if (count == 0 || row >= query_starts[count]) return -1;
    int low = 0;  // the last request that starts at or before the row, so never an empty one
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (query_starts[middle] <= row ? low : high) = middle;
    }
    return low;
  }

  // One past the last row of a request.
  IC_HD int end_of(int request) const {
    return query_starts == nullptr ? (request + 1) * rows_per_request : query_starts[request + 1];
  }
};

struct BlockTable {
  const int* pages;
  int64_t stride;

  IC_HD int page(int request, int index) const { return pages[request * stride + index]; }

  // The physical slot of a position; the position itself without a table.
  IC_HD int slot_or_position(int request, int position) const {
    if (pages == nullptr) return position;
    return page(request, position / kPageTokens) * kPageTokens + position % kPageTokens;
  }
};

}  // namespace indexcache
