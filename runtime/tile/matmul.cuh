// SPDX-License-Identifier: Apache-2.0
//
// Matrix products of one warp. Accumulators are acc[row block of 16][column octet][4], see mma.cuh.
#pragma once
#include "element.cuh"
#include "shared_tile.cuh"

namespace tile {

template <int ROW_BLOCKS, int OCTETS>
AFC_FN void clear(float (&acc)[ROW_BLOCKS][OCTETS][4]) {
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int c = 0; c < OCTETS; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[r][c][e] = 0.0f;
}

// acc += a b for one depth of 16, where `b` holds the two column octets of one 16x16 block.
template <class E, int ROW_BLOCKS, int OCTETS>
AFC_FN void multiply_block(float (&acc)[ROW_BLOCKS][OCTETS][4], const uint32_t (&a)[ROW_BLOCKS][4],
                           const uint32_t (&b)[4], int column_block) {
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r) {
    E::mma(acc[r][2 * column_block], a[r], b[0], b[1]);
    E::mma(acc[r][2 * column_block + 1], a[r], b[2], b[3]);
  }
}

// acc (16 ROW_BLOCKS x 8 OCTETS) += A B^T for the depth block `k`, the columns 16 k .. 16 k + 15 of both tiles.
// A: column-major blocks, B: row-major blocks.
template <class E, class TileA, class TileB, int ROW_BLOCKS, int OCTETS>
AFC_FN void multiply_rows_step(float (&acc)[ROW_BLOCKS][OCTETS][4], const Blocks<TileA> &a_blocks, uint32_t a_base,
                               const Blocks<TileB> &b_blocks, uint32_t b_base, int k) {
  uint32_t a[ROW_BLOCKS][4];
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r) ptx::ldmatrix_x4(a[r], a_blocks.address(a_base, r, k));
#pragma unroll
  for (int c = 0; c < OCTETS / 2; ++c) {
    uint32_t b[4];
    ptx::ldmatrix_x4(b, b_blocks.address(b_base, c, k));
    multiply_block<E>(acc, a, b, c);
  }
}

// The same with A in registers: a[depth block][row block].
template <class E, class TileB, int DEPTH_BLOCKS, int ROW_BLOCKS, int OCTETS>
AFC_FN void multiply_rows_step(float (&acc)[ROW_BLOCKS][OCTETS][4], const uint32_t (&a)[DEPTH_BLOCKS][ROW_BLOCKS][4],
                               const Blocks<TileB> &b_blocks, uint32_t b_base, int k) {
#pragma unroll
  for (int c = 0; c < OCTETS / 2; ++c) {
    uint32_t b[4];
    ptx::ldmatrix_x4(b, b_blocks.address(b_base, c, k));
    multiply_block<E>(acc, a[k], b, c);
  }
}

// All depth blocks.
template <class E, class TileA, class TileB, int ROW_BLOCKS, int OCTETS>
AFC_FN void multiply_rows(float (&acc)[ROW_BLOCKS][OCTETS][4], const Blocks<TileA> &a_blocks, uint32_t a_base,
                          const Blocks<TileB> &b_blocks, uint32_t b_base) {
#pragma unroll
  for (int k = 0; k < TileA::COLUMNS / 16; ++k) multiply_rows_step<E>(acc, a_blocks, a_base, b_blocks, b_base, k);
}

template <class E, class TileB, int DEPTH_BLOCKS, int ROW_BLOCKS, int OCTETS>
AFC_FN void multiply_rows(float (&acc)[ROW_BLOCKS][OCTETS][4], const uint32_t (&a)[DEPTH_BLOCKS][ROW_BLOCKS][4],
                          const Blocks<TileB> &b_blocks, uint32_t b_base) {
#pragma unroll
  for (int k = 0; k < DEPTH_BLOCKS; ++k) multiply_rows_step<E>(acc, a, b_blocks, b_base, k);
}

