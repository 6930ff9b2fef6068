// Exact top-k of given logits: one block a row.
#include "common/block.cuh"
#include "common/launch.h"
#include "common/requests.h"
#include "topk/row.h"

namespace indexcache::topk {

constexpr int kThreads = 1024;

struct Params {
  const float* logits;
  int64_t stride;  // elements between rows
  const int* visible;
  int k;
  int* out;
  Requests requests;
  BlockTable table;  // without pages, positions are written and not slots
};

__global__ void __launch_bounds__(kThreads, 1) topk_kernel(const Params params) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ BlockScratch block_scratch;
  Scratch& scratch = *reinterpret_cast<Scratch*>(shared);
  DeviceBlock<kThreads, 0> block(block_scratch);

  const int row = blockIdx.x;
  const int request = params.requests.of_row(row);
  const int visible = request < 0 ? 0 : params.visible[row];
  select_row(block, params.logits + row * params.stride, visible, params.k, scratch,
             params.out + int64_t(row) * params.k,
             [&](int position) { return params.table.slot_or_position(request, position); });
}

void run(const Params& params, int rows, const Place& place) {
  launch(topk_kernel, ::dim3(rows), kThreads, sizeof(Scratch), 1, place.stream(), params);
}

// logits [T, S] float32, unit stride in a row; visible [T] int32; out [T, k] int32, contiguous.
void topk(TensorView logits, TensorView visible, TensorView out) {
  run({data<float>(logits), logits.stride(0), data<int>(visible), int(out.size(1)), data<int>(out),
       single_rows(), no_table()},
      int(out.size(0)), Place(logits));
}

// The second half of an unfused indexer. query_starts [B + 1] in prefill; absent in decode, where
// row r belongs to request r / rows_per_request. block_table [B, W], or absent for positions.
void topk_of_requests(TensorView logits, TensorView visible,
                      tvm::ffi::Optional<TensorView> query_starts, int64_t rows_per_request,
                      tvm::ffi::Optional<TensorView> block_table, TensorView out) {
  run({data<float>(logits), logits.stride(0), data<int>(visible), int(out.size(1)), data<int>(out),
       requests_of(query_starts, rows_per_request), table_of(block_table)},
      int(out.size(0)), Place(logits));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk, topk);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_of_requests, topk_of_requests);

}  // namespace indexcache::topk
