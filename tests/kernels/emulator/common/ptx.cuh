// common/ptx.cuh on the emulated GPU: the same functions.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cmath>

#include "common/host_device.h"
#include "simt.h"

namespace indexcache {

// What the tests put into a CUtensorMap.
struct EmulatedMap {
  const unsigned char* base;
  int rank;
  int64_t sizes[3];
  int64_t strides[3];  // of dimensions 1 and 2, in bytes, at [1] and [2]
  int box[3];
};

inline CUtensorMap tensor_map(const EmulatedMap& emulated) {
  CUtensorMap map;
  static_assert(sizeof emulated <= sizeof map);
  std::memcpy(&map, &emulated, sizeof emulated);
  return map;
}

inline uint32_t shared_address(const void* pointer) { return simt::shared_offset(pointer); }

template <class Shared>
Shared& dynamic_shared() {
  simt::Block& own = simt::block();
  // The vector's memory is aligned here, as the hardware's window is by its own addresses.
  const size_t offset = 1024;
  if (offset + sizeof(Shared) > own.memory.size()) simt::fail("too little shared memory");
  return *reinterpret_cast<Shared*>(own.memory.data() + offset);
}

inline void store_shared(uint32_t address, uint32_t value) {
  std::memcpy(simt::shared_pointer(address), &value, sizeof value);
}

inline void store_shared(uint32_t address, uint4 value) {
  std::memcpy(simt::shared_pointer(address), &value, sizeof value);
}

inline void store_shared(uint32_t address, float first, float second) {
  const float both[2] = {first, second};
  std::memcpy(simt::shared_pointer(address), both, sizeof both);
}

inline float load_shared(uint32_t address) {
  float value;
  std::memcpy(&value, simt::shared_pointer(address), sizeof value);
  return value;
}

// -- barriers ----------------------------------------------------------------------------------

__forceinline__ void named_barrier_sync(int id, int threads) {
  if (!simt::fails("sync", id)) simt::barrier(simt::block().meetings[id], threads);
}

inline void named_barrier_arrive_now(int id, int threads) {
  if (!simt::fails("pass", id)) simt::arrive(simt::block().meetings[id], threads, 0);
  simt::stumble();
}

inline simt::Mbarrier& mbarrier_at(uint32_t address) {
  auto& all = simt::machine().blocks[address >> simt::kPlaceShift]->mbarriers;
  const auto found = all.find(address);
  if (found == all.end()) simt::fail("an mbarrier that was not initialised");
  return found->second;
}

inline void mbarrier_init(uint64_t* barrier, int arrivals) {
  simt::Mbarrier fresh;
  fresh.arrivals = fresh.pending = arrivals;
  simt::block().mbarriers[shared_address(barrier)] = fresh;
}

inline void fence_barrier_init() {}

inline void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
  simt::Mbarrier& own = mbarrier_at(shared_address(barrier));
  if (simt::fails("arrive", shared_address(barrier))) return;
  if (own.pending == 0) simt::fail("more arrivals than an mbarrier's phase has");
  own.bytes += bytes;
  --own.pending;
  own.settle();
  simt::stumble();
}

inline void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive_expect(barrier, 0); }

inline void mbarrier_wait(uint64_t* barrier, int parity) {
  simt::Mbarrier& own = mbarrier_at(shared_address(barrier));
  if (simt::fails("wait", shared_address(barrier))) return;
  if (own.phase == parity) simt::wait_until([&own, parity] { return own.phase != parity; });
}

// -- asynchronous copies -----------------------------------------------------------------------

inline void land(uint32_t barrier, int64_t bytes) {
  simt::Mbarrier& own = mbarrier_at(barrier);
  own.bytes -= bytes;  // may be ahead of the expectation
  own.settle();
}

