// SPDX-License-Identifier: Apache-2.0
//
// Bounds in place of numbers: interval arithmetic for the three-valued test of a mask, on every target. The generated
// function keep_box has the text of the mask over these types. The same rules as afc/masks/boxes.py: sound for every
// compute type, NaN and reads outside a tensor followed.
//
// Included where afc::max and afc::min of numbers are declared.
#ifndef AFC_BOUNDS_H
#define AFC_BOUNDS_H

#include "afc_run.h"

namespace afc {

// `may`: some element of the box may satisfy the condition; `must`: every element does.
struct Truth {
  bool may, must;
  AFC_MEMBER Truth(bool may_, bool must_) : may(may_), must(must_) {}
  AFC_MEMBER Truth(bool value) : may(value), must(value) {}
};

AFC_FN Truth operator&&(const Truth &a, const Truth &b) { return {a.may && b.may, a.must && b.must}; }
AFC_FN Truth operator||(const Truth &a, const Truth &b) { return {a.may || b.may, a.must || b.must}; }
AFC_FN Truth operator!(const Truth &a) { return {!a.must, !a.may}; }
AFC_FN Truth operator==(const Truth &a, const Truth &b) { return (a && b) || (!a && !b); }
AFC_FN Truth operator!=(const Truth &a, const Truth &b) { return !(a == b); }

// ---- numbers ------------------------------------------------------------------

constexpr double UNBOUNDED = __builtin_huge_val();
constexpr double LARGEST_EXACT = 9007199254740992.0;  // 2^53: integers up to here are exact
constexpr double INT_OVERFLOW = 4611686018427387904.0;    // 2^62: nothing is claimed beyond

// Integers in [lo, hi]. An overflow, or anything not known, is unbounded on both sides.
struct Ints {
  double lo, hi;
  AFC_MEMBER Ints(int64_t first, int64_t last) : Ints(outward(double(first), double(last))) {}
  AFC_MEMBER Ints(int64_t value) : Ints(value, value) {}
  AFC_MEMBER Ints(int value) : lo(value), hi(value) {}