// acc += A B; depth = rows of B's tile, from the rows that b_blocks starts at. A in registers; B: column-major blocks,
// transposed on load.
template <class E, class TileB, int DEPTH_BLOCKS, int ROW_BLOCKS, int OCTETS>
AFC_FN void multiply_columns(float (&acc)[ROW_BLOCKS][OCTETS][4], const uint32_t (&a)[DEPTH_BLOCKS][ROW_BLOCKS][4],
                             const Blocks<TileB> &b_blocks, uint32_t b_base) {
#pragma unroll
  for (int k = 0; k < DEPTH_BLOCKS; ++k)
#pragma unroll
    for (int c = 0; c < OCTETS / 2; ++c) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_blocks.address(b_base, k, c));
      multiply_block<E>(acc, a[k], b, c);
    }
}

// Operand B with zeros in the place of infinities and NaN.
template <class E>
AFC_FN void drop_infinite(uint32_t (&b)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] &= ~((infinite_halves<E>(b[i]) >> 15) * 0xffffu);
}

// The same for a row of a tile in shared memory; returns whether it held one.
template <class E, class Tile> AFC_FN bool drop_infinite_row(unsigned char *tile, int row) {
  uint32_t found = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < Tile::CHUNKS; ++chunk) {
    uint4 &values = *reinterpret_cast<uint4 *>(tile + Tile::chunk_offset(row, chunk));
    uint32_t b[4] = {values.x, values.y, values.z, values.w};
    for (int i = 0; i < 4; ++i) found |= infinite_halves<E>(b[i]);
    drop_infinite<E>(b);
    values = {b[0], b[1], b[2], b[3]};
  }
  return found != 0;
}

// The same for all rows, between barriers. All threads call; rarely needed.
template <class E, class Tile, int THREADS> AFC_FN void drop_infinite_rows(unsigned char *tile) {
  __syncthreads();
#pragma unroll 1
  for (int row = threadIdx.x; row < Tile::ROWS; row += THREADS) drop_infinite_row<E, Tile>(tile, row);
  __syncthreads();
}

// For products P^T dO and dS^T Q with P^T and dS^T [key][query] in shared memory: infinities and NaN of Q and dO become 0, and an element of P that is not 0 becomes NaN where its row of dO holds one. All threads call; rarely needed.
template <class E, class TileP, class TileQ, class TileDO, int THREADS>
AFC_FN void hide_infinite(unsigned char *p, unsigned char *q, unsigned char *d_o) {
#pragma unroll 1
  for (int m = threadIdx.x; m < TileP::COLUMNS; m += THREADS) {
    drop_infinite_row<E, TileQ>(q, m);
    if (!drop_infinite_row<E, TileDO>(d_o, m)) continue;
#pragma unroll 1
    for (int n = 0; n < TileP::ROWS; ++n) {
      uint16_t &weight = *reinterpret_cast<uint16_t *>(p + TileP::offset(n, m));
      if (weight & 0x7fff) weight = 0x7fff;
    }
  }
}

// Operand A of a product with rows of a tile: an element that is not 0 becomes NaN where its row of the tile holds an
// infinity or NaN. Ones times their places, in row-major blocks, count them for all rows of A at once.
template <class E, class TileB, int DEPTH_BLOCKS, int ROW_BLOCKS>
AFC_FN void mark_infinite(uint32_t (&a)[DEPTH_BLOCKS][ROW_BLOCKS][4], const Blocks<TileB> &b_rows_blocks,
                          uint32_t b_base) {
  constexpr uint32_t ONES = E::ONE * 0x10001u;
  const uint32_t ones[1][4] = {{ONES, ONES, ONES, ONES}};
#pragma unroll
  for (int k = 0; k < DEPTH_BLOCKS; ++k) {
    float found[1][2][4];
    clear(found);
#pragma unroll 1
    for (int c = 0; c < TileB::COLUMNS / 16; ++c) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, b_rows_blocks.address(b_base, k, c));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = (infinite_halves<E>(b[i]) >> 15) * E::ONE;
      multiply_block<E>(found, ones, b, 0);
    }
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low = found[0][i / 2][0] != 0.0f ? 0x7fffu : 0, high = found[0][i / 2][1] != 0.0f ? 0x7fff0000u : 0;
        const uint32_t not_zero = ((a[k][r][i] & 0x7fff7fffu) + 0x7fff7fffu) >> 15 & 0x10001u;
        a[k][r][i] |= (low | high) & not_zero * 0xffffu;
      }
  }
}

