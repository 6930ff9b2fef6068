// Exact top-k of one row of logits, by a cluster of blocks, with memory that does not depend on the
// row's length.
//
// Every block has a share of the row, the blocks in the order of positions.
//
// 1. A bound. Of the largest logit that each thread holds, the w-th largest, w being the share's part
//    of k: w logits of the block reach it. So k of the row reach the smallest of the blocks' bounds.
// 2. What reaches the bound is listed: of 200K random logits on eight blocks some 2650 for the best
//    2048. These are looked up again, the others are read once. A list that would overflow is cut to
//    its k best; from then on only what is larger counts: a later logit of the same value is worse.
// 3. The k-th largest of all lists, digit by digit: histograms of 256 bins over what is left of the
//    range of entries, added up across the cluster.
// 4. Positions in ascending order, behind those of the blocks before.
//
// Which entries a list holds, and in which order, differs from run to run; what is selected does not.
#pragma once

#include "common/block.cuh"
#include "common/ptx.cuh"
#include "common/select.h"

namespace indexcache::topk {

constexpr int kMaxTopk = 2048;
constexpr int kVectors = 7;        // of four logits, that a thread holds at once
constexpr int kMaxCluster = 8;     // portable
constexpr int kUnalignedMost = 8;  // logits before the first and behind the last whole vector: 3 + 3
constexpr int kLineVectors = 8;    // of 128 bytes

template <int kThreads, int kCapacity>
struct RowShared {
  Entry list[kCapacity + kUnalignedMost];
  int hists[2][kDigitBins];
  int sums[kDigitBins];    // of the cluster
  int lowers[kDigitBins];  // of the blocks before
  uint32_t bits[kThreads];
  int ranks[kThreads];
  uint32_t least[kThreads / 32];
  uint32_t largest[kThreads / 32];
  int warp_sums[kThreads / 32];
  int count;
  // This block's, for the others.
  uint32_t bound;
  uint32_t top;
  // The cluster's.
  uint32_t row_bound;
  uint32_t row_top;
  int before;  // selected by the blocks before
  BlockScratch block;
};

template <int kThreads, int kCapacity>
class ClusterRow {
 public:
  using Shared = RowShared<kThreads, kCapacity>;

  __device__ __forceinline__ ClusterRow(Shared& shared, const float* row, int n, int k)
      : shared_(shared), block_(shared.block), row_(row), n_(n), k_(k), selected_(k) {
    const int misplaced = int(reinterpret_cast<uintptr_t>(row) / sizeof(float) % 4);
    head_ = smaller((4 - misplaced) % 4, n);
    vectors_ = (n - head_) / 4;
    const int each = ceil_div(ceil_div(vectors_, blocks()), kLineVectors) * kLineVectors;
    first_ = smaller(rank() * each, vectors_);
    end_ = smaller(first_ + each, vectors_);
  }

  // `out` receives k positions, through `map`, ascending, padded with -1; n > k.
  template <class Map>
  __device__ __forceinline__ void select(int* out, Map map) {
    float4 own[kVectors];
    load(own, first_);
    share_bound(own);
    list(own);
    write(kth_of_cluster(), out, map);
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kChunk = kThreads * kVectors;
  static constexpr int kStep = kThreads * 4;
  static constexpr uint32_t kLowest = 0x007fffffu;  // the key of -inf
  static constexpr int kFineShift = 18;             // 32 bins an octave are fine enough
  static_assert(kThreads % 32 == 0 && kWarps <= 32);

  __device__ __forceinline__ static int blocks() { return int(cluster_size()); }
  __device__ __forceinline__ static int rank() { return int(cluster_rank()); }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ void sync() { block_.sync(); }

  // This thread's vectors of those from `base` on; NaN, which nothing selects, beyond the share.
  template <int kCount>
  __device__ __forceinline__ void load(float4 (&own)[kCount], int base) const {
    const int v = base + int(threadIdx.x);
    const float* from = row_ + head_ + 4 * int64_t(v);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float none = float_of_bits(0x7fffffffu);
      own[j] = {none, none, none, none};
      if (v + j * kThreads < end_) own[j] = load_dependent4(from + 4 * j * kThreads);
    }
  }

