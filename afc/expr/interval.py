# SPDX-License-Identifier: Apache-2.0
"""Bounds of a formula's value from bounds of its variables.

Used to prove that an integer fits 32 bits and that a score is finite. Bounds may be wider than the truth,
never narrower; an operator without a rule gives (-inf, inf).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from afc.expr.nodes import Const, Expr, Load, Op, Type, Var


@dataclass(frozen=True)
class Interval:
    """All values between `lo` and `hi`, both included."""

    lo: float
    hi: float

    def within(self, lo: float, hi: float) -> bool:
        """Whether every value lies in [lo, hi]."""
        return lo <= self.lo and self.hi <= hi


EVERYTHING = Interval(-math.inf, math.inf)
INT32 = (-(2**31), 2**31 - 1)


def interval(expr: Expr, ranges: Mapping[str, Interval]) -> Interval:
    """Bounds of a number; booleans are 0..1."""
    match expr:
        case Const(value=value):
            return Interval(value, value) if not math.isnan(value) else EVERYTHING
        case Var(name=name):
            return ranges.get(name, EVERYTHING)
        case Load(type=kind):
            return Interval(0, 1) if kind is Type.BOOL else EVERYTHING
        case Op(name=name, args=args, type=kind):
            if kind is Type.BOOL:
                return Interval(0, 1)
            rule = RULES.get(name)
            return _tidy(rule(*(interval(a, ranges) for a in args))) if rule else EVERYTHING


def _tidy(bounds: Interval) -> Interval:
    return EVERYTHING if math.isnan(bounds.lo) or math.isnan(bounds.hi) else bounds


def _product(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _mul(a: Interval, b: Interval) -> Interval:
    corners = [_product(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return Interval(min(corners), max(corners))


def _floordiv(a: Interval, b: Interval) -> Interval:
    if b.lo <= 0:
        return EVERYTHING
    corners = [
        x if math.isinf(x) else (0 if math.isinf(y) and x >= 0 else -1 if math.isinf(y) else x // y)
        for x in (a.lo, a.hi)
        for y in (b.lo, b.hi)
    ]
    return Interval(min(corners), max(corners))


def _div(a: Interval, b: Interval) -> Interval:
    if b.lo <= 0 <= b.hi or any(map(math.isinf, (a.lo, a.hi, b.lo, b.hi))):
        return EVERYTHING
    corners = [x / y for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return Interval(min(corners), max(corners))


def _exp(a: Interval) -> Interval:
    return Interval(
        math.exp(min(a.lo, 709)) if a.lo > -745 else 0.0, math.exp(a.hi) if a.hi < 709 else math.inf
    )


def _trunc(x: float) -> float:
    return x if math.isinf(x) else math.trunc(x)


def _abs(a: Interval) -> Interval:
    return Interval(0 if a.lo <= 0 <= a.hi else min(abs(a.lo), abs(a.hi)), max(abs(a.lo), abs(a.hi)))


RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: Interval(a.lo + b.lo, a.hi + b.hi),
    "sub": lambda a, b: Interval(a.lo - b.hi, a.hi - b.lo),
    "mul": _mul,
    "div": _div,
    "neg": lambda a: Interval(-a.hi, -a.lo),
    "max": lambda a, b: Interval(max(a.lo, b.lo), max(a.hi, b.hi)),
    "min": lambda a, b: Interval(min(a.lo, b.lo), min(a.hi, b.hi)),
    "abs": _abs,
    "floor": lambda a: Interval(a.lo - 1, a.hi),
    "ceil": lambda a: Interval(a.lo, a.hi + 1),
    "floordiv": _floordiv,
    "mod": lambda a, b: Interval(0, b.hi - 1) if b.lo > 0 else EVERYTHING,
    "exp": _exp,
    "tanh": lambda a: Interval(-1, 1),
    "sigmoid": lambda a: Interval(0, 1),
    "random": lambda *counter: Interval(0, 1),
    "sin": lambda a: Interval(-1, 1),
    "cos": lambda a: Interval(-1, 1),
    "to_float": lambda a: a,
    "to_int": lambda a: Interval(_trunc(a.lo), _trunc(a.hi)),
    "select": lambda c, a, b: Interval(min(a.lo, b.lo), max(a.hi, b.hi)),
}