  AFC_MEMBER static Ints anything() { return raw(-UNBOUNDED, UNBOUNDED); }
  AFC_MEMBER static Ints raw(double lo, double hi) {
    Ints x(0);
    x.lo = lo;
    x.hi = hi;
    return x;
  }
  // The result of an operation, from its bounds in arithmetic on doubles.
  AFC_MEMBER static Ints outward(double lo, double hi) {
    if (::fabs(lo) >= LARGEST_EXACT) lo = ::nextafter(lo, -UNBOUNDED);
    if (::fabs(hi) >= LARGEST_EXACT) hi = ::nextafter(hi, UNBOUNDED);
    return lo > -INT_OVERFLOW && hi < INT_OVERFLOW ? raw(lo, hi) : anything();
  }
  // Stored values, which may be as large as they like.
  AFC_MEMBER static Ints stored(double lo, double hi) {
    if (::fabs(lo) >= LARGEST_EXACT) lo = ::nextafter(lo, -UNBOUNDED);
    if (::fabs(hi) >= LARGEST_EXACT) hi = ::nextafter(hi, UNBOUNDED);
    return raw(lo, hi);
  }
  AFC_MEMBER bool finite() const { return lo > -UNBOUNDED && hi < UNBOUNDED; }
  AFC_MEMBER bool point() const { return lo == hi; }
};

AFC_FN double least(double a, double b, double c, double d) { return min(min(a, b), min(c, d)); }
AFC_FN double largest(double a, double b, double c, double d) { return max(max(a, b), max(c, d)); }
AFC_FN double product(double a, double b) { return a == 0 || b == 0 ? 0 : a * b; }

AFC_FN Ints operator+(const Ints &a, const Ints &b) { return Ints::outward(a.lo + b.lo, a.hi + b.hi); }
AFC_FN Ints operator-(const Ints &a) { return Ints::raw(-a.hi, -a.lo); }
AFC_FN Ints operator-(const Ints &a, const Ints &b) { return a + -b; }
AFC_FN Ints operator*(const Ints &a, const Ints &b) {
  const double p = product(a.lo, b.lo), q = product(a.lo, b.hi);
  const double r = product(a.hi, b.lo), s = product(a.hi, b.hi);
  return Ints::outward(least(p, q, r, s), largest(p, q, r, s));
}
AFC_FN Ints max(const Ints &a, const Ints &b) { return Ints::raw(max(a.lo, b.lo), max(a.hi, b.hi)); }
AFC_FN Ints min(const Ints &a, const Ints &b) { return Ints::raw(min(a.lo, b.lo), min(a.hi, b.hi)); }
AFC_FN Ints abs(const Ints &a) {
  const double low = ::fabs(a.lo), high = ::fabs(a.hi);
  return Ints::raw(a.lo <= 0 && a.hi >= 0 ? 0 : min(low, high), max(low, high));
}
AFC_FN double floor_quotient(double a, double b) {  // |a|, b below 2^53: the quotient may round up to an integer
  const double quotient = ::floor(a / b);
  return quotient * b > a ? quotient - 1 : quotient;
}
AFC_FN Ints floor_div(const Ints &a, const Ints &b) {
  const double bound = LARGEST_EXACT;
  if (!(b.lo > 0) || !(b.hi < bound) || !(a.lo > -bound) || !(a.hi < bound)) return Ints::anything();
  const double p = floor_quotient(a.lo, b.lo), q = floor_quotient(a.lo, b.hi);
  const double r = floor_quotient(a.hi, b.lo), s = floor_quotient(a.hi, b.hi);
  return Ints::raw(least(p, q, r, s), largest(p, q, r, s));
}
AFC_FN Ints floor_mod(const Ints &a, const Ints &b) {
  if (!(b.lo > 0) || !b.finite()) return Ints::anything();
  if (a.lo >= 0 && a.hi < b.lo) return a;
  const Ints quotient = floor_div(a, b);
  if (b.point() && quotient.finite() && quotient.point()) {
    return Ints::raw(a.lo - quotient.lo * b.lo, a.hi - quotient.lo * b.lo);
  }
  return Ints::raw(0, b.hi - 1);
}
AFC_FN Ints ipow(const Ints &a, int exponent) {
  Ints power(1);
  for (int k = 0; k < exponent; ++k) power = power * (exponent % 2 == 0 ? abs(a) : a);
  return power;
}

// Floats in [lo, hi], as elements compute them; `nan`: some may be NaN.
struct Reals {
  double lo, hi;
  bool nan;
  AFC_MEMBER Reals(double lo_, double hi_, bool nan_) : lo(lo_), hi(hi_), nan(nan_) {}
  AFC_MEMBER Reals(double value) : lo(value), hi(value), nan(false) {
    if (value != value) *this = anything();
  }
  // Integers as floats: rounding to float is monotone.
  AFC_MEMBER explicit Reals(const Ints &x)
      : lo(min(x.lo, double(float(x.lo)))), hi(max(x.hi, double(float(x.hi)))), nan(false) {}