  // The same of another block of the cluster.
  __device__ __forceinline__ static uint32_t peer(const void* own, int rank) {
    return load_peer_word(peer_address(shared_address(own), uint32_t(rank)));
  }

  // -- 1: a bound ---------------------------------------------------------------------------------

  __device__ __forceinline__ void share_bound(const float4 (&own)[kVectors]) {
    const int share = end_ - first_;
    const int wanted = vectors_ > 0 ? int((int64_t(k_) * share + vectors_ - 1) / vectors_) : 0;
    if (threadIdx.x == 0) {
      shared_.count = rank() == 0 ? head_ : 0;
      shared_.before = 0;
      shared_.bound = vectors_ > 0 ? ~0u : kLowest;  // of a share of nothing
      shared_.top = 0;
    }
    if (wanted > 0) own_bound(own, wanted);
    cluster_sync();
    if (warp() == 0) {
      const bool there = lane() < blocks();
      const uint32_t bound = there ? peer(&shared_.bound, lane()) : ~0u;
      const uint32_t top = there ? peer(&shared_.top, lane()) : 0;
      shared_.row_bound = __reduce_min_sync(~0u, bound);
      shared_.row_top = __reduce_max_sync(~0u, top);
    }
    sync();
  }

  // At least `wanted` logits of the share reach what this finds. The best of 28 logits of a thread
  // stand for them where there are enough threads, else the best of each 7.
  __device__ __forceinline__ void own_bound(const float4 (&own)[kVectors], int wanted) {
    float best[4] = {own[0].x, own[0].y, own[0].z, own[0].w};
#pragma unroll
    for (int j = 1; j < kVectors; ++j) {
      best[0] = fmaxf(best[0], own[j].x);
      best[1] = fmaxf(best[1], own[j].y);
      best[2] = fmaxf(best[2], own[j].z);
      best[3] = fmaxf(best[3], own[j].w);
    }
    int groups = 4;
    if (2 * wanted <= kThreads) {
      best[0] = fmaxf(fmaxf(best[0], best[1]), fmaxf(best[2], best[3]));
      groups = 1;
    }
    uint32_t least = ~0u;
    uint32_t largest = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < groups && best[e] == best[e]) {
        least = smaller(least, order_key(best[e]));
        largest = larger(largest, order_key(best[e]));
      }
    }
    least = __reduce_min_sync(~0u, least);
    largest = __reduce_max_sync(~0u, largest);
    if (lane() == 0) {
      shared_.least[warp()] = least;
      shared_.largest[warp()] = largest;
    }
    sync();
    least = __reduce_min_sync(~0u, lane() < kWarps ? shared_.least[lane()] : ~0u);
    largest = __reduce_max_sync(~0u, lane() < kWarps ? shared_.largest[lane()] : 0);
    for (int shift = digit_shift(largest - least);; shift = larger(shift - kDigitBits, 0)) {
      for (int bin = threadIdx.x; bin < kDigitBins; bin += kThreads) shared_.sums[bin] = 0;
      sync();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t bin = (order_key(best[e]) - least) >> shift;
        if (e < groups && best[e] == best[e] && order_key(best[e]) >= least && bin < kDigitBins) {
          atomicAdd(&shared_.sums[bin], 1);
        }
      }
      sync();
      const Bin bin = block_.template find_from_top<kDigitBins>(shared_.sums, wanted);
      if (bin.index < 0) {
        least = kLowest;
        break;
      }
      least += uint32_t(bin.index) << shift;
      wanted -= bin.above;
      if (shift <= kFineShift) break;
    }
    if (threadIdx.x == 0) {
      shared_.bound = least;
      shared_.top = largest;
    }
  }

  // The bits below the highest digit of a range.
  __device__ __forceinline__ static int digit_shift(uint64_t range) {
    return larger(64 - __clzll(int64_t(range)) - kDigitBits, 0);
  }

  // -- 2: lists -----------------------------------------------------------------------------------

  __device__ __forceinline__ void list(float4 (&own)[kVectors]) {
    float floor = float_of_key(shared_.row_bound);
    int listed = rank() == 0 ? head_ : 0;
    if (rank() == 0 && int(threadIdx.x) < head_) put(threadIdx.x, threadIdx.x);
    for (int base = first_; base < end_; base += kChunk) {
      if (base > first_) sync();
      const uint32_t reach = reaching(own, floor);
      load(own, base + kChunk);
      const int at = reserve(reach);
      sync();
      const int count = shared_.count;
      if (count <= kCapacity) {
        listed = count;
        put_all(reach, base, at);
      } else {
        sync();
        if (threadIdx.x == 0) shared_.count = listed;
        sync();
        listed = list_by_steps(base, listed, floor);
        load(own, base + kChunk);  // there was no room to keep it
      }
    }
    const int behind = head_ + 4 * vectors_;
    if (rank() == blocks() - 1) {
      if (int(threadIdx.x) < n_ - behind) put(listed + threadIdx.x, behind + threadIdx.x);
      listed += n_ - behind;
    }
    listed_ = listed;  // read by the others behind the next barrier
  }

  // A chunk that does not fit, loaded again: a vector at a time, with room made before each.
  __device__ __forceinline__ int list_by_steps(int base, int listed, float& floor) {
#pragma unroll 1
    for (int step = 0; step < kVectors; ++step) {
      if (listed > kCapacity - kStep) {
        const Entry bound = kth_bound(block_, shared_.list, listed, k_, shared_.sums);
        block_.compact(shared_.list, listed, bound, &shared_.count);
        floor = float_of_key(key_of(bound) + 1);
      }
      float4 own[1];
      load(own, base + step * kThreads);
      const uint32_t reach = reaching(own, floor);
      const int at = reserve(reach);
      sync();
      listed = shared_.count;
      put_all(reach, base + step * kThreads, at);
      if (step < kVectors - 1) sync();
    }
    return listed;
  }

  // Bit 4 * j + e: logit e of vector j reaches the floor.
  template <int kCount>
  __device__ __forceinline__ static uint32_t reaching(const float4 (&own)[kCount], float floor) {
    uint32_t reach = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (own[j].x >= floor) reach |= 1u << (4 * j);
      if (own[j].y >= floor) reach |= 2u << (4 * j);
      if (own[j].z >= floor) reach |= 4u << (4 * j);
      if (own[j].w >= floor) reach |= 8u << (4 * j);
    }
    return reach;
  }

  // Where this thread's go in the list.
  __device__ __forceinline__ int reserve(uint32_t reach) {
    const int found = __popc(reach);
    const int through = inclusive_sum(found);
    int start = 0;
    if (lane() == 31 && through > 0) start = atomicAdd(&shared_.count, through);
    return __shfl_sync(~0u, start, 31) + through - found;
  }

  // Few do, so that looking them up again takes less than to have every logit at hand for it.
  __device__ __forceinline__ void put_all(uint32_t reach, int base, int at) {
    for (; reach != 0; reach &= reach - 1) {
      const int bit = __ffs(reach) - 1;
      put(at++, head_ + 4 * (base + bit / 4 * kThreads + int(threadIdx.x)) + bit % 4);
    }
  }

  __device__ __forceinline__ void put(int at, int position) {
    shared_.list[at] = make_entry(order_key(load_dependent(row_ + position)), position);
  }

  // -- 3: the k-th largest of all lists -------------------------------------------------------------

  // What k entries of the cluster reach; all of the listed where there are fewer, which only NaN does.
  __device__ __forceinline__ Entry kth_of_cluster() {
    Entry bound = Entry(shared_.row_bound) << 32;
    Entry limit = ~Entry(0);
    int shift = digit_shift((Entry(shared_.row_top) << 32 | ~0u) - bound);
    int wanted = k_;
    for (int round = 0;; ++round) {
      // The others read the histogram of the round before, and are done with the one before that.
      int* hist = shared_.hists[round % 2];
      for (int bin = threadIdx.x; bin < kDigitBins; bin += kThreads) hist[bin] = 0;
      sync();
      for (int i = threadIdx.x; i < listed_; i += kThreads) {
        const Entry entry = shared_.list[i];
        if (entry >= bound && entry <= limit) {
          // Beyond the digits of the first round is what was larger than all of the first chunk.
          atomicAdd(&hist[smaller((entry - bound) >> shift, Entry(kDigitBins - 1))], 1);
        }
      }
      cluster_sync();
      for (int bin = threadIdx.x; bin < kDigitBins; bin += kThreads) {
        int sum = 0;
        int lower = 0;
#pragma unroll
        for (int other = 0; other < kMaxCluster; ++other) {
          const int count = other < blocks() ? int(peer(&hist[bin], other)) : 0;
          sum += count;
          if (other < rank()) lower += count;
        }
        shared_.sums[bin] = sum;
        shared_.lowers[bin] = lower;
      }
      sync();
      const Bin bin = block_.template find_from_top<kDigitBins>(shared_.sums, wanted);
      if (bin.index < 0) {
        count_before(0);
        for (int each = 0; each < kDigitBins; ++each) wanted -= shared_.sums[each];
        selected_ = k_ - wanted;
        return bound;
      }
      bound += Entry(bin.index) << shift;
      if (bin.index < kDigitBins - 1) limit = bound + ((Entry(1) << shift) - 1);
      wanted -= bin.above;
      const bool last = bin.count == wanted || shift == 0;
      count_before(bin.index + !last);
      if (last) return bound;
      shift = digit_shift(limit - bound);
    }
  }

  // What the blocks before have in the bins from `first` on is selected.
  __device__ __forceinline__ void count_before(int first) {
    int found = 0;
    for (int bin = threadIdx.x; bin < kDigitBins; bin += kThreads) {
      if (bin >= first) found += shared_.lowers[bin];
    }
    found = __reduce_add_sync(~0u, found);
    if (lane() == 0 && found > 0) atomicAdd(&shared_.before, found);
  }

  // -- 4: positions -------------------------------------------------------------------------------

  template <class Map>
  __device__ __forceinline__ void write(Entry bound, int* out, Map map) {
    const int begin = rank() == 0 ? 0 : head_ + 4 * first_;
    const int end = rank() == blocks() - 1 ? n_ : head_ + 4 * end_;
    int written = 0;
    for (int base = begin; base < end; base += 32 * kThreads) {
      shared_.bits[threadIdx.x] = 0;
      sync();
      each_selected(bound, base, [&](int at) {
        atomicOr(&shared_.bits[at / 32], 1u << (at % 32));
      });
      sync();
      written += rank_words(written);
      sync();
      each_selected(bound, base, [&](int at) {
        const uint32_t before = shared_.bits[at / 32] & ((1u << (at % 32)) - 1);
        out[shared_.before + shared_.ranks[at / 32] + __popc(before)] = map(base + at);
      });
      sync();
    }
    if (rank() == blocks() - 1) {
      for (int i = selected_ + threadIdx.x; i < k_; i += kThreads) out[i] = -1;
    }
    cluster_leave();  // the others have read this block's histograms
  }

  template <class F>
  __device__ __forceinline__ void each_selected(Entry bound, int base, F f) {
    for (int i = threadIdx.x; i < listed_; i += kThreads) {
      const Entry entry = shared_.list[i];
      const int at = position_of(entry) - base;
      if (entry >= bound && at >= 0 && at < 32 * kThreads) f(at);
    }
  }

  // The number of bits before each word, from `first` on; returns the number of all.
  __device__ __forceinline__ int rank_words(int first) {
    const int own = __popc(shared_.bits[threadIdx.x]);
    const int through = inclusive_sum(own);
    if (lane() == 31) shared_.warp_sums[warp()] = through;
    sync();
    const int sum = lane() < kWarps ? shared_.warp_sums[lane()] : 0;
    const int before = __reduce_add_sync(~0u, lane() < warp() ? sum : 0);
    shared_.ranks[threadIdx.x] = first + before + through - own;
    return __reduce_add_sync(~0u, sum);
  }

  // Over the lanes of the warp.
  __device__ __forceinline__ static int inclusive_sum(int value) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, value, d);
      if (lane() >= d) value += other;
    }
    return value;
  }

  Shared& shared_;
  DeviceBlock<kThreads, 0> block_;
  const float* row_;
  int n_;
  int k_;
  int head_;     // logits before the first whole vector
  int vectors_;  // whole ones of the row
  int first_;    // this block's
  int end_;
  int listed_;
  int selected_;  // by all blocks: k, but for NaN
};

}  // namespace indexcache::topk
