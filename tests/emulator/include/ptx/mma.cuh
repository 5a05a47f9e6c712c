// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emulator.hpp"
#include "ptx/convert.cuh"

namespace ptx {

struct MatrixProduct {
  float *d;
  const uint32_t *a;
  uint32_t b[2];
};

template <float (*UNPACK)(uint16_t)>
inline void multiply_matrices(void **lanes, uint32_t) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto *own = static_cast<const MatrixProduct *>(lanes[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 8 + half] = UNPACK(uint16_t(own->a[i] >> (16 * half)));
      for (int i = 0; i < 2; ++i) b[t + i * 8 + half][g] = UNPACK(uint16_t(own->b[i] >> (16 * half)));
    }
  }
  for (int row = 0; row < 16; ++row) {
    float sum[8] = {};
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) sum[column] += a[row][k] * b[k][column];
    for (int column = 0; column < 8; ++column)
      static_cast<MatrixProduct *>(lanes[row % 8 * 4 + column / 2])->d[row / 8 * 2 + column % 2] += sum[column];
  }
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MatrixProduct mine{d, a, {b0, b1}};
  emulator::meet(0xffffffffu, multiply_matrices<unpack_bf16>, &mine);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MatrixProduct mine{d, a, {b0, b1}};
  emulator::meet(0xffffffffu, multiply_matrices<unpack_f16>, &mine);
}

}  // namespace ptx
