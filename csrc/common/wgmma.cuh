// WGMMA: D[64, N] (+)= A[64, K] x B[K, N], both operands in shared memory, one K step of 32 bytes.
//
// Protocol (PTX ISA, "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group"):
//   wgmma_fence(d); <steps>; wgmma_commit(); ... ; wgmma_wait(d); then the accumulators may be read.
// The fence and the wait name the accumulators: an asm statement orders only what it names, and the
// compiler could move arithmetic on other registers across it.
#pragma once

#include <cstdint>

namespace indexcache {

// No instruction; what was done to these registers before is done, and nothing later has begun.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i]));
}

// Before steps that start from zero: there is nothing in the accumulators yet.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Before steps that add to what ordinary instructions wrote.
template <int kCount>
__device__ __forceinline__ void wgmma_fence(float (&d)[kCount]) {
  pin(d);
  wgmma_fence();
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kCount>
__device__ __forceinline__ void wgmma_wait(float (&d)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin(d);
}

// Operand lists of 8 to 128 accumulators.
#define IC_ACC8(d, i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define IC_ACC16(d, i) IC_ACC8(d, i), IC_ACC8(d, i + 8)
#define IC_ACC32(d, i) IC_ACC16(d, i), IC_ACC16(d, i + 16)
#define IC_ACC64(d, i) IC_ACC32(d, i), IC_ACC32(d, i + 32)
#define IC_ACC128(d, i) IC_ACC64(d, i), IC_ACC64(d, i + 64)

// e4m3 x e4m3, both K-major. `add` is 0 to start from zero.
template <int kN>
struct Fp8Wgmma;

template <>
struct Fp8Wgmma<32> {
  static __device__ __forceinline__ void step(float (&d)[16], uint64_t a, uint64_t b, int add) {
    asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1;\n}\n"
      : IC_ACC16(d, 0)
      : "l"(a), "l"(b), "r"(add));
  }
};

template <>
struct Fp8Wgmma<64> {
  static __device__ __forceinline__ void step(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1;\n}\n"
      : IC_ACC32(d, 0)
      : "l"(a), "l"(b), "r"(add));
  }
};

template <>
struct Fp8Wgmma<128> {
  static __device__ __forceinline__ void step(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1;\n}\n"
      : IC_ACC64(d, 0)
      : "l"(a), "l"(b), "r"(add));
  }
};

template <>
struct Fp8Wgmma<256> {
  static __device__ __forceinline__ void step(float (&d)[128], uint64_t a, uint64_t b, int add) {
    asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1;\n}\n"
      : IC_ACC128(d, 0)
      : "l"(a), "l"(b), "r"(add));
  }
};

// bfloat16 x bfloat16; A is K-major, B is K-major or (kTransposeB) N-major.
template <int kN, bool kTransposeB>
struct Bf16Wgmma;

template <bool kTransposeB>
struct Bf16Wgmma<64, kTransposeB> {
  static __device__ __forceinline__ void step(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, %35;\n}\n"
      : IC_ACC32(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(int(kTransposeB)));
  }
};

template <bool kTransposeB>
struct Bf16Wgmma<256, kTransposeB> {
  static __device__ __forceinline__ void step(float (&d)[128], uint64_t a, uint64_t b, int add) {
    asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, 0, %131;\n}\n"
      : IC_ACC128(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(int(kTransposeB)));
  }
};

#undef IC_ACC8
#undef IC_ACC16
#undef IC_ACC32
#undef IC_ACC64
#undef IC_ACC128

}  // namespace indexcache