template <class TileA, int DEPTH_BLOCKS, int ROW_BLOCKS>
AFC_FN void load_operand(uint32_t (&a)[DEPTH_BLOCKS][ROW_BLOCKS][4], const Blocks<TileA> &blocks, uint32_t base) {
#pragma unroll
  for (int k = 0; k < DEPTH_BLOCKS; ++k)
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) ptx::ldmatrix_x4(a[k][r], blocks.address(base, r, k));
}

// Rounds an accumulator to the storage type, as operand A of the next product: two column octets are one depth block.
template <class E, int DEPTH_BLOCKS, int ROW_BLOCKS>
AFC_FN void round_to_operand(uint32_t (&a)[DEPTH_BLOCKS][ROW_BLOCKS][4],
                             const float (&acc)[ROW_BLOCKS][2 * DEPTH_BLOCKS][4]) {
#pragma unroll
  for (int k = 0; k < DEPTH_BLOCKS; ++k)
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
      a[k][r][0] = E::pack(acc[r][2 * k][0], acc[r][2 * k][1]);
      a[k][r][1] = E::pack(acc[r][2 * k][2], acc[r][2 * k][3]);
      a[k][r][2] = E::pack(acc[r][2 * k + 1][0], acc[r][2 * k + 1][1]);
      a[k][r][3] = E::pack(acc[r][2 * k + 1][2], acc[r][2 * k + 1][3]);
    }
}

// Writes operand A to a tile: depth block k becomes column block first_block + k, as in Blocks::from_column_block.
template <class Tile, int DEPTH_BLOCKS, int ROW_BLOCKS>
AFC_FN void store_operand(unsigned char *tile, const uint32_t (&a)[DEPTH_BLOCKS][ROW_BLOCKS][4], int first_row,
                          int first_block) {
  const Blocks<Tile> blocks = blocks_at<Tile>(first_row + fragment_row(), 0).from_column_block(first_block);
#pragma unroll
  for (int k = 0; k < DEPTH_BLOCKS; ++k)
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t left = blocks.address(0, r, k) + (i % 2 * 8 * Tile::ROW_BYTES + fragment_column() * 2);
        *reinterpret_cast<uint32_t *>(tile + (i < 2 ? left : left ^ 16)) = a[k][r][i];
      }
}

// acc += A B with A read by columns from a tile of [depth][rows], B by columns from a tile of [depth][columns]. The rows
// are A's column blocks 0, 1, ...; of B's, 0, STEP, 2 STEP, ... are used, `column_blocks` of them. FINITE: all of B is;
// else infinities and NaN count as 0, in little code, as it rarely runs.
template <class E, int STEP, bool FINITE = true, class TileA, class TileB, int ROW_BLOCKS, int OCTETS>
AFC_FN void multiply_transposed(float (&acc)[ROW_BLOCKS][OCTETS][4], const Blocks<TileA> &a_blocks, uint32_t a_base,
                                const Blocks<TileB> &b_blocks, uint32_t b_base, int column_blocks) {
#pragma unroll (FINITE ? TileA::ROWS / 16 : 1)
  for (int k = 0; k < TileA::ROWS / 16; ++k) {
    uint32_t a[ROW_BLOCKS][4];
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) ptx::ldmatrix_x4_trans(a[r], a_blocks.address(a_base, k, r));
#pragma unroll
    for (int c = 0; c < OCTETS / 2; ++c) {
      if (c >= column_blocks) break;
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_blocks.address(b_base, k, c * STEP));
      if (!FINITE) drop_infinite<E>(b);
      multiply_block<E>(acc, a, b, c);
    }
  }
}

