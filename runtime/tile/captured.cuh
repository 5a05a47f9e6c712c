// SPDX-License-Identifier: Apache-2.0
//
// Sums for gradients of captured tensors, without atomics: an element is added to by one thread, in a fixed order.
#pragma once
#include "abi/afc_shares.h"
#include "device.cuh"

namespace tile {

// target[places[k]] += values[k] for k = 0, 1, ...; a negative place is skipped, and so is one that is another part's.
// `step` from one k to the next.
template <int PARTS>
AFC_FN void add_part_in_order(float *target, const float *values, const int *places, int count, int step, int part) {
  int at = -1;
  float sum = 0.0f;
#pragma unroll 4
  for (int k = 0; k < count; ++k) {
    const int place = places[k * step];
    if (place < 0 || place % PARTS != part) continue;
    if (place != at) {
      if (at >= 0) target[at] += sum;
      at = place, sum = 0.0f;
    }
    sum += values[k * step];
  }
  if (at >= 0) target[at] += sum;
}

// The same by all threads of a block: the one that adds to an element depends on its place alone. The lists are in shared
// memory; the caller synchronises before and after.
template <int THREADS>
AFC_FN void add_in_order(float *target, const float *values, const int *places, int count) {
  add_part_in_order<THREADS>(target, values, places, count, 1, static_cast<int>(threadIdx.x));
}

// The same for the rows of a tile whose rows are `pitch` apart.
template <int THREADS>
AFC_FN void add_rows_in_order(float *target, const float *values, const int *places, int rows, int columns, int pitch) {
  for (int row = 0; row < rows; ++row)
    add_in_order<THREADS>(target, values + row * pitch, places + row * pitch, columns);
}

// The same where no two rows have an element in common: the threads of the block are shared out to the rows.
template <int THREADS, int ROWS, int COLUMNS, int PITCH>
AFC_FN void add_own_rows_in_order(float *target, const float *values, const int *places) {
  constexpr int PARTS = THREADS / ROWS;
  const int row = static_cast<int>(threadIdx.x) / PARTS, part = static_cast<int>(threadIdx.x) % PARTS;
  add_part_in_order<PARTS>(target, values + row * PITCH, places + row * PITCH, COLUMNS, 1, part);
}

// The same where no two columns have an element in common.
template <int THREADS, int ROWS, int COLUMNS, int PITCH>
AFC_FN void add_own_columns_in_order(float *target, const float *values, const int *places) {
  const int column = static_cast<int>(threadIdx.x) % COLUMNS, part = static_cast<int>(threadIdx.x) / COLUMNS;
  add_part_in_order<THREADS / COLUMNS>(target, values + column, places + column, ROWS, PITCH, part);
}

// Sum over the rows of column `column` of a tile.
AFC_FN float column_sum(const float *values, int rows, int pitch, int column) {
  float sum = 0.0f;
#pragma unroll 8
  for (int row = 0; row < rows; ++row) sum += values[row * pitch + column];
  return sum;
}

// Sum over the elements of a tile whose column less row is `distance`.
AFC_FN float diagonal_sum(const float *values, int rows, int columns, int pitch, int distance) {
  float sum = 0.0f;
  const int first = max(0, -distance), last = min(rows, columns - distance);
#pragma unroll 4
  for (int row = first; row < last; ++row) sum += values[row * pitch + row + distance];
  return sum;
}

// Sums of all copies of a block's gradients, by one warp for each element: lanes take every 32nd copy.
AFC_FN void add_copies(const Shares &shares, int k, const float *copies_data, int64_t element) {
  const int64_t copies = shares.copies(k);
  const float *from = copies_data + shares.start[k] + element;
  double sum = 0.0;
  for (int64_t copy = lane_index(); copy < copies; copy += WARP) sum += from[copy * shares.size[k]];
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane_index() == 0) shares.data[k][element] += static_cast<float>(sum);
}

}  // namespace tile
