// SPDX-License-Identifier: Apache-2.0
//
// Storage types and their conversions: rows of float64, float32, bfloat16 or float16 in memory, Real in
// tiles. Conversions to 16 bits round to nearest, ties to even; NaN stays NaN, overflow becomes infinity.
#ifndef AFC_CPU_ELEMENT_HPP
#define AFC_CPU_ELEMENT_HPP

#include "abi/afc_abi.h"
#include "math.hpp"

namespace afc {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// ---- one element --------------------------------------------------------------

AFC_FN double to_real(double x) { return x; }
AFC_FN float to_real(float x) { return x; }
AFC_FN float to_real(bfloat16 x) { return from_bits<float>(uint32_t(x.bits) << 16); }

// The exponent is rebased by a multiplication with 2^112, which also makes subnormal numbers right.
AFC_FN float to_real(float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  const uint32_t finite = to_bits(from_bits<float>(magnitude) * 0x1p112f);
  return from_bits<float>(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}

AFC_FN void convert(double x, double *y) { *y = x; }
AFC_FN void convert(float x, float *y) { *y = x; }

AFC_FN void convert(float x, bfloat16 *y) {
  const uint32_t bits = to_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  y->bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

AFC_FN void convert(float x, float16 *y) {
  const uint32_t bits = to_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // Adding 1/2 aligns the last place with the spacing 2^-24 of subnormal numbers; the addition rounds.
  const uint32_t subnormal = to_bits(from_bits<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  y->bits = uint16_t((bits >> 16 & 0x8000u) | (magnitude >= 0x477ff000u ? special : finite));
}

// x as it reads back from storage.
template <class Element, class Real> AFC_FN Real round_to(Real x) {
  Element y;
  convert(x, &y);
  return to_real(y);
}

// ---- rows ---------------------------------------------------------------------

template <class Element, class Real>
AFC_FN void load_row(Real *__restrict to, const Element *__restrict from, int count) {
#pragma omp simd
  for (int c = 0; c < count; ++c) to[c] = to_real(from[c]);
}

template <class Element, class Real>
AFC_FN void store_row(Element *__restrict to, const Real *__restrict from, int count) {
#pragma omp simd
  for (int c = 0; c < count; ++c) convert(from[c], &to[c]);
}

// Rounds `count` values to the storage type, in place. Nothing to do where Real is the storage type.
template <class Element, class Real> AFC_FN void round_row(Real *row, int count) {
  if (std::is_same<Element, Real>::value) return;
#pragma omp simd
  for (int c = 0; c < count; ++c) row[c] = round_to<Element>(row[c]);
}

#if defined(__F16C__)
// Rows of float16 through the conversion instructions, eight at a time.
typedef float Float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef short Half8 __attribute__((vector_size(16), aligned(2), may_alias));

template <> inline void load_row(float *__restrict to, const float16 *__restrict from, int count) {
  int c = 0;
  for (; c + 8 <= count; c += 8) {
    *(Float8 *)(to + c) = __builtin_ia32_vcvtph2ps256(*(const Half8 *)(from + c));
  }
  for (; c < count; ++c) to[c] = to_real(from[c]);
}

template <> inline void store_row(float16 *__restrict to, const float *__restrict from, int count) {
  int c = 0;
  for (; c + 8 <= count; c += 8) {
    *(Half8 *)(to + c) = __builtin_ia32_vcvtps2ph256(*(const Float8 *)(from + c), 0);
  }
  for (; c < count; ++c) convert(from[c], &to[c]);
}

template <> inline void round_row<float16>(float *row, int count) {
  int c = 0;
  for (; c + 8 <= count; c += 8) {
    const Half8 half = __builtin_ia32_vcvtps2ph256(*(const Float8 *)(row + c), 0);
    *(Float8 *)(row + c) = __builtin_ia32_vcvtph2ps256(half);
  }
  for (; c < count; ++c) row[c] = round_to<float16>(row[c]);
}
#endif

// ---- captured tensors ---------------------------------------------------------

// An element of a captured tensor, in the tensor's own type, as T.
template <class T> AFC_FN T read_at(const afc_captured &tensor, int64_t offset) {
  switch (tensor.dtype) {
    case AFC_BOOL: return T(static_cast<const bool *>(tensor.data)[offset]);
    case AFC_INT32: return T(static_cast<const int32_t *>(tensor.data)[offset]);
    case AFC_INT64: return T(static_cast<const int64_t *>(tensor.data)[offset]);
    case AFC_FLOAT16: return T(to_real(static_cast<const float16 *>(tensor.data)[offset]));
    case AFC_BFLOAT16: return T(to_real(static_cast<const bfloat16 *>(tensor.data)[offset]));
    case AFC_FLOAT32: return T(static_cast<const float *>(tensor.data)[offset]);
    default: return T(static_cast<const double *>(tensor.data)[offset]);
  }
}

// Offset of tensor[indices...], -1 outside the tensor.
template <class... Index> AFC_FN int64_t element_offset(const afc_captured &tensor, Index... indices) {
  const int64_t index[sizeof...(indices) + 1] = {int64_t(indices)..., 0};
  bool inside = true;
  int64_t offset = 0;
  for (int d = 0; d < int(sizeof...(indices)); ++d) {
    inside = inside && index[d] >= 0 && index[d] < tensor.size[d];
    offset += index[d] * tensor.stride[d];
  }
  return inside ? offset : -1;
}

// tensor[indices...] as T (Real, int64_t or bool). Outside the tensor nothing is read: NaN for a float, 0,
// false.
template <class T, class... Index> AFC_FN T read(const afc_captured &tensor, Index... indices) {
  const int64_t offset = element_offset(tensor, indices...);
  if (offset < 0) return std::numeric_limits<T>::quiet_NaN();  // 0 for integers
  return read_at<T>(tensor, offset);
}

}  // namespace afc
#endif  // AFC_CPU_ELEMENT_HPP
