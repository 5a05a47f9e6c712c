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
#include "ptx/load_if.cuh"
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
  bool inside = true;
#pragma unroll
  for (int axis = 0; axis < int(sizeof...(index)); ++axis) {
    const int64_t position = tensor.size[axis] == 1 ? 0 : indices[axis];
    inside &= position >= 0 && position < tensor.size[axis];
    offset += position * tensor.stride[axis];
  }
  return inside ? offset : -1;
}

// Element `at` of a captured tensor as T (float or double of any float type, int64_t of int32 and int64, bool of bool), or
// NaN, 0, false where `at` is negative. The launch code has checked the type. No branch on it or on `at`, so that the
// reads of several elements are on their way at once.
template <class T> AFC_FN T read_at(const afc_captured &tensor, int64_t at) {
  const bool inside = at >= 0, wide = tensor.dtype >= AFC_FLOAT32, widest = tensor.dtype == AFC_FLOAT64;
  const int bytes = widest ? 8 : wide ? 4 : 2;
  const unsigned char *address = static_cast<const unsigned char *>(tensor.data) + at * bytes;
  const uint16_t first = ptx::load_u16_if(inside, address);
  const uint32_t low = first | static_cast<uint32_t>(ptx::load_u16_if(inside && wide, address + 2)) << 16;
  const uint32_t high = ptx::load_u32_if(inside && widest, address + 4);
  const float narrow = wide ? __uint_as_float(low)
                            : tensor.dtype == AFC_FLOAT16 ? ptx::unpack_f16(first) : ptx::unpack_bf16(first);
  const T value = widest ? T(__hiloint2double(static_cast<int>(high), static_cast<int>(low))) : T(narrow);
  return inside ? value : nan<T>();
}
template <> AFC_FN int64_t read_at<int64_t>(const afc_captured &tensor, int64_t at) {
  const bool inside = at >= 0, wide = tensor.dtype == AFC_INT64;
  const uint32_t *address = static_cast<const uint32_t *>(tensor.data) + (wide ? 2 * at : at);
  const uint32_t low = ptx::load_u32_if(inside, address), high = ptx::load_u32_if(inside && wide, address + 1);
  const uint32_t sign = wide ? high : static_cast<uint32_t>(static_cast<int32_t>(low) >> 31);
  return static_cast<int64_t>(static_cast<uint64_t>(sign) << 32 | low);
}
template <> AFC_FN bool read_at<bool>(const afc_captured &tensor, int64_t at) {
  return at >= 0 && static_cast<const bool *>(tensor.data)[at];
}

// An element of a captured tensor in the compute type; outside the tensor NaN, 0 or false.
template <class T, class... Index> AFC_FN T read(const afc_captured &tensor, Index... index) {
  return read_at<T>(tensor, element_offset(tensor, index...));
}

}  // namespace afc
