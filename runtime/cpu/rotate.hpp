// SPDX-License-Identifier: Apache-2.0
//
// Rotated copies of q and k: once per call, ahead of the kernels that read them.
#ifndef AFC_CPU_ROTATE_HPP
#define AFC_CPU_ROTATE_HPP

#include "tile.hpp"
#include "walk.hpp"

namespace afc {

constexpr int ROTATE_ROWS = 64;  // rows of one task

// Replaces `operand` [batch, heads, rows, WIDTH] by a rotated copy in `rotated`, rounded once. Only the first
// used(b) rows of batch b are read.
//
// `table` [tables, rows, table_width] holds the coefficients of each position: one table for all batches, or
// one each. tabulate(b, first, last) fills its rows first .. last - 1; rotate(row, coefficients) rotates one
// row of Real values in place.
template <int WIDTH, class Element, class Real, class Used, class Tabulate, class Rotate>
AFC_FN void rotate_operand(int threads, int64_t batch, int64_t heads, int64_t rows, afc_tensor &operand,
                           Element *rotated, const Real *table, int64_t tables, int table_width, Used used,
                           Tabulate tabulate, Rotate rotate) {
  int64_t most = 0;  // rows that some batch uses
  for (int64_t b = 0; b < batch; ++b) most = used(b) > most ? used(b) : most;
  const int64_t blocks = ceil_div(most, ROTATE_ROWS);
  const auto last_row = [](int64_t block, int64_t end) { return min((block + 1) * ROTATE_ROWS, end); };
  parallel_for(threads, tables * blocks, [&](int64_t task, int) {
    const int64_t b = task / blocks, block = task % blocks;
    tabulate(b, block * ROTATE_ROWS, last_row(block, tables > 1 ? used(b) : most));
  });

  const afc_tensor copy = contiguous(rotated, heads, rows, WIDTH);
  parallel_for(threads, batch * heads * blocks, [&](int64_t task, int) {
    const int64_t head = task / blocks, block = task % blocks, b = head / heads;
    const Matrix<const Element> from = matrix<const Element>(operand, b, head % heads);
    const Matrix<Element> to = matrix<Element>(copy, b, head % heads);
    const Real *coefficients = table + (tables > 1 ? b * rows * table_width : 0);
    for (int64_t r = block * ROTATE_ROWS; r < last_row(block, used(b)); ++r) {
      Real row[WIDTH];
      load_row(row, from.row(r), WIDTH);
      rotate(row, coefficients + r * table_width);
      store_row(to.row(r), row, WIDTH);
    }
  });
  operand = copy;
}

}  // namespace afc
#endif  // AFC_CPU_ROTATE_HPP
