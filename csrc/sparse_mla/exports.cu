// The functions that Python calls. Shapes and dtypes are checked there (kernels/sparse_mla/cuda.py).
#include "common/block.cuh"
#include "common/launch.h"
#include "sparse_mla/attend.cuh"
#include "sparse_mla/pack.h"

namespace indexcache::sparse_mla {

using tvm::ffi::Optional;

constexpr int kPackThreads = 1024;
static_assert(sizeof(PackScratch) + sizeof(BlockScratch) <= 227 * 1024, "shared memory of a block");

__global__ void __launch_bounds__(kPackThreads, 1)
    pack_kernel(const int* slots, int rows, int k, int rows_per_tile, int* packed,
                unsigned char* masks, int* counts) {
  extern __shared__ __align__(16) unsigned char raw[];
  __shared__ BlockScratch block_scratch;
  DeviceBlock<kPackThreads, 0> block(block_scratch);
  const int first = blockIdx.x * rows_per_tile;
  const int64_t start = int64_t(blockIdx.x) * rows_per_tile * k;
  const int count =
      pack_rows(block, slots + int64_t(first) * k, smaller(rows_per_tile, rows - first), k,
                *reinterpret_cast<PackScratch*>(raw), packed + start, masks + start);
  if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// slots [T, k] -> packed [tiles, rows_per_tile * k] int32, masks (bytes, same shape), counts [tiles].
void run_pack(TensorView slots, int64_t rows_per_tile, TensorView packed, TensorView masks,
          TensorView counts) {
  const int rows = int(slots.size(0));
  const int k = int(slots.size(1));
  TVM_FFI_CHECK(rows_per_tile <= kMaxPackedRows && rows_per_tile * k <= kMaxPackedSlots, ValueError)
      << "cannot pack " << rows_per_tile << " rows of " << k << " slots";
  const Place place(slots);
  launch(pack_kernel, ::dim3(ceil_div(rows, int(rows_per_tile))), kPackThreads, sizeof(PackScratch),
         1, place, data<int>(slots), rows, k, int(rows_per_tile), data<int>(packed),
         data<unsigned char>(masks), data<int>(counts));
}

using AttendKernel = void (*)(Params);

// Clusters of more than eight blocks have to be allowed.
AttendKernel attend_of(bool fp8, const Place& place) {
  const AttendKernel kernel = fp8 ? attend_kernel<true> : attend_kernel<false>;
  TVM_FFI_CHECK_CUDA_ERROR(
      set_once(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1, place));
  return kernel;
}

// Clusters of `size` blocks of the attention kernel that the GPU of `cache` runs at once; 0 where it
// has no such clusters.
int64_t run_clusters(TensorView cache, int64_t size) {
  const Place place(cache);
  return active_clusters(attend_of(cache.size(1) == kFp8RowBytes, place), kThreads, kSharedBytes,
                         int(size), place);
}

// q [T, H, 576] bfloat16, cache [N, 576] bfloat16 or [N, 656] bytes, slots [T, k] or a packed list
// with its masks; counts [tiles]: how many of each list there are, needed with masks, out [T, H, 512], lse [T, H]. `cluster` blocks share a list.
void run_attend(TensorView q, TensorView cache, TensorView slots, Optional<TensorView> masks,
            Optional<TensorView> counts, int64_t rows_per_tile, double scale,
            Optional<TensorView> sinks, int64_t cluster, TensorView out, TensorView lse) {
  const bool fp8 = cache.size(1) == kFp8RowBytes;
  const int rows = int(q.size(0));
  const int heads = int(q.size(1));
  TVM_FFI_CHECK(cluster >= 1 && cluster <= kMaxCluster, ValueError) << "a cluster of " << cluster;
  TVM_FFI_CHECK(rows_per_tile * heads_per_block(heads) <= kRows, ValueError)
      << rows_per_tile << " rows of " << heads << " heads in one tile";
  const Place place(q);
  const Params params = {data<__nv_bfloat16>(q), data<unsigned char>(cache),
                         data_or_null<float>(sinks), data<__nv_bfloat16>(out), data<float>(lse),
                         rows, heads, int(rows_per_tile), float(scale * double(kLog2e)),
                         data<int>(slots), data_or_null<unsigned char>(masks),
                         data_or_null<int>(counts), int(slots.size(1))};
  launch(attend_of(fp8, place),
         ::dim3(ceil_div(rows, int(rows_per_tile)) * cluster, head_blocks(heads)), kThreads,
         kSharedBytes, int(cluster), place, params);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_mla_pack, run_pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_mla_attend, run_attend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_mla_clusters, run_clusters);

}  // namespace indexcache::sparse_mla
