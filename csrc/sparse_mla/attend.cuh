// Sparse MLA: attention of a tile of query heads over a list of latent rows.
//
// A tile has 64 rows: the heads of one query row, or of several neighbouring ones over the union of
// their lists (pack.h): three rows of 20 heads fill 60 of 64. A list is split over the blocks of a
// cluster, which combine their partial results through distributed shared memory, in rank order.
//
//   loading warpgroup   gathers 64 keys a step; warps 0-1 fill stage 0, warps 2-3 stage 1
//   math warpgroup w    scores of keys [32w, 32w + 32): S = Q K^T; then, with the probabilities of
//                       both in shared memory, value columns [256w, 256w + 256) of O += P V
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "sparse_mla/config.h"

namespace indexcache::sparse_mla {

struct Params {
  const __nv_bfloat16* q;  // [rows, heads, 576]
  const unsigned char* cache;
  const float* sinks;  // [heads] or null
  __nv_bfloat16* out;  // [rows, heads, 512]
  float* lse;          // [rows, heads]
  int rows;
  int heads;
  int rows_per_tile;
  float scale_log2;  // softmax scale * log2(e)
  // Lists: [tiles, list_stride]. Packed lists have masks and counts; without masks a tile is one
  // row, and every slot of its list that is not -1 is the row's.
  const int* slots;
  const unsigned char* masks;
  const int* counts;
  int list_stride;
};

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2e = 1.4426950408889634f;

// Keys of the tile's list, -1 among them included. Every thread of the block; all of them, and those
// of the cluster's other blocks, get the same. Exact where -1 stands at the end only; else up to
// kThreads too many, which are -1.
__device__ __forceinline__ int list_length(const Params& params, const int* list, int tile) {
  if (params.counts != nullptr) return params.counts[tile];
  int last = 0;  // the last kThreads slots with a key among them: their first, and how many keys
  int count = 0;
  bool own = false;
  for (int base = 0; base < params.list_stride; base += kThreads) {
    const int i = base + threadIdx.x;
    const bool valid = i < params.list_stride && list[i] >= 0;
    const int found = __syncthreads_count(valid);
    if (found == 0) continue;
    last = base;
    count = found;
    own = valid;
  }
  const int in_front = __syncthreads_count(own && int(threadIdx.x) < count);
  return in_front == count ? last + count : smaller(last + kThreads, params.list_stride);
}

// Every thread of the block; rows of the tile that are no query head become zeros.
__device__ __forceinline__ void load_queries(Shared& shared, const Params& params,
                                             const TileRows& tile) {
  constexpr int kChunks = kDim / 8;
  const uint32_t base = shared_address(shared.queries);
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int m = i / kChunks;
    const int chunk = i % kChunks;
    const bool used = m < tile.used();
    const int64_t row = used ? tile.first_row + tile.query_of(m) : 0;
    const int head = used ? tile.head_of(m) : 0;
    copy16(base + (chunk / 8) * kTileBytes + swizzle128(m, chunk % 8 * 16),
           params.q + (row * params.heads + head) * kDim + chunk * 8, used);
  }
  wait_copies();
  fence_async_proxy();
}

// -- the loading warpgroup ------------------------------------------------------------------------

// Eight lanes a key: each copies one 16-byte chunk of every 128-byte tile row.
__device__ __forceinline__ void gather_bf16(uint32_t tile, const unsigned char* cache,
                                            const int (&slots)[8], int thread) {
  const int chunk = thread % 8;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int key = j * 8 + thread / 8;
    const bool valid = slots[j] >= 0;
    const unsigned char* row = cache + int64_t(valid ? slots[j] : 0) * (kDim * 2) + chunk * 16;
    const uint32_t to = tile + swizzle128(key, chunk * 16);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      copy16(to + t * kTileBytes, row + t * kTileRowBytes, valid);
    }
  }
}

// Two e4m3 values, times a scale, as two bfloat16.
__device__ __forceinline__ uint32_t dequantise(uint32_t pair, float scale) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  const float2 values = __half22float2(__half2(halves));
  const __nv_bfloat162 result = __floats2bfloat162_rn(values.x * scale, values.y * scale);
  return *reinterpret_cast<const uint32_t*>(&result);
}

