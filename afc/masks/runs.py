# SPDX-License-Identifier: Apache-2.0
"""Runs of keys for a range of queries, and of queries for a range of keys, from a plan's bounds.

`runtime/abi/afc_run.h` has the same arithmetic for the emitted code (`Limits`); a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

from afc.expr.evaluate import evaluate
from afc.ir.masks import MaskPlan, Run


class _Limits:
    """Intersection of ranges: where something may be kept (outer), and where all is (inner)."""

    def __init__(self, origin: int, size: int) -> None:
        self.origin, self.size = origin, size
        self.begin = self.full_begin = origin
        self.end = self.full_end = origin + size

    def at_most(self, smallest: int, largest: int) -> None:
        """An upper bound that ranges over [smallest, largest]."""
        self.end = min(self.end, largest + 1)
        self.full_end = min(self.full_end, smallest + 1)

    def at_least(self, smallest: int, largest: int) -> None:
        """A lower bound that ranges over [smallest, largest]."""
        self.begin = max(self.begin, smallest)
        self.full_begin = max(self.full_begin, largest)

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


def key_run(plan: MaskPlan, m_first: int, m_last: int, sizes: Mapping[str, int]) -> Run:
    """Keys for queries m_first..m_last.

    `sizes`: M, N, q_origin, k_origin and the scalars that bounds read.
    """
    i_first, i_last = m_first + sizes["q_origin"], m_last + sizes["q_origin"]
    limits = _Limits(sizes["k_origin"], sizes["N"])
    for bound in plan.bounds:
        c = int(evaluate(bound.offset, sizes))
        ends = sorted((bound.slope * i_first + c, bound.slope * i_last + c))
        (limits.at_most if bound.side == "upper" else limits.at_least)(*ends)
    return limits.run(plan.residual)


def query_run(plan: MaskPlan, n_first: int, n_last: int, sizes: Mapping[str, int]) -> Run:
    """Queries for keys n_first..n_last: the transpose of `key_run`."""
    j_first, j_last = n_first + sizes["k_origin"], n_last + sizes["k_origin"]
    limits = _Limits(sizes["q_origin"], sizes["M"])
    for bound in plan.bounds:
        c = int(evaluate(bound.offset, sizes))
        upper = bound.side == "upper"
        if bound.slope == 0:
            inside = (j_first <= c, j_last <= c) if upper else (j_last >= c, j_first >= c)
            limits.only_if(*inside)
        elif bound.slope == 1:  # upper: i >= j - c, lower: i <= j - c
            (limits.at_least if upper else limits.at_most)(j_first - c, j_last - c)
        else:  # upper: i <= c - j, lower: i >= c - j
            (limits.at_most if upper else limits.at_least)(c - j_last, c - j_first)
    return limits.run(plan.residual)
