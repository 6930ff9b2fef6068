// A GPU in slow motion: the kernels' own device code, run on the host to see whether its barriers,
// phases, shuffles and addresses do what was meant.
//
// Every thread of a block (of a cluster's blocks, or of blocks that share what is left to do) is a
// fibre. A fibre runs until it waits for others; which one goes on is random, so that a barrier that is
// missing shows as a wrong result and one that nobody completes as a deadlock, which is reported. TMA
// copies land at a random later moment, cp.async when it is waited for, WGMMA when it is waited for.
//
// Not modelled: memory proxies and their fences, memory ordering finer than a wait, time.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <vector_functions.h>
#include <vector_types.h>

#define __global__
#undef __device__
#define __device__
#undef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

namespace simt {

struct Mbarrier {
  int arrivals = 0;  // of a phase
  int pending = 0;
  int64_t bytes = 0;
  int phase = 0;

  void settle() {
    if (pending == 0 && bytes == 0) {
      phase ^= 1;
      pending = arrivals;
    }
  }
};

struct Meeting {  // of the threads behind a barrier
  int arrived = 0;
  int sum = 0;
  int last_sum = 0;
  int generation = 0;
};

struct Warp {
  uint32_t arrived = 0;
  int generation = 0;
  uint64_t values[32];
  uint64_t last_values[32];
};

struct WgmmaStep {
  float* registers;
  int columns;
  uint64_t a;
  uint64_t b;
  int add;
  int kind;  // 0: e4m3, 1: bfloat16, 2: bfloat16 with B transposed
};

struct Warpgroup {
  std::vector<WgmmaStep> steps[128];
  int waiting[4] = {};  // lanes of each warp that wait for their products
  int made[4] = {};     // products of each warp that were waited for
};

struct Block {
  std::vector<unsigned char> memory;
  std::map<uint32_t, Mbarrier> mbarriers;
  std::map<int, Meeting> meetings;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  uint3 index;
  int place;    // among those that run together, which its shared memory's addresses begin with
  int rank;     // of its cluster
  int running;        // threads that have not ended
  int fetches = 0;  // of a counter
};

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block;
  uint3 thread;
  bool done = false;
  bool previous_launch_ended = false;  // as far as it has waited for
  std::function<bool()> ready;  // what it waits for
  std::vector<std::function<void()>> copies;  // its cp.async
  const float* fenced = nullptr;  // the accumulators that the last wgmma_fence named
};

// A mutant: what the kernels ask for and do not get, on barriers [first, last): named ones by their
// number, mbarriers by their offset in shared memory.
struct Fault {
  std::string what;
  uint32_t first = 0;
  uint32_t last = 0;
};

inline Fault& fault() {
  static Fault instance;
  return instance;
}

inline bool fails(const char* what, uint32_t barrier) {
  return barrier >= fault().first && barrier < fault().last && fault().what == what;
}

constexpr size_t kStack = 256 << 10;
constexpr uint32_t kPlaceShift = 20;

struct Machine {
  dim3 grid;
  int threads = 0;
  int cluster = 1;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<std::function<void()>> in_flight;  // TMA copies
  std::map<int, Meeting> cluster_meetings;       // by the place of the cluster's first block
  uint64_t asleep = 0;                           // warps of all blocks, modulo 64
  int slow = -1;                                 // a block that runs only while all others wait
  Fibre* current = nullptr;
  ucontext_t scheduler;
  std::function<void()> kernel;
  std::string failure;
};

inline Machine& machine() {
  static Machine instance;
  return instance;
}

// Mutants: the places in the code that wait at a barrier, as they were come to first, and the one that
// does not wait (-1: all do).
inline std::vector<void*> barrier_places;
inline int missing_barrier = -1;

inline Fibre& self() { return *machine().current; }
inline Block& block() { return *self().block; }
inline Meeting& cluster_meeting() {
  return machine().cluster_meetings[block().place - block().rank];
}
inline int lane() { return self().thread.x % 32; }
inline Warp& warp() { return block().warps[self().thread.x / 32]; }

inline void fail(const std::string& what) {
  if (machine().failure.empty()) machine().failure = what;
  throw std::runtime_error(what);
}

inline void wait_until(std::function<bool()> ready) {
  self().ready = std::move(ready);
  swapcontext(&self().context, &machine().scheduler);
}

// Let others go first, sometimes.
inline void stumble() {
  if (machine().random() % 16 == 0) wait_until([] { return true; });
}

// Let others go first, fewer than `most` times.
inline void delay(int most) {
  for (int rounds = machine().random() % most; rounds > 0; --rounds) {
    wait_until([] { return true; });
  }
}

// Whether that was the last one.
inline bool arrive(Meeting& meeting, int threads, int value) {
  meeting.sum += value;
  if (++meeting.arrived < threads) return false;
  meeting.arrived = 0;
  meeting.last_sum = meeting.sum;
  meeting.sum = 0;
  ++meeting.generation;
  return true;
}

inline int meet(Meeting& meeting, int threads, int value = 0) {
  const int then = meeting.generation;
  if (arrive(meeting, threads, value)) {
    stumble();
  } else {
    wait_until([&meeting, then] { return meeting.generation != then; });
  }
  return meeting.last_sum;
}

