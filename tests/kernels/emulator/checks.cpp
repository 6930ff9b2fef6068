// The host-and-device code of csrc/ as plain C functions, for the tests (tests/kernels/test_cuda_*).
#include <cstring>
#include <memory>
#include <vector>

#include "common/layout.h"
#include "common/requests.h"
#include "serial_block.h"
#include "indexer/gate.h"
#include "indexer/scores.h"
#include "indexer/reduce.h"
#include "indexer/schedule.h"
#include "indexer/splits.h"
#include "sparse_mla/config.h"
#include "sparse_mla/pack.h"

using namespace indexcache;

namespace {

const auto kPositions = [](int position) { return position; };

// The quad's sum as pipeline.cuh makes it: what one lane keeps plus what its partner sends.
template <int kCount>
void exchange(std::vector<std::vector<float>>& lanes, int bit) {
  const auto before = lanes;
  for (int lane = 0; lane < 4; ++lane) {
    const float* own = before[lane].data();
    const float* other = before[lane ^ bit].data();
    if constexpr (kCount == 1) {
      lanes[lane][0] = own[0] + other[0];
    } else {
      for (int x = 0; x < kCount / 2; ++x) {
        lanes[lane][x] = indexer::kept<kCount>(own, x, lane & bit) +
                         indexer::sent<kCount>(other, x, (lane ^ bit) & bit);
      }
    }
  }
}

// products [64, rows * heads], gates [rows * heads] -> sums [64, rows]; writers counts the lanes
// that own each of them.
template <int kHeads, int kRows>
void sum_heads(const float* products, const float* gates, float* sums, int* writers) {
  constexpr int kColumns = kHeads * kRows;
  using Share = indexer::QuadShare<2 * kRows>;
  for (int quad = 0; quad < 32; ++quad) {
    std::vector<std::vector<float>> lanes(4, std::vector<float>(2 * kRows));
    for (int lane = 0; lane < 4; ++lane) {
      const int thread = 4 * quad + lane;
      std::vector<float> registers(kColumns / 2);
      std::vector<float> weights(kColumns / 4);
      for (int i = 0; i < kColumns / 2; ++i) {
        registers[i] =
            products[accumulator_row(thread, i) * kColumns + accumulator_column(thread, i)];
      }
      for (int j = 0; j < kColumns / 8; ++j) {  // as load_weights does
        weights[2 * j] = gates[accumulator_column(thread, 4 * j)];
        weights[2 * j + 1] = gates[accumulator_column(thread, 4 * j) + 1];
      }
      indexer::sum_own_heads<kHeads, kRows>(registers.data(), weights.data(), lanes[lane].data());
    }
    exchange<2 * kRows>(lanes, 1);
    exchange<kRows>(lanes, 2);
    for (int lane = 0; lane < 4; ++lane) {
      const int thread = 4 * quad + lane;
      if (!Share::owns(thread)) continue;
      for (int slot = 0; slot < Share::kOwned; ++slot) {
        const int value = Share::value(thread, slot);
        const int key = accumulator_row(thread, 0) + 8 * (value & 1);
        sums[key * kRows + value / 2] = lanes[lane][slot];
        ++writers[key * kRows + value / 2];
      }
    }
  }
}

}  // namespace

