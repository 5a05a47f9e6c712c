// SPDX-License-Identifier: Apache-2.0
//
// The two storage types: how pairs are packed, and which mma multiplies them.
#pragma once
#include "ptx/convert.cuh"
#include "device.cuh"
#include "ptx/mma.cuh"

namespace tile {

struct Bf16 {
  static constexpr uint32_t EXPONENT = 0x7f80, ONE = 0x3f80;  // bits of the exponent, and the number 1
  AFC_FN static uint32_t pack(float low, float high) { return ptx::pack_bf16(low, high); }
  AFC_FN static float unpack(uint16_t bits) { return ptx::unpack_bf16(bits); }
  AFC_FN static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  }
};

struct F16 {
  static constexpr uint32_t EXPONENT = 0x7c00, ONE = 0x3c00;
  AFC_FN static uint32_t pack(float low, float high) { return ptx::pack_f16(low, high); }
  AFC_FN static float unpack(uint16_t bits) { return ptx::unpack_f16(bits); }
  AFC_FN static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
};

template <class E>
AFC_FN float unpack_low(uint32_t pair) {
  return E::unpack(static_cast<uint16_t>(pair));
}

template <class E>
AFC_FN float unpack_high(uint32_t pair) {
  return E::unpack(static_cast<uint16_t>(pair >> 16));
}

// The halves of a pair that are infinite or NaN, as 0x8000 in each: adding the lowest bit of the exponent carries into the
// sign only where the exponent is all ones.
template <class E>
AFC_FN uint32_t infinite_halves(uint32_t pair) {
  constexpr uint32_t exponents = E::EXPONENT * 0x10001u, lowest = (E::EXPONENT & ~(E::EXPONENT << 1)) * 0x10001u;
  return ((pair & exponents) + lowest) & 0x80008000u;
}

}  // namespace tile
