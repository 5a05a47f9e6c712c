// SPDX-License-Identifier: Apache-2.0
//
// stmatrix: four 8x8 blocks of 16-bit elements from the registers of a warp to shared memory. Lane l names the row
// (16 bytes) l % 8 of block l / 8; register i of lane l holds columns 2(l % 4), 2(l % 4) + 1 of row l / 4 of block i.
#pragma once
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t *block) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(block[0]), "r"(block[1]), "r"(block[2]), "r"(block[3])
               : "memory");
}

__device__ __forceinline__ void store_shared_x4(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" : : "r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ float2 load_shared_x2(uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
  return pair;
}

}  // namespace ptx
