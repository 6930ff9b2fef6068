// Code that runs on the device and, in the tests, on the host.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define IC_HD __host__ __device__ __forceinline__
#else
#define IC_HD inline
#endif

namespace indexcache {

IC_HD constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <class T>
IC_HD constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}

template <class T>
IC_HD constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

IC_HD int popcount(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// Its number, 0 to 31; there must be one.
IC_HD int highest_bit(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return 31 - __clz(bits);
#else
  return 31 - __builtin_clz(bits);
#endif
}

}  // namespace indexcache
