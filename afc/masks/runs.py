# SPDX-License-Identifier: Apache-2.0
"""Runs of keys for a range of queries, and of queries for a range of keys, from a plan's bounds.

`runtime/abi/afc_run.h` has the same arithmetic for the emitted code (`Limits`, `merge`); a test compares the
two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from afc.expr.evaluate import evaluate
from afc.ir.masks import Bound, MaskPlan, Run


class _Limits:
    """Intersection of ranges: where something may be kept (outer), and where all is (inner)."""

    def __init__(self, origin: int, size: int) -> None:
        self.origin, self.size = origin, size
        self.begin = self.full_begin = origin
        self.end = self.full_end = origin + size

    def at_most(self, smallest: int, largest: int, step: int) -> None:
        """An upper bound, counted in steps, that ranges over [smallest, largest]."""
        self.end = min(self.end, (largest + 1) * step)
        self.full_end = min(self.full_end, (smallest + 1) * step)

    def at_least(self, smallest: int, largest: int, step: int) -> None:
        """A lower bound, counted in steps, that ranges over [smallest, largest]."""
        self.begin = max(self.begin, smallest * step)
        self.full_begin = max(self.full_begin, largest * step)

    def only_if(self, some: bool, every: bool) -> None:
        """A condition that holds for some, or for every, element of the other axis."""
        if not some:
            self.end = self.begin
        if not every:
            self.full_end = self.full_begin

    def run(self, residual: bool) -> Run:
        """The run in index space."""
        if self.end <= self.begin:
            return Run(0, 0, 0, 0)
        begin, end = self.begin - self.origin, self.end - self.origin
        full_begin, full_end = self.full_begin - self.origin, self.full_end - self.origin
        if residual or full_end <= full_begin:
            return Run(begin, end, end, end)
        return Run(begin, full_begin, full_end, end)


def key_runs(
    plan: MaskPlan, m_first: int, m_last: int, sizes: Mapping[str, int], grid: int = 1
) -> tuple[Run, ...]:
    """Keys for queries m_first..m_last: runs, ordered and disjoint.

    `sizes`: M, N, q_origin, k_origin and the scalars that bounds read. `grid`: of tiles that start at
    multiples of it; several runs then share no tile.
    """
    ends = m_first + sizes["q_origin"], m_last + sizes["q_origin"]
    return _runs(plan, ends, "k_origin", "N", _limit_keys, sizes, grid)


def query_runs(
    plan: MaskPlan, n_first: int, n_last: int, sizes: Mapping[str, int], grid: int = 1
) -> tuple[Run, ...]:
    """Queries for keys n_first..n_last: the transpose of `key_runs`."""
    ends = n_first + sizes["k_origin"], n_last + sizes["k_origin"]
    return _runs(plan, ends, "q_origin", "M", _limit_queries, sizes, grid)


def _runs(
    plan: MaskPlan,
    ends: tuple[int, int],
    origin: str,
    size: str,
    limit: Callable[[_Limits, Bound, tuple[int, int], Mapping[str, int]], None],
    sizes: Mapping[str, int],
    grid: int,
) -> tuple[Run, ...]:
    """Runs of the axis with this origin and size, for positions between `ends` of the other."""
    parts = []
    for bounds in plan.conjunctions:
        limits = _Limits(sizes[origin], sizes[size])
        for bound in bounds:
            limit(limits, bound, ends, sizes)
        parts.append(limits.run(plan.residual))
    return merge(parts, grid, sizes[size])


def _limit_keys(limits: _Limits, bound: Bound, ends: tuple[int, int], sizes: Mapping[str, int]) -> None:
    c, step = int(evaluate(bound.offset, sizes)), int(evaluate(bound.step, sizes))
    first, last = (end // step for end in ends)
    if bound.of == "i":
        limits.only_if(*((first <= c, last <= c) if bound.side == "upper" else (last >= c, first >= c)))
        return
    low, high = sorted((bound.slope * first + c, bound.slope * last + c))
    (limits.at_most if bound.side == "upper" else limits.at_least)(low, high, step)


def _limit_queries(limits: _Limits, bound: Bound, ends: tuple[int, int], sizes: Mapping[str, int]) -> None:
    c, step = int(evaluate(bound.offset, sizes)), int(evaluate(bound.step, sizes))
    first, last = (end // step for end in ends)
    upper = bound.side == "upper"
    if bound.of == "i":
        (limits.at_most if upper else limits.at_least)(c, c, step)
    elif bound.slope == 0:
        limits.only_if(*((first <= c, last <= c) if upper else (last >= c, first >= c)))
    elif bound.slope == 1:  # upper: i >= j - c, lower: i <= j - c
        (limits.at_least if upper else limits.at_most)(first - c, last - c, step)
    else:  # upper: i <= c - j, lower: i >= c - j
        (limits.at_most if upper else limits.at_least)(c - last, c - first, step)


def merge(parts: Sequence[Run], grid: int, length: int) -> tuple[Run, ...]:
    """The union of runs as runs, ordered and disjoint; with a grid above 1 no two touch one tile.

    Where full parts of several runs lie in one range, the range is cut before the second one. A single run
    stays as it is.
    """
    if len(parts) == 1:
        return tuple(r for r in parts if r.begin < r.end)
    full = _joined((r.full_begin, r.full_end) for r in parts)
    full = [(-(-a // grid) * grid, b // grid * grid) for a, b in full]
    outer = _joined((r.begin // grid * grid, min(-(-r.end // grid) * grid, length)) for r in parts)
    found: list[Run] = []
    for begin, end in outer:
        inside = [(a, b) for a, b in full if begin <= a < b <= end]
        for k, (a, b) in enumerate(inside):
            found.append(Run(begin, a, b, end if k == len(inside) - 1 else b))
            begin = b
        if not inside:
            found.append(Run(begin, end, end, end))
    return tuple(found)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, with overlapping and touching ones as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(r for r in ranges if r[0] < r[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined
