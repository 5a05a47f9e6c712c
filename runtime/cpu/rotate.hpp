// SPDX-License-Identifier: Apache-2.0
//
// Rotated copies of q and k: once per call, ahead of the kernels that read them.
#ifndef AFC_CPU_ROTATE_HPP
#define AFC_CPU_ROTATE_HPP

#include "tile.hpp"
#include "walk.hpp"

namespace afc {

constexpr int ROTATE_ROWS = 64;  // rows of one task

// Replaces `operand` [batch, heads, rows, WIDTH] by a rotated copy in `rotated`, rounded once.
//
// tabulate(first, last) fills the rows first .. last - 1 of `table` [rows, table_width] with the coefficients
// of a position; rotate(row, coefficients) rotates one row of Real values in place.
template <int WIDTH, class Element, class Real, class Tabulate, class Rotate>
AFC_FN void rotate_operand(int threads, int64_t batch, int64_t heads, int64_t rows, afc_tensor &operand,
                           Element *rotated, const Real *table, int table_width, Tabulate tabulate,
                           Rotate rotate) {
  const int64_t blocks = ceil_div(rows, ROTATE_ROWS);
  const auto last_row = [&](int64_t block) { return min((block + 1) * ROTATE_ROWS, rows); };
  parallel_for(threads, blocks, [&](int64_t block, int) { tabulate(block * ROTATE_ROWS, last_row(block)); });

  const afc_tensor copy = contiguous(rotated, heads, rows, WIDTH);
  parallel_for(threads, batch * heads * blocks, [&](int64_t task, int) {
    const int64_t head = task / blocks, block = task % blocks;
    const Matrix<const Element> from = matrix<const Element>(operand, head / heads, head % heads);
    const Matrix<Element> to = matrix<Element>(copy, head / heads, head % heads);
    for (int64_t r = block * ROTATE_ROWS; r < last_row(block); ++r) {
      Real row[WIDTH];
      load_row(row, from.row(r), WIDTH);
      rotate(row, table + r * table_width);
      store_row(to.row(r), row, WIDTH);
    }
  });
  operand = copy;
}

}  // namespace afc
#endif  // AFC_CPU_ROTATE_HPP