// Eight lanes a key: of each group of 128 values a lane converts 16, two chunks of bfloat16.
__device__ __forceinline__ void gather_fp8(uint32_t tile, const unsigned char* cache,
                                           const int (&slots)[8], int thread) {
  const int lane = thread % 8;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int key = j * 8 + thread / 8;
    uint4 values[kFp8Groups] = {};
    uint4 rotary = {};
    float4 scales = {};
    if (slots[j] >= 0) {
      const uint4* row = reinterpret_cast<const uint4*>(cache + int64_t(slots[j]) * kFp8RowBytes);
#pragma unroll
      for (int g = 0; g < kFp8Groups; ++g) values[g] = __ldg(row + g * 8 + lane);
      scales = __ldg(reinterpret_cast<const float4*>(row + kValueDim / 16));
      rotary = __ldg(row + kValueDim / 16 + 1 + lane);
    }
    const float scale_of[kFp8Groups] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int g = 0; g < kFp8Groups; ++g) {
      const uint32_t words[4] = {values[g].x, values[g].y, values[g].z, values[g].w};
      const uint32_t to = tile + (2 * g + lane / 4) * kTileBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t low = words[2 * half];
        const uint32_t high = words[2 * half + 1];
        store_shared(to + swizzle128(key, (lane % 4) * 32 + half * 16),
                    make_uint4(dequantise(low & 0xFFFF, scale_of[g]),
                               dequantise(low >> 16, scale_of[g]),
                               dequantise(high & 0xFFFF, scale_of[g]),
                               dequantise(high >> 16, scale_of[g])));
      }
    }
    store_shared(tile + (kTiles - 1) * kTileBytes + swizzle128(key, lane * 16), rotary);
  }
}

template <bool kFp8>
__device__ __forceinline__ void load_keys(Shared& shared, const Params& params, const int* list,
                                          const unsigned char* masks, int length, int begin,
                                          int end) {
  const int thread = (threadIdx.x - kMathThreads) % kLoadersPerStage;
  const int stage = (threadIdx.x - kMathThreads) / kLoadersPerStage;
  const uint32_t tile = shared_address(shared.keys[stage]);
  int parity = 1;
  for (int step = begin + stage; step < end; step += kStages, parity ^= 1) {
    const int* keys = list + step * kKeys;
    const int left = length - step * kKeys;  // keys of the list from here on
    int slots[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int key = j * 8 + thread / 8;
      slots[j] = key < left ? keys[key] : -1;
    }
    unsigned char mask = 0;
    if (thread < left) mask = masks == nullptr ? keys[thread] >= 0 : masks[step * kKeys + thread];

    mbarrier_wait(&shared.empty[stage], parity);
    shared.masks[stage][thread] = mask;
    if constexpr (kFp8) {
      gather_fp8(tile, params.cache, slots, thread);
    } else {
      gather_bf16(tile, params.cache, slots, thread);
      wait_copies();
    }
    fence_async_proxy();  // WGMMA reads the keys through the async proxy
    mbarrier_arrive(&shared.full[stage]);
  }
}

// -- the math warpgroups ---------------------------------------------------------------------------

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

__device__ __forceinline__ void sync_math() { named_barrier_sync(kMathBarrier, kMathThreads); }

// What a thread carries over the steps: two rows, 256 value columns of the tile.
struct Accumulator {
  float out[128];
  float peak[2];  // of the scores so far, in powers of two; -inf before the first
  float sum[2];   // this warpgroup's keys, this thread's columns
};

// S = Q K^T for this warpgroup's 32 keys.
__device__ __forceinline__ void score(float (&scores)[16], const Shared& shared, int stage,
                                      int group) {
  const uint64_t queries = k_major_descriptor(shared_address(shared.queries));
  const uint64_t keys = k_major_descriptor(shared_address(shared.keys[stage]) +
                                           group * (kKeys / 2) * kTileRowBytes);
  wgmma_fence();
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int byte = 0; byte < kTileRowBytes; byte += 32) {
      const int offset = t * kTileBytes + byte;
      Bf16Wgmma<32, false>::step(scores, advance(queries, offset), advance(keys, offset),
                                 offset > 0);
    }
  }
  wgmma_commit();
  wgmma_wait(scores);
}

