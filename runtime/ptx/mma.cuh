// SPDX-License-Identifier: Apache-2.0
//
// mma.sync m16n8k16: d += a b, 16-bit operands, float32 accumulator. With g = lane / 4, t = lane % 4:
//   a: {a[g][2t..], a[g+8][2t..], a[g][2t+8..], a[g+8][2t+8..]}, two columns to a register
//   b: {b[2t..][g], b[2t+8..][g]}, two rows to a register
//   d: {d[g][2t], d[g][2t+1], d[g+8][2t], d[g+8][2t+1]}
#pragma once
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx
