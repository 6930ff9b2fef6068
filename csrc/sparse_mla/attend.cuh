// Sparse MLA: attention of a tile of query heads over a list of latent rows.
//
// A tile has 64 rows: the heads of one query row, or of several neighbouring ones over the union of
// their lists (pack.h): three rows of 20 heads fill 60 of 64. A list is split over the blocks of a
// cluster, which combine their partial results through distributed shared memory, in rank order.
//
//   loading warpgroup   gathers 64 keys a step. bfloat16: warps 0-1 fill stage 0, warps 2-3 stage 1;
//                       FP8: all four fill a stage with the raw rows, and convert them in place
//   math warpgroup w    owns the steps of stage w: S = Q K^T of all 64 keys, the probabilities, which
//                       take the place of the keys' rotary part; then, of every step, value columns
//                       [256w, 256w + 256) of O += P V
//
// One warpgroup multiplies all 64 keys because half of them each would read Q twice: shared memory,
// not the tensor cores, would set the pace.
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

// Which of the step's keys each query of the tile selected, 32 keys a word. `key` is the calling
// thread's: whole warps, from a multiple of 32 on. Without masks a key that is there is query 0's.
__device__ __forceinline__ void note_selected(uint32_t (&selected)[kMaskRows][2], int key,
                                              uint32_t mask) {
#pragma unroll
  for (int query = 0; query < kMaxQueries; ++query) {
    const uint32_t bits = __ballot_sync(~0u, mask >> query & 1);
    if (key % 32 == query) selected[query][key / 32] = bits;
  }
}

// A step's keys as a loading thread sees them.
struct ListPart {
  const int* keys;
  const unsigned char* masks;  // or null
  int left;                    // keys of the list from here on

  __device__ __forceinline__ int slot(int key) const { return key < left ? keys[key] : -1; }

  __device__ __forceinline__ uint32_t mask(int key) const {
    if (key >= left) return 0;
    return masks == nullptr ? keys[key] >= 0 : masks[key];
  }
};

__device__ __forceinline__ ListPart part_of(const int* list, const unsigned char* masks, int length,
                                            int step) {
  return {list + step * kKeys, masks == nullptr ? nullptr : masks + step * kKeys,
          length - step * kKeys};
}

// Half of the warps a stage. Eight lanes a key: each copies one 16-byte chunk of every 128-byte tile
// row.
__device__ __forceinline__ void load_bf16(Shared& shared, const Params& params, const int* list,
                                          const unsigned char* masks, int length, int begin,
                                          int end) {
  constexpr int kTogether = kBf16Loaders / 8;
  const int thread = (threadIdx.x - kMathThreads) % kBf16Loaders;
  const int stage = (threadIdx.x - kMathThreads) / kBf16Loaders;
  const int chunk = thread % 8;
  const uint32_t tile = shared_address(shared.keys[stage]);
  int parity = 1;
  for (int step = begin + stage; step < end; step += kStages, parity ^= 1) {
    const ListPart part = part_of(list, masks, length, step);
    int slots[kKeys / kTogether];
#pragma unroll
    for (int j = 0; j < kKeys / kTogether; ++j) slots[j] = part.slot(j * kTogether + thread / 8);
    const uint32_t mask = part.mask(thread);

    mbarrier_wait(&shared.empty[stage], parity);
    note_selected(shared.selected[stage], thread, mask);
#pragma unroll
    for (int j = 0; j < kKeys / kTogether; ++j) {
      const bool valid = slots[j] >= 0;
      const unsigned char* row =
          params.cache + int64_t(valid ? slots[j] : 0) * (kDim * 2) + chunk * 16;
      const uint32_t to = tile + swizzle128(j * kTogether + thread / 8, chunk * 16);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        copy16(to + t * kTileBytes, row + t * kTileRowBytes, valid);
      }
    }
    wait_copies();
    fence_async_proxy();  // WGMMA reads the keys through the async proxy
    mbarrier_arrive(&shared.full[stage]);
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

// The warps of one math warpgroup.
__device__ __forceinline__ void sync_group(int group) {
  if (group == 0) {  // a number that the compiler knows: else a kernel takes all sixteen barriers
    named_barrier_sync(kGroupBarrier, 128);
  } else {
    named_barrier_sync(kGroupBarrier + 1, 128);
  }
}

// What a thread carries over the steps: two rows, 256 value columns of the tile.
struct Accumulator {
  float out[128];
  float peak[2];  // what scores are relative to, in powers of two; -inf before a row's first
  float sum[2];   // of this warpgroup's steps, this thread's columns
};

// S = Q K^T for the step's 64 keys.
__device__ __forceinline__ void score(float (&scores)[32], const Shared& shared, int stage) {
  const uint64_t queries = k_major_descriptor(shared_address(shared.queries));
  const uint64_t keys = k_major_descriptor(shared_address(shared.keys[stage]));
  wgmma_fence();
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int byte = 0; byte < kTileRowBytes; byte += 32) {
      const int offset = t * kTileBytes + byte;
      Bf16Wgmma<kKeys, false>::step(scores, advance(queries, offset), advance(keys, offset),
                                    offset > 0);
    }
  }
  wgmma_commit();
  wgmma_wait(scores);
}

