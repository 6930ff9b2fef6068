// Gathering bfloat16 rows: what the loading warpgroup does.
#pragma once

#include "sparse_mla/inputs.cuh"

namespace indexcache::sparse_mla {

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

}  // namespace indexcache::sparse_mla
