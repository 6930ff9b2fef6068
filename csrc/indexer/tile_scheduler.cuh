// A dynamic tile scheduler: every persistent block fetches its next tile from one counter in global
// memory.
//
// With a fixed share a launch would last as long as its slowest block, and one whose SM is taken (by
// communication beside it) would begin when another ends. So it finds fewer tiles left instead. No bit
// of a tile's result depends on the block that works on it.
//
//   loading warp    fetches a tile, waits for `empty`, produces    -> full
//   all other warps                                        full    -> empty
//
// The loading warp fetches when a tile's last page is on its way: early enough for nobody to wait for
// it, and no earlier, because what one block has fetched no other can do.
#pragma once

#include "common/ptx.cuh"

namespace indexcache::indexer {

struct TileScheduler {
  int tile;
  uint64_t full;
  uint64_t empty;
};

// One thread; `readers` warps consume each tile.
__device__ __forceinline__ void init_scheduler(TileScheduler& scheduler, int readers) {
  mbarrier_init(&scheduler.full, 1);
  mbarrier_init(&scheduler.empty, readers);
}

// One lane. A tile of `tiles` that no block had, the last first: in a chunk its rows see the most
// tokens, and what is left for the end should be short. Negative when there are no more.
//
// Every block fetches until it gets that, so a launch fetches tiles + blocks times. With the last of
// these the counter is at zero again: a launch that is replayed needs no reset.
__device__ __forceinline__ int fetch_tile(unsigned* counter, int tiles) {
  return tiles - 1 - int(atomicInc(counter, tiles + gridDim.x - 1));
}

// The loading warp's number `n` of the block's tiles, for the other warps too.
__device__ __forceinline__ int produce_tile(TileScheduler& scheduler, unsigned* counter, int tiles,
                                            int n) {
  int tile = 0;
  if (threadIdx.x % 32 == 0) {
    tile = fetch_tile(counter, tiles);
    mbarrier_wait(&scheduler.empty, (n & 1) ^ 1);
    scheduler.tile = tile;
    mbarrier_arrive(&scheduler.full);
  }
  return uniform(tile);
}

// The same number, in any other warp.
__device__ __forceinline__ int consume_tile(TileScheduler& scheduler, int n) {
  mbarrier_wait(&scheduler.full, n & 1);
  const int tile = uniform(scheduler.tile);
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&scheduler.empty);
  return tile;
}

}  // namespace indexcache::indexer
