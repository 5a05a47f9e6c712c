// SPDX-License-Identifier: Apache-2.0
//
// The scores of one warp's 16 rows once more, by mma.sync from the tiles that wgmma reads: for the rare step whose
// scores are needed after they were overwritten, where the four warps of a warpgroup may not agree.
#pragma once
#include <stdint.h>

#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "tile/sm90/descriptor.cuh"

namespace tile {

// query: address of the warp's first row in panel 0 of a tile of QUERY_ROWS; key: address of a tile of KEY_ROWS.
template <int QUERY_ROWS, int KEY_ROWS, int HEAD_DIM>
__device__ __forceinline__ void warp_scores(float (&score)[KEY_ROWS / 2], uint32_t query, uint32_t key) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < KEY_ROWS / 8; ++j) {
    float block[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    // A loop that stays one: what it costs in time does not matter, what it costs in registers does.
#pragma unroll 1
    for (int k = 0; k < HEAD_DIM / 32; ++k) {
      const uint32_t query_panel = query + k / 2 * Panels<QUERY_ROWS, HEAD_DIM>::PANEL_BYTES;
      const uint32_t key_panel = key + k / 2 * Panels<KEY_ROWS, HEAD_DIM>::PANEL_BYTES + 8 * j * PANEL_ROW_BYTES;
      const int chunk = k % 2 * 4;
      uint32_t a[4], b[4];
      ptx::ldmatrix_x4(b, key_panel + swizzled(lane % 8, chunk + lane / 8));
      ptx::ldmatrix_x4(a, query_panel + swizzled(lane % 16, chunk + lane / 16));
      ptx::mma_m16n8k16_bf16(block, a, b[0], b[1]);
      ptx::ldmatrix_x4(a, query_panel + swizzled(lane % 16, chunk + 2 + lane / 16));
      ptx::mma_m16n8k16_bf16(block, a, b[2], b[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      score[4 * j + e] = block[e];
    }
  }
}

// Adds the product of 16 more columns, in narrow tiles. query: address of the warp's first row.
template <int KEY_ROWS>
__device__ __forceinline__ void add_narrow_scores(float (&score)[KEY_ROWS / 2], uint32_t query, uint32_t key) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint32_t a[4];
  ptx::ldmatrix_x4(a, query + narrow_swizzled(lane % 16, lane / 16));
#pragma unroll
  for (int j = 0; j < KEY_ROWS / 16; ++j) {
    uint32_t b[4];
    ptx::ldmatrix_x4(b, key + narrow_swizzled(16 * j + lane / 16 * 8 + lane % 8, lane / 8 % 2));
    ptx::mma_m16n8k16_bf16(*reinterpret_cast<float(*)[4]>(&score[8 * j]), a, b[0], b[1]);
    ptx::mma_m16n8k16_bf16(*reinterpret_cast<float(*)[4]>(&score[8 * j + 4]), a, b[2], b[3]);
  }
}

}  // namespace tile
