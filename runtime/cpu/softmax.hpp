// SPDX-License-Identifier: Apache-2.0
//
// The online softmax of one panel: a row per lane, its running maximum and sum in memory between tiles.
// Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691.
#ifndef AFC_CPU_SOFTMAX_HPP
#define AFC_CPU_SOFTMAX_HPP

#include "tile.hpp"

namespace afc {

// X[rows][lanes] -> weights exp2(scale_log2 * (X - maximum)), in place. Updates maximum and sum of each lane
// and gives the factor by which what was accumulated before has to be multiplied. A lane without a finite
// score has weights 0.
template <class Real>
AFC_FN void online_softmax(Real *__restrict X, int rows, Real scale_log2, Real *__restrict maximum,
                           Real *__restrict sum, Real *__restrict rescale) {
  constexpr int lanes = Panel<Real>::lanes;
  alignas(VECTOR_BYTES) Real base[lanes];
  for (int c = 0; c < lanes; ++c) base[c] = maximum[c];
  for (int r = 0; r < rows; ++r) {
#pragma omp simd
    for (int c = 0; c < lanes; ++c) base[c] = X[r * lanes + c] > base[c] ? X[r * lanes + c] : base[c];
  }
#pragma omp simd
  for (int c = 0; c < lanes; ++c) {
    const Real before = maximum[c];
    maximum[c] = base[c];
    base[c] = base[c] == minus_infinity<Real>() ? Real(0) : base[c];  // keeps -infinity - -infinity away
    rescale[c] = exp2_weight(scale_log2 * (before - base[c]));
  }
  alignas(VECTOR_BYTES) Real total[lanes] = {};
  for (int r = 0; r < rows; ++r) {
#pragma omp simd
    for (int c = 0; c < lanes; ++c) {
      const Real p = exp2_weight(scale_log2 * (X[r * lanes + c] - base[c]));
      X[r * lanes + c] = p;
      total[c] += p;
    }
  }
#pragma omp simd
  for (int c = 0; c < lanes; ++c) sum[c] = sum[c] * rescale[c] + total[c];
}

// Natural logarithm of a row's sum of exp(softmax_scale * score); -infinity for a row without a key.
template <class Real> AFC_FN Real log_sum_exp(Real softmax_scale, Real maximum, Real sum) {
  return sum == Real(0) ? minus_infinity<Real>() : softmax_scale * maximum + std::log(sum);
}

// exp(softmax_scale * maximum) / Z with Z = sum * exp(softmax_scale * maximum) + exp(log_extra): what turns
// the weighted sum of a row into its output. 0 for a row without a key.
template <class Real> AFC_FN Real inverse_sum(Real softmax_scale, Real maximum, Real sum, Real log_extra) {
  return sum == Real(0) ? Real(0) : Real(1) / (sum + std::exp(log_extra - softmax_scale * maximum));
}

// log(exp(a) + exp(b)) without overflow.
template <class Real> AFC_FN Real log_add_exp(Real a, Real b) {
  const Real high = a > b ? a : b, low = a > b ? b : a;
  return high == minus_infinity<Real>() ? high : high + std::log1p(std::exp(low - high));
}

// The LSE as backward subtracts it: in units of log2, +infinity for a row without a key, so that its weights
// are 0.
template <class Real> AFC_FN Real weight_offset(Real lse) {
  return lse == minus_infinity<Real>() ? infinity<Real>() : lse * Real(LOG2_E);
}

}  // namespace afc
#endif  // AFC_CPU_SOFTMAX_HPP
