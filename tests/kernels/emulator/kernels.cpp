// The kernels on the emulated GPU, as plain C functions for tests/kernels/test_cuda_emulated.py. Each
// returns an empty string, or what went wrong (deadlock, misuse of a barrier, bad address).
#include "simt.h"
//
#include "common/block.cuh"
#include "indexer/logits.cuh"
#include "indexer/select.cuh"
#include "sparse_mla/attend.cuh"
#include "sparse_mla/pack.h"
#include "topk/kernel.cuh"

using namespace indexcache;

namespace {

std::string last_failure;

const char* report(std::string failure) {
  last_failure = std::move(failure);
  return last_failure.c_str();
}

template <class T>
CUtensorMap queries_map(const void* queries, int rows) {
  return tensor_map({static_cast<const unsigned char*>(queries),
                     2,
                     {128, int64_t(rows) * T::kHeads, 1},
                     {1, 128, 0},
                     {128, T::kColumns, 1}});
}

CUtensorMap keys_map(const void* pages, int count) {
  return tensor_map({static_cast<const unsigned char*>(pages),
                     3,
                     {128, 64, count},
                     {1, 128, indexer::kPageBytes},
                     {128, 64, 1}});
}

// Call f(null pointer to T) for the T of a list that has these heads and rows.
template <class... Tiles, class F>
bool with_tile(int heads, int rows, F f) {
  return ((heads == Tiles::kHeads && rows == Tiles::kRows &&
           (f(static_cast<Tiles*>(nullptr)), true)) ||
          ...);
}

template <class F>
bool with_logits_tile(int heads, int rows, F f) {
  using namespace indexer;
  return with_tile<Tile<8, 4>, Tile<16, 4>, Tile<32, 1>, Tile<32, 2>, Tile<32, 4>, Tile<64, 1>,
                   Tile<64, 2>, Tile<64, 4>>(heads, rows, f);
}

template <class F>
bool with_select_tile(int heads, int rows, F f) {
  using namespace indexer;
  return with_tile<SelectTile<8, 8>, SelectTile<16, 8>, SelectTile<32, 8>, SelectTile<64, 4>>(
      heads, rows, f);
}

}  // namespace

