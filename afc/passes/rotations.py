# SPDX-License-Identifier: Apache-2.0
"""Rotations as matrices: y = A x for each column pair, with A read off the formula by differentiation."""

from __future__ import annotations

from dataclasses import replace

from afc.errors import SourceError
from afc.expr.differentiate import gradient
from afc.expr.nodes import Const, Formula, Type
from afc.expr.simplify import simplify_formula
from afc.ir.program import Program, Rotation, RowStep, Transform
from afc.passes.linear import linear

ONE, ZERO = Const(1.0, Type.FLOAT), Const(0.0, Type.FLOAT)


def matrices(program: Program) -> Program:
    """Set `matrix` of every rotation.

    Raises SourceError E0307 where the map is not linear, E0308 for odd widths.
    """
    return replace(
        program,
        q_steps=tuple(map(_with_matrix, program.q_steps)),
        k_steps=tuple(map(_with_matrix, program.k_steps)),
    )


def _with_matrix(step: Transform) -> Transform:
    if isinstance(step, RowStep):
        return step
    _check_columns(step)
    formula = _pair_inlined(step)
    rows = [gradient(formula, ("x0", "x1"), seeds) for seeds in ((ONE, ZERO), (ZERO, ONE))]
    entries = tuple(e for row in rows for e in row.results)
    lets = tuple(dict.fromkeys(let for row in rows for let in row.lets))
    return replace(step, matrix=simplify_formula(Formula(entries, lets)))


def _pair_inlined(step: Rotation) -> Formula:
    """The formula, found to be linear, without intermediate values that read the pair."""
    formula = linear(step.formula, ("x0", "x1"))
    if formula is None:
        raise SourceError.of(
            "E0307",
            f"`{step.block}` is not linear in x0, x1; a rotation maps pairs linearly, and 0 to 0",
            step.origin,
            notes=(f"used at {step.span}",),
        )
    return formula


def _check_columns(step: Rotation) -> None:
    first, width = step.first, step.width
    if not isinstance(first, Const) or not isinstance(width, Const):
        raise SourceError.of("E0309", "the columns of a rotation must be known at compile time", step.span)
    if width.value <= 0 or width.value % 2 or first.value < 0:
        raise SourceError.of(
            "E0308",
            f"a rotation needs an even number of columns, not {width.value} (from column {first.value})",
            step.span,
        )
