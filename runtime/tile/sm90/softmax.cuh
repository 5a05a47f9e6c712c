// SPDX-License-Identifier: Apache-2.0
//
// Online softmax on wgmma accumulators: a thread holds two rows, [0] and [1], of which it sees a quarter of the
// columns: elements 4j, 4j + 1 and 4j + 2, 4j + 3. Maxima are of raw scores; `factor` = scale * log2(e) > 0 is applied in the
// exponent. Row sums stay partial (one per thread) until the end.
#pragma once
#include <stdint.h>

#include "ptx/convert.cuh"
#include "ptx/math.cuh"

namespace tile {

constexpr float MINUS_INFINITY = -__builtin_huge_valf();

// Growth of the maximum (log2) up to which probabilities relative to the old one are kept ...
constexpr float STALE_GROWTH = 8.0f;
// ... and beyond which they may have left the range of float32, so that the scores are needed again.
constexpr float STALE_LIMIT = 100.0f;

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Nothing that stands after may be scheduled before these sums (never negative) are known: without it ptxas moves the
// wait for a product up, in front of the exponentials that are meant to run beside that product.
__device__ __forceinline__ void schedule_after(float a, float b) {
  const int positive = ~((__float_as_int(a) | __float_as_int(b)) >> 31);
  asm volatile("bar.warp.sync %0;" : : "r"(positive) : "memory");
}

// Columns from limit[row] on get -inf. limit counts from this thread's first column.
template <int COUNT>
__device__ __forceinline__ void mask_from(float (&score)[COUNT], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    score[i] = i / 4 * 8 + i % 2 < limit[i / 2 % 2] ? score[i] : MINUS_INFINITY;
  }
}

// This thread's part of the row maxima, not below `maximum`.
template <int COUNT>
__device__ __forceinline__ void partial_maximum(const float (&score)[COUNT], float (&maximum)[2]) {
  float other[2] = {score[1], score[3]};
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    maximum[0] = fmaxf(maximum[0], score[i]);
    maximum[1] = fmaxf(maximum[1], score[i + 2]);
    other[0] = fmaxf(other[0], score[i + 1]);
    other[1] = fmaxf(other[1], score[i + 3]);
  }
  maximum[0] = fmaxf(maximum[0], other[0]);
  maximum[1] = fmaxf(maximum[1], other[1]);
}

// score becomes 2^(factor score - shift[row]); returns this thread's part of the row sums.
template <int COUNT>
__device__ __forceinline__ void exponentials(float (&score)[COUNT], float factor, const float (&shift)[2],
                                             float (&sum)[2]) {
  float other[2] = {0.0f, 0.0f};
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      score[i + e] = ptx::exp2_approx(fmaf(score[i + e], factor, -shift[e / 2]));
    }
    sum[0] += score[i];
    other[0] += score[i + 1];
    sum[1] += score[i + 2];
    other[1] += score[i + 3];
  }
  sum[0] += other[0];
  sum[1] += other[1];
}

template <int COUNT>
__device__ __forceinline__ void scale_rows(float (&value)[COUNT], const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    value[i] *= by[i / 2 % 2];
  }
}

// Accumulators to the registers of a 16-bit A operand: k step t reads elements 4t .. 4t + 3 of the result.
template <int COUNT>
__device__ __forceinline__ void pack_operand(uint32_t (&operand)[COUNT / 2], const float (&value)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) {
    operand[i] = ptx::pack_bf16(value[2 * i], value[2 * i + 1]);
  }
}

// Partial row sum of one step beyond which its probabilities are brought to a new reference.
constexpr float WATCHED_SUM = 8192.0f;
// Beyond this the probabilities may have left the range of float32.
constexpr float WATCHED_LIMIT = 1e30f;

struct RunningSoftmax {
  float maximum[2] = {MINUS_INFINITY, MINUS_INFINITY};
  float sum[2] = {0.0f, 0.0f};
  float shift[2] = {0.0f, 0.0f};  // factor * maximum, 0 while no column of the row was live

