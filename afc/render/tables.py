# SPDX-License-Identifier: Apache-2.0
"""Which table of rotation coefficients serves which batch entry and head, as C++ in `args`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from afc.ir.program import Rotation
from afc.ir.rotation import dependence


@dataclass(frozen=True)
class TableIndex:
    """The tables of an operand whose coefficients need more than position and pair.

    `tables`: their count; `table`: the index of the one that serves batch entry b and head h; `batch`,
    `head`: b and h where the coefficients of the table with index `table` are computed, 0 where they do not
    matter.
    """

    tables: str
    table: str
    batch: str
    head: str


def table_index(
    rotations: Iterable[Rotation], heads: Literal["Hq", "Hk"], count: str | None = None
) -> TableIndex | None:
    """The tables of q (`heads` is Hq) or k; None where all rotations are plain, and there is one table.

    `count`: the number of heads where the tables are computed, if not in the words of `args`.
    """
    reads = dependence(rotations)
    if reads.plain:
        return None
    own, count = f"args.{heads}", count or f"args.{heads}"
    match reads.batch, reads.head:
        case True, True:
            return TableIndex(f"args.B * {own}", f"b * {own} + h", f"table / {count}", f"table % {count}")
        case True, False:
            return TableIndex("args.B", "b", "table", "0")
        case False, True:
            return TableIndex(own, "h", "0", "table")
        case _:
            return TableIndex("1", "0", "0", "0")