// Scale and mask the scores; what each row's are to be relative to from this step on. It follows the
// largest so far by kSlack at most: what is behind it by less only makes probabilities up to
// 2^kSlack, which rounds like any other, and a higher one costs a product of all sums.
__device__ __forceinline__ void find_peaks(float (&scores)[32], float (&peak)[2],
                                           const uint32_t (&selected)[kMaskRows][2],
                                           const int (&mask_bit)[2], float scale_log2) {
  // The thread's first key at bit 0, so that the others are at bits that the compiler knows.
  const uint32_t first = threadIdx.x % 4 * 2;
  uint32_t wanted[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    wanted[half][0] = selected[mask_bit[half]][0] >> first;
    wanted[half][1] = selected[mask_bit[half]][1] >> first;
  }
  // Of each row two chains of maxima, so that one need not wait for the last.
  float highest[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int half = (i >> 1) & 1;
    const int key = accumulator_column(0, i);
    const bool chosen = wanted[half][key / 32] >> (key % 32) & 1;
    scores[i] = chosen ? scores[i] * scale_log2 : -INFINITY;
    highest[half][i & 1] = fmaxf(highest[half][i & 1], scores[i]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float most = quad_max(fmaxf(highest[half][0], highest[half][1]));
    if (most > peak[half] + kSlack) peak[half] = most;
  }
}

// The step's probabilities, to where the keys' rotary part was: every warp of the group must be done
// with the scores.
__device__ __forceinline__ void exponentiate(const float (&scores)[32], const float (&peak)[2],
                                             float (&sum)[2], uint32_t probabilities) {
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int half = (i >> 1) & 1;
    const float shift = peak[half] == -INFINITY ? 0.0f : peak[half];
    const float first = exp2_flushed(scores[i] - shift);
    const float second = exp2_flushed(scores[i + 1] - shift);
    sum[half] += first + second;
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    store_shared(probabilities + swizzle128(accumulator_row(thread, i),
                                            2 * accumulator_column(thread, i)),
                 *reinterpret_cast<const uint32_t*>(&pair));
  }
}

// Make what was summed so far relative to `peak`. Before a row's first score there is nothing.
__device__ __forceinline__ void rescale(Accumulator& state, const float (&peak)[2]) {
  const bool rises = (peak[0] != state.peak[0] && state.peak[0] != -INFINITY) ||
                     (peak[1] != state.peak[1] && state.peak[1] != -INFINITY);
  if (__ballot_sync(~0u, rises) != 0) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool first = state.peak[half] == -INFINITY;
      factor[half] = first ? 1.0f : exp2_flushed(state.peak[half] - peak[half]);
      state.sum[half] *= factor[half];
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) state.out[i] *= factor[(i >> 1) & 1];
  }
  state.peak[0] = peak[0];
  state.peak[1] = peak[1];
}

// O += P V for this warpgroup's 256 value columns.
__device__ __forceinline__ void accumulate(Accumulator& state, const Shared& shared, int stage,
                                           int group) {
  const uint32_t keys = shared_address(shared.keys[stage]);
  const uint64_t probabilities = k_major_descriptor(keys + kRotaryTile * kTileBytes);
  const uint64_t values =
      mn_major_descriptor(keys + group * (kTiles / 2) * kTileBytes, kTileBytes);
  wgmma_fence(state.out);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    Bf16Wgmma<256, true>::step(state.out, advance(probabilities, 32 * k),
                               advance(values, 16 * kTileRowBytes * k), 1);
  }
  wgmma_commit();
  wgmma_wait(state.out);
}

