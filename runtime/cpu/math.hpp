// SPDX-License-Identifier: Apache-2.0
//
// Elementary functions of scores, masks and rotations on the CPU, for float and double.
//
// exp, exp2, log, tanh and sigmoid have no branch, no table and no call, so a loop over the lanes of a tile
// that uses them becomes vector code. Each reduces its argument with fused multiply-adds and evaluates one
// polynomial (least maximum error by interpolation at Chebyshev nodes). Errors, in units in the last place,
// are below 1.5 (exp, exp2, log) and 3 (tanh, sigmoid); NaN goes through, infinities and subnormal results
// are exact in kind.
#ifndef AFC_CPU_MATH_HPP
#define AFC_CPU_MATH_HPP

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "abi/afc_random.h"

namespace afc {

// ---- constants and bits -------------------------------------------------------

template <class T> AFC_FN constexpr T infinity() { return std::numeric_limits<T>::infinity(); }
template <class T> AFC_FN constexpr T minus_infinity() { return -std::numeric_limits<T>::infinity(); }
template <class T> AFC_FN constexpr T nan() { return std::numeric_limits<T>::quiet_NaN(); }

constexpr double LOG2_E = 1.4426950408889634074;

// The parts of a binary floating-point format that the functions below need.
template <class T> struct Ieee;
template <> struct Ieee<float> {
  using Bits = uint32_t;
  static constexpr int mantissa = 23;
  static constexpr Bits bias = 127;
  static constexpr float round = 12582912.0f;  // 1.5 * 2^23: x + round ends in the nearest integer
  static constexpr float exp2_low = -151.0f, exp2_high = 129.0f;  // beyond: 0 and infinity
  static constexpr float exp2_normal = -126.0f;                   // least exponent of a normal number
  static constexpr float tanh_high = 20.0f;                       // tanh(x) rounds to 1 for 2x beyond it
  static constexpr float ln2_high = 0.693147182464599609375f, ln2_low = -1.904654323148236e-9f;
};
template <> struct Ieee<double> {
  using Bits = uint64_t;
  static constexpr int mantissa = 52;
  static constexpr Bits bias = 1023;
  static constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double exp2_low = -1077.0, exp2_high = 1025.0;
  static constexpr double exp2_normal = -1022.0;
  static constexpr double tanh_high = 45.0;
  static constexpr double ln2_high = 0.69314718055994528623, ln2_low = 2.3190468138462995584e-17;
};

template <class T> AFC_FN typename Ieee<T>::Bits to_bits(T x) {
  typename Ieee<T>::Bits bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

template <class T> AFC_FN T from_bits(typename Ieee<T>::Bits bits) {
  T x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// 2^n, where `rounded` is n + Ieee<T>::round and 2^n is a normal number.
template <class T> AFC_FN T power_of_two(T rounded) {
  return from_bits<T>((to_bits(rounded) + Ieee<T>::bias) << Ieee<T>::mantissa);
}

// p * 2^n with one rounding, also where the result is subnormal or overflows: 2^n is applied as two factors.
template <class T> AFC_FN T scale(T p, T n) {
  const T half = n * T(0.5) + Ieee<T>::round;
  const T rest = (n - (half - Ieee<T>::round)) + Ieee<T>::round;
  return p * power_of_two(half) * power_of_two(rest);
}

// x within [low, high]; NaN stays NaN.
template <class T> AFC_FN T clamp(T x, T low, T high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// ---- polynomials --------------------------------------------------------------

// 2^r for |r| <= 1/2.
AFC_FN float exp2_polynomial(float r) {
  float p = 0.0001545316295f;
  p = std::fma(p, r, 0.001339086336f);
  p = std::fma(p, r, 0.009618082557f);
  p = std::fma(p, r, 0.05550357114f);
  p = std::fma(p, r, 0.2402265076f);
  p = std::fma(p, r, 0.693147188f);
  return std::fma(p, r, 1.0f);
}

AFC_FN double exp2_polynomial(double r) {
  double p = 2.57293241773623042e-11;
  p = std::fma(p, r, 4.45581790833606449e-10);
  p = std::fma(p, r, 7.05489730415549928e-9);
  p = std::fma(p, r, 1.01780570877339411e-7);
  p = std::fma(p, r, 1.32154868087055628e-6);
  p = std::fma(p, r, 0.0000152527338415567726);
  p = std::fma(p, r, 0.000154035303933707334);
  p = std::fma(p, r, 0.00133335581464064707);
  p = std::fma(p, r, 0.00961812910762847949);
  p = std::fma(p, r, 0.055504108664821627);
  p = std::fma(p, r, 0.240226506959100712);
  p = std::fma(p, r, 0.693147180559945309);
  return std::fma(p, r, 1.0);
}

// e^r - 1 for |r| <= ln(2)/2, without cancellation.
AFC_FN float expm1_polynomial(float r) {
  float q = 0.001392618359f;
  q = std::fma(q, r, 0.008363179053f);
  q = std::fma(q, r, 0.04166655462f);
  q = std::fma(q, r, 0.1666657699f);
  q = std::fma(q, r, 0.5f);
  return std::fma(r * r, q, r);
}

AFC_FN double expm1_polynomial(double r) {
  double q = 2.51003854955103191e-8;
  q = std::fma(q, r, 2.76200884454097482e-7);
  q = std::fma(q, r, 2.75572684599970648e-6);
  q = std::fma(q, r, 0.0000248015212959543751);
  q = std::fma(q, r, 0.000198412698630536169);
  q = std::fma(q, r, 0.00138888889172137169);
  q = std::fma(q, r, 0.00833333333333006183);
  q = std::fma(q, r, 0.0416666666666241279);
  q = std::fma(q, r, 0.166666666666666675);
  q = std::fma(q, r, 0.500000000000000102);
  return std::fma(r * r, q, r);
}

// (2 atanh(s) / s - 2) / s^2 as a function of z = s^2, for s = (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)].
AFC_FN float log_polynomial(float z) {
  float p = 0.2333161447f;
  p = std::fma(p, z, 0.2855077863f);
  p = std::fma(p, z, 0.4000012221f);
  return std::fma(p, z, 0.6666666655f);
}

AFC_FN double log_polynomial(double z) {
  double p = 0.130880348509275538;
  p = std::fma(p, z, 0.132686383692668239);
  p = std::fma(p, z, 0.153862447376216666);
  p = std::fma(p, z, 0.181817955475211362);
  p = std::fma(p, z, 0.222222223925810451);
  p = std::fma(p, z, 0.28571428570799785);
  p = std::fma(p, z, 0.400000000000008832);
  return std::fma(p, z, 0.666666666666666665);
}

// ---- exponentials -------------------------------------------------------------

template <class T> AFC_FN T exp2(T x) {
  x = clamp(x, Ieee<T>::exp2_low, Ieee<T>::exp2_high);
  const T n = (x + Ieee<T>::round) - Ieee<T>::round;
  return scale(exp2_polynomial(x - n), n);
}

// exp2 of a softmax weight: x <= 0 up to rounding. Exactly 0 for -infinity and where 2^x is not a normal
// number.
template <class T> AFC_FN T exp2_weight(T x) {
  const T rounded = x + Ieee<T>::round;
  const T p = exp2_polynomial(x - (rounded - Ieee<T>::round)) * power_of_two(rounded);
  return x < Ieee<T>::exp2_normal ? T(0) : p;
}

template <class T> AFC_FN T exp(T x) {
  x = clamp(x, T(0.6931471805599453) * Ieee<T>::exp2_low, T(0.6931471805599453) * Ieee<T>::exp2_high);
  const T n = std::fma(x, T(LOG2_E), Ieee<T>::round) - Ieee<T>::round;
  const T r = std::fma(-n, Ieee<T>::ln2_low, std::fma(-n, Ieee<T>::ln2_high, x));
  return scale(T(1) + expm1_polynomial(r), n);
}

template <class T> AFC_FN T tanh(T x) {
  T y = T(2) * std::fabs(x);
  y = y > Ieee<T>::tanh_high ? Ieee<T>::tanh_high : y;
  const T rounded = std::fma(y, T(LOG2_E), Ieee<T>::round);
  const T n = rounded - Ieee<T>::round;
  const T r = std::fma(-n, Ieee<T>::ln2_low, std::fma(-n, Ieee<T>::ln2_high, y));
  const T power = power_of_two(rounded);
  const T e = std::fma(power, expm1_polynomial(r), power - T(1));  // exp(2|x|) - 1, accurate near 0
  return std::copysign(e / (e + T(2)), x);
}

template <class T> AFC_FN T sigmoid(T x) { return T(1) / (T(1) + exp(-x)); }

// ---- logarithm ----------------------------------------------------------------

// log(x): -infinity at 0, NaN below. x = m 2^e with m in [sqrt(1/2), sqrt(2)) is taken apart in its bits.
template <class T> AFC_FN T log(T x) {
  using Bits = typename Ieee<T>::Bits;
  constexpr int mantissa = Ieee<T>::mantissa;
  const Bits one_over_root_half = (Ieee<T>::bias << mantissa) - to_bits(T(0.70710678118654752440));
  const bool subnormal = x < std::numeric_limits<T>::min();
  const Bits bits = to_bits(subnormal ? x * T(Bits(1) << mantissa) : x);
  const Bits exponent = (bits + one_over_root_half) >> mantissa;  // e + bias
  const T m = from_bits<T>(bits - ((exponent - Ieee<T>::bias) << mantissa));
  const T biased = from_bits<T>(to_bits(Ieee<T>::round) + exponent) - Ieee<T>::round;
  const T e = biased - T(Ieee<T>::bias) - (subnormal ? T(mantissa) : T(0));

  const T f = m - T(1);
  const T s = f / (T(2) + f);
  const T half_square = T(0.5) * f * f;
  const T tail = half_square + s * s * log_polynomial(s * s);
  const T log_m = f - (half_square - std::fma(s, tail, e * Ieee<T>::ln2_low));
  T y = std::fma(e, Ieee<T>::ln2_high, log_m);
  y = x > std::numeric_limits<T>::max() ? x : y;
  y = x == T(0) ? minus_infinity<T>() : y;
  return x >= T(0) ? y : nan<T>();
}

// ---- functions of the C++ library ---------------------------------------------

AFC_FN float sin(float x) { return std::sin(x); }
AFC_FN double sin(double x) { return std::sin(x); }
AFC_FN float cos(float x) { return std::cos(x); }
AFC_FN double cos(double x) { return std::cos(x); }
AFC_FN float pow(float x, float y) { return std::pow(x, y); }
AFC_FN double pow(double x, double y) { return std::pow(x, y); }
template <class T> AFC_FN T sqrt(T x) { return std::sqrt(x); }
template <class T> AFC_FN T rsqrt(T x) { return T(1) / std::sqrt(x); }
template <class T> AFC_FN T floor(T x) { return std::floor(x); }
template <class T> AFC_FN T ceil(T x) { return std::ceil(x); }

// ---- selections and integers --------------------------------------------------

AFC_FN float abs(float x) { return std::fabs(x); }
AFC_FN double abs(double x) { return std::fabs(x); }
AFC_FN int abs(int x) { return x < 0 ? -x : x; }
AFC_FN int64_t abs(int64_t x) { return x < 0 ? -x : x; }

// The larger and the smaller argument; NaN if either is. A tie goes to the first.
template <class T, class U> AFC_FN std::common_type_t<T, U> max(T a, U b) {
  return a >= b || a != a ? std::common_type_t<T, U>(a) : std::common_type_t<T, U>(b);
}
template <class T, class U> AFC_FN std::common_type_t<T, U> min(T a, U b) {
  return a <= b || a != a ? std::common_type_t<T, U>(a) : std::common_type_t<T, U>(b);
}

// Quotient and remainder rounded towards minus infinity; b > 0.
template <class T, class U> AFC_FN std::common_type_t<T, U> floor_div(T a, U b) {
  return a / b - (a % b < 0);
}
template <class T, class U> AFC_FN std::common_type_t<T, U> floor_mod(T a, U b) {
  const std::common_type_t<T, U> rest = a % b;
  return rest < 0 ? rest + b : rest;
}

// base^exponent for a small exponent >= 0.
template <class T, class U> AFC_FN T ipow(T base, U exponent) {
  T product = 1;
  for (U factor = 0; factor < exponent; ++factor) product *= base;
  return product;
}

}  // namespace afc
#endif  // AFC_CPU_MATH_HPP