extern "C" {

// -- selection ---------------------------------------------------------------------------------

uint32_t check_order_key(float value) { return order_key(value); }

int check_split_count(int tiles, int pages, int resident) {
  return indexer::split_count(tiles, pages, resident);
}

// The streaming gate over one row, pages in the kernel's order. `entries` receives how many entries
// were ever listed; returns the fullest that the list ever was, or -1 if it overflowed.
int check_gate(const float* row, int n, int k, uint64_t seed, const int* order, int* out,
               int64_t* entries) {
  constexpr int kRows = 2;  // the second row stays empty and must not disturb the first
  SerialBlock block(seed);
  std::vector<Entry> lists(kRows * indexer::kListCapacity, ~Entry(0));
  std::vector<int> hists(kRows * indexer::kGateBins, -1);
  indexer::Gate<kRows> gate;
  indexer::reset(block, gate, hists.data());

  const int pages = ceil_div(n, kPageTokens);
  const int step = indexer::page_step(pages);
  int fullest = 0;
  bool overflowed = false;
  *entries = 0;
  int keys = indexer::kFirstCheck;
  for (int done = 0; done < pages;) {
    const int stop = smaller(done + keys / kPageTokens, pages);
    const int before = gate.counts[0];
    constexpr int kTogether = 4;  // logits that one thread offers at once
    block.each((stop - done) * kPageTokens / kTogether, [&](int i) {
      uint32_t passes = 0;
      const auto at = [&](int j) -> indexer::Scored {
        const int key = i * kTogether + j;
        const int number = done + key / kPageTokens;
        const int page = order ? order[number] : indexer::spread_page(number, step, pages);
        const int position = page * kPageTokens + key % kPageTokens;
        return {position < n ? row[position] : 0.0f, position};
      };
      for (int j = 0; j < kTogether; ++j) {
        const float floor = gate.floors[0];
        const bool below = floor > -INFINITY && indexer::push_below(0, at(j).logit, floor);
        passes |= uint32_t(at(j).position < n && !below) << j;
      }
      overflowed |= gate.counts[0] > indexer::kListCapacity - kTogether;
      if (overflowed) return;
      indexer::append(block, &gate.counts[0], lists.data(), 0, hists.data(), passes, at);
    });
    fullest = larger(fullest, gate.counts[0]);
    *entries += gate.counts[0] - before;
    done = stop;
    if (done < pages) {
      keys = indexer::check(block, gate, lists.data(), hists.data(), k, done * kPageTokens);
    }
  }
  if (overflowed) return -1;
  indexer::raise_floors(block, gate, hists.data(), k);
  std::vector<Entry> list(indexer::kListCapacity);
  int collected;
  const int left = block.copy_if(lists.data(), gate.counts[0], indexer::floor_entry(gate.floors[0]),
                                 list.data(), indexer::kListCapacity, &collected);
  const auto scratch = std::make_unique<AscendingScratch>();
  write_topk(block, list.data(), left, k, n, gate.digit_hist, *scratch, out, kPositions);
  return fullest;
}

// -- scores --------------------------------------------------------------------------------------

int check_score_place(int rows, int row, int key) {
  return rows == 8 ? indexer::score_place<8>(row, key) : indexer::score_place<4>(row, key);
}

// row, key and place of what a gate lane sees as its number `i`; returns how many it sees.
int check_gate_share(int rows, int lane, int i, int* row, int* key, int* place) {
  const auto fill = [&](auto share) {
    using Share = decltype(share);
    *row = Share::row(lane);
    *key = Share::key(lane, i);
    *place = Share::place(lane, i);
    return Share::kCount;
  };
  return rows == 8 ? fill(indexer::GateShare<8>()) : fill(indexer::GateShare<4>());
}

uint32_t check_below(int rows, int lane, int end) {
  return rows == 8 ? indexer::GateShare<8>::below(lane, end)
                   : indexer::GateShare<4>::below(lane, end);
}

// -- the gate ------------------------------------------------------------------------------------

int check_gate_bin(float value) { return indexer::gate_bin(value); }
float check_gate_edge(int bin) { return indexer::gate_edge(bin); }
float check_float_of_key(uint32_t key) { return float_of_key(key); }

// -- schedule ----------------------------------------------------------------------------------

// Walks every tile as the kernels do; writes the request and the end of the segment of each row.
void check_segments(const int* query_starts, int requests, int rows, int tile_rows, int* request_of,
                    int* end_of) {
  const Requests map = {query_starts, requests, 1};
  for (int first = 0; first < rows; first += tile_rows) {
    const int end = smaller(first + tile_rows, rows);
    for (int row = first; row < end;) {
      const indexer::Segment segment = indexer::segment_at(map, row, end);
      for (int i = segment.first; i < segment.end; ++i) {
        request_of[i] = segment.request;
        end_of[i] = segment.end;
      }
      row = segment.end;
    }
  }
}

int check_pages_of(const int* visible, int rows, int trivial) {
  return indexer::pages_of({0, 0, rows}, visible, trivial);
}

void check_page_order(int pages, int* order) {
  const int step = indexer::page_step(pages);
  for (int i = 0; i < pages; ++i) order[i] = indexer::spread_page(i, step, pages);
}

int check_slot(const int* table, int64_t stride, int request, int position) {
  return BlockTable{table, stride}.slot_or_position(request, position);
}

// -- sums over the heads -------------------------------------------------------------------------

// False if no kernel has this tile.
bool check_sum_heads(int heads, int rows, const float* products, const float* gates, float* sums,
                     int* writers) {
#define IC_CASE(h, r)                                  \
  if (heads == h && rows == r) {                       \
    sum_heads<h, r>(products, gates, sums, writers);   \
    return true;                                       \
  }
  IC_CASE(8, 4)
  IC_CASE(8, 8)
  IC_CASE(16, 4)
  IC_CASE(16, 8)
  IC_CASE(32, 1)
  IC_CASE(32, 2)
  IC_CASE(32, 4)
  IC_CASE(32, 8)
  IC_CASE(64, 1)
  IC_CASE(64, 2)
  IC_CASE(64, 4)
#undef IC_CASE
  return false;
}

// -- sparse MLA ----------------------------------------------------------------------------------

int check_pack(const int* slots, int rows, int k, uint64_t seed, int* packed,
               unsigned char* masks) {
  SerialBlock block(seed);
  const auto scratch = std::make_unique<sparse_mla::PackScratch>();
  std::memset(scratch.get(), 0xA5, sizeof(sparse_mla::PackScratch));
  return sparse_mla::pack_rows(block, slots, rows, k, *scratch, packed, masks);
}

int check_head_blocks(int heads) { return sparse_mla::head_blocks(heads); }
int check_heads_per_block(int heads) { return sparse_mla::heads_per_block(heads); }
int check_split_begin(int steps, int rank, int splits) {
  return sparse_mla::split_begin(steps, rank, splits);
}

// Row m of a tile: its mask bit, and its query row and head (-1 where the row is not used).
int check_tile_row(int first_row, int rows, int first_head, int heads, int m, int* query,
                   int* head) {
  const sparse_mla::TileRows tile = {first_row, rows, first_head, heads};
  const bool used = m < tile.used();
  *query = used ? first_row + tile.query_of(m) : -1;
  *head = used ? tile.head_of(m) : -1;
  return tile.mask_bit_of(m);
}

int check_constant(const char* name) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("gate.list_capacity")) return indexer::kListCapacity;
  if (is("gate.first_check")) return indexer::kFirstCheck;
  if (is("gate.check_keys")) return indexer::kCheckKeys;
  if (is("gate.check_part")) return indexer::kCheckPart;
  if (is("gate.bins")) return indexer::kGateBins;
  if (is("indexer.max_pages")) return indexer::kMaxPages;
  if (is("mla.rows")) return sparse_mla::kRows;
  if (is("mla.keys")) return sparse_mla::kKeys;
  if (is("mla.max_cluster")) return sparse_mla::kMaxCluster;
  if (is("mla.max_packed_rows")) return sparse_mla::kMaxPackedRows;
  if (is("mla.max_packed_slots")) return sparse_mla::kMaxPackedSlots;
  return -1;
}

}  // extern "C"
