// SPDX-License-Identifier: Apache-2.0
//
// Rows of float32 in shared memory, eight lanes of a warp to a row: what row and output blocks act on. Lanes take every
// eighth column (or chunk of eight columns); the caller separates steps by __syncwarp.
#pragma once
#include "element.cuh"
#include "gradient_sum.cuh"
#include "rotation.cuh"

namespace tile {

constexpr int ROW_LANES = 8;

AFC_FN int row_lane() { return static_cast<int>(threadIdx.x) % ROW_LANES; }

// Sum over the lanes of a row.
AFC_FN float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x + __shfl_xor_sync(0xffffffffu, x, 4);
}

// A row of 16-bit elements, 16-byte aligned; zeros where it is not `inside`.
template <class E, int COLUMNS>
AFC_FN void load_row(float *row, const unsigned char *from, bool inside) {
  for (int chunk = row_lane(); chunk < COLUMNS / 8; chunk += ROW_LANES) {
    const uint4 x = inside ? *reinterpret_cast<const uint4 *>(from + chunk * 16) : uint4{0, 0, 0, 0};
    float4 *to = reinterpret_cast<float4 *>(row + chunk * 8);
    to[0] = {unpack_low<E>(x.x), unpack_high<E>(x.x), unpack_low<E>(x.y), unpack_high<E>(x.y)};
    to[1] = {unpack_low<E>(x.z), unpack_high<E>(x.z), unpack_low<E>(x.w), unpack_high<E>(x.w)};
  }
}

// The same of a row whose elements are `stride` apart.
template <class E, int COLUMNS>
AFC_FN void load_strided_row(float *row, const unsigned char *from, int64_t stride, bool inside) {
  for (int c = row_lane(); c < COLUMNS; c += ROW_LANES)
    row[c] = inside ? E::unpack(reinterpret_cast<const uint16_t *>(from)[c * stride]) : 0.0f;
}

// Rounds a row to 16-bit elements, 16-byte aligned.
template <class E, int COLUMNS>
AFC_FN void store_row(unsigned char *to, const float *row) {
  for (int chunk = row_lane(); chunk < COLUMNS / 8; chunk += ROW_LANES) {
    const float4 *from = reinterpret_cast<const float4 *>(row + chunk * 8);
    const float4 low = from[0], high = from[1];
    *reinterpret_cast<uint4 *>(to + chunk * 16) = {E::pack(low.x, low.y), E::pack(low.z, low.w),
                                                   E::pack(high.x, high.y), E::pack(high.z, high.w)};
  }
}

// Row `index` of a (batch, head) of the dQ sum, of rows with SUM_COLUMNS columns, times `scale`; rows = M.
template <int COLUMNS, int SUM_COLUMNS>
AFC_FN void load_sum_row(float *row, const float *sum, int64_t batch_head, int rows, int index, float scale) {
  for (int c = row_lane(); c < COLUMNS; c += ROW_LANES) {
    const float *block = sum + block_offset<SUM_COLUMNS>(batch_head, rows, index / 16, c / 16);
    row[c] = block[block_index(index % 8 * 4 + c % 8 / 2, c / 8 % 2, index / 8 % 2 * 2 + c % 2)] * scale;
  }
}

// A contiguous row of float32, times `scale`.
template <int COLUMNS>
AFC_FN void load_float_row(float *row, const float *from, float scale) {
  for (int c = row_lane(); c < COLUMNS; c += ROW_LANES) row[c] = from[c] * scale;
}

template <int COLUMNS>
AFC_FN void clear_row(float *row) {
  for (int c = row_lane(); c < COLUMNS; c += ROW_LANES) row[c] = 0.0f;
}

template <int COLUMNS>
AFC_FN void copy_row(float *to, const float *from) {
  for (int c = row_lane(); c < COLUMNS; c += ROW_LANES) to[c] = from[c];
}

// Whether all elements of a row are 0; all lanes of the warp must call.
template <int COLUMNS>
AFC_FN bool is_zero_row(const float *row) {
  bool zero = true;
  for (int c = row_lane(); c < COLUMNS; c += ROW_LANES) zero = zero && row[c] == 0.0f;
  const uint32_t votes = __ballot_sync(0xffffffffu, zero);
  return (votes >> (lane_index() / ROW_LANES * ROW_LANES) & 0xffu) == 0xffu;
}

// Rotates a row, or its gradient back, by the coefficients of its table row.
template <class R>
AFC_FN void rotate_row(float *row, const float *table_row) {
  for (int pair = row_lane(); pair < R::PAIRS; pair += ROW_LANES) {
    float c[R::COEFFICIENTS];
    load_coefficients<R>(c, table_row, pair);
    rotate<R>(row[first_column<R>(pair)], row[second_column<R>(pair)], c);
  }
}

template <class R>
AFC_FN void rotate_row_back(float *row, const float *table_row) {
  for (int pair = row_lane(); pair < R::PAIRS; pair += ROW_LANES) {
    float c[R::COEFFICIENTS];
    load_coefficients<R>(c, table_row, pair);
    rotate_back<R>(row[first_column<R>(pair)], row[second_column<R>(pair)], c);
  }
}

// Writes 16 rows of an accumulator to the dQ sum, of rows with COLUMNS columns, in the place of what is there.
template <int COLUMNS, int OCTETS>
AFC_FN void store_blocks(float *sum, int64_t batch_head, int rows, int row_block, const float (&acc)[OCTETS][4]) {
  float *block = sum + block_offset<COLUMNS>(batch_head, rows, row_block, 0);
#pragma unroll
  for (int c = 0; c < OCTETS; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      block[c / 2 * BLOCK_FLOATS + block_index(static_cast<int>(lane_index()), c % 2, e)] = acc[c][e];
}

// Writes an accumulator to contiguous float32 rows in global memory, those below `valid_rows`; blocks as in
// round_to_tile.
template <int COLUMNS, int ROW_BLOCKS, int OCTETS>
AFC_FN void store_float_rows(float *rows_data, const float (&acc)[ROW_BLOCKS][OCTETS][4], int first_row, int first_block,
                             int step, int valid_rows) {
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + r * 16 + half * 8 + fragment_row();
      if (row >= valid_rows) continue;
#pragma unroll
      for (int c = 0; c < OCTETS; ++c) {
        if ((first_block + c / 2 * step) * 16 >= COLUMNS) break;
        const int column = (first_block + c / 2 * step) * 16 + c % 2 * 8 + fragment_column();
        *reinterpret_cast<float2 *>(rows_data + static_cast<int64_t>(row) * COLUMNS + column) = {acc[r][c][2 * half],
                                                                                                 acc[r][c][2 * half + 1]};
      }
    }
}

}  // namespace tile
