// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdint.h>

#include "ptx/convert.cuh"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return ptx::unpack_bf16(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {uint16_t(ptx::pack_bf16(x, 0.0f))}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