// This step's scores and probabilities are this warpgroup's; the other gets the peaks.
__device__ __forceinline__ void own_step(Accumulator& state, Shared& shared, int stage, int group,
                                         const int (&mask_bit)[2], float scale_log2) {
  const int thread = threadIdx.x % 128;
  float scores[32];
  score(scores, shared, stage);
  float peak[2] = {state.peak[0], state.peak[1]};
  find_peaks(scores, peak, shared.selected[stage], mask_bit, scale_log2);
  if (thread % 4 == 0) {
    shared.peaks[stage][accumulator_row(thread, 0)] = peak[0];
    shared.peaks[stage][accumulator_row(thread, 2)] = peak[1];
  }
  rescale(state, peak);
  sync_group(group);  // its four warps are done with the scores
  exponentiate(scores, peak, state.sum,
               shared_address(shared.keys[stage]) + kRotaryTile * kTileBytes);
  fence_async_proxy();
}

__device__ __forceinline__ void attend(Shared& shared, const Params& params, const TileRows& tile,
                                       int steps) {
  const int group = uniform(threadIdx.x / 128);
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
    mbarrier_wait(&shared.full[stage], (step / kStages) & 1);
    if (stage == group) own_step(state, shared, stage, group, mask_bit, params.scale_log2);
    sync_math();  // the probabilities are complete
    if (stage != group) {
      const float peak[2] = {shared.peaks[stage][accumulator_row(thread, 0)],
                             shared.peaks[stage][accumulator_row(thread, 2)]};
      rescale(state, peak);
    }
    accumulate(state, shared, stage, group);
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
  // What every block found, to here: 64 rows of six of them at a time.
  for (int i = threadIdx.x; i < blocks * kRows; i += kThreads) {
    const int from = i / kRows;
    const int row = i % kRows;
    shared.peer_peaks[from][row] = load_peer(peer_address(shared_address(&shared.peaks[0][row]), from));
    shared.peer_sums[from][row] =
        load_peer(peer_address(shared_address(&shared.sums[0][row]), from)) +
        load_peer(peer_address(shared_address(&shared.sums[1][row]), from));
  }
  __syncthreads();
  const int m = threadIdx.x;
  if (m < tile.used()) {
    float peak = -INFINITY;
    for (int r = 0; r < blocks; ++r) peak = fmaxf(peak, shared.peer_peaks[r][m]);
    const float shift = peak == -INFINITY ? 0.0f : peak;
    float sum = 0.0f;
    for (int r = 0; r < blocks; ++r) {
      sum += shared.peer_sums[r][m] * exp2f(shared.peer_peaks[r][m] - shift);
    }
    float denominator = sum;
    if (params.sinks != nullptr) {
      denominator += exp2f(params.sinks[tile.head_of(m)] * kLog2e - shift);
    }
    for (int r = 0; r < blocks; ++r) {
      shared.weights[r][m] =
          sum > 0.0f ? exp2f(shared.peer_peaks[r][m] - shift) / denominator : 0.0f;
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
      mbarrier_init(&shared.full[stage], kFp8 ? kLoadThreads : kBf16Loaders);
      mbarrier_init(&shared.empty[stage], kMathThreads / 32);
    }
    fence_barrier_init();
  }
  // No query's: what a tile row without a head may attend to.
  if (threadIdx.x < kStages * 2) shared.selected[threadIdx.x / 2][kNoQuery][threadIdx.x % 2] = 0;
  load_queries(shared, params, tile);
  const int length = list_length(params, list, index);
  const int steps = ceil_div(length, kKeys);
  const int begin = split_begin(steps, rank, blocks);
  const int end = split_begin(steps, rank + 1, blocks);
  __syncthreads();

  if (threadIdx.x >= kMathThreads) {
    lower_registers<kLoadRegisters>();
    if constexpr (kFp8) {
      load_fp8(shared, params, list, masks, length, begin, end);
    } else {
      load_bf16(shared, params, list, masks, length, begin, end);
    }
  } else {
    raise_registers<kMathRegisters>();
    attend(shared, params, tile, end - begin);
  }
  cluster_sync();
  combine(shared, params, tile, rank, blocks);
  cluster_leave();
}

}  // namespace indexcache::sparse_mla
