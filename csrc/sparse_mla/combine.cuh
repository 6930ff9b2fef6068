// What the blocks of a cluster found of their parts of a list, added up and written.
#pragma once

#include "sparse_mla/inputs.cuh"

namespace indexcache::sparse_mla {

// Partial results that a thread has under way: all sixteen would not fit beside the accumulators.
constexpr int kPartsAtOnce = 8;

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

  const int first = split_begin(kValueDim / 4, rank, blocks);
  const int quads = split_begin(kValueDim / 4, rank + 1, blocks) - first;
  for (int i = threadIdx.x; i < tile.used() * quads; i += kThreads) {
    const int row = i / quads;
    const int column = 4 * (first + i % quads);
    const uint32_t own = shared_address(&shared.partial[row * kPartialStride + column]);
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int base = 0; base < blocks; base += kPartsAtOnce) {
      float4 parts[kPartsAtOnce];
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        if (base + i < blocks) parts[i] = load_peer4(peer_address(own, base + i));
      }
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        if (base + i >= blocks) break;
        const float weight = shared.weights[base + i][row];
        total.x += weight * parts[i].x;
        total.y += weight * parts[i].y;
        total.z += weight * parts[i].z;
        total.w += weight * parts[i].w;
      }
    }
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(total.x, total.y),
                               __floats2bfloat162_rn(total.z, total.w)};
    const int64_t query = tile.first_row + tile.query_of(row);
    *reinterpret_cast<uint2*>(params.out + (query * params.heads + tile.head_of(row)) * kValueDim +
                              column) = *reinterpret_cast<const uint2*>(pairs);
  }
}

}  // namespace indexcache::sparse_mla
