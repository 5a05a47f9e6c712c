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
// tabulate(t, first, last) fills the rows first .. last - 1 of the t-th of `tables` tables [rows, table_width]
// with coefficients; table_of(b, h) is the index of the table of a head; rotate(row, coefficients) rotates one
// row of Real values in place.
template <int WIDTH, class Element, class Real, class Tabulate, class TableOf, class Rotate>
AFC_FN void rotate_operand_by_tables(int threads, int64_t batch, int64_t heads, int64_t rows,
                                     afc_tensor &operand, Element *rotated, const Real *table, int table_width,
                                     int64_t tables, Tabulate tabulate, TableOf table_of, Rotate rotate) {
  const int64_t blocks = ceil_div(rows, ROTATE_ROWS);
  const auto last_row = [&](int64_t block) { return min((block + 1) * ROTATE_ROWS, rows); };
  parallel_for(threads, tables * blocks, [&](int64_t task, int) {
    tabulate(task / blocks, task % blocks * ROTATE_ROWS, last_row(task % blocks));
  });

  const afc_tensor copy = contiguous(rotated, heads, rows, WIDTH);
  parallel_for(threads, batch * heads * blocks, [&](int64_t task, int) {
    const int64_t b = task / blocks / heads, h = task / blocks % heads, block = task % blocks;
    const Matrix<const Element> from = matrix<const Element>(operand, b, h);
    const Matrix<Element> to = matrix<Element>(copy, b, h);
    const Real *coefficients = table + table_of(b, h) * rows * table_width;
    for (int64_t r = block * ROTATE_ROWS; r < last_row(block); ++r) {
      Real row[WIDTH];
      load_row(row, from.row(r), WIDTH);
      rotate(row, coefficients + r * table_width);
      store_row(to.row(r), row, WIDTH);
    }
  });
  operand = copy;
}

// The same with one table for all heads; tabulate(first, last) fills its rows first .. last - 1.
template <int WIDTH, class Element, class Real, class Tabulate, class Rotate>
AFC_FN void rotate_operand(int threads, int64_t batch, int64_t heads, int64_t rows, afc_tensor &operand,
                           Element *rotated, const Real *table, int table_width, Tabulate tabulate,
                           Rotate rotate) {
  rotate_operand_by_tables<WIDTH>(
      threads, batch, heads, rows, operand, rotated, table, table_width, 1,
      [&](int64_t, int64_t first, int64_t last) { tabulate(first, last); },
      [](int64_t, int64_t) { return int64_t(0); }, rotate);
}

}  // namespace afc
#endif  // AFC_CPU_ROTATE_HPP