inline void tma_load(void* destination, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                     int z) {
  EmulatedMap source;
  std::memcpy(&source, map, sizeof source);
  const uint32_t to = shared_address(destination);
  const uint32_t signal = shared_address(barrier);
  if (to % 1024 != 0) simt::fail("a swizzled box must begin at a multiple of 1024");
  if (source.box[0] != 128 || x != 0) simt::fail("only boxes of whole 128-byte rows are modelled");
  simt::machine().in_flight.push_back([=] {
    for (int row = 0; row < source.box[1]; ++row) {
      for (int chunk = 0; chunk < 8; ++chunk) {
        unsigned char bytes[16] = {};
        const bool inside = y + row >= 0 && y + row < source.sizes[1] && z >= 0 &&
                            (source.rank < 3 || z < source.sizes[2]);
        if (inside) {
          std::memcpy(bytes,
                      source.base + (y + row) * source.strides[1] + z * source.strides[2] +
                          chunk * 16,
                      16);
        }
        uint32_t at = to + row * 128 + chunk * 16;
        at ^= (at >> 7 & 7) << 4;
        std::memcpy(simt::shared_pointer(at), bytes, 16);
      }
    }
    land(signal, int64_t(source.box[0]) * source.box[1]);
  });
}

inline void tma_load_2d(void* destination, const CUtensorMap* map, uint64_t* barrier, int x,
                        int y) {
  tma_load(destination, map, barrier, x, y, 0);
}

inline void tma_load_3d(void* destination, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                        int z) {
  tma_load(destination, map, barrier, x, y, z);
}

inline void bulk_load(void* destination, const void* source, int bytes, uint64_t* barrier) {
  const uint32_t to = shared_address(destination);
  const uint32_t signal = shared_address(barrier);
  if (to % 16 != 0 || bytes % 16 != 0) simt::fail("bulk copies are of multiples of 16");
  simt::machine().in_flight.push_back([=] {
    std::memcpy(simt::shared_pointer(to), source, bytes);
    land(signal, bytes);
  });
}

inline void copy16(uint32_t destination, const void* source, bool valid) {
  if (destination % 16 != 0) simt::fail("copies of 16 bytes go to multiples of 16");
  simt::self().copies.push_back([=] {
    unsigned char bytes[16] = {};
    if (valid) std::memcpy(bytes, source, 16);
    std::memcpy(simt::shared_pointer(destination), bytes, 16);
  });
}

inline void wait_copies() {
  simt::delay(32);
  for (auto& copy : simt::self().copies) copy();
  simt::self().copies.clear();
}

inline void fence_async_proxy() {}

// -- arithmetic --------------------------------------------------------------------------------

inline float exp2_flushed(float x) {
  const float result = std::exp2(x);
  return result < 0x1p-126f ? 0.0f : result;
}

// Every read of what the launch before wrote comes through here, and behind the wait for it.
inline float load_dependent(const float* source) {
  if (!simt::self().previous_launch_ended) simt::fail("a read before the previous launch has ended");
  return *source;
}

inline float4 load_dependent4(const float* source) {
  if (reinterpret_cast<uintptr_t>(source) % 16 != 0) simt::fail("a load of 16 bytes from elsewhere");
  const float first = load_dependent(source);
  return {first, source[1], source[2], source[3]};
}

// -- launches that overlap ---------------------------------------------------------------------

inline void let_next_launch_begin() {}

inline void wait_for_previous_launch() { simt::self().previous_launch_ended = true; }

// -- registers ---------------------------------------------------------------------------------

template <int>
void raise_registers() {}

template <int>
void lower_registers() {}

template <class T>
T fresh(T value) {
  return value;
}

template <class T>
T uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}

// -- clusters ----------------------------------------------------------------------------------

inline uint32_t cluster_rank() { return simt::block().rank; }
inline uint32_t cluster_size() { return simt::machine().cluster; }

__forceinline__ void cluster_sync() {
  simt::barrier(simt::cluster_meeting(), simt::machine().threads * simt::machine().cluster);
}

// The same barrier: that it orders nothing is not modelled.
__forceinline__ void cluster_leave() { cluster_sync(); }

inline uint32_t peer_address(uint32_t address, uint32_t rank) {
  const uint32_t place = simt::block().place - simt::block().rank + rank;
  return (address & ((1u << simt::kPlaceShift) - 1)) | place << simt::kPlaceShift;
}

inline float load_peer(uint32_t address) {
  float value;
  std::memcpy(&value, simt::shared_pointer(address), sizeof value);
  return value;
}

inline uint32_t load_peer_word(uint32_t address) {
  uint32_t value;
  std::memcpy(&value, simt::shared_pointer(address), sizeof value);
  return value;
}

inline float4 load_peer4(uint32_t address) {
  float4 value;
  std::memcpy(&value, simt::shared_pointer(address), sizeof value);
  return value;
}

}  // namespace indexcache
