# SPDX-License-Identifier: Apache-2.0
"""Rotations as matrices: y = A x for each column pair, with A read off the formula by differentiation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from afc.errors import SourceError
from afc.expr.differentiate import gradient
from afc.expr.nodes import Const, Expr, Formula, Let, Load, Op, Type, Var, substitute
from afc.expr.simplify import simplify_formula
from afc.ir.program import Program, Rotation, RowStep, Transform

ONE, ZERO = Const(1.0, Type.FLOAT), Const(0.0, Type.FLOAT)


class Kind(Enum):
    """How a formula depends on the pair (x0, x1)."""

    ZERO = "the number 0"
    FREE = "does not read the pair"
    LINEAR = "linear, and 0 where the pair is 0"
    OTHER = "anything else"


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
    """The formula, found to be linear, without intermediate values that read the pair.

    Both results would name the derivative of such a value alike. A term without x0 or x1 has no derivative:
    it must be refused here, or it would be dropped.
    """
    kinds = {"x0": Kind.LINEAR, "x1": Kind.LINEAR}
    lets: list[Let] = []
    values: dict[str, Expr] = {}
    for let in step.formula.lets:
        value = substitute(let.value, values)
        kinds[let.name] = kind(value, kinds)
        if kinds[let.name] in (Kind.ZERO, Kind.FREE):
            lets.append(Let(let.name, value))
        else:
            values[let.name] = value
    results = tuple(substitute(e, values) for e in step.formula.results)
    for result in results:
        if kind(result, kinds) not in (Kind.ZERO, Kind.LINEAR):
            raise SourceError.of(
                "E0307",
                f"`{step.block}` is not linear in x0, x1; a rotation maps pairs linearly, and 0 to 0",
                step.origin,
                notes=(f"used at {step.span}",),
            )
    return Formula(results, tuple(lets))


def kind(expr: Expr, kinds: Mapping[str, Kind]) -> Kind:
    """How an expression depends on the pair, by its form; `kinds` has those of the names that do."""
    match expr:
        case Const(value=value, type=Type.FLOAT) if value == 0:
            return Kind.ZERO
        case Const():
            return Kind.FREE
        case Var(name=name):
            return kinds.get(name, Kind.FREE)
        case Load(indices=indices):
            free = all(kind(i, kinds) in (Kind.ZERO, Kind.FREE) for i in indices)
            return Kind.FREE if free else Kind.OTHER
        case Op(name=name, args=args):
            parts = [kind(a, kinds) for a in args]
            if all(p in (Kind.ZERO, Kind.FREE) for p in parts):
                return Kind.FREE
            return _combined(name, parts)


def _combined(name: str, parts: list[Kind]) -> Kind:
    """An operator of which an argument reads the pair."""
    vanishing = (Kind.ZERO, Kind.LINEAR)
    match name, parts:
        case ("neg", [Kind.LINEAR]):
            return Kind.LINEAR
        case ("add" | "sub", [a, b]) if a in vanishing and b in vanishing:
            return Kind.LINEAR
        case ("mul", [Kind.LINEAR, Kind.FREE | Kind.ZERO] | [Kind.FREE | Kind.ZERO, Kind.LINEAR]):
            return Kind.LINEAR
        case ("div", [Kind.LINEAR, Kind.FREE]):
            return Kind.LINEAR
        case ("select", [Kind.FREE, a, b]) if a in vanishing and b in vanishing:
            return Kind.LINEAR
        case _:
            return Kind.OTHER


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
