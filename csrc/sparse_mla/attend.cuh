// Sparse MLA: attention of a tile of query heads over a list of latent rows.
//
// A tile has 64 rows: the heads of one query row, or of several neighbouring ones over the union of
// their lists (pack.h): eight rows of 8 heads, three of 20. A list is split over the blocks of a
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
//
// A block is a tile, so it is the GPU that hands tiles out, each to the SM that is free next: a block
// whose SM is taken has no others waiting for it. A tile's end is not under the next one's products:
//   - O is 128 registers of every math thread, of whose 208 up to 193 are in use, so a second O has no
//     place before the first is written;
//   - the partial sums, 133,120 bytes, lie where the keys did: 229,552 of 232,448 are taken, so the next
//     keys cannot come before the end either.
#pragma once

#include "sparse_mla/combine.cuh"
#include "sparse_mla/load_bf16.cuh"
#include "sparse_mla/load_fp8.cuh"
#include "sparse_mla/products.cuh"

namespace indexcache::sparse_mla {

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
