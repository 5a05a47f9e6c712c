// SPDX-License-Identifier: Apache-2.0
//
// ldmatrix: four 8x8 blocks of 16-bit elements from shared memory to the registers of a warp. Lane l names the row
// (16 bytes) l % 8 of block l / 8; afterwards register i of lane l holds columns 2(l % 4), 2(l % 4) + 1 of row l / 4
// of block i (.trans: of the transposed block).
#pragma once
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&block)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(block[0]), "=r"(block[1]), "=r"(block[2]), "=r"(block[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&block)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(block[0]), "=r"(block[1]), "=r"(block[2]), "=r"(block[3])
               : "r"(address)
               : "memory");
}

}  // namespace ptx
