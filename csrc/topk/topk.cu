// Exact top-k of given logits: a cluster of blocks a row, as many blocks as find room at once.
#include <array>
#include <atomic>

#include "common/layout.h"
#include "common/launch.h"
#include "topk/kernel.cuh"

namespace indexcache::topk {

constexpr int kThreads = 1024;
constexpr int kCapacity = 8192;
constexpr int kShared = sizeof(RowShared<kThreads, kCapacity>) + kSwizzlePeriod;
constexpr int kLeastShare = 4096;  // logits of a block that are worth the cluster's barriers

__global__ void __launch_bounds__(kThreads, 1) topk_kernel(const Params params) {
  topk_of_block<kThreads, kCapacity>(params);
}

// Clusters of a size that run at once, asked of the driver once for each device and size.
int clusters_at_once(int size, const Place& place) {
  constexpr int kDevices = 64;
  static std::array<std::array<std::atomic<int>, kMaxCluster + 1>, kDevices> known;  // plus one
  std::atomic<int>& own = known[place.device() % kDevices][size];
  if (own == 0) own = 1 + active_clusters(topk_kernel, kThreads, kShared, size, place);
  return own - 1;
}

int cluster_of(int rows, int width, const Place& place) {
  for (int size = kMaxCluster; size > 1; size /= 2) {
    if (width >= size * kLeastShare && rows <= clusters_at_once(size, place)) return size;
  }
  return 1;
}

void run(const Params& params, int rows, int width, const Place& place, bool early) {
  const int cluster = cluster_of(rows, width, place);
  launch(topk_kernel, ::dim3(rows * cluster), kThreads, kShared, {cluster, early}, place, params);
}

// logits [T, S] float32, unit stride in a row; visible [T] int32; out [T, k] int32, contiguous.
void topk(TensorView logits, TensorView visible, TensorView out) {
  run({data<float>(logits), logits.stride(0), data<int>(visible), int(out.size(1)), data<int>(out),
       single_rows(), no_table()},
      int(out.size(0)), int(logits.size(1)), Place(logits), false);
}

// The second half of an unfused indexer, launched while the first, `indexer_logits`, still runs.
// query_starts [B + 1] in prefill; absent in decode, where row r belongs to request
// r / rows_per_request. block_table [B, W], or absent for positions.
void topk_of_requests(TensorView logits, TensorView visible,
                      tvm::ffi::Optional<TensorView> query_starts, int64_t rows_per_request,
                      tvm::ffi::Optional<TensorView> block_table, TensorView out) {
  run({data<float>(logits), logits.stride(0), data<int>(visible), int(out.size(1)), data<int>(out),
       requests_of(query_starts, rows_per_request), table_of(block_table)},
      int(out.size(0)), int(logits.size(1)), Place(logits), true);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk, topk);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_of_requests, topk_of_requests);

}  // namespace indexcache::topk
