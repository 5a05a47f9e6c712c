// SPDX-License-Identifier: Apache-2.0
//
// The three-valued test of a mask on a box of queries x keys, by interval arithmetic: the generated function
// keep_box has the text of the mask, over bounds in place of numbers. The same rules as afc/masks/boxes.py and
// tables.py: sound for every compute type, NaN and reads outside a tensor followed.
#ifndef AFC_CPU_BOUNDS_HPP
#define AFC_CPU_BOUNDS_HPP

#include "abi/afc_run.h"
#include "element.hpp"
#include "walk.hpp"

namespace afc {

// `may`: some element of the box may satisfy the condition; `must`: every element does.
struct Truth {
  bool may, must;
  Truth(bool may_, bool must_) : may(may_), must(must_) {}
  Truth(bool value) : may(value), must(value) {}
};

AFC_FN Truth operator&&(const Truth &a, const Truth &b) { return {a.may && b.may, a.must && b.must}; }
AFC_FN Truth operator||(const Truth &a, const Truth &b) { return {a.may || b.may, a.must || b.must}; }
AFC_FN Truth operator!(const Truth &a) { return {!a.must, !a.may}; }
AFC_FN Truth operator==(const Truth &a, const Truth &b) { return (a && b) || (!a && !b); }
AFC_FN Truth operator!=(const Truth &a, const Truth &b) { return !(a == b); }

// ---- numbers ------------------------------------------------------------------

constexpr double UNBOUNDED = std::numeric_limits<double>::infinity();
constexpr double LARGEST_EXACT = 9007199254740992.0;  // 2^53: integers up to here are exact
constexpr double INT_OVERFLOW = 4611686018427387904.0;    // 2^62: nothing is claimed beyond

// Integers in [lo, hi]. An overflow, or anything not known, is unbounded on both sides.
struct Ints {
  double lo, hi;
  Ints(int64_t first, int64_t last) : Ints(outward(double(first), double(last))) {}
  Ints(int64_t value) : Ints(value, value) {}
  Ints(int value) : lo(value), hi(value) {}

