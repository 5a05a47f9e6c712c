// SPDX-License-Identifier: Apache-2.0
//
// A row-major tile of 16-bit elements in shared memory, in chunks of 16 bytes. The chunk index is XORed with bits of
// the row so that the eight rows of one ldmatrix block, at one chunk column, fall into eight different groups of banks:
//
//   COLUMNS = 64 (8 chunks, one row = all 32 banks)    chunk' = chunk ^ (row % 8)
//   COLUMNS = 32 (4 chunks, two rows = all 32 banks)   chunk' = chunk ^ (row / 2 % 4)
//   COLUMNS = 16 (2 chunks)                            chunk' = chunk ^ (row / 4 % 2)
//
// Other widths use the largest of these whose width divides theirs.
#pragma once
#include "ptx/cp_async.cuh"
#include "device.cuh"
#include "element.cuh"
#include "ptx/ldmatrix.cuh"

namespace tile {

// The columns from VALID on are padding: zero when the tile is copied in, left out when it is stored.
template <int ROWS_, int COLUMNS_, int VALID_ = COLUMNS_>
struct SharedTile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static_assert(ROWS % 16 == 0 && COLUMNS % 16 == 0, "a tile consists of 16x16 blocks");
  static_assert(VALID_ % 8 == 0 && VALID_ <= COLUMNS, "rows in memory consist of chunks");
  static constexpr int CHUNKS = COLUMNS / 8, VALID_CHUNKS = VALID_ / 8;
  AFC_FN static bool is_valid(uint32_t chunk) { return VALID_CHUNKS == CHUNKS || chunk < VALID_CHUNKS; }
  static constexpr int SWIZZLED = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;  // chunks that change places
  static constexpr int ROW_BYTES = COLUMNS * 2;
  static constexpr int BYTES = ROWS * ROW_BYTES;

  // Unsigned, so that division and remainder are shifts and masks.
  AFC_FN static uint32_t swizzle(uint32_t row) { return row / (8 / SWIZZLED) % SWIZZLED; }

  // Byte offset of a chunk, and of a single element.
  AFC_FN static uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    return row * ROW_BYTES + (chunk ^ swizzle(row)) * 16;
  }
  AFC_FN static uint32_t offset(uint32_t row, uint32_t column) {
    return chunk_offset(row, column / 8) + column % 8 * 2;
  }
};

// A lane's view of the 16x16 blocks of a tile, for ldmatrix.x4. With constant row_block and column_block an address is
// an exclusive or and an addition, both shared by many blocks, and an immediate.
template <class Tile>
struct Blocks {
  uint32_t lane;  // byte offset of the lane's row, and its chunk bits: half of the block, swizzle of the row

  AFC_FN uint32_t address(uint32_t base, int row_block, int column_block) const {
    const int chunk = column_block * 2;
    const int far = chunk / Tile::SWIZZLED * Tile::SWIZZLED, near = chunk % Tile::SWIZZLED;
    return base + (lane ^ (near * 16)) + (row_block * 16 * Tile::ROW_BYTES + far * 16);
  }

  // The view from a column block on that is known only at run time: column block c of the result is first + c of the
  // tile. No c may share a binary digit with `first`; then both can be flipped into the address one after the other.
  AFC_FN Blocks from_column_block(uint32_t first) const {
    const uint32_t chunk = first * 2, near = chunk % Tile::SWIZZLED;
    return {(lane ^ (near * 16)) + (chunk - near) * 16};
  }
};

template <class Tile>
AFC_FN Blocks<Tile> blocks_at(uint32_t row, uint32_t half) {
  return {row * Tile::ROW_BYTES + (half ^ Tile::swizzle(row)) * 16};
}

// Block order (upper left, lower left, upper right, lower right): operand A read by rows; with .trans, operand B whose
// depth runs along the rows of the tile (two column octets: registers 0, 1 and 2, 3).
template <class Tile>
AFC_FN Blocks<Tile> column_major_blocks(uint32_t first_row) {
  const uint32_t lane = lane_index();
  return blocks_at<Tile>(first_row + lane % 16, lane / 16);
}

