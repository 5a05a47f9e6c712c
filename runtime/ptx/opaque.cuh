// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdint.h>

namespace ptx {

// Zero for a number that is never negative, computed in a way that the compiler does not see through.
__device__ __forceinline__ uint32_t opaque_zero(int number) {
  uint32_t zero;
  asm("shr.u32 %0, %1, 31;" : "=r"(zero) : "r"(number));
  return zero;
}

}  // namespace ptx
