// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emulator.hpp"

namespace ptx {

inline uint32_t round_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t round_f16(float x) {
  const _Float16 value = _Float16(x);
  uint16_t bits;
  memcpy(&bits, &value, 2);
  return bits;
}
inline uint32_t pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
inline uint32_t pack_f16(float low, float high) { return round_f16(low) | round_f16(high) << 16; }
inline float unpack_bf16(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
inline float unpack_f16(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return float(value);
}

}  // namespace ptx
