// Scores, softmax and output: what the two math warpgroups do.
#pragma once

#include "common/wgmma.cuh"
#include "sparse_mla/inputs.cuh"

namespace indexcache::sparse_mla {

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

}  // namespace indexcache::sparse_mla
