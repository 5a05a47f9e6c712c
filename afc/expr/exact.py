# SPDX-License-Identifier: Apache-2.0
"""Constants in 40-digit decimal arithmetic, rounded once to float64: the same digits on every machine.

The C library's pow, exp and log may differ in the last place between processors; emitted text must not.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping
from decimal import Decimal

from afc.expr.evaluate import evaluate
from afc.expr.nodes import Const, Expr, Op, Type, Var

CONTEXT = decimal.Context(prec=40, Emin=-9999, Emax=9999, traps=[])

RULES: dict[str, Callable[..., Decimal]] = {
    "add": CONTEXT.add,
    "sub": CONTEXT.subtract,
    "mul": CONTEXT.multiply,
    "div": CONTEXT.divide,
    "neg": CONTEXT.minus,
    "pow": CONTEXT.power,
    "exp": CONTEXT.exp,
    "log": CONTEXT.ln,
    "sqrt": CONTEXT.sqrt,
    "to_float": lambda x: x,
    "abs": CONTEXT.abs,
    "max": CONTEXT.max,
    "min": CONTEXT.min,
}


def exact(expr: Expr, values: Mapping[str, int] | None = None) -> float:
    """Value of a float expression; `values` gives integers to its variables.

    An operator outside the table above is evaluated in float64.
    """
    number = _value(expr, values or {})
    return float(number) if number is not None else float(evaluate(expr, values or {}))


def _value(expr: Expr, values: Mapping[str, int]) -> Decimal | None:
    match expr:
        case Const(value=value, type=kind) if kind is not Type.BOOL:
            return Decimal(value)
        case Var(name=name) if name in values:
            return Decimal(values[name])
        case Op(name=name, args=args) if name in RULES:
            parts = [_value(a, values) for a in args]
            if any(p is None or not p.is_finite() for p in parts):
                return None
            result = RULES[name](*parts)
            return result if result.is_finite() else None
        case _:
            return None
