# SPDX-License-Identifier: Apache-2.0
"""Reverse-mode differentiation of formulas; the result is again a formula.

`if` selects the adjoint instead of multiplying it by zero, so a branch that was not taken cannot inject NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from afc.expr.nodes import Const, Expr, Formula, Let, Load, Op, Type, Var
from afc.expr.operators import OPERATORS, add, mul, select
from afc.expr.simplify import simplify, simplify_formula

ONE = Const(1.0, Type.FLOAT)
ZERO = Const(0.0, Type.FLOAT)


class NotDifferentiable(Exception):
    """A float result depends on a variable through an operator without a derivative."""

    def __init__(self, operator: str) -> None:
        super().__init__(operator)
        self.operator = operator


def gradient(formula: Formula, wrt: Iterable[str], seeds: tuple[Expr, ...] | None = None) -> Formula:
    """Derivatives of sum(seed_r * result_r) with respect to the variables `wrt`, one result per variable.

    The intermediate values of `formula` stay available under their names; adjoints of theirs are `d_<name>`.
    Raises NotDifferentiable.
    """
    names = tuple(wrt)
    adjoints: dict[str, Expr] = {}
    for result, seed in zip(formula.results, seeds or (ONE,) * len(formula.results), strict=True):
        _push(result, seed, adjoints)
    lets = list(formula.lets)
    for let in reversed(formula.lets):
        if let.name not in adjoints:
            continue
        adjoint = simplify(adjoints.pop(let.name))
        if not isinstance(adjoint, Const):
            lets.append(Let(f"d_{let.name}", adjoint))
            adjoint = Var(f"d_{let.name}", Type.FLOAT)
        _push(let.value, adjoint, adjoints)
    return simplify_formula(Formula(tuple(adjoints.get(name, ZERO) for name in names), tuple(lets)))


def _push(expr: Expr, adjoint: Expr, adjoints: dict[str, Expr]) -> None:
    """Add `adjoint` times the derivative of `expr` to the adjoints of the variables it reads."""
    if expr.type is not Type.FLOAT or (isinstance(adjoint, Const) and adjoint.value == 0):
        return
    match expr:
        case Var(name=name):
            _add(name, adjoint, adjoints)
        case Op(name="select", args=(condition, a, b)):
            _push_branch(a, adjoint, adjoints, lambda value: select(condition, value, ZERO))
            _push_branch(b, adjoint, adjoints, lambda value: select(condition, ZERO, value))
        case Op(name=name, args=args):
            row = OPERATORS[name]
            if row.partials is None:
                raise NotDifferentiable(name)
            for argument, partial in zip(args, row.partials(args, expr), strict=True):
                if partial is not None and _reaches(argument):
                    _push(argument, simplify(mul(adjoint, partial)), adjoints)
        case Const() | Load():
            return


def _add(name: str, adjoint: Expr, adjoints: dict[str, Expr]) -> None:
    adjoints[name] = add(adjoints[name], adjoint) if name in adjoints else adjoint


def _push_branch(expr: Expr, adjoint: Expr, adjoints: dict[str, Expr], guard: Callable[[Expr], Expr]) -> None:
    """Derivatives inside a branch are guarded as a whole: 0 times the NaN of a branch not taken would be
    NaN.
    """
    inside: dict[str, Expr] = {}
    _push(expr, adjoint, inside)
    for name, value in inside.items():
        _add(name, simplify(guard(value)), adjoints)


def _reaches(expr: Expr) -> bool:
    """Whether a float variable lies below: constants need no adjoint."""
    match expr:
        case Var(type=kind):
            return kind is Type.FLOAT
        case Op(args=args, type=kind):
            return kind is Type.FLOAT and any(_reaches(a) for a in args)
        case _:
            return False
