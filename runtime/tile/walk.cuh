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

  AFC_FN Walk(const Run &run, int size) {
    const bool empty = run.begin >= run.end;
    const int last = empty ? 0 : ceil_div(run.end, size);
    first = empty ? 0 : run.begin / size;
    full_first = max(ceil_div(run.full_begin, size), first);
    full_last = min(run.full_end / size, last);
    if (full_last <= full_first) full_first = full_last = last;
    partial_before = full_first - first;
    partial = partial_before + (last - full_last);
    count = last - first;
  }

  AFC_FN int tile(int step) const {
    if (step < partial_before) return first + step;
    return step < partial ? full_last + (step - partial_before) : full_first + (step - partial);
  }
};

// The walk repeated for each of `members` heads: all partial tiles of all members, then all full ones.
struct GroupWalk {
  Walk walk;
  int partial, count;

  struct Step {
    int member, tile;
  };

  AFC_FN GroupWalk(const Run &run, int size, int members)
      : walk(run, size), partial(walk.partial * members), count(walk.count * members) {}

  AFC_FN Step at(int step) const {
    const int first = step < partial ? 0 : walk.partial, index = step < partial ? step : step - partial;
    const int width = step < partial ? walk.partial : walk.count - walk.partial;
    const int member = index / width;
    return {member, walk.tile(first + index - member * width)};
  }
};

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
