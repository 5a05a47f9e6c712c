# SPDX-License-Identifier: Apache-2.0
"""Rotations as matrices: y = A x for each column pair, with A read off the formula by differentiation.

Of a captured tensor that A reads, an element t gets sum d0 dy0/dt + d1 dy1/dt over all pairs that read it,
where (d0, d1) is the gradient of the pair behind the rotation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from afc.errors import SourceError
from afc.expr.differentiate import NotDifferentiable, gradient
from afc.expr.nodes import Const, Expr, Formula, Load, Type, Var, inline_lets, rewrite, substitute, walk
from afc.expr.simplify import share_calls, simplify, simplify_formula
from afc.ir.program import Program, Rotation, RotationRead, RowStep, Transform
from afc.passes.linear import linear

ONE, ZERO = Const(1.0, Type.FLOAT), Const(0.0, Type.FLOAT)
SEEDS = (Var("d0_value", Type.FLOAT), Var("d1_value", Type.FLOAT))


def matrices(program: Program) -> Program:
    """Set `matrix` and `reads` of every rotation.

    Raises SourceError E0303 for an operator without a derivative between a learned tensor and the matrix,
    E0307 where the map is not linear, E0308 for odd widths.
    """
    wanted = {t.name for t in program.tensors if t.grad}

    def lowered(step: Transform) -> Transform:
        return step if isinstance(step, RowStep) else _with_matrix(step, wanted)

    return replace(
        program, q_steps=tuple(map(lowered, program.q_steps)), k_steps=tuple(map(lowered, program.k_steps))
    )


def _with_matrix(step: Rotation, wanted: Collection[str]) -> Rotation:
    _check_columns(step)
    formula = _pair_inlined(step)
    rows = [gradient(formula, ("x0", "x1"), seeds) for seeds in ((ONE, ZERO), (ZERO, ONE))]
    entries = tuple(e for row in rows for e in row.results)
    lets = tuple(dict.fromkeys(let for row in rows for let in row.lets))
    return replace(step, matrix=simplify_formula(Formula(entries, lets)), reads=_reads(step, wanted))


def _reads(step: Rotation, wanted: Collection[str]) -> tuple[RotationRead, ...]:
    """The reads of captured tensors whose gradient is asked for, each with its derivative."""
    results = inline_lets(step.formula)
    loads = dict.fromkeys(e for r in results for e in walk(r) if isinstance(e, Load) and e.tensor in wanted)
    names = {load: Var(f"read_{n}_value", Type.FLOAT) for n, load in enumerate(loads, 1)}
    back: dict[str, Expr] = {v.name: load for load, v in names.items()}
    formula = Formula(
        tuple(rewrite(r, lambda e: names.get(e, e) if isinstance(e, Load) else e) for r in results)
    )
    try:
        derived = inline_lets(gradient(formula, back, SEEDS))
    except NotDifferentiable as missing:
        raise SourceError.of(
            "E0303", f"`{step.block}` has no derivative through `{missing.operator}`", step.span
        ) from None
    return tuple(
        RotationRead(load, share_calls(Formula((simplify(substitute(term, back)),))))
        for load, term in zip(loads, derived, strict=True)
    )


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
