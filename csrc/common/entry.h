// A candidate of a top-k: 64 bits whose unsigned order is the selection's order.
//
// The high word orders as the float32 value does, the low word is the complement of the position:
// of two equal values the one at the smaller position is the larger entry. No two entries of a row
// are equal, so "the k largest entries" is one set, whatever order they were found in.
#pragma once

#include "common/host_device.h"

#ifndef __CUDA_ARCH__
#include <cstring>
#endif

namespace indexcache {

using Entry = uint64_t;

IC_HD float float_of_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

IC_HD uint32_t float_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

// Unsigned integers in the order of the floats; -0.0 and +0.0 are one value.
IC_HD uint32_t order_key(float value) {
  const uint32_t bits = float_bits(value + 0.0f);  // turns -0.0 into +0.0
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

// The float of a key.
IC_HD float float_of_key(uint32_t key) {
  return float_of_bits((key & 0x80000000u) ? key ^ 0x80000000u : ~key);
}

IC_HD Entry make_entry(uint32_t key, int position) {
  return (Entry(key) << 32) | uint32_t(~position);
}

IC_HD uint32_t key_of(Entry entry) { return uint32_t(entry >> 32); }

IC_HD int position_of(Entry entry) { return int(~uint32_t(entry)); }

}  // namespace indexcache