  AFC_MEMBER static Reals anything() { return {-UNBOUNDED, UNBOUNDED, true}; }
  // The result of an operation, widened by more than it rounds in float or flushes to zero.
  AFC_MEMBER static Reals outward(double lo, double hi, bool nan) {
    constexpr double relative = 0x1p-22, absolute = 0x1p-120, top = 0x1.fffffep127 * (1 - relative);
    if (lo != lo || hi != hi) return anything();
    lo -= ::fabs(lo) * relative + absolute;
    hi += ::fabs(hi) * relative + absolute;
    if (lo != lo || hi != hi) return anything();
    return {lo < -top ? -UNBOUNDED : lo, hi > top ? UNBOUNDED : hi, nan};
  }
  AFC_MEMBER bool zero() const { return lo <= 0 && hi >= 0; }
  AFC_MEMBER bool infinite() const { return ::fabs(lo) == UNBOUNDED || ::fabs(hi) == UNBOUNDED; }
};

AFC_FN Reals operator+(const Reals &a, const Reals &b) {
  const bool opposite = (a.hi == UNBOUNDED && b.lo == -UNBOUNDED) || (a.lo == -UNBOUNDED && b.hi == UNBOUNDED);
  return Reals::outward(a.lo + b.lo, a.hi + b.hi, a.nan || b.nan || opposite);
}
AFC_FN Reals operator-(const Reals &a) { return {-a.hi, -a.lo, a.nan}; }
AFC_FN Reals operator-(const Reals &a, const Reals &b) { return a + -b; }
AFC_FN Reals operator*(const Reals &a, const Reals &b) {
  const double p = product(a.lo, b.lo), q = product(a.lo, b.hi);
  const double r = product(a.hi, b.lo), s = product(a.hi, b.hi);
  const bool undefined = (a.infinite() && b.zero()) || (b.infinite() && a.zero());
  return Reals::outward(least(p, q, r, s), largest(p, q, r, s), a.nan || b.nan || undefined);
}
AFC_FN Reals operator/(const Reals &a, const Reals &b) {
  if (b.zero() || b.infinite()) return Reals::anything();
  const double p = a.lo / b.lo, q = a.lo / b.hi, r = a.hi / b.lo, s = a.hi / b.hi;
  return Reals::outward(least(p, q, r, s), largest(p, q, r, s), a.nan || b.nan);
}
AFC_FN Reals max(const Reals &a, const Reals &b) { return {max(a.lo, b.lo), max(a.hi, b.hi), a.nan || b.nan}; }
AFC_FN Reals min(const Reals &a, const Reals &b) { return {min(a.lo, b.lo), min(a.hi, b.hi), a.nan || b.nan}; }
AFC_FN Reals abs(const Reals &a) {
  const double low = ::fabs(a.lo), high = ::fabs(a.hi);
  return {a.zero() ? 0 : min(low, high), max(low, high), a.nan};
}
AFC_FN Reals floor(const Reals &a) { return {::floor(a.lo), ::floor(a.hi), a.nan}; }
AFC_FN Reals ceil(const Reals &a) { return {::ceil(a.lo), ::ceil(a.hi), a.nan}; }
AFC_FN Ints to_int(const Reals &a) {
  if (a.nan || !(a.lo > -2147483648.0) || !(a.hi < 2147483648.0)) return Ints::anything();
  return Ints::raw(::trunc(a.lo), ::trunc(a.hi));
}

// ---- comparisons ----------------------------------------------------------------

// `NAN_IN`: one of the two may be NaN, which fails every comparison but !=.
#define AFC_COMPARISONS(Number, NAN_IN)                                            \
  AFC_FN Truth operator<(const Number &a, const Number &b) {                    \
    return {a.lo < b.hi, a.hi < b.lo && !(NAN_IN)};                                \
  }                                                                             \
  AFC_FN Truth operator<=(const Number &a, const Number &b) {                   \
    return {a.lo <= b.hi, a.hi <= b.lo && !(NAN_IN)};                              \
  }                                                                             \
  AFC_FN Truth operator==(const Number &a, const Number &b) {                   \
    return {a.lo <= b.hi && b.lo <= a.hi, a.lo == b.hi && a.hi == b.lo && !(NAN_IN)}; \
  }                                                                             \
  AFC_FN Truth operator>(const Number &a, const Number &b) { return b < a; }    \
  AFC_FN Truth operator>=(const Number &a, const Number &b) { return b <= a; }  \
  AFC_FN Truth operator!=(const Number &a, const Number &b) { return !(a == b); }
AFC_COMPARISONS(Ints, false)
AFC_COMPARISONS(Reals, a.nan || b.nan)
#undef AFC_COMPARISONS

AFC_FN Truth select(const Truth &c, const Truth &a, const Truth &b) {
  if (c.must || !c.may) return c.must ? a : b;
  return {a.may || b.may, a.must && b.must};
}
AFC_FN Ints select(const Truth &c, const Ints &a, const Ints &b) {
  if (c.must || !c.may) return c.must ? a : b;
  return Ints::raw(min(a.lo, b.lo), max(a.hi, b.hi));
}
AFC_FN Reals select(const Truth &c, const Reals &a, const Reals &b) {
  if (c.must || !c.may) return c.must ? a : b;
  return {min(a.lo, b.lo), max(a.hi, b.hi), a.nan || b.nan};
}

// ---- captured tensors -------------------------------------------------------------

// Least and largest of some stored values; NaN counts for neither.
struct Extent {
  double lo, hi;
  bool nan;

  AFC_MEMBER static Extent none() { return {UNBOUNDED, -UNBOUNDED, false}; }
  AFC_MEMBER void add(const Extent &x) {
    lo = min(lo, x.lo);
    hi = max(hi, x.hi);
    nan = nan || x.nan;
  }
};

AFC_FN Extent extent(int64_t x) {
  const Ints bounds = Ints::stored(double(x), double(x));
  return {bounds.lo, bounds.hi, false};
}
AFC_FN Extent extent(bool x) { return {double(x), double(x), false}; }
AFC_FN Extent extent(double x) { return x == x ? Extent{x, x, false} : Extent{UNBOUNDED, -UNBOUNDED, true}; }
AFC_FN Extent extent(float x) { return extent(double(x)); }

}  // namespace afc
#endif  // AFC_BOUNDS_H
