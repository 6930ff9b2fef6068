// What a tile reads: arguments of the launch, its queries, and its list as a loading thread sees it.
#pragma once

#include <cuda_bf16.h>

#include "common/ptx.cuh"
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
  // Lists: [tiles, list_stride], of which `counts` says how much is to be read. Packed lists have
  // masks and counts; without masks a tile is one row, every slot of its list that is not -1 is the
  // row's, and a tile without a count looks for the last slot itself.
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

}  // namespace indexcache::sparse_mla
