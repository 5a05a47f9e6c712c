// SPDX-License-Identifier: Apache-2.0
//
// The plan pass: runs of a tile, found by the three-valued test of a mask from coarse boxes to single tiles. One warp
// works on one tile; 32 boxes are tested at once, and only those that the test leaves open are cut into 32. The same
// runs as afc/masks/stored.py.
#pragma once
#include "stored_walk.cuh"

#include "mask_tables.cuh"

namespace tile {

// Writes the runs of one tile in their order. All lanes hold the same; lane 0 writes. A run behind MOST_RUNS closes the
// smallest gap between two others: its tiles are then visited as partial ones.
struct RunWriter {
  int4 *row;
  int count = 0, visited = 0, full = 0;
  int4 back = {0, 0, 0, 0};  // the last run

  AFC_FN explicit RunWriter(int4 *row_) : row(row_) {}

  // Tiles first .. last - 1, behind all others.
  AFC_FN void add(int first, int last, bool all_kept) {
    visited += last - first;
    full += all_kept ? last - first : 0;
    if (count > 0 && back.w == first) {
      const bool has_full = back.y < back.z;
      if (!all_kept) {
        back.w = last;
        if (!has_full) back.y = back.z = last;
        return;
      }
      if (!has_full || back.z == first) {
        back.y = has_full ? back.y : first;
        back.z = back.w = last;
        return;
      }
    }
    if (count > 0) put(count, back);
    if (count == MOST_RUNS) close_gap();
    ++count;
    back = all_kept ? int4{first, first, last, last} : int4{first, last, last, last};
  }

  AFC_FN void finish() {
    if (count > 0) put(count, back);
    put(0, {count, visited - full, visited, 0});
  }

 private:
  AFC_FN void put(int at, const int4 &run) {
    if (lane_index() == 0) row[at] = run;
  }

  AFC_FN static int4 joined(const int4 &a, const int4 &b) {
    const bool first = a.z - a.y >= b.z - b.y;
    const int4 kept = first ? a : b;
    return kept.y < kept.z ? int4{a.x, kept.y, kept.z, b.w} : int4{a.x, b.w, b.w, b.w};
  }

  AFC_FN void close_gap() {
    __syncwarp();
    const int lane = static_cast<int>(lane_index());
    int4 runs[2], after[2];
    uint32_t smallest = ~0u;  // gap and its place
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = lane + half * WARP;
      runs[half] = row[1 + min(k, MOST_RUNS - 1)];
      after[half] = row[1 + min(k + 1, MOST_RUNS - 1)];
      if (k + 1 < MOST_RUNS) smallest = min(smallest, uint32_t(after[half].x - runs[half].w) * RUN_ROW + k);
    }
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
      smallest = min(smallest, __shfl_xor_sync(0xffffffffu, smallest, distance));
    }
    const int place = static_cast<int>(smallest % RUN_ROW);
    int lost = 0;
    __syncwarp();  // all lanes have read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = lane + half * WARP;
      if (k == place) {
        lost = min(runs[half].z - runs[half].y, after[half].z - after[half].y);
        runs[half] = joined(runs[half], after[half]);
      }
      if (k < MOST_RUNS - 1) row[1 + k] = k <= place ? runs[half] : after[half];
    }
    __syncwarp();
    visited += static_cast<int>(smallest / RUN_ROW);
    full -= __shfl_sync(0xffffffffu, lost, place % WARP);
    --count;
  }
};

// Finds the runs of one tile: test(first, last) of ranges of indices of the other axis, which has `length` of them in
// tiles of `size`. `full`: whether tiles may go without an element test.
template <class Test>
AFC_FN void find_runs(RunWriter &runs, const Test &test, int length, int size, bool full) {
  const int lane = static_cast<int>(lane_index());
  const int tiles = ceil_div(length, size), whole = length / size;
  int span = 1, level = 0;  // tiles of a box
  for (; span * WARP < tiles; span *= WARP) ++level;
  const int top = level;
  int base = 0;                             // first tile of the 32 boxes
  uint32_t open_above = 0, kept_above = 0;  // of the level with the lane's number: what is left to do
  uint32_t open = 0, kept = 0;              // boxes that are left, boxes of which all is kept
  bool tested = false;
  while (true) {
    if (!tested) {
      const int first = base + lane * span, last = min(first + span, tiles);
      afc::Truth found(false);
      if (first < tiles) found = test(first * size, min(last * size, length) - 1);
      __syncwarp();
      open = __ballot_sync(0xffffffffu, found.may);
      kept = __ballot_sync(0xffffffffu, found.may && found.must && last <= whole);
      tested = true;
    }
    if (open == 0) {
      if (level == top) return;
      span *= WARP;
      ++level;
      base -= base % (span * WARP);
      open = __shfl_sync(0xffffffffu, open_above, level);
      kept = __shfl_sync(0xffffffffu, kept_above, level);
      continue;
    }
    const int k = __ffs(open) - 1;
    const bool all_kept = (kept >> k & 1) != 0;
    const int first = base + k * span;
    if (all_kept || span == 1) {
      const uint32_t other = ~((all_kept ? kept : open & ~kept) >> k);  // boxes of another kind, from box k on
      const int boxes = min(other == 0 ? WARP : __ffs(other) - 1, WARP - k);
      runs.add(first, min(first + boxes * span, tiles), all_kept && full);
      open &= ~((boxes == WARP ? ~0u : (1u << boxes) - 1) << k);
      continue;
    }
    open &= ~(1u << k);
    if (lane == level) {
      open_above = open;
      kept_above = kept;
    }
    span /= WARP;
    --level;
    base = first;
    tested = false;
  }
}

}  // namespace tile