// Of the 16-column blocks 0, 1, ... of a row that warps take in turn, how many are this warp's.
template <int COLUMNS, int WARPS>
AFC_FN int column_blocks_of_warp(int warp) {
  constexpr int BLOCKS = COLUMNS / 16;
  return BLOCKS % WARPS == 0 ? BLOCKS / WARPS : (BLOCKS - warp + WARPS - 1) / WARPS;
}

// acc += A B with both in shared memory; A read by rows from a tile of [rows][depth], B by columns from a tile of
// [depth][columns], of whose column blocks 0, STEP, 2 STEP, ... `column_blocks` are used.
template <class E, int STEP, class TileA, class TileB, int ROW_BLOCKS, int OCTETS>
AFC_FN void multiply_tiles(float (&acc)[ROW_BLOCKS][OCTETS][4], const Blocks<TileA> &a_blocks, uint32_t a_base,
                           const Blocks<TileB> &b_blocks, uint32_t b_base, int column_blocks) {
#pragma unroll
  for (int k = 0; k < TileA::COLUMNS / 16; ++k) {
    uint32_t a[ROW_BLOCKS][4];
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) ptx::ldmatrix_x4(a[r], a_blocks.address(a_base, r, k));
#pragma unroll
    for (int c = 0; c < OCTETS / 2; ++c) {
      if (c >= column_blocks) break;
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_blocks.address(b_base, k, c * STEP));
      multiply_block<E>(acc, a, b, c);
    }
  }
}

// Rounds an accumulator into a tile whose rows start at `first_row` for this warp. Column block c of the accumulator is
// column block first_block + c * step of the tile.
template <class E, class Tile, int ROW_BLOCKS, int OCTETS>
AFC_FN void round_to_tile(unsigned char *tile, const float (&acc)[ROW_BLOCKS][OCTETS][4], int first_row,
                          int first_block = 0, int step = 1) {
  const int row = first_row + fragment_row();
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int c = 0; c < OCTETS; ++c) {
      if ((first_block + c / 2 * step) * 16 >= Tile::COLUMNS) break;
      const int column = (first_block + c / 2 * step) * 16 + c % 2 * 8 + fragment_column();
      const uint32_t upper = E::pack(acc[r][c][0], acc[r][c][1]), lower = E::pack(acc[r][c][2], acc[r][c][3]);
      *reinterpret_cast<uint32_t *>(tile + Tile::offset(row + r * 16, column)) = upper;
      *reinterpret_cast<uint32_t *>(tile + Tile::offset(row + r * 16 + 8, column)) = lower;
    }
}

// Writes an accumulator to float32 rows, `pitch` floats apart; blocks as in round_to_tile.
template <int COLUMNS, int ROW_BLOCKS, int OCTETS>
AFC_FN void store_floats(float *rows_data, int pitch, const float (&acc)[ROW_BLOCKS][OCTETS][4], int first_row,
                         int first_block, int step) {
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int c = 0; c < OCTETS; ++c) {
      if ((first_block + c / 2 * step) * 16 >= COLUMNS) break;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = first_row + r * 16 + e / 2 * 8 + fragment_row();
        const int column = (first_block + c / 2 * step) * 16 + c % 2 * 8 + fragment_column() + e % 2;
        rows_data[row * pitch + column] = acc[r][c][e];
      }
    }
}

// Rounds float32 rows and writes them to global memory, 16 bytes at a time.
template <class E, int COLUMNS, int THREADS>
AFC_FN void round_rows(const float *rows_data, int pitch, unsigned char *destination, int64_t stride, int rows) {
  for (int index = threadIdx.x; index < rows * (COLUMNS / 8); index += THREADS) {
    const int row = index / (COLUMNS / 8), chunk = index % (COLUMNS / 8);
    const float4 *from = reinterpret_cast<const float4 *>(rows_data + row * pitch + chunk * 8);
    const float4 low = from[0], high = from[1];
    *reinterpret_cast<uint4 *>(destination + row * stride + chunk * 16) = {
        E::pack(low.x, low.y), E::pack(low.z, low.w), E::pack(high.x, high.y), E::pack(high.z, high.w)};
  }
}

}  // namespace tile
