// SPDX-License-Identifier: Apache-2.0
//
// The three-valued test of a mask on a box of queries x keys: what its reads of captured tensors may give, and the runs
// that are found with it. Numbers are in abi/afc_bounds.h; the same rules as afc/masks/tables.py.
#ifndef AFC_CPU_BOUNDS_HPP
#define AFC_CPU_BOUNDS_HPP

#include <math.h>

#include "element.hpp"
#include "walk.hpp"

#include "abi/afc_bounds.h"

namespace afc {

// ---- captured tensors -------------------------------------------------------------

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