// Online softmax of one step, P to shared memory. Leaves the factor of what was there before.
__device__ __forceinline__ void softmax(float (&scores)[16], Accumulator& state,
                                        float (&factor)[2], Shared& shared, int stage, int group,
                                        const int (&mask_bit)[2], float scale_log2) {
  const int thread = threadIdx.x % 128;
  const unsigned char* masks = shared.masks[stage] + group * (kKeys / 2);
  float peak[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int half = (i >> 1) & 1;
    const bool selected = (masks[accumulator_column(thread, i)] >> mask_bit[half]) & 1;
    scores[i] = selected ? scores[i] * scale_log2 : -INFINITY;
    peak[half] = fmaxf(peak[half], scores[i]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = accumulator_row(thread, 2 * half);
    peak[half] = quad_max(peak[half]);
    if (thread % 4 == 0) shared.peaks[group][row] = peak[half];
  }
  sync_math();  // both know each other's peaks; both are done with the last probabilities
  float shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = accumulator_row(thread, 2 * half);
    const float before = state.peak[half];
    state.peak[half] = fmaxf(before, fmaxf(shared.peaks[0][row], shared.peaks[1][row]));
    shift[half] = state.peak[half] == -INFINITY ? 0.0f : state.peak[half];
    factor[half] = exp2f(before - shift[half]);
    state.sum[half] *= factor[half];
  }
  const uint32_t base = shared_address(shared.probabilities);
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const int half = (i >> 1) & 1;
    const float first = exp2f(scores[i] - shift[half]);
    const float second = exp2f(scores[i + 1] - shift[half]);
    state.sum[half] += first + second;
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    const int key = group * (kKeys / 2) + accumulator_column(thread, i);
    store_shared(base + swizzle128(accumulator_row(thread, i), 2 * key),
                 *reinterpret_cast<const uint32_t*>(&pair));
  }
  fence_async_proxy();
  sync_math();  // the probabilities are complete
}

// O = factor * O + P V for this warpgroup's 256 value columns.
__device__ __forceinline__ void accumulate(Accumulator& state, const float (&factor)[2],
                                           const Shared& shared, int stage, int group) {
#pragma unroll
  for (int i = 0; i < 128; ++i) state.out[i] *= factor[(i >> 1) & 1];
  const uint64_t probabilities = k_major_descriptor(shared_address(shared.probabilities));
  const uint64_t values = mn_major_descriptor(
      shared_address(shared.keys[stage]) + group * (kTiles / 2) * kTileBytes, kTileBytes);
  wgmma_fence(state.out);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    Bf16Wgmma<256, true>::step(state.out, advance(probabilities, 32 * k),
                               advance(values, 16 * kTileRowBytes * k), 1);
  }
  wgmma_commit();
  wgmma_wait(state.out);
}

__device__ __forceinline__ void attend(Shared& shared, const Params& params, const TileRows& tile,
                                       int steps) {
  const int group = threadIdx.x / 128;
  const int thread = threadIdx.x % 128;
  const int mask_bit[2] = {tile.mask_bit_of(accumulator_row(thread, 0)),
                           tile.mask_bit_of(accumulator_row(thread, 2))};
  Accumulator state;
#pragma unroll
  for (int i = 0; i < 128; ++i) state.out[i] = 0.0f;
  state.peak[0] = state.peak[1] = -INFINITY;
  state.sum[0] = state.sum[1] = 0.0f;

  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages;
    float scores[16];
    float factor[2];
    mbarrier_wait(&shared.full[stage], (step / kStages) & 1);
    score(scores, shared, stage, group);
    softmax(scores, state, factor, shared, stage, group, mask_bit, params.scale_log2);
    accumulate(state, factor, shared, stage, group);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.empty[stage]);
  }

  sync_math();  // the keys are done with; the partial sums take their place
#pragma unroll
  for (int i = 0; i < 128; i += 2) {
    const int row = accumulator_row(thread, i);
    const int column = group * (kValueDim / 2) + accumulator_column(thread, i);
    *reinterpret_cast<float2*>(&shared.partial[row * kPartialStride + column]) =
        make_float2(state.out[i], state.out[i + 1]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = accumulator_row(thread, 2 * half);
    const float sum = quad_sum(state.sum[half]);
    if (thread % 4 == 0) {
      shared.sums[group][row] = sum;
      if (group == 0) shared.peaks[0][row] = state.peak[half];
    }
  }
}

// -- combining the splits --------------------------------------------------------------------------

