// common/wgmma.cuh on the emulated GPU. Products are made when they are waited for, in float64 rounded
// to float32 after each step: exact for the small integers of the tests. Each warp of a warpgroup has
// its rows when it waits itself: what it does next may come before another's are multiplied.
#pragma once

#include <cuda_fp8.h>

#include <cmath>

#include "simt.h"

namespace indexcache {

inline void wgmma_fence() { simt::self().fenced = nullptr; }
inline void wgmma_commit() {}

template <int kCount>
void wgmma_fence(float (&d)[kCount]) {
  simt::self().fenced = d;
}

namespace emulated {

struct Operand {
  uint32_t start;
  uint32_t leading;
  uint32_t stride;
  uint32_t block;  // bits of the place

  Operand(uint64_t bits, uint32_t place) {
    start = (bits & 0x3FFF) << 4;
    leading = (bits >> 16 & 0x3FFF) << 4;
    stride = (bits >> 32 & 0x3FFF) << 4;
    block = place << simt::kPlaceShift;
    if (bits >> 62 != 1 || (bits >> 49 & 7) != 0) simt::fail("not a 128-byte swizzle descriptor");
  }

  const unsigned char* at(uint32_t address) const {
    return simt::shared_pointer((address ^ (address >> 7 & 7) << 4) | block);
  }

  // Byte `byte` of row `row` of a K-major operand.
  const unsigned char* k_major(int row, int byte) const {
    return at(start + row / 8 * stride + row % 8 * 128 + byte);
  }

  // Element (k, column) of an N-major operand of 2-byte elements.
  const unsigned char* n_major(int k, int column) const {
    return at(start + column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2);
  }
};

inline float e4m3(const unsigned char* byte) {
  const int sign = *byte >> 7;
  const int exponent = *byte >> 3 & 15;
  const int mantissa = *byte & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10)
                               : std::ldexp(float(mantissa), -9);
  return sign ? -value : value;
}

inline float bf16(const unsigned char* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The 16 rows of one warp.
inline void multiply(simt::Warpgroup& group, int warp, size_t number, int place) {
  const simt::WgmmaStep& first = group.steps[warp * 32][number];
  const Operand a(first.a, place);
  const Operand b(first.b, place);
  const int depth = first.kind == 0 ? 32 : 16;
  std::vector<float> left(64 * depth);
  std::vector<float> right(first.columns * depth);
  for (int k = 0; k < depth; ++k) {
    for (int row = warp * 16; row < warp * 16 + 16; ++row) {
      left[row * depth + k] = first.kind == 0 ? e4m3(a.k_major(row, k)) : bf16(a.k_major(row, 2 * k));
    }
    for (int column = 0; column < first.columns; ++column) {
      right[column * depth + k] = first.kind == 0   ? e4m3(b.k_major(column, k))
                                  : first.kind == 1 ? bf16(b.k_major(column, 2 * k))
                                                    : bf16(b.n_major(k, column));
    }
  }
  for (int thread = warp * 32; thread < warp * 32 + 32; ++thread) {
    const simt::WgmmaStep& own = group.steps[thread][number];
    if (own.a != first.a || own.b != first.b || own.add != first.add || own.kind != first.kind) {
      simt::fail("the threads of a warpgroup disagree on a WGMMA");
    }
    for (int i = 0; i < first.columns / 2; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
      const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      double sum = first.add ? own.registers[i] : 0.0;
      for (int k = 0; k < depth; ++k) {
        sum += double(left[row * depth + k]) * right[column * depth + k];
      }
      own.registers[i] = float(sum);
    }
  }
}

inline void issue(float* registers, int columns, uint64_t a, uint64_t b, int add, int kind) {
  const int thread = simt::self().thread.x;
  auto& steps = simt::block().warpgroups[thread / 128].steps[thread % 128];
  if (steps.empty() && add && simt::self().fenced != registers) {
    simt::fail("a WGMMA adds to accumulators that the fence before it does not name");
  }
  steps.push_back({registers, columns, a, b, add, kind});
}

}  // namespace emulated

template <int kCount>
void wgmma_wait(float (&d)[kCount]) {
  simt::Warpgroup& group = simt::block().warpgroups[simt::self().thread.x / 128];
  for (const simt::WgmmaStep& step : group.steps[simt::self().thread.x % 128]) {
    if (step.registers != d) simt::fail("a wait that does not name a WGMMA's accumulators");
  }
  const int warp = simt::self().thread.x % 128 / 32;
  if (++group.waiting[warp] < 32) {
    simt::wait_until([&group, warp, then = group.made[warp]] { return group.made[warp] != then; });
    return;
  }
  // The tensor cores take their time, not the same for each warp.
  simt::delay(16);
  auto* lanes = group.steps + warp * 32;
  for (int lane = 0; lane < 32; ++lane) {
    if (lanes[lane].size() != lanes[0].size()) {
      simt::fail("not every thread of a warp issued every WGMMA");
    }
  }
  for (size_t number = 0; number < lanes[0].size(); ++number) {
    emulated::multiply(group, warp, number, simt::block().place);
  }
  for (int lane = 0; lane < 32; ++lane) lanes[lane].clear();
  group.waiting[warp] = 0;
  ++group.made[warp];
}

template <int kN>
struct Fp8Wgmma {
  static void step(float (&d)[kN / 2], uint64_t a, uint64_t b, int add) {
    emulated::issue(d, kN, a, b, add, 0);
  }
};

template <int kN, bool kTransposeB>
struct Bf16Wgmma {
  static void step(float (&d)[kN / 2], uint64_t a, uint64_t b, int add) {
    emulated::issue(d, kN, a, b, add, kTransposeB ? 2 : 1);
  }
};

}  // namespace indexcache
