// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdint.h>
#include <string.h>

struct __half {
  uint16_t bits;
};
inline float __half2float(__half x) {
  _Float16 value;
  memcpy(&value, &x.bits, 2);
  return float(value);
}
inline __half __float2half_rn(float x) {
  const _Float16 value = _Float16(x);
  __half half;
  memcpy(&half.bits, &value, 2);
  return half;
}
inline __half __float2half(float x) { return __float2half_rn(x); }
