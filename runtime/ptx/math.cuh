// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ptx {

// 2^x in one instruction, error at most 2 ulp; 2^-inf = 0. exp2f without fast-math adds a range check and two products.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx
