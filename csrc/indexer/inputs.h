// What every indexer kernel is given, beside the tensor maps of queries and pages.
#pragma once

#include "common/requests.h"

namespace indexcache::indexer {

constexpr int kIndexDim = 128;
constexpr int kKeyBytes = kPageTokens * kIndexDim;
constexpr int kScaleBytes = kPageTokens * 4;
constexpr int kPageBytes = kKeyBytes + kScaleBytes;

struct Inputs {
  const unsigned char* pages;  // [P, kPageBytes]: a page's keys, then its scales
  const float* weights;        // [rows, heads]
  const int* visible;          // [rows]
  int rows;
  Requests requests;
  BlockTable table;
};

}  // namespace indexcache::indexer
