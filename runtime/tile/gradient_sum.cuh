// SPDX-License-Identifier: Apache-2.0
//
// The float32 sum of dQ in global memory. It is kept in the order of accumulator fragments, so that every addition of a
// warp covers contiguous memory:  [B][Hq][ceil(M / 16)][D / 16][one 16x16 block: 256 floats].
// Within a block the eight numbers of a lane (octet, element) are either 32 floats apart or, where the vector form of
// red exists, four and four adjacent.
#pragma once
#include "device.cuh"
#include "ptx/reduce.cuh"

namespace tile {

constexpr int BLOCK_FLOATS = 256;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
AFC_FN int block_index(int lane, int octet, int element) { return octet * 128 + lane * 4 + element; }
#else
AFC_FN int block_index(int lane, int octet, int element) { return (octet * 4 + element) * 32 + lane; }
#endif

// First float of a block of 16 rows and 16 columns; rows = M.
template <int COLUMNS>
AFC_FN int64_t block_offset(int64_t batch_head, int rows, int row_block, int column_block) {
  const int row_blocks = ceil_div(rows, 16);
  return ((batch_head * row_blocks + row_block) * (COLUMNS / 16) + column_block) * BLOCK_FLOATS;
}

AFC_FN void add_octet(float *block, int octet, const float (&value)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::red_add_x4(block + block_index(lane_index(), octet, 0), value);
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) ptx::red_add(block + block_index(lane_index(), octet, e), value[e]);
#endif
}

// Row and column of a block's float `index`: the inverse of block_index.
struct BlockPosition {
  int row, column;
};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
AFC_FN BlockPosition block_position(int index) {
  const int octet = index / 128, lane = index / 4 % 32, element = index % 4;
#else
AFC_FN BlockPosition block_position(int index) {
  const int octet = index / 128, lane = index % 32, element = index / 32 % 4;
#endif
  return {element / 2 * 8 + lane / 4, octet * 8 + lane % 4 * 2 + element % 2};
}

}  // namespace tile
