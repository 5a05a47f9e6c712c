// SPDX-License-Identifier: Apache-2.0
//
// wgmma m64nNk16: d (64 x N, float32, registers of 128 threads) += a b. In warp w of the warpgroup, lane l holds rows
// 16w + l / 4 and + 8, columns 8j + 2(l % 4) + {0, 1} for j = 0 .. N/8 - 1:
//   d[4j + 0, 1] = row l / 4, d[4j + 2, 3] = row l / 4 + 8
// a comes from shared memory (ss) or registers (rs), b from shared memory, named by 64-bit descriptors. TRANSPOSE_A/B
// says that the operand lies in memory with its 64 (N) direction contiguous rather than k. `accumulate` = 0 ignores
// what d held; pass a constant. All operands stay untouched until wgmma_wait.
#pragma once
#include <stdint.h>

namespace ptx {

// Before the first wgmma that reads registers written by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Waits until at most PENDING groups of the warpgroup are under way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
}

// No instruction: the compiler may not move reads or writes of these registers across. Stands before wgmma_fence, after
// wgmma_commit and after wgmma_wait, for accumulators and for operands in registers.
template <int COUNT>
__device__ __forceinline__ void wgmma_hold(float (&registers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("" : "+f"(registers[i]) : : "memory");
  }
}

template <int COUNT>
__device__ __forceinline__ void wgmma_hold(uint32_t (&registers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("" : "+r"(registers[i]) : : "memory");
  }
}

template <int N>
struct Wgmma;

#define AFC_LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define AFC_LIST_16 AFC_LIST_8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define AFC_LIST_24 AFC_LIST_16 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define AFC_LIST_32 AFC_LIST_24 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define AFC_LIST_40 AFC_LIST_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define AFC_LIST_48 AFC_LIST_40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define AFC_LIST_56 AFC_LIST_48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define AFC_LIST_64 AFC_LIST_56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define AFC_LIST_72 AFC_LIST_64 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define AFC_LIST_80 AFC_LIST_72 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define AFC_LIST_88 AFC_LIST_80 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define AFC_LIST_96 AFC_LIST_88 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define AFC_LIST_104 AFC_LIST_96 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define AFC_LIST_112 AFC_LIST_104 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define AFC_LIST_120 AFC_LIST_112 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define AFC_LIST_128 AFC_LIST_120 ", " "%120, %121, %122, %123, %124, %125, %126, %127"

#define AFC_BOUND(i) "+f"(d[i])
#define AFC_BOUND_4(i) AFC_BOUND(i), AFC_BOUND(i + 1), AFC_BOUND(i + 2), AFC_BOUND(i + 3)
#define AFC_BOUND_8 AFC_BOUND_4(0), AFC_BOUND_4(4)
#define AFC_BOUND_16 AFC_BOUND_8, AFC_BOUND_4(8), AFC_BOUND_4(12)
#define AFC_BOUND_24 AFC_BOUND_16, AFC_BOUND_4(16), AFC_BOUND_4(20)
#define AFC_BOUND_32 AFC_BOUND_24, AFC_BOUND_4(24), AFC_BOUND_4(28)
#define AFC_BOUND_40 AFC_BOUND_32, AFC_BOUND_4(32), AFC_BOUND_4(36)
#define AFC_BOUND_48 AFC_BOUND_40, AFC_BOUND_4(40), AFC_BOUND_4(44)
#define AFC_BOUND_56 AFC_BOUND_48, AFC_BOUND_4(48), AFC_BOUND_4(52)
#define AFC_BOUND_64 AFC_BOUND_56, AFC_BOUND_4(56), AFC_BOUND_4(60)
#define AFC_BOUND_72 AFC_BOUND_64, AFC_BOUND_4(64), AFC_BOUND_4(68)
#define AFC_BOUND_80 AFC_BOUND_72, AFC_BOUND_4(72), AFC_BOUND_4(76)
#define AFC_BOUND_88 AFC_BOUND_80, AFC_BOUND_4(80), AFC_BOUND_4(84)
#define AFC_BOUND_96 AFC_BOUND_88, AFC_BOUND_4(88), AFC_BOUND_4(92)
#define AFC_BOUND_104 AFC_BOUND_96, AFC_BOUND_4(96), AFC_BOUND_4(100)
#define AFC_BOUND_112 AFC_BOUND_104, AFC_BOUND_4(104), AFC_BOUND_4(108)
#define AFC_BOUND_120 AFC_BOUND_112, AFC_BOUND_4(112), AFC_BOUND_4(116)
#define AFC_BOUND_128 AFC_BOUND_120, AFC_BOUND_4(120), AFC_BOUND_4(124)

