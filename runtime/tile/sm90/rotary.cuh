// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding of 16-bit rows, half-split pairs (c, c + HEAD_DIM / 2), by a table of (cos, sin) for each
// position and pair. Arithmetic in float32, one rounding.
#pragma once
#include <stdint.h>

#include "ptx/convert.cuh"
#include "tile/sm90/descriptor.cuh"

namespace tile {

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Two neighbouring pairs: low and high halves of both words are one pair each.
__device__ __forceinline__ void rotate_word(uint32_t &first, uint32_t &second, float4 turn) {
  const float a0 = __uint_as_float(first << 16), a1 = __uint_as_float(first & 0xffff0000u);
  const float b0 = __uint_as_float(second << 16), b1 = __uint_as_float(second & 0xffff0000u);
  first = ptx::pack_bf16(a0 * turn.x - b0 * turn.y, a1 * turn.z - b1 * turn.w);
  second = ptx::pack_bf16(b0 * turn.x + a0 * turn.y, b1 * turn.z + a1 * turn.w);
}

// Eight neighbouring pairs; `table` points at the first one's (cos, sin).
__device__ __forceinline__ void rotate_chunk(uint4 &first, uint4 &second, const float2 *table) {
  const float4 *turn = reinterpret_cast<const float4 *>(table);
  rotate_word(first.x, second.x, __ldg(turn));
  rotate_word(first.y, second.y, __ldg(turn + 1));
  rotate_word(first.z, second.z, __ldg(turn + 2));
  rotate_word(first.w, second.w, __ldg(turn + 3));
}

// A warp rotates its 16 rows of a tile in place; the first `rows` of them are at positions `position` and on. A row at a
// negative position, before the first key, is left alone.
template <int TILE_ROWS, int HEAD_DIM>
__device__ __forceinline__ void rotate_rows(uint32_t tile_rows, const float2 *table, int position, int rows) {
  constexpr int CHUNKS = HEAD_DIM / 16;
  constexpr int HALF_CHUNK = HEAD_DIM / 16;
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < CHUNKS / 2; ++i) {
    const int row = (i * 32 + lane) / CHUNKS;
    const int chunk = lane % CHUNKS;
    const int partner = chunk + HALF_CHUNK;
    const uint32_t a = tile_rows + chunk / 8 * Panels<TILE_ROWS, HEAD_DIM>::PANEL_BYTES + swizzled(row, chunk % 8);
    const uint32_t b = tile_rows + partner / 8 * Panels<TILE_ROWS, HEAD_DIM>::PANEL_BYTES + swizzled(row, partner % 8);
    if (row < rows && position + row >= 0) {
      uint4 first = load_shared_16(a), second = load_shared_16(b);
      rotate_chunk(first, second, table + static_cast<int64_t>(position + row) * (HEAD_DIM / 2) + 8 * chunk);
      store_shared_16(a, first);
      store_shared_16(b, second);
    }
  }
}

}  // namespace tile