  // Scores to probabilities under the maximum that includes them. `correction` is what older sums (done here) and the
  // output (the caller) must be multiplied by.
  template <bool GUARDED, int COUNT>
  __device__ __forceinline__ void exact(float (&score)[COUNT], float factor, float (&correction)[2]) {
    float grown[2] = {maximum[0], maximum[1]};
    partial_maximum(score, grown);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float value = quad_max(grown[row]);
      const float old = shift[row];
      maximum[row] = value;
      shift[row] = GUARDED && value == MINUS_INFINITY ? 0.0f : value * factor;
      // Without a live column so far the sums are 0, whatever the correction; it only must be finite.
      correction[row] = ptx::exp2_approx(GUARDED ? fminf(old - shift[row], 0.0f) : old - shift[row]);
    }
    float added[2];
    exponentials(score, factor, shift, added);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] = fmaf(sum[row], correction[row], added[row]);
    }
  }

  // Stale maximum: the probabilities are taken under the maximum of the steps before, so no shuffle stands before the
  // exponentials; the scores' own maxima are gathered beside them. Every row must have had a live column.
  template <int COUNT>
  __device__ __forceinline__ void stale(float (&score)[COUNT], float factor, float (&grown)[2], float (&added)[2]) {
    grown[0] = score[0];
    grown[1] = score[2];
    partial_maximum(score, grown);
    exponentials(score, factor, shift, added);
  }

  // Whether a row of this warp outgrew its maximum by so much that all must be brought to the new one.
  __device__ __forceinline__ bool outgrown(const float (&grown)[2], float factor) const {
    return __any_sync(0xffffffffu, fmaf(grown[0], factor, -shift[0]) > STALE_GROWTH ||
                                       fmaf(grown[1], factor, -shift[1]) > STALE_GROWTH);
  }

  // Brings sums, output and the probabilities of this step to the new maximum. Those of a step that jumped out of range
  // are taken again from the scores, which `recompute(score)` provides.
  template <int COUNT, int OUTPUTS, class Recompute>
  __device__ __forceinline__ void rebase(float (&score)[COUNT], float (&output)[OUTPUTS], float factor,
                                         const float (&grown)[2], float (&added)[2], Recompute recompute) {
    float correction[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      maximum[row] = fmaxf(maximum[row], quad_max(grown[row]));
      correction[row] = shift[row] - maximum[row] * factor;
      shift[row] = maximum[row] * factor;
    }
    if (__any_sync(0xffffffffu, fminf(correction[0], correction[1]) < -STALE_LIMIT)) {
      recompute(score);
      exponentials(score, factor, shift, added);
      correction[0] = ptx::exp2_approx(correction[0]);
      correction[1] = ptx::exp2_approx(correction[1]);
    } else {
      correction[0] = ptx::exp2_approx(correction[0]);
      correction[1] = ptx::exp2_approx(correction[1]);
      scale_rows(score, correction);
      added[0] *= correction[0];
      added[1] *= correction[1];
    }
    sum[0] *= correction[0];
    sum[1] *= correction[1];
    scale_rows(output, correction);
  }

  // No maximum at all: a sum that grew says that a probability did. In range, the probabilities themselves give the new
  // reference; out of range (or NaN), the scores are taken again. `maximum` is not kept up.
  __device__ __forceinline__ bool overgrown(const float (&added)[2]) const {
    return __any_sync(0xffffffffu, !(fmaxf(added[0], added[1]) <= WATCHED_SUM));
  }

  template <int COUNT, int OUTPUTS, class Recompute>
  __device__ __forceinline__ void reduce(float (&score)[COUNT], float (&output)[OUTPUTS], float factor,
                                         float (&added)[2], Recompute recompute) {
    float correction[2] = {1.0f, 1.0f};
    if (__any_sync(0xffffffffu, !(fmaxf(added[0], added[1]) <= WATCHED_LIMIT))) {
      recompute(score);
      float grown[2] = {score[0], score[2]};
      partial_maximum(score, grown);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float old = shift[row];
        shift[row] = fmaxf(old, quad_max(grown[row]) * factor);
        correction[row] = ptx::exp2_approx(old - shift[row]);
      }
      exponentials(score, factor, shift, added);
    } else {
      partial_maximum(score, correction);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float growth = __log2f(quad_max(correction[row]));
        shift[row] += growth;
        correction[row] = ptx::exp2_approx(-growth);
        added[row] *= correction[row];
      }
      scale_rows(score, correction);
    }
    sum[0] *= correction[0];
    sum[1] *= correction[1];
    scale_rows(output, correction);
  }
};

}  // namespace tile