// Every thread of every block of the cluster, after cluster_sync. Block r writes its share of the
// value columns; partial results are added in rank order.
__device__ __forceinline__ void combine(Shared& shared, const Params& params, const TileRows& tile,
                                        int rank, int blocks) {
  const int m = threadIdx.x;
  if (m < tile.used()) {
    float peaks[kMaxCluster];
    float sums[kMaxCluster];
    float peak = -INFINITY;
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r) {
      if (r >= blocks) continue;
      peaks[r] = load_peer(peer_address(shared_address(&shared.peaks[0][m]), r));
      sums[r] = load_peer(peer_address(shared_address(&shared.sums[0][m]), r)) +
                load_peer(peer_address(shared_address(&shared.sums[1][m]), r));
      peak = fmaxf(peak, peaks[r]);
    }
    const float shift = peak == -INFINITY ? 0.0f : peak;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r) {
      if (r < blocks) sum += sums[r] * exp2f(peaks[r] - shift);
    }
    float denominator = sum;
    if (params.sinks != nullptr) {
      denominator += exp2f(params.sinks[tile.head_of(m)] * kLog2e - shift);
    }
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r) {
      if (r < blocks) {
        shared.weights[r][m] = sum > 0.0f ? exp2f(peaks[r] - shift) / denominator : 0.0f;
      }
    }
    if (rank == 0) {
      const int64_t row = tile.first_row + tile.query_of(m);
      params.lse[row * params.heads + tile.head_of(m)] =
          sum > 0.0f ? (peak + log2f(sum)) * kLn2 : -INFINITY;
    }
  }
  __syncthreads();

  const int columns = kValueDim / blocks;
  const int quads = columns / 4;
  for (int i = threadIdx.x; i < tile.used() * quads; i += kThreads) {
    const int row = i / quads;
    const int column = rank * columns + i % quads * 4;
    const uint32_t own = shared_address(&shared.partial[row * kPartialStride + column]);
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int r = 0; r < blocks; ++r) {
      const float4 part = load_peer4(peer_address(own, r));
      const float weight = shared.weights[r][row];
      total.x += weight * part.x;
      total.y += weight * part.y;
      total.z += weight * part.z;
      total.w += weight * part.w;
    }
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(total.x, total.y),
                               __floats2bfloat162_rn(total.z, total.w)};
    const int64_t query = tile.first_row + tile.query_of(row);
    *reinterpret_cast<uint2*>(params.out + (query * params.heads + tile.head_of(row)) * kValueDim +
                              column) = *reinterpret_cast<const uint2*>(pairs);
  }
}

// Grid (tiles * cluster, head blocks).
template <bool kFp8>
__global__ void __launch_bounds__(kThreads, 1) attend_kernel(const Params params) {
  Shared& shared = dynamic_shared<Shared>();
  const int blocks = cluster_size();
  const int rank = cluster_rank();
  const int index = blockIdx.x / blocks;
  const int first_row = index * params.rows_per_tile;
  const int first_head = blockIdx.y * heads_per_block(params.heads);
  const TileRows tile = {first_row, smaller(params.rows_per_tile, params.rows - first_row),
                         first_head,
                         smaller(heads_per_block(params.heads), params.heads - first_head)};
  const int64_t list_start = int64_t(index) * params.list_stride;
  const int* list = params.slots + list_start;
  const unsigned char* masks = params.masks == nullptr ? nullptr : params.masks + list_start;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&shared.full[stage], kLoadersPerStage);
      mbarrier_init(&shared.empty[stage], kMathThreads / 32);
    }
    fence_barrier_init();
  }
  load_queries(shared, params, tile);
  const int length = list_length(params, list, index);
  const int steps = ceil_div(length, kKeys);
  const int begin = split_begin(steps, rank, blocks);
  const int end = split_begin(steps, rank + 1, blocks);
  __syncthreads();

  if (threadIdx.x >= kMathThreads) {
    lower_registers<kLoadRegisters>();
    load_keys<kFp8>(shared, params, list, masks, length, begin, end);
  } else {
    raise_registers<kMathRegisters>();
    attend(shared, params, tile, end - begin);
  }
  cluster_sync();
  combine(shared, params, tile, rank, blocks);
  cluster_sync();  // nobody leaves while a peer may still read from it
}

}  // namespace indexcache::sparse_mla
