# SPDX-License-Identifier: Apache-2.0
"""The plan pass: runs of every tile of one axis, found by the three-valued test and stored.

Boxes of 4**level tiles a side are tested from the coarsest down: an empty or a full one is decided as a
whole, a partial one is cut into 16. Time and memory grow with the border of what is kept, not with the
number of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from afc.ir.masks import Run
from afc.masks.boxes import BoxTest

FANOUT = 4
CHUNK = 2**15  # boxes tested at once
COMPACT = 2**18  # stored spans after which neighbours are merged, at least
MOST_RUNS = 63  # of a tile, where each has the same memory


@dataclass(frozen=True)
class StoredRuns:
    """Runs of tile t: `runs[offsets[t]:offsets[t + 1]]`, rows (begin, full_begin, full_end, end) in index
    space, ordered and disjoint."""

    offsets: Any  # int64 [tiles + 1]
    runs: Any  # int64 [count, 4]

    def of(self, tile: int) -> tuple[Run, ...]:
        """Runs of one tile."""
        rows = self.runs[self.offsets[tile] : self.offsets[tile + 1]]
        return tuple(Run(*row) for row in rows.tolist())

    def at_most(self, count: int) -> StoredRuns:
        """The same with at most `count` runs a tile: one more closes the smallest gap between those before
        it, the first of several, and the larger full part of the two remains."""
        rows: list[list[int]] = []
        offsets = [0]
        for tile in range(len(self.offsets) - 1):
            found: list[list[int]] = []
            for run in self.runs[self.offsets[tile] : self.offsets[tile + 1]].tolist():
                if len(found) == count:
                    gaps = [b[0] - a[3] for a, b in pairwise(found)]
                    k = gaps.index(min(gaps))
                    found[k : k + 2] = [_joined(*found[k : k + 2])]
                found.append(run)
            rows += found
            offsets.append(len(rows))
        return StoredRuns(np.array(offsets), np.array(rows, np.int64).reshape(-1, 4))


def _joined(a: list[int], b: list[int]) -> list[int]:
    """Two runs and the gap between them as one, with the larger full part."""
    begin, end = max(a, b, key=lambda run: run[2] - run[1])[1:3]
    return [a[0], begin, end, b[3]] if begin < end else [a[0], b[3], b[3], b[3]]


@dataclass
class _Spans:
    """(own tile, first other tile, last other tile + 1, full) of what is visited, in pieces."""

    parts: list[Any]
    count: int = 0
    limit: int = COMPACT

    def add(self, own: Any, first: Any, last: Any, full: Any) -> None:
        self.parts.append(np.stack([own, first, last, full], axis=1).astype(np.int32))
        self.count += len(own)
        if self.count > self.limit:
            self.merge()

    def merge(self) -> Any:
        """Ordered, with touching spans of one kind as one."""
        spans = np.concatenate(self.parts) if self.parts else np.zeros((0, 4), np.int32)
        spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
        touching = (spans[1:, 0] == spans[:-1, 0]) & (spans[1:, 1] == spans[:-1, 2])
        starts = np.flatnonzero(_first(touching & (spans[1:, 3] == spans[:-1, 3]), len(spans)))
        merged = spans[starts]
        merged[:, 2] = spans[np.append(starts[1:], len(spans))[: len(starts)] - 1, 2]
        self.parts, self.count = [merged], len(merged)
        self.limit = max(COMPACT, 2 * self.count)  # so that each is sorted a few times only
        return merged


def _first(joined: Any, count: int) -> Any:
    """Whether each of `count` things starts a group; `joined[k]`: thing k + 1 belongs to the one before."""
    return np.concatenate([np.ones(1, bool), ~joined])[:count]


def stored_runs(
    test: BoxTest, size: tuple[int, int], tile: tuple[int, int], by_keys: bool = False, b: int = 0, h: int = 0
) -> StoredRuns:
    """Runs of keys of each tile of queries, or with `by_keys` of queries of each tile of keys.

    `size`: M, N; `tile`: queries and keys of a tile. Runs begin and end on the grid of tiles, or where the
    tensor ends.
    """
    tiles = -(-size[0] // tile[0]), -(-size[1] // tile[1])
    spans = _Spans([])
    level = 0
    while FANOUT**level < max(tiles):
        level += 1
    root = np.zeros(1 if min(tiles) else 0, np.int64)
    stack = [(level, root, root)]
    while stack:
        level, rows, columns = stack.pop()
        if len(rows) > CHUNK:
            half = len(rows) // 2
            stack += [(level, rows[half:], columns[half:]), (level, rows[:half], columns[:half])]
            continue
        may, must = test(_ends(rows, level, tile[0], size[0]), _ends(columns, level, tile[1], size[1]), b, h)
        decided = may if level == 0 else must
        own, other, count = (columns, rows, tiles[::-1]) if by_keys else (rows, columns, tiles)
        _record(spans, own[decided], other[decided], must[decided], level, count)
        rest = may & ~decided
        if rest.any():
            stack.append((level - 1, *_parts(rows[rest], columns[rest], level - 1, tiles)))
    axis = int(not by_keys)
    return _stored(spans.merge(), tiles[1 - axis], tile[axis], size[axis])


def _ends(box: Any, level: int, tile: int, size: int) -> tuple[Any, Any]:
    """First and last index of boxes."""
    side = tile * FANOUT**level
    return box * side, np.minimum((box + 1) * side, size) - 1


def _parts(rows: Any, columns: Any, level: int, tiles: tuple[int, int]) -> tuple[Any, Any]:
    """The boxes of a level that make up boxes of the level above."""
    step = np.arange(FANOUT)
    down = np.broadcast_to((rows[:, None] * FANOUT + step)[:, :, None], (len(rows), FANOUT, FANOUT))
    across = np.broadcast_to((columns[:, None] * FANOUT + step)[:, None, :], (len(rows), FANOUT, FANOUT))
    down, across = down.reshape(-1), across.reshape(-1)
    exists = (down * FANOUT**level < tiles[0]) & (across * FANOUT**level < tiles[1])
    return down[exists], across[exists]


def _record(spans: _Spans, own: Any, other: Any, full: Any, level: int, tiles: tuple[int, int]) -> None:
    """Store boxes as one span for each of their own tiles."""
    side = FANOUT**level
    if not len(own):
        return
    counts = np.minimum((own + 1) * side, tiles[0]) - own * side
    before = np.cumsum(counts) - counts
    offset = np.arange(int(counts.sum())) - np.repeat(before, counts)
    tile = np.repeat(own * side, counts) + offset
    last = np.minimum((other + 1) * side, tiles[1])
    spans.add(tile, np.repeat(other * side, counts), np.repeat(last, counts), np.repeat(full, counts))


def _stored(spans: Any, count: int, tile: int, size: int) -> StoredRuns:
    """Touching spans become runs: a partial one, a full one, a partial one."""
    own, full = spans[:, 0], spans[:, 3] == 1
    touching = (own[1:] == own[:-1]) & (spans[1:, 1] == spans[:-1, 2])
    alone = _first(touching, len(spans))  # nothing touches it on the left
    led = np.concatenate([[False], (alone & ~full)[:-1]])[: len(spans)]  # what touches it there begins a run
    starts = np.flatnonzero(alone | (full & ~led))
    last = np.append(starts[1:], len(spans))[: len(starts)] - 1
    end = spans[last, 2]
    second = np.minimum(starts + 1, last)  # a run has its full span first or second
    kept = np.where(full[starts], starts, second)
    has_full = full[kept]
    edges = np.stack(
        [
            spans[starts, 1],
            np.where(has_full, spans[kept, 1], end),
            np.where(has_full, spans[kept, 2], end),
            end,
        ],
        axis=1,
    )
    runs = np.minimum(edges.astype(np.int64) * tile, size)
    return StoredRuns(np.searchsorted(own[starts], np.arange(count + 1)), runs)
