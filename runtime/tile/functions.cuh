// SPDX-License-Identifier: Apache-2.0
//
// The functions that formulas call, on the GPU: the column `text` of the operator table (afc/expr/operators.py).
//
// float: inputs are 16-bit, so the approximate units serve; absolute errors stay near 2^-22 of the result's range.
// double: used once per row and column pair, for the coefficients of rotations.
#pragma once
#include "abi/afc_random.h"
#include "device.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

namespace afc {

template <class T> AFC_FN T infinity() { return T(__builtin_huge_valf()); }
template <class T> AFC_FN T minus_infinity() { return T(-__builtin_huge_valf()); }
template <class T> AFC_FN T nan() { return T(__builtin_nanf("")); }

// ---- integers ----------------------------------------------------------------------------------------------------

template <class A, class B> AFC_FN auto floor_div(A a, B b) -> decltype(a / b) {
  const auto quotient = a / b;
  return quotient - ((a % b != 0) && ((a < 0) != (b < 0)));
}

template <class A, class B> AFC_FN auto floor_mod(A a, B b) -> decltype(a % b) {
  const auto rest = a % b;
  return rest + (((rest != 0) && ((rest < 0) != (b < 0))) ? b : 0);
}

template <class A, class B> AFC_FN A ipow(A base, B exponent) {
  A power = 1;
  for (; exponent > 0; --exponent) power *= base;
  return power;
}

AFC_FN int abs(int x) { return x < 0 ? -x : x; }
AFC_FN int64_t abs(int64_t x) { return x < 0 ? -x : x; }
AFC_FN int max(int a, int b) { return a > b ? a : b; }
AFC_FN int min(int a, int b) { return a < b ? a : b; }
AFC_FN int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
AFC_FN int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- float -------------------------------------------------------------------------------------------------------

AFC_FN float abs(float x) { return fabsf(x); }
AFC_FN float max(float a, float b) { return (a > b || a != a) ? a : b; }  // NaN goes through
AFC_FN float min(float a, float b) { return (a < b || a != a) ? a : b; }
AFC_FN float floor(float x) { return floorf(x); }
AFC_FN float ceil(float x) { return ceilf(x); }
AFC_FN float exp(float x) { return ptx::exp2_approx(x * 1.44269504f); }
AFC_FN float log(float x) { return logf(x); }
AFC_FN float sqrt(float x) { return sqrtf(x); }
AFC_FN float rsqrt(float x) { return rsqrtf(x); }
AFC_FN float sin(float x) { return sinpif(x * 0.318309886f); }
AFC_FN float cos(float x) { return cospif(x * 0.318309886f); }
AFC_FN float pow(float a, float b) { return powf(a, b); }
AFC_FN float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp(-x)); }

// 1 - 2 / (e^2x + 1): exact at both ends, absolute error about 2^-22.
AFC_FN float tanh(float x) { return 1.0f - __fdividef(2.0f, 1.0f + exp(2.0f * fminf(x, 15.0f))); }

// ---- double ------------------------------------------------------------------------------------------------------

AFC_FN double abs(double x) { return fabs(x); }
AFC_FN double max(double a, double b) { return (a > b || a != a) ? a : b; }
AFC_FN double min(double a, double b) { return (a < b || a != a) ? a : b; }
AFC_FN double floor(double x) { return ::floor(x); }
AFC_FN double ceil(double x) { return ::ceil(x); }
AFC_FN double exp(double x) { return ::exp(x); }
AFC_FN double log(double x) { return ::log(x); }
AFC_FN double sqrt(double x) { return ::sqrt(x); }
AFC_FN double pow(double a, double b) { return ::pow(a, b); }
AFC_FN double rsqrt(double x) { return ::rsqrt(x); }
AFC_FN double tanh(double x) { return ::tanh(x); }
AFC_FN double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }

// The turn is taken off in double, where it is exact for any position; what is left is a float's business. (The library's
// sin and cos carry a table for huge arguments, on the stack.)
AFC_FN float half_turns(double angle) {
  const double turns = angle * 0.15915494309189535;
  return 2.0f * static_cast<float>(turns - rint(turns));
}
AFC_FN double sin(double angle) { return sinpif(half_turns(angle)); }
AFC_FN double cos(double angle) { return cospif(half_turns(angle)); }

// ---- captured tensors ----------------------------------------------------------------------------------------------

// Offset of an element, or -1 outside the tensor; a dimension of size 1 broadcasts.
template <class... Index> AFC_FN int64_t element_offset(const afc_captured &tensor, Index... index) {
  const int64_t indices[sizeof...(index) + 1] = {int64_t(index)..., 0};
  int64_t offset = 0;
#pragma unroll
  for (int axis = 0; axis < int(sizeof...(index)); ++axis) {
    const int64_t position = tensor.size[axis] == 1 ? 0 : indices[axis];
    if (position < 0 || position >= tensor.size[axis]) return -1;
    offset += position * tensor.stride[axis];
  }
  return offset;
}

template <class T> struct Outside;
template <> struct Outside<float> { AFC_FN static float value() { return nan<float>(); } };
template <> struct Outside<double> { AFC_FN static double value() { return nan<double>(); } };
template <> struct Outside<int64_t> { AFC_FN static int64_t value() { return 0; } };
template <> struct Outside<bool> { AFC_FN static bool value() { return false; } };

// An element of a captured tensor as T: float or double of any float type, int64_t of int32 and int64, bool of bool.
// The launch code has checked the type; few comparisons, so that no read becomes an indirect branch.
template <class T> AFC_FN T read_at(const afc_captured &tensor, int64_t at) {
  if (tensor.dtype > AFC_FLOAT32) return T(static_cast<const double *>(tensor.data)[at]);
  if (tensor.dtype == AFC_FLOAT32) return T(static_cast<const float *>(tensor.data)[at]);
  if (tensor.dtype == AFC_FLOAT16) return T(ptx::unpack_f16(static_cast<const uint16_t *>(tensor.data)[at]));
  return T(ptx::unpack_bf16(static_cast<const uint16_t *>(tensor.data)[at]));
}
template <> AFC_FN int64_t read_at<int64_t>(const afc_captured &tensor, int64_t at) {
  if (tensor.dtype == AFC_INT64) return static_cast<const int64_t *>(tensor.data)[at];
  return static_cast<const int32_t *>(tensor.data)[at];
}
template <> AFC_FN bool read_at<bool>(const afc_captured &tensor, int64_t at) {
  return static_cast<const bool *>(tensor.data)[at];
}

// An element of a captured tensor in the compute type; outside the tensor NaN, 0 or false.
template <class T, class... Index> AFC_FN T read(const afc_captured &tensor, Index... index) {
  const int64_t at = element_offset(tensor, index...);
  return at < 0 ? Outside<T>::value() : read_at<T>(tensor, at);
}

}  // namespace afc
