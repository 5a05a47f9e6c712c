// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "emulator.hpp"

namespace ptx {

struct MatrixLoad {
  uint32_t *block;
  uint32_t address;
};

inline uint32_t shared_address(const void *pointer) { return emulator::shared_offset(pointer); }

template <bool TRANSPOSED>
inline void load_matrices(void **lanes, uint32_t) {
  uint16_t rows[32][8];
  for (int lane = 0; lane < 32; ++lane)
    memcpy(rows[lane], emulator::shared_pointer(static_cast<MatrixLoad *>(lanes[lane])->address, 16), 16);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4, column = lane % 4 * 2;
      const uint16_t low = TRANSPOSED ? rows[i * 8 + column][row] : rows[i * 8 + row][column];
      const uint16_t high = TRANSPOSED ? rows[i * 8 + column + 1][row] : rows[i * 8 + row][column + 1];
      static_cast<MatrixLoad *>(lanes[lane])->block[i] = low | uint32_t(high) << 16;
    }
}
inline void ldmatrix_x4(uint32_t (&block)[4], uint32_t address) {
  MatrixLoad mine{block, address};
  emulator::meet(0xffffffffu, load_matrices<false>, &mine);
}
inline void ldmatrix_x4_trans(uint32_t (&block)[4], uint32_t address) {
  MatrixLoad mine{block, address};
  emulator::meet(0xffffffffu, load_matrices<true>, &mine);
}

}  // namespace ptx
