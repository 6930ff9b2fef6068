// The functions that Python calls. Shapes and dtypes are checked there (kernels/indexer/cuda.py).
#include "indexer/run.h"

namespace indexcache::indexer {

using tvm::ffi::Optional;

Operands operands_of(TensorView queries, TensorView weights, TensorView pages,
                     TensorView block_table, Optional<TensorView> query_starts,
                     int64_t rows_per_request, TensorView visible) {
  return {queries,
          pages,
          {data<unsigned char>(pages), data<float>(weights), data<int>(visible),
           int(visible.size(0)), requests_of(query_starts, rows_per_request),
           table_of(block_table)}};
}

// Call f(integral constant) with the head count.
template <class F>
void with_heads(int64_t heads, F f) {
  switch (heads) {
    case 8: return f(std::integral_constant<int, 8>());
    case 16: return f(std::integral_constant<int, 16>());
    case 32: return f(std::integral_constant<int, 32>());
    case 64: return f(std::integral_constant<int, 64>());
    default: TVM_FFI_THROW(ValueError) << "no indexer kernel for " << heads << " heads";
  }
}

// q [T, H, 128], weights [T, H], pages [P, 8448], block_table [B, W], visible [T], out [T, width].
// In prefill query_starts is [B + 1]; in decode it is absent and T = B * rows_per_request.
void indexer_logits(TensorView queries, TensorView weights, TensorView pages,
                    TensorView block_table, Optional<TensorView> query_starts,
                    int64_t rows_per_request, TensorView visible, TensorView out) {
  const Operands operands = operands_of(queries, weights, pages, block_table, query_starts,
                                        rows_per_request, visible);
  const int rows_per_tile =
      query_starts.has_value() ? kLogitsRows : smaller(int(rows_per_request), kLogitsRows);
  const LogitsOutput output = {data<float>(out), out.stride(0), int(out.size(1))};
  const Place place(queries);
  with_heads(queries.size(1), [&](auto heads) {
    run_logits<decltype(heads)::value>(operands, rows_per_tile, output, place);
  });
}

// As indexer_logits; out [T, k], lists [blocks, select_rows(H), kListCapacity] int64 scratch, counter
// [1] int32: zero, and of no launch that may run at the same time.
void indexer_select(TensorView queries, TensorView weights, TensorView pages,
                    TensorView block_table, TensorView query_starts, TensorView visible,
                    bool as_slots, TensorView lists, TensorView counter, TensorView out) {
  const Operands operands =
      operands_of(queries, weights, pages, block_table, query_starts, 1, visible);
  const SelectOutput output = {data<int>(out), int(out.size(1)), as_slots, data<Entry>(lists),
                               int(lists.size(0)), data<unsigned>(counter)};
  TVM_FFI_CHECK(lists.size(1) == select_rows(int(queries.size(1))), ValueError)
      << "lists has " << lists.size(1) << " rows a block";
  TVM_FFI_CHECK(lists.size(2) == kListCapacity, ValueError)
      << "lists has room for " << lists.size(2) << " entries a row";
  const Place place(queries);
  with_heads(queries.size(1), [&](auto heads) {
    run_select<decltype(heads)::value>(operands, output, place);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(indexer_logits, indexer_logits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(indexer_select, indexer_select);

}  // namespace indexcache::indexer