// As a mutant has it. What calls this must be inlined (__forceinline__): its return address is the place.
__attribute__((noinline)) inline int barrier(Meeting& meeting, int threads, int value = 0) {
  auto& places = barrier_places;
  const auto found = std::find(places.begin(), places.end(), __builtin_return_address(0));
  if (missing_barrier >= 0 && found - places.begin() == missing_barrier) return 0;
  if (found == places.end()) places.push_back(__builtin_return_address(0));
  return meet(meeting, threads, value);
}

// All lanes of the mask leave a value and see everybody's.
inline const uint64_t* warp_meet(uint32_t mask, uint64_t value) {
  Warp& own = warp();
  own.values[lane()] = value;
  if (mask == 1u << lane()) return own.values;
  if (mask != ~0u) fail("a warp meets with a mask that is neither full nor one lane");
  own.arrived |= 1u << lane();
  if (own.arrived == mask) {
    own.arrived = 0;
    std::memcpy(own.last_values, own.values, sizeof own.values);
    ++own.generation;
  } else {
    wait_until([&own, then = own.generation] { return own.generation != then; });
  }
  return own.last_values;
}

inline unsigned char* shared_pointer(uint32_t address) {
  Block& owner = *machine().blocks[address >> kPlaceShift];
  const uint32_t offset = address & ((1u << kPlaceShift) - 1);
  if (owner.running == 0) fail("the shared memory of a block that has ended");
  if (offset >= owner.memory.size()) fail("shared memory address out of range");
  return owner.memory.data() + offset;
}

inline uint32_t shared_offset(const void* pointer) {
  Block& own = block();
  const auto offset = static_cast<const unsigned char*>(pointer) - own.memory.data();
  if (offset < 0 || size_t(offset) >= own.memory.size()) fail("not a shared memory pointer");
  return uint32_t(offset) | uint32_t(own.place) << kPlaceShift;
}

inline void entry(unsigned low, unsigned high) {
  auto* fibre = reinterpret_cast<Fibre*>(uintptr_t(low) | uintptr_t(high) << 32);
  try {
    machine().kernel();
  } catch (const std::exception&) {
  }
  fibre->done = true;
  --fibre->block->running;
  swapcontext(&fibre->context, &machine().scheduler);
}

// Half of the warps, or all but one, get far ahead of the others, as far as barriers let them: then
// others do. A slow block's are behind all others.
inline bool sleeps(const Fibre& fibre) {
  const int warp = fibre.block->place * (machine().threads / 32) + fibre.thread.x / 32;
  return machine().asleep >> (warp % 64) & 1;
}

inline void run_blocks() {
  Machine& m = machine();
  for (;;) {
    std::vector<Fibre*> ready;
    std::vector<Fibre*> slow;
    bool alive = false;
    bool others = false;
    for (auto& fibre : m.fibres) {
      if (fibre->done) continue;
      alive = true;
      if (fibre->ready && !fibre->ready()) continue;
      if (fibre->block->place == m.slow) {
        slow.push_back(fibre.get());
      } else if (sleeps(*fibre)) {
        others = true;
      } else {
        ready.push_back(fibre.get());
      }
    }
    if (ready.empty() && !others && m.in_flight.empty()) ready.swap(slow);
    if (m.random() % 64 == 0 || (ready.empty() && others)) {
      const int warps = m.threads / 32 * int(m.blocks.size());
      m.asleep = m.random() % 2 ? m.random() : uint64_t(1) << m.random() % warps % 64;
    }
    if (ready.empty() && others) continue;
    if (!m.failure.empty() || !alive) return;
    if (!m.in_flight.empty() && (ready.empty() || m.random() % 4 == 0)) {
      const size_t which = m.random() % m.in_flight.size();
      auto copy = std::move(m.in_flight[which]);
      m.in_flight.erase(m.in_flight.begin() + which);
      copy();
      continue;
    }
    if (ready.empty()) {
      m.failure = "deadlock: every thread waits";
      return;
    }
    std::shuffle(ready.begin(), ready.end(), m.random);
    for (Fibre* fibre : ready) {  // a round: everyone that could go when it began
      if (fibre->done || (fibre->ready && !fibre->ready())) continue;
      fibre->ready = nullptr;
      m.current = fibre;
      swapcontext(&m.scheduler, &fibre->context);
      if (!m.failure.empty()) return;
    }
  }
}

inline std::unique_ptr<Block> new_block(int place, uint3 index, size_t shared) {
  Machine& m = machine();
  auto block = std::make_unique<Block>();
  block->memory.resize(shared);
  for (auto& byte : block->memory) byte = static_cast<unsigned char>(m.random());
  block->warps.resize(m.threads / 32);
  block->warpgroups.resize((m.threads + 127) / 128);
  block->index = index;
  block->place = place;
  block->rank = place % m.cluster;
  block->running = m.threads;
  return block;
}

