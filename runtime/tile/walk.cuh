// SPDX-License-Identifier: Apache-2.0
//
// Which tiles a work item visits, and which work item a CTA is.
#pragma once
#include "device.cuh"

namespace tile {

// The tiles of a run: first those in which elements must be tested, then the full ones. The order is free because
// softmax and sums are; each kind has a loop of its own so that the loop over full tiles has no test at all.
struct Walk {
  int first, full_first, full_last;  // tile indices; full tiles are [full_first, full_last)
  int partial_before, partial, count;

  AFC_FN static Walk of(const Run &run, int size) {
    Walk walk;
    const bool empty = run.begin >= run.end;
    const int last = empty ? 0 : ceil_div(run.end, size);
    walk.first = empty ? 0 : run.begin / size;
    walk.full_first = max(ceil_div(run.full_begin, size), walk.first);
    walk.full_last = min(run.full_end / size, last);
    if (walk.full_last <= walk.full_first) walk.full_first = walk.full_last = last;
    walk.partial_before = walk.full_first - walk.first;
    walk.partial = walk.partial_before + (last - walk.full_last);
    walk.count = last - walk.first;
    return walk;
  }

  AFC_FN int tile(int step) const {
    if (step < partial_before) return first + step;
    return step < partial ? full_last + (step - partial_before) : full_first + (step - partial);
  }
};

// The tiles of several runs, no two of which touch one tile: the partial ones of all, then the full ones. For shared
// memory, as it is indexed.
template <int N> struct RunsWalk {
  Walk walks[N];
  int partial, count;

  AFC_FN void set(const Runs<N> &runs, int size) {
    partial = count = 0;
    for (int k = 0; k < N; ++k) {
      walks[k] = Walk::of(k < runs.count ? runs.run[k] : Run{0, 0, 0, 0}, size);
      partial += walks[k].partial;
      count += walks[k].count;
    }
  }

  AFC_FN int tile(int step) const {
    const bool full = step >= partial;
    int rest = full ? step - partial : step, k = 0;
    for (; k < N - 1; ++k) {
      const int own = full ? walks[k].count - walks[k].partial : walks[k].partial;
      if (rest < own) break;
      rest -= own;
    }
    return walks[k].tile(full ? walks[k].partial + rest : rest);
  }
};

// A walk repeated for each of `members` heads: all partial tiles of all members, then all full ones. The position is
// kept, not computed from the step: that would take a division.
template <class One> struct GroupWalkOf {
  One walk;
  int members, partial, count;

  struct Position {
    int member, index;  // index: step of `walk`
  };

  // `walk` is set.
  AFC_FN void repeat(int members_) {
    members = members_;
    partial = walk.partial * members;
    count = walk.count * members;
  }

  AFC_FN static GroupWalkOf of(const Run &run, int size, int members) {
    const One walk = One::of(run, size);
    return {walk, members, walk.partial * members, walk.count * members};
  }

  AFC_FN static Position begin() { return {0, 0}; }

  AFC_FN Position next(Position p) const {
    const bool in_partial = p.index < walk.partial;
    if (++p.index < (in_partial ? walk.partial : walk.count)) return p;
    const bool last = ++p.member == members;
    return {last ? 0 : p.member, in_partial && !last ? 0 : walk.partial};
  }

  AFC_FN int tile(const Position &p) const { return walk.tile(p.index); }
};
using GroupWalk = GroupWalkOf<Walk>;

struct WorkItem {
  int batch, head, tile;
};

// Heads are taken in sections of `section` whose keys and values fit into the L2 cache together; within a section the
// tile index changes slowest, from the last to the first if `descending`, so that the longest rows start first.
AFC_FN WorkItem work_item(int index, int tiles, int heads, int batches, int section, bool descending) {
  const int group = index / (section * tiles);
  const int in_group = index - group * section * tiles;
  const int width = min(section, heads * batches - group * section);
  const int rank = in_group / width;
  const int batch_head = group * section + in_group % width;
  return {batch_head / heads, batch_head % heads, descending ? tiles - 1 - rank : rank};
}

}  // namespace tile
