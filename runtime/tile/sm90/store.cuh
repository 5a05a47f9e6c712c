// SPDX-License-Identifier: Apache-2.0
//
// Accumulators to global memory in 16-byte pieces: the four lanes that share a row exchange packed pairs, so that each
// ends up with eight neighbouring columns. No shared memory is touched: the loads of the next work item need not wait.
#pragma once
#include <stdint.h>

#include "ptx/convert.cuh"

namespace tile {

// Lane q of a quad gives pair[i] = its columns of block i and gets block q: pair[i] = the columns of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&pair)[4], int q) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (q & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) == 0) {
        const uint32_t mine = upper ? pair[i] : pair[i + distance];
        const uint32_t theirs = __shfl_xor_sync(0xffffffffu, mine, distance);
        pair[i] = upper ? theirs : pair[i];
        pair[i + distance] = upper ? pair[i + distance] : theirs;
      }
    }
  }
}

// One row of a thread's accumulators (half 0: row lane / 4, 1: 8 below) times `factor`, to `row` if it is valid.
template <int COUNT>
__device__ __forceinline__ void store_row(uint16_t *row, bool valid, const float (&value)[COUNT], int half,
                                          float factor) {
  const int q = static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int t = 0; t < COUNT / 16; ++t) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int element = 16 * t + 4 * i + 2 * half;
      pair[i] = ptx::pack_bf16(value[element] * factor, value[element + 1] * factor);
    }
    transpose_quad(pair, q);
    if (valid) {
      *reinterpret_cast<uint4 *>(row + 32 * t + 8 * q) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
  }
}

}  // namespace tile