extern "C" {

struct IndexerCall {
  const void* queries;
  const void* pages;
  int page_count;
  const float* weights;
  const int* visible;
  int rows;
  const int* query_starts;  // null in decode
  int requests;
  int rows_per_request;
  const int* table;
  int64_t table_stride;
  uint64_t seed;
};

static indexer::Inputs inputs_of(const IndexerCall& call) {
  return {static_cast<const unsigned char*>(call.pages),
          call.weights,
          call.visible,
          call.rows,
          {call.query_starts, call.requests, call.rows_per_request},
          {call.table, call.table_stride}};
}

const char* emulate_logits(const IndexerCall* call, int heads, int tile_rows, int rows_per_tile,
                           int splits, float* out, int64_t stride) {
  std::string failure = "no such kernel";
  with_logits_tile(heads, tile_rows, [&](auto* tile) {
    using T = std::remove_pointer_t<decltype(tile)>;
    const indexer::LogitsParams params = {inputs_of(*call), rows_per_tile, out, stride};
    const CUtensorMap queries = queries_map<T>(call->queries, call->rows);
    const CUtensorMap keys = keys_map(call->pages, call->page_count);
    const int tiles = indexer::tiles_of(params.inputs.requests, call->rows, rows_per_tile);
    failure = simt::launch(dim3(tiles, splits, 1), 1,
                           T::kThreads, sizeof(indexer::Ring<T>) + 1024, call->seed, [&] {
                             indexer::logits_kernel<T::kHeads, T::kRows>(queries, keys, params);
                           });
  });
  return report(failure);
}

// All blocks run at once; `slow` is one that gets to run only while the others wait, or -1.
const char* emulate_select(const IndexerCall* call, int heads, int tile_rows, int k, int blocks,
                           int slow, bool as_slots, unsigned* counter, int* out) {
  std::string failure = "no such kernel";
  with_select_tile(heads, tile_rows, [&](auto* tile) {
    using T = std::remove_pointer_t<decltype(tile)>;
    std::vector<Entry> lists(size_t(blocks) * T::kRows * indexer::kListCapacity, ~Entry(0));
    const indexer::SelectParams params = {inputs_of(*call), k,       out,
                                          lists.data(),     counter, as_slots};
    const CUtensorMap queries = queries_map<T>(call->queries, call->rows);
    const CUtensorMap keys = keys_map(call->pages, call->page_count);
    failure = simt::launch(
        dim3(blocks, 1, 1), 1, T::kThreads, sizeof(indexer::SelectShared<T>) + 1024, call->seed,
        [&] { indexer::select_kernel<T::kHeads, T::kRows>(queries, keys, params); }, blocks, slow);
  });
  return report(failure);
}

// How often a block of the last launch fetched a tile.
int emulated_fetches(int block) { return simt::machine().blocks[block]->fetches; }

// From now on "sync", "pass", "arrive" or "wait" is left out on a barrier of select_kernel<8, 8>; on
// none if that is not the name of one.
void emulate_fault(const char* what, const char* barrier) {
  using Shared = indexer::SelectShared<indexer::SelectTile<8, 8>>;
  const auto at = [&](const char* name, uint32_t first, uint32_t count) {
    if (std::strcmp(name, barrier) == 0) simt::fault() = {what, first, first + count};
  };
  const auto shared = [&](const char* name, size_t offset, size_t bytes) {
    at(name, uint32_t(1024 + offset), uint32_t(bytes));
  };
  simt::fault() = {};
  at("gate", indexer::kGateBarrier, 1);
  at("segment", indexer::kSegmentBarrier, 1);
  at("order", indexer::kOrderBarrier, 4);
  shared("full", offsetof(Shared, ring.full), sizeof(Shared::ring.full));
  shared("empty", offsetof(Shared, ring.empty), sizeof(Shared::ring.empty));
  shared("queries_full", offsetof(Shared, ring.queries_full), 8);
  shared("queries_empty", offsetof(Shared, ring.queries_empty), 8);
  shared("scored", offsetof(Shared, scored), sizeof(Shared::scored));
  shared("tile_full", offsetof(Shared, scheduler.full), 8);
  shared("tile_empty", offsetof(Shared, scheduler.empty), 8);
}

// The next launches lack the barrier of a number, of those that the launches since a call with -1,
// which gives all of them back, have come to.
void emulate_without_barrier(int number) {
  simt::missing_barrier = number;
  if (number < 0) simt::barrier_places.clear();
}
int emulated_barriers() { return int(simt::barrier_places.size()); }

constexpr int kTopkThreads = 64;
constexpr int kTopkCapacity = topk::kMaxTopk + 4 * kTopkThreads;

const char* emulate_topk(const float* logits, int64_t stride, const int* visible, int rows, int k,
                         const int* query_starts, int requests, int rows_per_request,
                         const int* table, int64_t table_stride, int cluster, uint64_t seed,
                         int* out) {
  const topk::Params params = {
      logits, stride, visible, k, out, {query_starts, requests, rows_per_request},
      {table, table_stride}};
  constexpr size_t kShared = sizeof(topk::RowShared<kTopkThreads, kTopkCapacity>) + 1024;
  return report(simt::launch(
      dim3(rows * cluster, 1, 1), cluster, kTopkThreads, kShared, seed,
      [&] { topk::topk_of_block<kTopkThreads, kTopkCapacity>(params); }));
}

// What the blocks of the last row had listed, before the row's last logits.
int emulated_listed() {
  int listed = 0;
  for (const auto& block : simt::machine().blocks) {
    using Shared = topk::RowShared<kTopkThreads, kTopkCapacity>;
    listed += reinterpret_cast<const Shared*>(block->memory.data() + 1024)->count;
  }
  return listed;
}

const char* emulate_pack(const int* slots, int rows, int k, uint64_t seed, int* packed,
                         unsigned char* masks, int* count) {
  constexpr int kThreads = 128;
  struct Shared {
    sparse_mla::PackScratch scratch;
    BlockScratch block;
  };
  return report(simt::launch(dim3(1, 1, 1), 1, kThreads, sizeof(Shared) + 1024, seed, [&] {
    Shared& shared = dynamic_shared<Shared>();
    DeviceBlock<kThreads, 0> block(shared.block);
    const int found = sparse_mla::pack_rows(block, slots, rows, k, shared.scratch, packed, masks);
    if (threadIdx.x == 0) *count = found;
  }));
}

const char* emulate_attend(const void* q, const void* cache, bool fp8, const float* sinks,
                           void* out, float* lse, int rows, int heads, int rows_per_tile,
                           float scale, const int* slots, const unsigned char* masks,
                           const int* counts, int list_stride, int cluster, uint64_t seed) {
  const sparse_mla::Params params = {static_cast<const __nv_bfloat16*>(q),
                                     static_cast<const unsigned char*>(cache),
                                     sinks,
                                     static_cast<__nv_bfloat16*>(out),
                                     lse,
                                     rows,
                                     heads,
                                     rows_per_tile,
                                     scale * sparse_mla::kLog2e,
                                     slots,
                                     masks,
                                     counts,
                                     list_stride};
  return report(simt::launch(
      dim3(ceil_div(rows, rows_per_tile) * cluster, sparse_mla::head_blocks(heads), 1), cluster,
      sparse_mla::kThreads, sizeof(sparse_mla::Shared) + 1024, seed, [&] {
        if (fp8) {
          sparse_mla::attend_kernel<true>(params);
        } else {
          sparse_mla::attend_kernel<false>(params);
        }
      }));
}

}  // extern "C"
