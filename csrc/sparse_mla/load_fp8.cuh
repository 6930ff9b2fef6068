// Gathering FP8 rows and converting them in place: what the loading warpgroup does.
#pragma once

#include <cuda_fp8.h>

#include "sparse_mla/inputs.cuh"

namespace indexcache::sparse_mla {

// Two e4m3 values, times a scale, as two bfloat16.
__device__ __forceinline__ uint32_t dequantise(uint32_t pair, float scale) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  const float2 values = __half22float2(__half2(halves));
  const __nv_bfloat162 result = __floats2bfloat162_rn(values.x * scale, values.y * scale);
  return *reinterpret_cast<const uint32_t*>(&result);
}

// Eight lanes a key, all four warps a step. A raw row lies within the bfloat16 row that it becomes:
// the 128 bytes of group g where the first half of its values will be (tile 2g), so that all of a
// step's bytes are under way at once and no other memory is needed.
//
// Every second row has the two halves of its raw bytes exchanged: the lanes of two rows, which read
// eight bytes each, then find them on different banks.
__device__ __forceinline__ uint32_t raw_place(int key, int chunk) {
  return uint32_t(key * kTileRowBytes + (chunk ^ (key & 1) * 4) * 16);
}

// What a loading thread needs of the list for a step of FP8 rows; read before there is room for them.
struct Fp8Step {
  int slots[kFp8KeysOfThread];
  uint32_t mask;
};

__device__ __forceinline__ Fp8Step fp8_step(const ListPart& part) {
  const int thread = threadIdx.x - kMathThreads;
  Fp8Step step;
#pragma unroll
  for (int j = 0; j < kFp8KeysOfThread; ++j) {
    step.slots[j] = part.slot(j * kFp8Together + thread / 8);
  }
  step.mask = thread < kKeys ? part.mask(thread) : 0;
  return step;
}

__device__ __forceinline__ void copy_raw(Shared& shared, const Params& params, const Fp8Step& step,
                                         int stage) {
  const int thread = threadIdx.x - kMathThreads;
  const int lane = thread % 8;
  const uint32_t tile = shared_address(shared.keys[stage]);
#pragma unroll
  for (int j = 0; j < kFp8KeysOfThread; ++j) {
    const int key = j * kFp8Together + thread / 8;
    const bool valid = step.slots[j] >= 0;
    const unsigned char* row =
        params.cache + int64_t(valid ? step.slots[j] : 0) * kFp8RowBytes + lane * 16;
#pragma unroll
    for (int g = 0; g < kFp8Groups; ++g) {
      copy16(tile + 2 * g * kTileBytes + raw_place(key, lane), row + g * kFp8GroupValues, valid);
    }
    const unsigned char* rotary = row + kValueDim + 16;
    copy16(tile + (kTiles - 1) * kTileBytes + swizzle128(key, lane * 16), rotary, valid);
    if (lane == 0) copy16(shared_address(shared.scales[stage][key]), row + kValueDim, valid);
  }
  if (thread < kKeys) note_selected(shared.selected[stage], thread, step.mask);
}

// One lane's share of a raw row: of every group eight values of the first half, eight of the second.
struct RawShare {
  uint2 words[kFp8Groups][2];
};

__device__ __forceinline__ RawShare read_raw(const Shared& shared, int stage, int key, int lane) {
  RawShare share;
#pragma unroll
  for (int g = 0; g < kFp8Groups; ++g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* from = shared.keys[stage] + 2 * g * kTileBytes +
                                  raw_place(key, half * 4 + lane / 2) + lane % 2 * 8;
      share.words[g][half] = *reinterpret_cast<const uint2*>(from);
    }
  }
  return share;
}

__device__ __forceinline__ void write_converted(const RawShare& share, float4 scales, uint32_t tile,
                                                int key, int lane) {
  const float scale_of[kFp8Groups] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
  for (int g = 0; g < kFp8Groups; ++g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 raw = share.words[g][half];
      store_shared(tile + (2 * g + half) * kTileBytes + swizzle128(key, lane * 16),
                  make_uint4(dequantise(raw.x & 0xFFFF, scale_of[g]),
                             dequantise(raw.x >> 16, scale_of[g]),
                             dequantise(raw.y & 0xFFFF, scale_of[g]),
                             dequantise(raw.y >> 16, scale_of[g])));
    }
  }
}

// In place: the lanes of a row have all read before one of them writes.
__device__ __forceinline__ void convert(Shared& shared, int stage) {
  const int thread = threadIdx.x - kMathThreads;
  const int lane = thread % 8;
  const uint32_t tile = shared_address(shared.keys[stage]);
  RawShare next = read_raw(shared, stage, thread / 8, lane);
#pragma unroll
  for (int j = 0; j < kFp8KeysOfThread; ++j) {
    const int key = j * kFp8Together + thread / 8;
    const RawShare share = next;
    const float4 scales = *reinterpret_cast<const float4*>(shared.scales[stage][key]);
    __syncwarp();
    if (j + 1 < kFp8KeysOfThread) next = read_raw(shared, stage, key + kFp8Together, lane);
    write_converted(share, scales, tile, key, lane);
  }
}

__device__ __forceinline__ void load_fp8(Shared& shared, const Params& params, const int* list,
                                         const unsigned char* masks, int length, int begin,
                                         int end) {
  const auto step_at = [&](int step) { return fp8_step(part_of(list, masks, length, step)); };
  for (int step = begin; step < smaller(begin + kStages, end); ++step) {
    copy_raw(shared, params, step_at(step), step - begin);
  }
  for (int step = begin; step < end; ++step) {
    const int stage = (step - begin) % kStages;
    // The stage before this one is refilled while the math warps are at this one.
    const int before = step - 1;
    const int following = before + kStages;
    const bool refill = before >= begin && following < end;
    const Fp8Step next = step_at(refill ? following : step);
    wait_copies();
    __syncwarp();  // a row was copied by the lanes of the warp that converts it
    convert(shared, stage);
    fence_async_proxy();  // WGMMA reads the keys through the async proxy
    mbarrier_arrive(&shared.full[stage]);
    if (!refill) continue;
    mbarrier_wait(&shared.empty[1 - stage], (before - begin) / kStages & 1);
    copy_raw(shared, params, next, 1 - stage);
  }
}

}  // namespace indexcache::sparse_mla
