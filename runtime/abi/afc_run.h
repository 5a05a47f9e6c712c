// SPDX-License-Identifier: Apache-2.0
//
// Runs of indices: what generated code computes from the bounds of a mask. The same arithmetic as afc/masks/runs.py.
#ifndef AFC_RUN_H
#define AFC_RUN_H

#include "afc_abi.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define AFC_FN __device__ __forceinline__
#else
#define AFC_FN static inline
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define AFC_MEMBER __device__ __forceinline__
#else
#define AFC_MEMBER inline
#endif

// Half-open index ranges, begin <= full_begin <= full_end <= end. Outside [begin, end) nothing is kept; inside
// [full_begin, full_end) everything is.
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

#endif  // AFC_RUN_H