// The operands after the accumulators are numbered from N / 2 on: P0 to P6.
#define AFC_WGMMA_SS(NAME, TYPE, N, COUNT, P0, P1, P2, P3, P4)                                                         \
  template <int TRANSPOSE_A, int TRANSPOSE_B>                                                                          \
  static __device__ __forceinline__ void NAME(float (&d)[COUNT], uint64_t a, uint64_t b, int accumulate) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" AFC_LIST_##COUNT "}, %" #P0      \
                 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}"                                                         \
                 : AFC_BOUND_##COUNT                                                                                   \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));                               \
  }

#define AFC_WGMMA_RS(NAME, TYPE, N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                 \
  template <int TRANSPOSE_B>                                                                                           \
  static __device__ __forceinline__ void NAME(float (&d)[COUNT], const uint32_t *a, uint64_t b, int accumulate) {      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" AFC_LIST_##COUNT "}, {%" #P0     \
                 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}"                                    \
                 : AFC_BOUND_##COUNT                                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B));             \
  }

#define AFC_WGMMA(N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                                \
  template <>                                                                                                          \
  struct Wgmma<N> {                                                                                                    \
    AFC_WGMMA_SS(ss_bf16, "bf16", N, COUNT, P0, P1, P2, P3, P4)                                                        \
    AFC_WGMMA_SS(ss_f16, "f16", N, COUNT, P0, P1, P2, P3, P4)                                                          \
    AFC_WGMMA_RS(rs_bf16, "bf16", N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                \
    AFC_WGMMA_RS(rs_f16, "f16", N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                  \
  };

AFC_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
AFC_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
AFC_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
AFC_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
AFC_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
AFC_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
AFC_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
AFC_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
AFC_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
AFC_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
AFC_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
AFC_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
AFC_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110)
AFC_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
AFC_WGMMA(240, 120, 120, 121, 122, 123, 124, 125, 126)
AFC_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef AFC_LIST_8
#undef AFC_LIST_16
#undef AFC_LIST_24
#undef AFC_LIST_32
#undef AFC_LIST_40
#undef AFC_LIST_48
#undef AFC_LIST_56
#undef AFC_LIST_64
#undef AFC_LIST_72
#undef AFC_LIST_80
#undef AFC_LIST_88
#undef AFC_LIST_96
#undef AFC_LIST_104
#undef AFC_LIST_112
#undef AFC_LIST_120
#undef AFC_LIST_128
#undef AFC_BOUND_8
#undef AFC_BOUND_16
#undef AFC_BOUND_24
#undef AFC_BOUND_32
#undef AFC_BOUND_40
#undef AFC_BOUND_48
#undef AFC_BOUND_56
#undef AFC_BOUND_64
#undef AFC_BOUND_72
#undef AFC_BOUND_80
#undef AFC_BOUND_88
#undef AFC_BOUND_96
#undef AFC_BOUND_104
#undef AFC_BOUND_112
#undef AFC_BOUND_120
#undef AFC_BOUND_128
#undef AFC_BOUND_4
#undef AFC_BOUND
#undef AFC_WGMMA_SS
#undef AFC_WGMMA_RS
#undef AFC_WGMMA

}  // namespace ptx
