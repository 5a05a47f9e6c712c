// SPDX-License-Identifier: Apache-2.0
//
// Runs of indices: what generated code computes from the bounds of a mask. The same arithmetic as afc/masks/runs.py.
#ifndef AFC_RUN_H
#define AFC_RUN_H

#include "afc_abi.h"

#ifndef AFC_FN  // of a function
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define AFC_FN __device__ __forceinline__
#else
#define AFC_FN static inline
#endif
#endif

#ifndef AFC_MEMBER  // of a member of a structure; the headers of the CPU define AFC_FN alone
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define AFC_MEMBER __device__ __forceinline__
#else
#define AFC_MEMBER inline
#endif
#endif

// Half-open index ranges, begin <= full_begin <= full_end <= end. Inside [full_begin, full_end) everything is kept;
// what is kept lies in the ranges [begin, end) of one or more runs, ordered and disjoint.
struct Run {
  int begin, full_begin, full_end, end;
};

// Intersection of ranges of positions: where something may be kept (outer) and where all is kept (full).
struct Limits {
  int64_t begin, full_begin, full_end, end;
  int64_t origin;

  AFC_MEMBER Limits(int64_t origin_, int64_t size)
      : begin(origin_), full_begin(origin_), full_end(origin_ + size), end(origin_ + size), origin(origin_) {}

  // An upper bound that ranges over [smallest, largest].
  AFC_MEMBER void at_most(int64_t smallest, int64_t largest) {
    if (largest + 1 < end) end = largest + 1;
    if (smallest + 1 < full_end) full_end = smallest + 1;
  }

  // A lower bound that ranges over [smallest, largest].
  AFC_MEMBER void at_least(int64_t smallest, int64_t largest) {
    if (smallest > begin) begin = smallest;
    if (largest > full_begin) full_begin = largest;
  }

  // The same bounds counted in steps: j / step, rounded down, is at most or at least ...
  AFC_MEMBER void at_most(int64_t smallest, int64_t largest, int64_t step) {
    at_most((smallest + 1) * step - 1, (largest + 1) * step - 1);
  }
  AFC_MEMBER void at_least(int64_t smallest, int64_t largest, int64_t step) {
    at_least(smallest * step, largest * step);
  }

  // A condition on the other axis that holds for some, or for every, element.
  AFC_MEMBER void only_if(bool some, bool every) {
    if (!some) end = begin;
    if (!every) full_end = full_begin;
  }

  // The run in index space; `elements`: each element must be tested, so no tile is full.
  AFC_MEMBER Run run(bool elements) const {
    if (end <= begin) return Run{0, 0, 0, 0};
    const int first = int(begin - origin), last = int(end - origin);
    if (elements || full_end <= full_begin) return Run{first, last, last, last};
    return Run{first, int(full_begin - origin), int(full_end - origin), last};
  }
};

// At most N half-open ranges, in order of their beginnings.
template <int N> struct Ranges {
  int count, begin[N], end[N];

  AFC_MEMBER void add(int first, int last) {
    if (first >= last) return;
    int k = count++;
    for (; k > 0 && begin[k - 1] > first; --k) {
      begin[k] = begin[k - 1];
      end[k] = end[k - 1];
    }
    begin[k] = first;
    end[k] = last;
  }

  // Overlapping and touching ranges become one.
  AFC_MEMBER void join() {
    int kept = 0;
    for (int k = 1; k < count; ++k) {
      if (begin[k] > end[kept]) {
        ++kept;
        begin[kept] = begin[k];
        end[kept] = end[k];
      } else if (end[k] > end[kept]) {
        end[kept] = end[k];
      }
    }
    if (count > 0) count = kept + 1;
  }
};

// The union of N runs as runs, ordered and disjoint.
template <int N> struct Runs {
  int count;
  Run run[N];
  Ranges<N> outer, full;

  AFC_MEMBER void clear() { count = outer.count = full.count = 0; }

  AFC_MEMBER void add(const Run &part) {
    outer.add(part.begin, part.end);
    full.add(part.full_begin, part.full_end);
  }

  // Tiles start at multiples of `grid`, so that no two runs touch one tile. Where full parts of several runs lie in
  // one range, the range is cut before the second one.
  AFC_MEMBER void merge(int grid, int length) {
    full.join();
    for (int k = 0; k < outer.count; ++k) {
      const int end = (outer.end[k] + grid - 1) / grid * grid;
      outer.begin[k] = outer.begin[k] / grid * grid;
      outer.end[k] = end < length ? end : length;
    }
    outer.join();
    int f = 0;
    for (int k = 0; k < outer.count; ++k) {
      int begin = outer.begin[k], first = count;
      const int end = outer.end[k];
      for (; f < full.count && full.begin[f] < end; ++f) {
        const int full_begin = (full.begin[f] + grid - 1) / grid * grid, full_end = full.end[f] / grid * grid;
        if (full_begin >= full_end) continue;
        run[count++] = Run{begin, full_begin, full_end, full_end};
        begin = full_end;
      }
      if (count == first) {
        run[count++] = Run{begin, end, end, end};
      } else {
        run[count - 1].end = end;
      }
    }
  }
};

#endif  // AFC_RUN_H
