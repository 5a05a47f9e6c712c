# SPDX-License-Identifier: Apache-2.0
"""How the scores of a tile that read one element of a captured tensor are summed, by the index formula."""

from __future__ import annotations

from typing import Literal

from afc.expr.nodes import Expr, Load, Op, Type, Var, rewrite, variables, walk

Sum = Literal["row", "column", "diagonal", "each", "gather", "gather in rows", "gather in columns"]
# What needs the place of each score.
PLACED = frozenset({"each", "gather", "gather in rows", "gather in columns"})


def axis(load: Load, *indices: str) -> int:
    """The dimension that one of these indices itself indexes, -1 where none does."""
    wanted = [Var(index, Type.INT) for index in indices]
    return next((n for n, i in enumerate(load.indices) if i in wanted), -1)


def score_sum(load: Load) -> Sum:
    """`row`: a query's scores read one element; `column`: a key's; `diagonal`: those of one difference of
    positions; `each`: every score reads its own, as query and key are dimensions; `gather`: anything else,
    `in rows` or `in columns` where the query or the key is a dimension.
    """
    used = {name for index in load.indices for name in variables(index)}
    if not used & {"n", "j"}:
        return "row"
    if not used & {"m", "i"}:
        return "column"
    if axis(load, "m", "i") >= 0 and axis(load, "n", "j") >= 0:
        return "each"
    rest = {name for index in load.indices for name in variables(rewrite(index, _difference))}
    nested = any(isinstance(e, Load) for index in load.indices for e in walk(index))
    if not nested and not rest & {"m", "n", "i", "j"}:
        return "diagonal"
    if axis(load, "m", "i") >= 0:
        return "gather in rows"
    return "gather in columns" if axis(load, "n", "j") >= 0 else "gather"


def column_sum(load: Load) -> Sum:
    """The same of a read in a row or output block: `each` if row and column are dimensions, `row` if a row's
    columns read one element, `column` if the element does not depend on the row.
    """
    used = {name for index in load.indices for name in variables(index)}
    if not used & {"m", "i", "r"}:
        return "column"
    if "c" not in used:
        return "row"
    return "each" if axis(load, "m", "i", "r") >= 0 and axis(load, "c") >= 0 else "gather"


def _difference(expr: Expr) -> Expr:
    """A difference of positions, or of rows, as one variable."""
    match expr:
        case Op(name="sub", args=(Var(name=a), Var(name=b))) if {a, b} in ({"i", "j"}, {"m", "n"}):
            return Var("difference", Type.INT)
        case Op(name="add", args=(Op(name="neg", args=(Var(name=a),)), Var(name=b))) if {a, b} == {"i", "j"}:
            return Var("difference", Type.INT)
    return expr
