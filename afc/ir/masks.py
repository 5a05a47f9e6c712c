# SPDX-License-Identifier: Apache-2.0
"""MaskPlan: which keys a range of queries can see, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from afc.expr.nodes import Expr


@dataclass(frozen=True)
class Bound:
    """`j <= slope * i + offset` (upper) or `j >= slope * i + offset` (lower), for every kept (i, j).

    `slope` is -1, 0 or 1; `offset` is an int expression of run-time scalars, dimensions and origins.
    """

    side: Literal["upper", "lower"]
    slope: int
    offset: Expr


@dataclass(frozen=True)
class MaskPlan:
    """`predicate`: the whole mask (None: every key is kept). `bounds` are implied by it; together they are equivalent to
    it unless `residual`, where some conjunct can only be decided element by element."""

    predicate: Expr | None
    bounds: tuple[Bound, ...]
    residual: bool


@dataclass(frozen=True)
class Run:
    """Half-open index ranges, begin <= full_begin <= full_end <= end: outside [begin, end) nothing is kept, inside
    [full_begin, full_end) everything is."""

    begin: int
    full_begin: int
    full_end: int
    end: int

    def tiles(self, size: int) -> list[tuple[int, bool]]:
        """(tile, full) of every visited tile of `size` indices: partial tiles first, then full ones."""
        visited = range(self.begin // size, -(-self.end // size)) if self.end > self.begin else range(0)
        kinds = [(t, t * size >= self.full_begin and (t + 1) * size <= self.full_end) for t in visited]
        return sorted(kinds, key=lambda kind: kind[1])
