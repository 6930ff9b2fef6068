// A row a cluster: what a launch is given, and which row a block works on.
#pragma once

#include "common/requests.h"
#include "topk/row.cuh"

namespace indexcache::topk {

struct Params {
  const float* logits;
  int64_t stride;  // elements between rows
  const int* visible;
  int k;
  int* out;
  Requests requests;
  BlockTable table;  // without pages, positions are written and not slots
};

template <int kThreads, int kCapacity>
__device__ __forceinline__ void topk_of_block(const Params& params) {
  static_assert(kCapacity >= kMaxTopk + 4 * kThreads, "a list that was cut has room for a step");
  using Shared = RowShared<kThreads, kCapacity>;
  Shared& shared = dynamic_shared<Shared>();
  const int row = blockIdx.x / cluster_size();
  const int request = params.requests.of_row(row);
  const int visible = request < 0 ? 0 : params.visible[row];
  wait_for_previous_launch();  // which makes the logits; the lengths were there before it

  int* out = params.out + int64_t(row) * params.k;
  const auto map = [&](int position) { return params.table.slot_or_position(request, position); };
  if (visible <= params.k) {
    const int stride = cluster_size() * kThreads;
    for (int i = cluster_rank() * kThreads + threadIdx.x; i < params.k; i += stride) {
      out[i] = i < visible ? map(i) : -1;
    }
    return;
  }
  ClusterRow<kThreads, kCapacity> selection(shared, params.logits + row * params.stride, visible,
                                            params.k);
  selection.select(out, map);
}

}  // namespace indexcache::topk