  static Ints anything() { return raw(-UNBOUNDED, UNBOUNDED); }
  static Ints raw(double lo, double hi) {
    Ints x(0);
    x.lo = lo;
    x.hi = hi;
    return x;
  }
  // The result of an operation, from its bounds in arithmetic on doubles.
  static Ints outward(double lo, double hi) {
    if (std::fabs(lo) >= LARGEST_EXACT) lo = std::nextafter(lo, -UNBOUNDED);
    if (std::fabs(hi) >= LARGEST_EXACT) hi = std::nextafter(hi, UNBOUNDED);
    return lo > -INT_OVERFLOW && hi < INT_OVERFLOW ? raw(lo, hi) : anything();
  }
  // Stored values, which may be as large as they like.
  static Ints stored(double lo, double hi) {
    if (std::fabs(lo) >= LARGEST_EXACT) lo = std::nextafter(lo, -UNBOUNDED);
    if (std::fabs(hi) >= LARGEST_EXACT) hi = std::nextafter(hi, UNBOUNDED);
    return raw(lo, hi);
  }
  bool finite() const { return lo > -UNBOUNDED && hi < UNBOUNDED; }
  bool point() const { return lo == hi; }
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
  const double low = std::fabs(a.lo), high = std::fabs(a.hi);
  return Ints::raw(a.lo <= 0 && a.hi >= 0 ? 0 : min(low, high), max(low, high));
}
AFC_FN double floor_quotient(double a, double b) {  // |a|, b below 2^53: the quotient may round up to an integer
  const double quotient = std::floor(a / b);
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
  Reals(double lo_, double hi_, bool nan_) : lo(lo_), hi(hi_), nan(nan_) {}
  Reals(double value) : lo(value), hi(value), nan(false) {
    if (value != value) *this = anything();
  }
  // Integers as floats: rounding to float is monotone.
  explicit Reals(const Ints &x)
      : lo(min(x.lo, double(float(x.lo)))), hi(max(x.hi, double(float(x.hi)))), nan(false) {}

  static Reals anything() { return {-UNBOUNDED, UNBOUNDED, true}; }
  // The result of an operation, widened by more than it rounds in float or flushes to zero.
  static Reals outward(double lo, double hi, bool nan) {
    constexpr double relative = 0x1p-22, absolute = 0x1p-120, top = 0x1.fffffep127 * (1 - relative);
    if (lo != lo || hi != hi) return anything();
    lo -= std::fabs(lo) * relative + absolute;
    hi += std::fabs(hi) * relative + absolute;
    if (lo != lo || hi != hi) return anything();
    return {lo < -top ? -UNBOUNDED : lo, hi > top ? UNBOUNDED : hi, nan};
  }
  bool zero() const { return lo <= 0 && hi >= 0; }
  bool infinite() const { return std::fabs(lo) == UNBOUNDED || std::fabs(hi) == UNBOUNDED; }
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
  const double low = std::fabs(a.lo), high = std::fabs(a.hi);
  return {a.zero() ? 0 : min(low, high), max(low, high), a.nan};
}
AFC_FN Reals floor(const Reals &a) { return {std::floor(a.lo), std::floor(a.hi), a.nan}; }
AFC_FN Reals ceil(const Reals &a) { return {std::ceil(a.lo), std::ceil(a.hi), a.nan}; }
AFC_FN Ints to_int(const Reals &a) {
  if (a.nan || !(a.lo > -2147483648.0) || !(a.hi < 2147483648.0)) return Ints::anything();
  return Ints::raw(std::trunc(a.lo), std::trunc(a.hi));
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

  static Extent none() { return {UNBOUNDED, -UNBOUNDED, false}; }
  void add(const Extent &x) {
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

constexpr int EXTENT_BLOCK = 32;   // elements of the finest extents
constexpr int EXTENT_LEVELS = 12;  // level k: extents of 2^k blocks, from every block on
constexpr int EXACT_BOX = 64;      // elements of a box that are read rather than looked up

// A captured tensor in a mask, with the extents of ranges along one axis (none if axis is negative).
struct Table {
  const afc_captured *tensor;
  int axis;
  const Extent *extents;  // [other indices][level][block]

  int64_t blocks() const { return (tensor->size[axis] + EXTENT_BLOCK - 1) / EXTENT_BLOCK; }
};

template <class T> AFC_FN Extent read_extent(const afc_captured &tensor, const int64_t *index) {
  int64_t offset = 0;
  for (int d = 0; d < tensor.rank; ++d) offset += index[d] * tensor.stride[d];
  return extent(read_at<T>(tensor, offset));
}

// Fills the extents of the `row`-th choice of the other indices.
template <class T> AFC_FN void tabulate_row(const Table &table, int64_t row, Extent *extents) {
  const afc_captured &tensor = *table.tensor;
  const int64_t blocks = table.blocks();
  int64_t index[4] = {0, 0, 0, 0}, rest = row;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    if (d == table.axis) continue;
    index[d] = rest % tensor.size[d];
    rest /= tensor.size[d];
  }
  Extent *level = extents + row * blocks * EXTENT_LEVELS;
  for (int64_t k = 0; k < blocks; ++k) {
    Extent found = Extent::none();
    const int64_t last = min((k + 1) * EXTENT_BLOCK, tensor.size[table.axis]);
    for (index[table.axis] = k * EXTENT_BLOCK; index[table.axis] < last; ++index[table.axis]) {
      found.add(read_extent<T>(tensor, index));
    }
    level[k] = found;
  }
  for (int l = 1; l < EXTENT_LEVELS; ++l, level += blocks) {
    for (int64_t k = 0; k < blocks; ++k) {
      Extent found = level[k];
      found.add(level[min(k + (int64_t(1) << (l - 1)), blocks - 1)]);
      level[blocks + k] = found;
    }
  }
}

// Fills all extents of a table. A tensor that is larger than `capacity` allows for goes without.
template <class T> AFC_FN void tabulate(int threads, Table &table, Extent *extents, int64_t capacity) {
  const afc_captured &tensor = *table.tensor;
  int64_t rows = 1;
  for (int d = 0; d < tensor.rank; ++d) rows *= d == table.axis ? 1 : tensor.size[d];
  if (rows * table.blocks() * EXTENT_LEVELS > capacity) return;
  if (table.blocks() > 0) parallel_for(threads, rows, [&](int64_t row, int) { tabulate_row<T>(table, row, extents); });
  table.extents = extents;
}

// Of blocks first .. last - 1.
AFC_FN Extent look_up(const Table &table, int64_t row, int64_t first, int64_t last) {
  const int64_t blocks = table.blocks();
  const Extent *extents = table.extents + row * blocks * EXTENT_LEVELS;
  int level = 0;
  while (level + 1 < EXTENT_LEVELS && (int64_t(2) << level) <= last - first) ++level;
  const int64_t span = int64_t(1) << level;
  Extent found = extents[level * blocks + last - span];
  for (int64_t k = first; k + span < last; k += span) found.add(extents[level * blocks + k]);
  return found;
}

// Of the values in the box low .. high (both included), all inside the tensor; `known` is false where that
// would take too long.
template <class T>
AFC_FN Extent read_box(const Table &table, const int64_t *low, const int64_t *high, bool *known) {
  const afc_captured &tensor = *table.tensor;
  double count = 1, others = 1;
  int64_t row = 0;
  for (int d = 0; d < tensor.rank; ++d) {
    count *= double(high[d] - low[d] + 1);
    if (d == table.axis) continue;
    others *= double(high[d] - low[d] + 1);
    row = row * tensor.size[d] + low[d];
  }
  Extent found = Extent::none();
  *known = count <= EXACT_BOX || (table.extents != nullptr && others == 1);
  if (!*known) return found;
  int64_t begin[2] = {0, 0}, end[2] = {0, 0};  // what is read along the axis
  int axis = table.axis >= 0 ? table.axis : 0;
  if (tensor.rank > 0) {
    begin[0] = low[axis];
    end[0] = high[axis] + 1;
  }
  if (count > EXACT_BOX) {
    const int64_t first = (low[axis] + EXTENT_BLOCK - 1) / EXTENT_BLOCK;
    const bool whole = high[axis] + 1 == tensor.size[axis];
    const int64_t last = whole ? table.blocks() : (high[axis] + 1) / EXTENT_BLOCK;
    found.add(look_up(table, row, first, last));
    begin[1] = last * EXTENT_BLOCK;
    end[1] = high[axis] + 1;
    end[0] = first * EXTENT_BLOCK;
  }
  int64_t index[4] = {0, 0, 0, 0};
  for (int d = 0; d < tensor.rank; ++d) index[d] = low[d];
  if (tensor.rank == 0) found.add(read_extent<T>(tensor, index));
  for (bool more = tensor.rank > 0; more;) {
    for (int part = 0; part < 2; ++part) {
      for (index[axis] = begin[part]; index[axis] < end[part]; ++index[axis]) {
        found.add(read_extent<T>(tensor, index));
      }
    }
    more = false;
    for (int d = tensor.rank - 1; d >= 0 && !more; --d) {  // the next of the other indices
      if (d == axis) continue;
      more = index[d] < high[d];
      index[d] = more ? index[d] + 1 : low[d];
    }
  }
  return found;
}

AFC_FN Ints bounds_of(int64_t, const Extent &x, bool known, bool inside) {
  if (!known) return Ints::anything();
  return inside ? Ints::raw(x.lo, x.hi) : Ints::raw(min(x.lo, 0.0), max(x.hi, 0.0));
}
AFC_FN Truth bounds_of(bool, const Extent &x, bool known, bool inside) {
  if (!known) return {true, false};
  return {x.hi > 0, inside && x.lo > 0};
}
template <class Real> AFC_FN Reals bounds_of(Real, const Extent &x, bool known, bool inside) {
  if (!known || x.lo > x.hi) return Reals::anything();
  return {x.lo, x.hi, x.nan || !inside};
}

// Bounds of table[indices...] as T (Real, int64_t or bool); what lies outside the tensor reads as NaN, 0 or
// false.
template <class T, class... Index> AFC_FN auto bounds_at(const Table &table, const Index &...indices) {
  const Ints index[sizeof...(indices) + 1] = {Ints(indices)..., Ints(0)};
  const afc_captured &tensor = *table.tensor;
  int64_t low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
  bool inside = true, partly = true;
  for (int d = 0; d < int(sizeof...(indices)); ++d) {
    const double last = double(tensor.size[d] - 1);
    inside = inside && index[d].lo >= 0 && index[d].hi <= last;
    partly = partly && index[d].hi >= 0 && index[d].lo <= last;
    low[d] = int64_t(max(index[d].lo, 0.0));
    high[d] = int64_t(min(index[d].hi, last));
    if (!partly) break;
  }
  bool known = true;
  const Extent found = partly ? read_box<T>(table, low, high, &known) : Extent::none();
  // Nothing inside: the extent is empty, and what is joined to it decides.
  return bounds_of(T(), found, known, inside);
}

// ---- runs -----------------------------------------------------------------------

// Runs in memory, in the order in which they are found.
struct RunList {
  Run *run;
  int count;

  // Appends a range behind all others; a run is a partial range, a full one, a partial one.
  void add(int first, int last, bool full) {
    if (count > 0 && run[count - 1].end == first) {
      Run &back = run[count - 1];
      const bool has_full = back.full_begin < back.full_end;
      if (!full) {
        back.end = last;
        if (!has_full) back.full_begin = back.full_end = last;
        return;
      }
      if (!has_full || back.full_end == first) {
        back.full_begin = has_full ? back.full_begin : first;
        back.full_end = back.end = last;
        return;
      }
    }
    run[count++] = full ? Run{first, first, last, last} : Run{first, last, last, last};
  }
};

// Appends the runs of tiles first .. first + span - 1, found by test(begin, end) of index ranges: from coarse to
// fine, so that the time grows with the number of runs.
template <class Test>
void find_runs(RunList &runs, const Test &test, int64_t first, int64_t span, int tile, int64_t length) {
  const int64_t begin = first * tile, end = min((first + span) * tile, length);
  if (begin >= length) return;
  const Truth found = test(begin, end);
  if (!found.may) return;
  if (found.must || span == 1) return runs.add(int(begin), int(end), found.must);
  for (int64_t k = 0; k < span; k += span / 4) find_runs(runs, test, first + k, span / 4, tile, length);
}

// Runs of all tiles of an axis of `length` indices.
template <class Test> AFC_FN RunList runs_of(Run *memory, int tile, int64_t length, const Test &test) {
  RunList runs{memory, 0};
  int64_t span = 1;
  while (span * tile < length) span *= 4;
  find_runs(runs, test, 0, span, tile, length);
  return runs;
}

// The part of the runs below index `end`; some may become empty.
AFC_FN RunList run_below(const RunList &runs, int64_t end) {
  for (int k = 0; k < runs.count; ++k) runs.run[k] = run_below(runs.run[k], end);
  return runs;
}

template <class Visit> AFC_FN void walk(const RunList &runs, int tile, Visit visit) {
  for (int k = 0; k < runs.count; ++k) walk(runs.run[k], tile, visit);
}

}  // namespace afc
#endif  // AFC_CPU_BOUNDS_HPP
