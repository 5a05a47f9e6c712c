// SPDX-License-Identifier: Apache-2.0
//
// Tiles in cache and the two products that attention needs.
//
// One side of the score matrix is stationary: its rows lie across the lanes of vector registers, in panels of
// Panel<Real>::lanes rows. The other side is streamed: its rows are read one scalar at a time and broadcast.
// Forward and dQ keep queries in the lanes and stream keys; dK and dV keep keys and stream queries. So a row
// maximum, a row sum and a mask are plain vector code, and neither product transposes the streamed side.
//
//   stationary operand   X^T[depth][lanes]   transposed once per task
//   streamed operand     Y[rows][width]      row-major, widened to Real, zero where the tensor ends
//   scores               S[rows][lanes]      S = Y X              (multiply)
//   accumulator          C[depth][lanes]     C = C*rescale + Y^T S  (accumulate)
#ifndef AFC_CPU_TILE_HPP
#define AFC_CPU_TILE_HPP

#include "element.hpp"

namespace afc {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#else
constexpr int VECTOR_BYTES = 32;
#endif

// Three vectors by four broadcast rows: twelve accumulators, three loads and one broadcast fill sixteen
// registers.
constexpr int PANEL_VECTORS = 3;
constexpr int STREAM_ROWS = 4;

template <class Real> struct Panel {
  static constexpr int vector = VECTOR_BYTES / int(sizeof(Real));
  static constexpr int lanes = PANEL_VECTORS * vector;
  typedef Real Vector __attribute__((vector_size(VECTOR_BYTES)));
};

AFC_FN constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
AFC_FN constexpr int round_up(int a, int multiple) { return (a + multiple - 1) / multiple * multiple; }

// ---- matrices in memory -------------------------------------------------------

// Rows of one head of a tensor; strides count elements.
template <class Element> struct Matrix {
  Element *data;
  int64_t row_stride, column_stride;
  Element *row(int64_t r) const { return data + r * row_stride; }
};

// The [rows, columns] matrix of batch b and head h.
template <class Element> AFC_FN Matrix<Element> matrix(const afc_tensor &t, int64_t b, int64_t h) {
  Element *data = static_cast<Element *>(t.data) + b * t.stride[0] + h * t.stride[1];
  return {data, t.stride[2], t.stride[3]};
}

// A contiguous tensor [batch, heads, rows, columns].
AFC_FN afc_tensor contiguous(void *data, int64_t heads, int64_t rows, int64_t columns) {
  return {data, {heads * rows * columns, rows * columns, columns, 1}};
}

// One row of `width` elements, for any column stride.
template <class Element, class Real>
AFC_FN void load_strided_row(Real *to, const Matrix<Element> &from, int64_t r, int width) {
  const Element *row = from.row(r);
  if (from.column_stride == 1) return load_row(to, row, width);
  for (int c = 0; c < width; ++c) to[c] = to_real(row[c * from.column_stride]);
}

template <class Real> AFC_FN bool is_zero(const Real *row, int width) {
  for (int c = 0; c < width; ++c) {
    if (row[c] != Real(0)) return false;
  }
  return true;
}

template <class Real> AFC_FN bool is_finite(const Real *row, int width) {
  Real zero = 0;  // NaN once a value is infinite or NaN
#pragma omp simd reduction(+ : zero)
  for (int c = 0; c < width; ++c) zero += row[c] * Real(0);
  return zero == Real(0);
}

// A streamed tile: rows first .. first + count - 1 at a pitch of `pitch` values. The columns beyond `width`
// and the rows up to the next multiple of STREAM_ROWS become zero. Returns whether all values are finite.
template <class Element, class Real>
AFC_FN bool load_tile(Real *tile, int pitch, const Matrix<Element> &from, int64_t first, int count,
                      int width) {
  bool finite = true;
  for (int r = 0; r < count; ++r) {
    load_strided_row(tile + r * pitch, from, first + r, width);
    finite &= is_finite(tile + r * pitch, width);
    for (int c = width; c < pitch; ++c) tile[r * pitch + c] = Real(0);
  }
  const int rest = round_up(count, STREAM_ROWS) - count;
  if (rest > 0) std::memset(tile + count * pitch, 0, size_t(rest) * size_t(pitch) * sizeof(Real));
  return finite;
}

// A stationary tile: rows first .. first + count - 1, transposed into panels [width][lanes]; lanes beyond
// count are zero. `row` is scratch for one row.
template <class Element, class Real>
AFC_FN void load_panels(Real *panels, Real *row, const Matrix<Element> &from, int64_t first, int count,
                        int width) {
  constexpr int lanes = Panel<Real>::lanes;
  for (int r = 0; r < round_up(count, lanes); ++r) {
    Real *lane = panels + (r / lanes) * width * lanes + r % lanes;
    if (r < count) load_strided_row(row, from, first + r, width);
    for (int c = 0; c < width; ++c) lane[c * lanes] = r < count ? row[c] : Real(0);
  }
}

// One row of an accumulator panel [width][lanes]: row[c] = panel[c][lane].
template <class Real> AFC_FN void gather_lane(Real *row, const Real *panel, int lane, int width) {
  for (int c = 0; c < width; ++c) row[c] = panel[c * Panel<Real>::lanes + lane];
}

// ---- products -----------------------------------------------------------------

// Not inlined: its register allocation must not depend on the caller.
#define AFC_KERNEL __attribute__((noinline)) static

// S[rows][lanes] = Y[rows][depth] X^T[depth][lanes], rows rounded up to STREAM_ROWS.
template <class Real>
AFC_KERNEL void multiply(Real *__restrict S, const Real *__restrict Y, int pitch, const Real *__restrict X,
                         int rows, int depth) {
  using Vector = typename Panel<Real>::Vector;
  constexpr int lanes = Panel<Real>::lanes;
  for (int r = 0; r < rows; r += STREAM_ROWS) {
    Vector sum[STREAM_ROWS][PANEL_VECTORS] = {};
    const Real *y = Y + r * pitch;
    for (int d = 0; d < depth; ++d) {
      const Vector *x = reinterpret_cast<const Vector *>(X + d * lanes);
#pragma GCC unroll 4
      for (int k = 0; k < STREAM_ROWS; ++k) {
#pragma GCC unroll 3
        for (int v = 0; v < PANEL_VECTORS; ++v) sum[k][v] += y[k * pitch + d] * x[v];
      }
    }
    Vector *s = reinterpret_cast<Vector *>(S + r * lanes);
#pragma GCC unroll 4
    for (int k = 0; k < STREAM_ROWS; ++k) {
#pragma GCC unroll 3
      for (int v = 0; v < PANEL_VECTORS; ++v) s[k * PANEL_VECTORS + v] = sum[k][v];
    }
  }
}

// C[width][lanes] = C * rescale[lanes] + Y[rows][width]^T S[rows][lanes]; width is a multiple of STREAM_ROWS.
// The product of a tile is summed on its own and added once, which keeps the rounding error of long sums
// small.
template <class Real>
AFC_KERNEL void accumulate(Real *__restrict C, const Real *__restrict rescale, const Real *__restrict Y,
                           int pitch, const Real *__restrict S, int rows, int width) {
  using Vector = typename Panel<Real>::Vector;
  constexpr int lanes = Panel<Real>::lanes;
  const Vector *factor = reinterpret_cast<const Vector *>(rescale);
  for (int d = 0; d < width; d += STREAM_ROWS) {
    Vector sum[STREAM_ROWS][PANEL_VECTORS] = {};
    const Real *y = Y + d;
    const Vector *s = reinterpret_cast<const Vector *>(S);
    for (int r = 0; r < rows; ++r, y += pitch, s += PANEL_VECTORS) {
#pragma GCC unroll 4
      for (int k = 0; k < STREAM_ROWS; ++k) {
#pragma GCC unroll 3
        for (int v = 0; v < PANEL_VECTORS; ++v) sum[k][v] += y[k] * s[v];
      }
    }
    Vector *c = reinterpret_cast<Vector *>(C + d * lanes);
#pragma GCC unroll 4
    for (int k = 0; k < STREAM_ROWS; ++k) {
#pragma GCC unroll 3
      for (int v = 0; v < PANEL_VECTORS; ++v) {
        Vector &element = c[k * PANEL_VECTORS + v];
        element = element * factor[v] + sum[k][v];
      }
    }
  }
}

// The same where Y is not finite: an element of S that is 0 lets nothing through, neither infinity nor NaN.
template <class Real>
AFC_KERNEL void accumulate_gated(Real *__restrict C, const Real *__restrict rescale, const Real *__restrict Y,
                                 int pitch, const Real *__restrict S, int rows, int width) {
  constexpr int lanes = Panel<Real>::lanes;
  for (int d = 0; d < width; ++d) {
    Real sum[lanes] = {};
    for (int r = 0; r < rows; ++r) {
#pragma omp simd
      for (int c = 0; c < lanes; ++c) {
        const Real s = S[r * lanes + c];
        sum[c] += s == Real(0) ? Real(0) : s * Y[r * pitch + d];
      }
    }
    for (int c = 0; c < lanes; ++c) C[d * lanes + c] = C[d * lanes + c] * rescale[c] + sum[c];
  }
}

// C[width][lanes] = C * rescale[lanes] + Y[rows][width]^T S[rows][lanes]; `finite`: all of Y is.
template <class Real>
AFC_FN void accumulate_tile(Real *__restrict C, const Real *__restrict rescale, const Real *__restrict Y,
                            bool finite, int pitch, const Real *__restrict S, int rows, int width) {
  (finite ? accumulate<Real> : accumulate_gated<Real>)(C, rescale, Y, pitch, S, rows, width);
}

// C[width][lanes] += Y[rows][width]^T S[rows][lanes].
template <class Real>
AFC_FN void accumulate_tile(Real *__restrict C, const Real *__restrict Y, bool finite, int pitch,
                            const Real *__restrict S, int rows, int width) {
  alignas(VECTOR_BYTES) Real ones[Panel<Real>::lanes];
  for (Real &one : ones) one = Real(1);
  accumulate_tile(C, ones, Y, finite, pitch, S, rows, width);
}

}  // namespace afc
#endif  // AFC_CPU_TILE_HPP
