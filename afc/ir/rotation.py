# SPDX-License-Identifier: Apache-2.0
"""The matrix of a rotation as a few stored values: rope has four entries but two values, cos and sin.

What the matrices of an operand depend on decides how many tables of coefficients it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afc.expr.nodes import Const, Expr, Op, formula_tensors, formula_variables
from afc.ir.program import Rotation


@dataclass(frozen=True)
class Dependence:
    """What coefficients depend on beside row and pair.

    `plain`: on nothing but position and pair, so that no argument of the call is needed; `batch`, `head`:
    there is a table for each batch entry, for each head of the operand.
    """

    plain: bool
    batch: bool
    head: bool


def dependence(rotations: Iterable[Rotation]) -> Dependence:
    """Of all rotations of an operand together. They must have `matrix`."""
    names: set[str] = set()
    tensors = False
    for rotation in rotations:
        assert rotation.matrix is not None
        names |= formula_variables(rotation.matrix)
        tensors = tensors or bool(formula_tensors(rotation.matrix))
    return Dependence(not tensors and names <= {"p", "c"}, "b" in names, "h" in names)


def distinct_entries(results: Iterable[Expr]) -> tuple[tuple[Expr, ...], tuple[str, str, str, str]]:
    """Distinct entries up to sign, and (a00, a01, a10, a11) in terms of `c[...]`; constants stay literals."""
    values: list[Expr] = []
    entries: list[str] = []
    for expr in results:
        if isinstance(expr, Const):
            entries.append(f"Real({expr.value!r})")
            continue
        negative = isinstance(expr, Op) and expr.name == "neg"
        bare = expr.args[0] if isinstance(expr, Op) and negative else expr
        if bare not in values:
            values.append(bare)
        entries.append(f"{'-' if negative else ''}c[{values.index(bare)}]")
    a00, a01, a10, a11 = entries
    return tuple(values), (a00, a01, a10, a11)
