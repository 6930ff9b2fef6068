// Which tile a persistent block works on next: every block asks one counter in global memory.
//
// With a fixed share a launch would last as long as its slowest block, and one whose SM is taken (by
// communication beside it) would begin when another ends. So it finds fewer tiles left instead. No bit
// of a tile's result depends on the block that works on it.
//
//   loading warp    takes a tile, waits for `read`, tells            -> known
//   all other warps                                 known -> read
//
// The loading warp asks when a tile's last page is on its way: early enough for nobody to wait for the
// answer, and no earlier, because what one block has taken no other can do.
#pragma once

#include "common/ptx.cuh"

namespace indexcache::indexer {

struct NextTile {
  int tile;
  uint64_t known;
  uint64_t read;
};

// One thread; `readers` warps are told of each tile.
__device__ __forceinline__ void init_next_tile(NextTile& next, int readers) {
  mbarrier_init(&next.known, 1);
  mbarrier_init(&next.read, readers);
}

// One lane. A tile of `tiles` that no block had, the last first: in a chunk its rows see the most
// tokens, and what is left for the end should be short. Negative when there are no more.
//
// Every block asks until it hears that, so a launch asks tiles + blocks times. With the last of these
// questions the counter is at zero again: a launch that is replayed needs no reset.
__device__ __forceinline__ int take_tile(unsigned* counter, int tiles) {
  return tiles - 1 - int(atomicInc(counter, tiles + gridDim.x - 1));
}

// The loading warp's number `n` of the block's tiles, which the other warps hear of.
__device__ __forceinline__ int tell_tile(NextTile& next, unsigned* counter, int tiles, int n) {
  int tile = 0;
  if (threadIdx.x % 32 == 0) {
    tile = take_tile(counter, tiles);
    mbarrier_wait(&next.read, (n & 1) ^ 1);
    next.tile = tile;
    mbarrier_arrive(&next.known);
  }
  return uniform(tile);
}

// The same number, in any other warp.
__device__ __forceinline__ int hear_tile(NextTile& next, int n) {
  mbarrier_wait(&next.known, n & 1);
  const int tile = uniform(next.tile);
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&next.read);
  return tile;
}

}  // namespace indexcache::indexer