// Block order (upper left, upper right, lower left, lower right): operand B whose depth runs along the columns (two row
// octets: registers 0, 1 and 2, 3); with .trans, operand A read by columns.
template <class Tile>
AFC_FN Blocks<Tile> row_major_blocks(uint32_t first_row) {
  const uint32_t lane = lane_index();
  return blocks_at<Tile>(first_row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Starts the copy of rows from global memory; `source` is the address of the tile's first row, `stride` its row stride
// in bytes. Rows from `valid_rows` on are zero and are not read, though an address is formed for them; so are chunks of
// padding. In a loop, `thread` comes from thread_in_step(). Thread t copies the chunks t, t + THREADS, ... of the tile.
template <class Tile, int THREADS>
AFC_FN void copy_rows_async(uint32_t base, const unsigned char *source, int64_t stride, int valid_rows, uint32_t thread) {
  constexpr int TOTAL = Tile::ROWS * Tile::CHUNKS;
  if constexpr (THREADS % Tile::CHUNKS == 0 && TOTAL % THREADS == 0) {
    constexpr int STEP = THREADS / Tile::CHUNKS;  // rows; every thread stays in its chunk column
    const uint32_t row = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS;
    const int rows_left = Tile::is_valid(chunk) ? valid_rows - static_cast<int>(row) : 0;
    const unsigned char *from = source + (row * stride + chunk * 16);
#pragma unroll
    for (int step = 0; step < TOTAL / THREADS; ++step) {
      ptx::cp_async_16(base + Tile::chunk_offset(row + step * STEP, chunk), from, step * STEP < rows_left);
      from += STEP * stride;
    }
  } else {
#pragma unroll
    for (int first = 0; first < TOTAL; first += THREADS) {
      const uint32_t index = first + thread;
      if (TOTAL % THREADS != 0 && index >= TOTAL) break;
      const uint32_t row = index / Tile::CHUNKS, chunk = index % Tile::CHUNKS;
      const unsigned char *from = source + row * stride + chunk * 16;
      const bool valid = static_cast<int>(row) < valid_rows && Tile::is_valid(chunk);
      ptx::cp_async_16(base + Tile::chunk_offset(row, chunk), from, valid);
    }
  }
}

// Whether the chunks that this thread has copied hold a value that is not finite. Its copies must have ended; those of
// others need not have.
template <class E, class Tile, int THREADS>
AFC_FN bool holds_infinite(const unsigned char *tile, uint32_t thread) {
  constexpr int TOTAL = Tile::ROWS * Tile::CHUNKS;
  uint32_t found = 0;
#pragma unroll
  for (int first = 0; first < TOTAL; first += THREADS) {
    const uint32_t index = first + thread;
    if (TOTAL % THREADS != 0 && index >= TOTAL) break;
    const uint32_t offset = Tile::chunk_offset(index / Tile::CHUNKS, index % Tile::CHUNKS);
    const uint4 chunk = *reinterpret_cast<const uint4 *>(tile + offset);
    found |= infinite_halves<E>(chunk.x) | infinite_halves<E>(chunk.y) | infinite_halves<E>(chunk.z) |
             infinite_halves<E>(chunk.w);
  }
  return found != 0;
}

// Writes rows to global memory in 16-byte stores; rows from `valid_rows` on are left alone.
template <class Tile, int THREADS>
AFC_FN void store_rows(const unsigned char *tile, unsigned char *destination, int64_t stride, int valid_rows) {
  constexpr int TOTAL = Tile::ROWS * Tile::VALID_CHUNKS;
#pragma unroll
  for (int first = 0; first < TOTAL; first += THREADS) {
    const uint32_t index = first + threadIdx.x;
    if (TOTAL % THREADS != 0 && index >= TOTAL) break;
    const uint32_t row = index / Tile::VALID_CHUNKS, chunk = index % Tile::VALID_CHUNKS;
    if (static_cast<int>(row) < valid_rows) {
      const uint4 value = *reinterpret_cast<const uint4 *>(tile + Tile::chunk_offset(row, chunk));
      *reinterpret_cast<uint4 *>(destination + row * stride + chunk * 16) = value;
    }
  }
}

}  // namespace tile
