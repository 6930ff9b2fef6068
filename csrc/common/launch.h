// Host side of a launch: streams, tensor maps, shared-memory limits.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <initializer_list>
#include <mutex>
#include <set>
#include <tuple>

#include "common/host_device.h"
#include "common/requests.h"

namespace indexcache {

using tvm::ffi::TensorView;

template <class T>
T* data(const TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
T* data_or_null(const tvm::ffi::Optional<TensorView>& tensor) {
  return tensor.has_value() ? data<T>(tensor.value()) : nullptr;
}

// Where a tensor lives: its device is current while this exists, and its stream is the caller's.
class Place {
 public:
  explicit Place(const TensorView& tensor)
      : device_(on_gpu(tensor.device())), guard_(device_.device_id) {}

  cudaStream_t stream() const {
    return static_cast<cudaStream_t>(
        TVMFFIEnvGetStream(device_.device_type, device_.device_id));
  }

  int device() const { return device_.device_id; }

  int multiprocessors() const {
    int count = 0;
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_.device_id));
    return count;
  }

 private:
  static DLDevice on_gpu(DLDevice device) {
    TVM_FFI_CHECK(device.device_type == kDLCUDA, ValueError) << "the tensors must be on a GPU";
    return device;
  }

  DLDevice device_;
  tvm::ffi::CUDADeviceGuard guard_;
};

inline Requests single_rows() { return {nullptr, 0, 1}; }

inline Requests requests_of(const tvm::ffi::Optional<TensorView>& query_starts,
                            int64_t rows_per_request) {
  const int count = query_starts.has_value() ? int(query_starts.value().size(0)) - 1 : 0;
  return {data_or_null<int>(query_starts), count, int(rows_per_request)};
}

inline BlockTable no_table() { return {nullptr, 0}; }

inline BlockTable table_of(const tvm::ffi::Optional<TensorView>& block_table) {
  if (!block_table.has_value()) return no_table();
  return {data<int>(block_table.value()), block_table.value().stride(0)};
}

// How a launch is made: blocks in clusters along x; `early`: while the launch before still runs, for
// a kernel that waits for it (ptx.cuh).
struct LaunchForm {
  LaunchForm(int cluster, bool early = false) : cluster(cluster), early(early) {}

  int cluster;
  bool early;
};

// Set an attribute of a kernel once on each device: a call costs as much as a short launch has to wait.
// A kernel gets the same value every time.
template <class... Params>
cudaError_t set_once(void (*kernel)(Params...), cudaFuncAttribute attribute, int value,
                     const Place& place) {
  static std::mutex mutex;
  static std::set<std::tuple<const void*, int, int>> known;
  const std::tuple<const void*, int, int> key = {reinterpret_cast<const void*>(kernel),
                                                 int(attribute), place.device()};
  const std::lock_guard<std::mutex> lock(mutex);
  if (known.count(key)) return cudaSuccess;
  const cudaError_t result = cudaFuncSetAttribute(kernel, attribute, value);
  if (result == cudaSuccess) known.insert(key);
  return result;
}

template <class... Params>
void allow_shared(void (*kernel)(Params...), size_t shared, const Place& place) {
  const cudaError_t granted = set_once(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(shared), place);
  TVM_FFI_CHECK(granted == cudaSuccess, RuntimeError)
      << "this GPU or driver does not give a block " << shared << " bytes of dynamic shared memory ("
      << cudaGetErrorString(granted) << "); serve with --indexcache-kernels engine";
}

inline cudaLaunchAttribute cluster_attribute(int cluster) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  return attribute;
}

// Launch `kernel` with dynamic shared memory.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), ::dim3 grid, int threads, size_t shared, LaunchForm form,
            const Place& place, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  allow_shared(kernel, shared, place);
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (form.cluster > 1) attributes[count++] = cluster_attribute(form.cluster);
  if (form.early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = ::dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = place.stream();
  config.attrs = attributes;
  config.numAttrs = count;
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...));
}

// Clusters of `size` blocks that the current device runs at once: GPCs differ in how many
// multiprocessors they have, so only the driver knows. None where it cannot say.
template <class... Params>
int active_clusters(void (*kernel)(Params...), int threads, size_t shared, int size,
                    const Place& place) {
  allow_shared(kernel, shared, place);
  cudaLaunchAttribute attribute = cluster_attribute(size);
  cudaLaunchConfig_t config = {};
  config.gridDim = ::dim3(size);
  config.blockDim = ::dim3(threads);
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // not an error of what is launched next
    return 0;
  }
  return count;
}

// Blocks of a kernel that all multiprocessors of the current device hold together.
template <class... Params>
int resident_blocks(void (*kernel)(Params...), int threads, size_t shared, const Place& place) {
  allow_shared(kernel, shared, place);
  int each = 0;
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared));
  return each * place.multiprocessors();
}

// A tensor map of bytes, innermost dimension first, with the 128-byte swizzle. Reads outside the
// tensor give zeros. `strides` are those of dimensions 1, 2, ... in bytes, multiples of 16.
inline CUtensorMap byte_tensor_map(const void* base, std::initializer_list<uint64_t> sizes,
                                   std::initializer_list<uint64_t> strides,
                                   std::initializer_list<uint32_t> box) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    TVM_FFI_CHECK(found == cudaDriverEntryPointSuccess, RuntimeError)
        << "this driver has no cuTensorMapEncodeTiled; CUDA 12 or later is needed";
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const uint32_t steps[] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, static_cast<cuuint32_t>(sizes.size()),
      const_cast<void*>(base), sizes.begin(), strides.begin(), box.begin(), steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_CHECK(result == CUDA_SUCCESS, RuntimeError)
      << "cuTensorMapEncodeTiled failed with CUresult " << static_cast<int>(result);
  return map;
}

}  // namespace indexcache
