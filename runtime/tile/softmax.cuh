// SPDX-License-Identifier: Apache-2.0
//
// Online softmax on accumulator fragments (Milakov and Gimelshein, arXiv:1805.02867). A lane holds two rows of each row
// block; the four lanes that share a row agree on its maximum at every step and add up its sum only at the end.
#pragma once
#include "device.cuh"
#include "ptx/math.cuh"

namespace tile {

template <int ROW_BLOCKS>
struct SoftmaxRows {
  float maximum[ROW_BLOCKS][2];  // of the scores so far, -inf before the first live one
  float sum[ROW_BLOCKS][2];      // of this lane's weights so far, relative to maximum
};

template <int ROW_BLOCKS>
AFC_FN void clear(SoftmaxRows<ROW_BLOCKS> &rows) {
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.maximum[r][half] = -INFINITE;
      rows.sum[r][half] = 0.0f;
    }
}

AFC_FN float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

AFC_FN float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Scores -> weights exp2(scale (s - max)), in place; earlier sums and outputs are rescaled to the new maximum.
// LIVE promises that no row of this tile consists of -inf alone, which saves the guard against -inf - -inf.
template <bool LIVE, int ROW_BLOCKS, int OCTETS, int OUTPUT_OCTETS>
AFC_FN void softmax_step(float (&s)[ROW_BLOCKS][OCTETS][4], SoftmaxRows<ROW_BLOCKS> &rows,
                         float (&o)[ROW_BLOCKS][OUTPUT_OCTETS][4], float scale) {
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s[r][0][2 * half];
#pragma unroll
      for (int c = 0; c < OCTETS; ++c) top = fmaxf(top, fmaxf(s[r][c][2 * half], s[r][c][2 * half + 1]));
      const float before = rows.maximum[r][half];
      top = fmaxf(before, quad_max(top));
      rows.maximum[r][half] = top;
      const float shift = LIVE || top != -INFINITE ? top * scale : 0.0f;
      const float correction = ptx::exp2_approx(before * scale - shift);
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < OCTETS; ++c)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s[r][c][e] = ptx::exp2_approx(fmaf(s[r][c][e], scale, -shift));
          sum += s[r][c][e];
        }
      rows.sum[r][half] = fmaf(rows.sum[r][half], correction, sum);
#pragma unroll
      for (int c = 0; c < OUTPUT_OCTETS; ++c) {
        o[r][c][2 * half] *= correction;
        o[r][c][2 * half + 1] *= correction;
      }
    }
}

// Divides the output by the sums and returns the logarithms of the sums of weights in `lse`; a row without a live key
// becomes 0 and -inf. `scale` is the factor of the scores in units of the natural exponent.
template <int ROW_BLOCKS, int OUTPUT_OCTETS>
AFC_FN void softmax_finish(float (&o)[ROW_BLOCKS][OUTPUT_OCTETS][4], const SoftmaxRows<ROW_BLOCKS> &rows,
                           float (&lse)[ROW_BLOCKS][2], float scale) {
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows.sum[r][half]);
      const bool empty = sum == 0.0f;  // not by the maximum, which does not see NaN scores
      const float inverse = empty ? 0.0f : 1.0f / sum;
      lse[r][half] = empty ? -INFINITE : fmaf(rows.maximum[r][half], scale, logf(sum));
#pragma unroll
      for (int c = 0; c < OUTPUT_OCTETS; ++c) {
        o[r][c][2 * half] *= inverse;
        o[r][c][2 * half + 1] *= inverse;
      }
    }
}

// The same where the normalizer adds a term to the sum of each row, given by its logarithm: a row without a live key
// becomes 0 and that logarithm.
template <int ROW_BLOCKS, int OUTPUT_OCTETS>
AFC_FN void softmax_finish(float (&o)[ROW_BLOCKS][OUTPUT_OCTETS][4], const SoftmaxRows<ROW_BLOCKS> &rows,
                           float (&lse)[ROW_BLOCKS][2], float scale, const float (&log_extra)[ROW_BLOCKS][2]) {
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows.sum[r][half]), extra = log_extra[r][half];
      const bool empty = sum == 0.0f;
      const float top = rows.maximum[r][half] * scale;
      const float inverse = empty ? 0.0f : 1.0f / (sum + expf(extra - top));
      const float own = empty ? -INFINITE : top + logf(sum);
      const float high = own > extra ? own : extra, low = own > extra ? extra : own;
      lse[r][half] = high == -INFINITE ? high : high + log1pf(expf(low - high));
#pragma unroll
      for (int c = 0; c < OUTPUT_OCTETS; ++c) {
        o[r][c][2 * half] *= inverse;
        o[r][c][2 * half + 1] *= inverse;
      }
    }
}

}  // namespace tile
