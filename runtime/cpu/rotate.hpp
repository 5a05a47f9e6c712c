// SPDX-License-Identifier: Apache-2.0
//
// Rotated copies of q and k: once per call, ahead of the kernels that read them.
#ifndef AFC_CPU_ROTATE_HPP
#define AFC_CPU_ROTATE_HPP

#include "tile.hpp"
#include "walk.hpp"

namespace afc {

constexpr int ROTATE_ROWS = 64;  // rows of one task

// The coefficient tables of an operand: one for the call, or one for each batch entry, each head, or both.
struct Tables {
  int64_t batches, heads;
  bool by_batch, by_head;

  int64_t count() const { return (by_batch ? batches : 1) * (by_head ? heads : 1); }
  int64_t of(int64_t b, int64_t h) const { return (by_batch ? b * (by_head ? heads : 1) : 0) + (by_head ? h : 0); }
  int64_t batch(int64_t table) const { return by_batch ? table / (by_head ? heads : 1) : 0; }
  int64_t head(int64_t table) const { return by_head ? table % heads : 0; }
};

// Replaces `operand` [batch, heads, rows, WIDTH] by a rotated copy in `rotated`, rounded once. Only the first
// used(b) rows of batch b are read.
//
// `coefficients` [tables, rows, width]: tabulate(table, first, last) fills rows first .. last - 1 of a table;
// rotate(b, h, r, row, coefficients of the row) changes one row of Real values in place.
template <int WIDTH, class Element, class Real, class Used, class Tabulate, class Rotate>
AFC_FN void rotate_operand(int threads, const Tables &tables, int64_t rows, afc_tensor &operand, Element *rotated,
                           const Real *coefficients, int width, Used used, Tabulate tabulate, Rotate rotate) {
  int64_t most = 0;  // rows that some batch uses
  for (int64_t b = 0; b < tables.batches; ++b) most = used(b) > most ? used(b) : most;
  const int64_t blocks = ceil_div(most, ROTATE_ROWS);
  const auto last_row = [](int64_t block, int64_t end) { return min((block + 1) * ROTATE_ROWS, end); };
  parallel_for(threads, tables.count() * blocks, [&](int64_t task, int) {
    const int64_t table = task / blocks, block = task % blocks;
    tabulate(table, block * ROTATE_ROWS, last_row(block, tables.by_batch ? used(tables.batch(table)) : most));
  });

  const afc_tensor copy = contiguous(rotated, tables.heads, rows, WIDTH);
  parallel_for(threads, tables.batches * tables.heads * blocks, [&](int64_t task, int) {
    const int64_t head = task / blocks, block = task % blocks, b = head / tables.heads, h = head % tables.heads;
    const Matrix<const Element> from = matrix<const Element>(operand, b, h);
    const Matrix<Element> to = matrix<Element>(copy, b, h);
    const Real *table = coefficients + tables.of(b, h) * rows * width;
    for (int64_t r = block * ROTATE_ROWS; r < last_row(block, used(b)); ++r) {
      Real row[WIDTH];
      load_row(row, from.row(r), WIDTH);
      rotate(b, h, r, row, table + r * width);
      store_row(to.row(r), row, WIDTH);
    }
  });
  operand = copy;
}

}  // namespace afc
#endif  // AFC_CPU_ROTATE_HPP
