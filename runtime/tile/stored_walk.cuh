// SPDX-License-Identifier: Apache-2.0
//
// Stored runs: what the plan kernel writes for each tile of one axis, and how the other kernels walk over it.
//
// A tile has RUN_ROW entries: {runs, partial tiles, all tiles, 0}, then its runs {first, full_first, full_last, last} in
// tiles of the other axis, ordered and disjoint; the tiles from full_first to full_last - 1 need no element test.
#pragma once
#include "walk.cuh"

namespace tile {

constexpr int RUN_ROW = 64, MOST_RUNS = RUN_ROW - 1;

// The tiles of a row for each of `members` heads: all partial tiles of all members, then all full ones. For shared
// memory. One thread reads the runs, two steps ahead of their use, so that nobody waits for them. The usual case, one run
// of one member, is a formula of the step.
struct StoredWalk {
  struct Position {
    int member, tile;
    int segment, end;  // of the tiles up to `end`: 2 k + part of run k, or -1 - k for its full tiles
  };

  const int4 *row;  // of member 0
  int64_t pitch;    // from the row of one member to that of the next, 0 where all share one
  int members, partial, count;
  bool single;
  Walk alone;  // where single
  Position positions[4];

  AFC_FN void set(const int4 *row_, int64_t pitch_, int members_) {
    row = row_;
    pitch = pitch_;
    members = members_;
    partial = count = 0;
    for (int member = 0; member < members; ++member) {
      const int4 head = row[member * pitch];
      partial += head.y;
      count += head.z;
    }
    single = members == 1 && row->x == 1;
    if (single) {
      const int4 run = row[1];
      alone = {run.x, run.y, run.z, run.y - run.x, partial, count};
    } else {
      positions[0] = seek(0, 0, false);
      positions[1] = next(positions[0]);
    }
  }

  // At the beginning of a step, by the thread that called set(); the others see it after the next barrier.
  AFC_FN void advance(int step) {
    if (!single) positions[(step + 2) & 3] = next(positions[(step + 1) & 3]);
  }

  // Of this step and of the next one.
  AFC_FN Position position(int step) const { return single ? Position{0, alone.tile(step), 0, 0} : positions[step & 3]; }
  AFC_FN int tile(int step) const { return single ? alone.tile(step) : positions[step & 3].tile; }
  AFC_FN int tile(const Position &p) const { return p.tile; }

 private:
  AFC_FN Position next(Position p) const {
    if (++p.tile < p.end) return p;
    return p.segment >= 0 ? seek(p.member, p.segment + 1, false) : seek(p.member, -p.segment, true);
  }

  // The first segment with a tile from a segment on (of full tiles: from a run on).
  AFC_FN Position seek(int member, int from, bool full) const {
    for (; member < members; ++member, from = 0) {
      const int4 *runs = row + member * pitch;
      const int end = full ? runs->x : 2 * runs->x;
      for (; from < end; ++from) {
        const int4 run = runs[1 + (full ? from : from / 2)];
        const int first = full ? run.y : from % 2 == 0 ? run.x : run.z;
        const int last = full ? run.z : from % 2 == 0 ? run.y : run.w;
        if (first < last) return {member, first, full ? -1 - from : from, last};
      }
      if (!full && member == members - 1) {
        full = true;
        member = -1;
      }
    }
    return {0, 0, 0, 0};  // behind the last step
  }
};

// What a walk says of its steps, without reading shared memory where it is a formula. After the barrier behind set().
struct WalkInRegisters {
  const StoredWalk &stored;
  bool single;
  Walk alone;
  int partial, count;

  AFC_FN explicit WalkInRegisters(const StoredWalk &walk)
      : stored(walk), single(walk.single), alone(walk.alone), partial(walk.partial), count(walk.count) {}

  AFC_FN int tile(int step) const { return single ? alone.tile(step) : stored.tile(step); }
};

}  // namespace tile
