// The executor of select.h on one thread, with a new random order for every loop.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "common/select.h"

namespace indexcache {

class SerialBlock {
 public:
  explicit SerialBlock(uint64_t seed) : random_(seed) {}

  template <class F>
  void each(int n, F f) {
    for (const int i : shuffled(n)) f(i);
  }

  void add(int* address, int value) { *address += value; }

  void sync() {}

  int fetch_add(int* counter, int n) { return std::exchange(*counter, *counter + n); }

  uint32_t set_bits(uint32_t* address, uint32_t bits) {
    return std::exchange(*address, *address | bits);
  }

  int replace(int* address, int expected, int desired) {
    const int old = *address;
    if (old == expected) *address = desired;
    return old;
  }

  template <int kBins>
  Bin find_from_top(const int* hist, int wanted) {
    int above = 0;
    for (int i = kBins - 1; i >= 0; --i) {
      if (above + hist[i] >= wanted) return {i, above, hist[i]};
      above += hist[i];
    }
    return {-1, above, 0};
  }

  template <int kBins, class F>
  void find_in_rows(int rows, const int* hists, int wanted, F f) {
    each(rows, [&](int row) { f(row, find_from_top<kBins>(hists + row * kBins, wanted)); });
  }

  int compact(Entry* list, int n, Entry bound, int* counter) {
    *counter = 0;
    for (int i = 0; i < n; ++i) {
      if (list[i] >= bound) list[(*counter)++] = list[i];
    }
    std::shuffle(list, list + *counter, random_);
    return *counter;
  }

  int copy_if(const Entry* list, int n, Entry bound, Entry* out, int room, int* counter) {
    *counter = 0;
    each(n, [&](int i) {
      if (list[i] < bound) return;
      if (*counter < room) out[*counter] = list[i];
      ++*counter;
    });
    return *counter;
  }

  int exclusive_scan(int* data, int n) {
    int sum = 0;
    for (int i = 0; i < n; ++i) sum += std::exchange(data[i], sum);
    return sum;
  }

 private:
  std::vector<int> shuffled(int n) {
    std::vector<int> order(std::max(n, 0));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    return order;
  }

  std::mt19937_64 random_;
};

}  // namespace indexcache
