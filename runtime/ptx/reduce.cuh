// SPDX-License-Identifier: Apache-2.0
//
// red: add to global memory without a result. The vector form exists from sm_90 on.
#pragma once

namespace ptx {

__device__ __forceinline__ void red_add(float *address, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" : : "l"(address), "f"(value) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void red_add_x4(float *address, const float (&value)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
}
#endif

}  // namespace ptx
