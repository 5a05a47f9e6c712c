# SPDX-License-Identifier: Apache-2.0
"""MaskPlan: which keys a range of queries can see, in closed form; Run: how kernels walk over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from afc.expr.nodes import Expr, const

ONE = const(1)


@dataclass(frozen=True)
class Bound:
    """`j <= slope * i + offset` (upper) or `j >= slope * i + offset` (lower), for every kept (i, j).

    `slope` is -1, 0 or 1; `offset` is an int expression of run-time scalars, dimensions and origins. `step`:
    both positions count steps, j // step and i // step (a positive int expression). `of`: with "i" the bound
    is on the query's position alone, `i <= offset` or `i >= offset`, and the slope is 0.
    """

    side: Literal["upper", "lower"]
    slope: int
    offset: Expr
    step: Expr = ONE
    of: Literal["j", "i"] = "j"

    @property
    def stepped(self) -> bool:
        """Whether positions count steps longer than one."""
        return self.step != ONE


@dataclass(frozen=True)
class MaskPlan:
    """`predicate`: the whole mask (None: every key is kept). Each of `bounds` holds for a kept element, and
    all bounds of at least one of `alternatives`, if there are any. Together they are equivalent to the
    predicate unless `residual`, where some conjunct can only be decided by a test of tiles or elements."""

    predicate: Expr | None
    bounds: tuple[Bound, ...]
    residual: bool
    alternatives: tuple[tuple[Bound, ...], ...] = ()

    @property
    def conjunctions(self) -> tuple[tuple[Bound, ...], ...]:
        """Each a run of keys for a range of queries; what is kept is in their union."""
        return tuple((*self.bounds, *more) for more in self.alternatives or ((),))


@dataclass(frozen=True)
class Run:
    """Half-open index ranges, begin <= full_begin <= full_end <= end: inside [full_begin, full_end) every
    element is kept. What is kept lies in the ranges [begin, end) of a tuple of runs, ordered and disjoint."""

    begin: int
    full_begin: int
    full_end: int
    end: int

    def below(self, end: int) -> Run:
        """The part of the run below index `end`."""
        return Run(*(min(x, end) for x in (self.begin, self.full_begin, self.full_end, self.end)))

    def tiles(self, size: int) -> list[tuple[slice, bool]]:
        """(range, full) of every visited tile of an aligned grid of `size` indices: partial tiles first,
        then full ones.
        """
        visited = range(self.begin // size, -(-self.end // size)) if self.end > self.begin else range(0)
        found = [
            (slice(t * size, (t + 1) * size), t * size >= self.full_begin and (t + 1) * size <= self.full_end)
            for t in visited
        ]
        return sorted(found, key=lambda piece: piece[1])

    def pieces(self, size: int) -> list[tuple[slice, bool]]:
        """(range, full) of pieces of at most `size` indices that start where the run starts and never
        straddle the border between its partial and its full part: what a target does whose tiles need not
        be aligned."""
        segments = (
            (self.begin, self.full_begin, False),
            (self.full_end, self.end, False),
            (self.full_begin, self.full_end, True),
        )
        return [
            (slice(at, min(at + size, last)), full)
            for first, last, full in segments
            for at in range(first, last, size)
        ]
