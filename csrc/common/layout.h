// Where bytes lie: swizzled shared memory, WGMMA descriptors and fragments. Pure arithmetic, tested
// on the host. Sections are those of the PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix
// Instructions" and "Tensor Data Movement".
#pragma once

#include "common/host_device.h"

namespace indexcache {

// Tiles are rows of 128 bytes, their eight 16-byte chunks permuted by the row (the 128-byte swizzle
// of TMA and WGMMA). A tile starts at a multiple of 1024 bytes, the period of the pattern.
constexpr int kTileRowBytes = 128;
constexpr int kSwizzlePeriod = 1024;

// Byte offset of byte `byte` (0 to 127) of row `row`.
IC_HD constexpr uint32_t swizzle128(int row, int byte) {
  return uint32_t(row * kTileRowBytes + (byte ^ ((row & 7) << 4)));
}

// -- descriptors ("Matrix Descriptor Format") ----------------------------------------------------

constexpr uint64_t kSwizzle128Mode = 1;

IC_HD constexpr uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t((leading & 0x3FFFF) >> 4) << 16 |
         uint64_t((stride & 0x3FFFF) >> 4) << 32 | kSwizzle128Mode << 62;
}

// An operand whose K runs along the tile's rows. The stride is from one group of eight rows to the
// next; the leading offset is not used with a swizzle. K steps of 32 bytes add to the address.
IC_HD constexpr uint64_t k_major_descriptor(uint32_t address) {
  return descriptor(address, 16, kSwizzlePeriod);
}

// An operand whose M or N runs along the tile's rows, 64 bfloat16 of it, and K down the rows. The
// leading offset is from one tile (64 of M or N) to the next, the stride from one group of eight K
// to the next. K steps of 16 add 16 rows to the address.
IC_HD constexpr uint64_t mn_major_descriptor(uint32_t address, uint32_t tile_bytes) {
  return descriptor(address, tile_bytes, kSwizzlePeriod);
}

// A descriptor moved by `bytes` (a multiple of 16). The address field is the low 14 bits; shared
// memory ends below its wrap.
IC_HD constexpr uint64_t advance(uint64_t desc, int bytes) { return desc + uint64_t(bytes >> 4); }

// -- accumulator fragments ("Register Fragments", D of m64nNkX) ------------------------------------

// Register i of thread t (0 to 127) of a warpgroup holds row accumulator_row, column
// accumulator_column of the 64 x N tile.
IC_HD constexpr int accumulator_row(unsigned thread, int i) {
  return int((thread / 32) * 16 + (thread % 32) / 4) + ((i >> 1) & 1) * 8;
}

IC_HD constexpr int accumulator_column(unsigned thread, int i) {
  return (i >> 2) * 8 + int(thread % 4) * 2 + (i & 1);
}

}  // namespace indexcache
