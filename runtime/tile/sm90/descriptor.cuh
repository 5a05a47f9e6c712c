// SPDX-License-Identifier: Apache-2.0
//
// Tiles of 16-bit elements in shared memory as TMA writes them with the 128-byte swizzle, and the wgmma descriptors
// that read them. A tile of ROWS x COLUMNS is COLUMNS / 64 panels, each ROWS rows of 128 bytes; a panel starts at a
// multiple of 1024 bytes, so ROWS is a multiple of 8.
#pragma once
#include <stdint.h>

namespace tile {

constexpr int PANEL_COLUMNS = 64;
constexpr int PANEL_ROW_BYTES = 128;
constexpr int SWIZZLE_ATOM_BYTES = 1024;  // 8 rows: the 16-byte chunk index is XORed with the row within the atom

template <int ROWS, int COLUMNS>
struct Panels {
  static_assert(ROWS % 8 == 0 && COLUMNS % PANEL_COLUMNS == 0, "whole panels of whole swizzle atoms");
  static constexpr int PANEL_BYTES = ROWS * PANEL_ROW_BYTES;
  static constexpr int BYTES = PANEL_BYTES * (COLUMNS / PANEL_COLUMNS);
};

// Upper half of a descriptor: stride between groups of 8 rows (in 16 bytes), and the swizzle mode (1: 128 bytes).
constexpr uint32_t DESCRIPTOR_HIGH = (SWIZZLE_ATOM_BYTES >> 4) | (1u << 30);

// Lower half: the address, and for an operand read across panels the distance between them (ignored otherwise).
template <int PANEL_BYTES>
__device__ __forceinline__ uint32_t descriptor_low(uint32_t address) {
  return (address >> 4) | (static_cast<uint32_t>(PANEL_BYTES >> 4) << 16);
}

__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  return (static_cast<uint64_t>(DESCRIPTOR_HIGH) << 32) | low;
}

// What to add to the lower half for the k-th step of 16 along the columns (operand contiguous in k) ...
template <int PANEL_BYTES>
__device__ __forceinline__ constexpr uint32_t along_columns(int k) {
  return (k / 4 * PANEL_BYTES + k % 4 * 32) >> 4;
}

// ... and along the rows (operand contiguous in the other direction).
__device__ __forceinline__ constexpr uint32_t along_rows(int k) { return (k * 16 * PANEL_ROW_BYTES) >> 4; }

// A tile of 16 columns with the 32-byte swizzle: one k step. Tiles start at multiples of 256 bytes.
constexpr int NARROW_COLUMNS = 16;
constexpr int NARROW_ROW_BYTES = 32;
constexpr uint32_t NARROW_HIGH = (8 * NARROW_ROW_BYTES >> 4) | (3u << 30);

__device__ __forceinline__ uint64_t narrow_descriptor(uint32_t low) {
  return (static_cast<uint64_t>(NARROW_HIGH) << 32) | low;
}

__device__ __forceinline__ uint32_t narrow_swizzled(int row, int chunk) {
  return static_cast<uint32_t>(row * NARROW_ROW_BYTES + ((chunk ^ (row >> 2 & 1)) << 4));
}

// Byte offset of the 16-byte chunk `chunk` (0..7) of row `row` in a panel.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return static_cast<uint32_t>(row * PANEL_ROW_BYTES + ((chunk ^ (row & 7)) << 4));
}

}  // namespace tile