inline std::unique_ptr<Fibre> new_fibre(Block* block, int thread) {
  auto fibre = std::make_unique<Fibre>();
  fibre->block = block;
  fibre->thread = make_uint3(thread, 0, 0);
  fibre->stack.reset(new char[kStack]);
  getcontext(&fibre->context);
  fibre->context.uc_stack.ss_sp = fibre->stack.get();
  fibre->context.uc_stack.ss_size = kStack;
  fibre->context.uc_link = nullptr;
  const auto address = reinterpret_cast<uintptr_t>(fibre.get());
  makecontext(&fibre->context, reinterpret_cast<void (*)()>(entry), 2, unsigned(address),
              unsigned(address >> 32));
  return fibre;
}

// Run a kernel; returns what went wrong, or nothing. So many clusters run at once; the block `slow` of
// them gets to run only while all others wait or have ended.
inline std::string launch(dim3 grid, int cluster, int threads, size_t shared, uint64_t seed,
                          std::function<void()> kernel, int at_once = 1, int slow = -1) {
  Machine& m = machine();
  m = Machine();
  m.random.seed(seed);
  m.grid = grid;
  m.threads = threads;
  m.cluster = cluster;
  m.slow = slow;
  m.kernel = std::move(kernel);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; x += cluster * at_once) {
      m.blocks.clear();
      m.fibres.clear();
      m.in_flight.clear();
      m.cluster_meetings.clear();
      const int count = std::min<int>(cluster * at_once, grid.x - x);
      for (int place = 0; place < count; ++place) {
        m.blocks.push_back(new_block(place, make_uint3(x + place, y, 0), shared));
        for (int t = 0; t < threads; ++t) {
          m.fibres.push_back(new_fibre(m.blocks.back().get(), t));
        }
      }
      run_blocks();
      if (!m.failure.empty()) return m.failure;
      if (!m.in_flight.empty()) return "a block ended while a copy was under way";
      for (const auto& block : m.blocks) {
        for (const auto& [id, meeting] : block->meetings) {
          if (meeting.arrived > 0) return "a block left a barrier that some had reached";
        }
      }
    }
  }
  return "";
}

}  // namespace simt

// -- CUDA's names ------------------------------------------------------------------------------

#define threadIdx (::simt::self().thread)
#define blockIdx (::simt::block().index)
#define gridDim (::simt::machine().grid)

__forceinline__ void __syncthreads() {
  simt::barrier(simt::block().meetings[0], simt::machine().threads);
}

__forceinline__ int __syncthreads_count(bool value) {
  return simt::barrier(simt::block().meetings[0], simt::machine().threads, value);
}

inline void __syncwarp() { simt::warp_meet(~0u, 0); }

inline uint32_t __activemask() { return 1u << simt::lane(); }

inline uint32_t __ballot_sync(uint32_t mask, bool value) {
  const uint64_t* all = simt::warp_meet(mask, value);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= uint32_t(all[i] != 0) << i;
  return bits;
}

template <class T>
T shuffle(uint32_t mask, T value, int source) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const uint64_t found = simt::warp_meet(mask, bits)[source];
  std::memcpy(&value, &found, sizeof value);
  return value;
}

template <class T>
T __shfl_sync(uint32_t mask, T value, int source) {
  return shuffle(mask, value, source);
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits) {
  return shuffle(mask, value, simt::lane() ^ bits);
}

template <class T>
T __shfl_up_sync(uint32_t mask, T value, int d) {
  return shuffle(mask, value, simt::lane() >= d ? simt::lane() - d : simt::lane());
}

template <class T>
T __shfl_down_sync(uint32_t mask, T value, int d) {
  return shuffle(mask, value, simt::lane() + d < 32 ? simt::lane() + d : simt::lane());
}

template <class T, class F>
T reduce(uint32_t mask, T value, F f) {
  const uint64_t* all = simt::warp_meet(mask, uint64_t(value));
  T found = T(all[0]);
  for (int i = 1; i < 32; ++i) found = f(found, T(all[i]));
  return found;
}

inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t value) {
  return reduce(mask, value, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}

inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
  return reduce(mask, value, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}

inline int __reduce_add_sync(uint32_t mask, int value) {
  return reduce(mask, value, [](int a, int b) { return a + b; });
}

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __clz(uint32_t bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __clzll(int64_t bits) { return bits ? __builtin_clzll(uint64_t(bits)) : 64; }
inline int __ffs(uint32_t bits) { return __builtin_ffs(int(bits)); }

inline int atomicAdd(int* address, int value) {
  simt::stumble();
  const int old = *address;
  *address += value;
  return old;
}

// One more, or zero from `most` on.
inline unsigned atomicInc(unsigned* address, unsigned most) {
  simt::stumble();
  ++simt::block().fetches;
  const unsigned old = *address;
  *address = old >= most ? 0 : old + 1;
  return old;
}

inline uint32_t atomicOr(uint32_t* address, uint32_t bits) {
  simt::stumble();
  const uint32_t old = *address;
  *address |= bits;
  return old;
}

inline int atomicCAS(int* address, int expected, int desired) {
  simt::stumble();
  const int old = *address;
  if (old == expected) *address = desired;
  return old;
}

#ifndef __ldg
template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}
#endif
