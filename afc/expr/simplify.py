# SPDX-License-Identifier: Apache-2.0
"""Constant folding and the identities that hold for every finite and non-finite value.

`x * 0` is kept (it is NaN for an infinite x); derivatives avoid it by never building zero adjoints.
"""

from __future__ import annotations

import math
from typing import Any

from afc.expr.evaluate import evaluate
from afc.expr.exact import exact
from afc.expr.nodes import (
    Const,
    Expr,
    Formula,
    Let,
    Op,
    Type,
    Var,
    const,
    drop_unused_lets,
    rewrite,
    substitute,
    variables,
    walk,
)
from afc.expr.operators import mul, neg, sub


def simplify(expr: Expr) -> Expr:
    """Fold constants and neutral elements, bottom up."""
    return rewrite(expr, _fold)


def simplify_formula(formula: Formula) -> Formula:
    """Simplify everything; constant intermediate values are substituted and unused ones removed."""
    values: dict[str, Expr] = {}
    lets = []
    for let in formula.lets:
        value = simplify(substitute(let.value, values))
        if isinstance(value, Const):
            values[let.name] = value
        else:
            lets.append(type(let)(let.name, value))
    results = tuple(simplify(substitute(e, values)) for e in formula.results)
    return drop_unused_lets(Formula(results, tuple(lets)))


def logarithm(formula: Formula) -> Formula:
    """log of a formula's result; of exp(e) it is e, which exists where exp(e) overflows."""
    match formula.result:
        case Op(name="exp", args=(exponent,)):
            return Formula((exponent,), formula.lets)
        case result:
            return simplify_formula(Formula((Op("log", (result,), Type.FLOAT),), formula.lets))


COSTLY = frozenset({"exp", "log", "tanh", "sigmoid", "sin", "cos", "pow", "sqrt", "rsqrt", "random"})


def share_calls(formula: Formula) -> Formula:
    """Name function values that occur more than once, so that each is computed (and read) once."""
    lets, results = list(formula.lets), formula.results
    count = 0
    while True:
        uses: dict[Expr, int] = {}
        for expr in (e for r in results for e in walk(r)):
            uses[expr] = uses.get(expr, 0) + 1
        repeated = [e for e, n in uses.items() if n > 1 and isinstance(e, Op) and e.name in COSTLY]
        if not repeated:
            return Formula(results, tuple(lets))
        chosen = min(repeated, key=lambda e: sum(1 for _ in walk(e)))
        assert isinstance(chosen, Op)
        count += 1
        name = f"{chosen.name}_value" if count == 1 else f"{chosen.name}_value_{count}"
        lets.append(Let(name, chosen))
        value = Var(name, chosen.type)
        results = tuple(rewrite(r, lambda e, c=chosen, v=value: v if e == c else e) for r in results)  # type: ignore[misc]


def _is(expr: Expr, value: float) -> bool:
    return isinstance(expr, Const) and expr.type is not Type.BOOL and expr.value == value


def _python(value: Any, kind: Type) -> Const:
    if kind is Type.BOOL:
        return const(bool(value))
    return const(int(value)) if kind is Type.INT else const(float(value))


def _fold(expr: Expr) -> Expr:
    if not isinstance(expr, Op):
        return expr
    if all(isinstance(a, Const) for a in expr.args):
        return _python(exact(expr) if expr.type is Type.FLOAT else evaluate(expr, {}), expr.type)
    return _neutral(expr)


def _by_reciprocal(a: Expr, b: float) -> bool:
    """Whether a / b may become a * (1 / b), which can differ in the last place.

    Scores are smooth in s, so there it may. A formula of positions may be cut into steps by a floor (T5's
    buckets), and a last place then moves an element to another step: only powers of two, whose reciprocal is
    exact.
    """
    exact_reciprocal = b != 0 and math.isfinite(b) and abs(math.frexp(b)[0]) == 0.5
    return exact_reciprocal or (b != 0 and "s" in variables(a))


def _neutral(expr: Op) -> Expr:
    a = expr.args[0]
    b = expr.args[1] if len(expr.args) > 1 else a
    match expr.name:
        case "add" if _is(b, 0):
            return a
        case "add" if _is(a, 0):
            return b
        case "sub" if _is(b, 0):
            return a
        case "sub" if _is(a, 0):
            return _fold(neg(b))
        case "add" if isinstance(a, Op) and a.name == "neg":
            return _fold(sub(b, a.args[0]))
        case "neg" if isinstance(a, Op) and a.name == "sub":
            return _fold(sub(a.args[1], a.args[0]))
        case "mul" if _is(a, 1):
            return b
        case "mul" if _is(b, 1):
            return a
        case "mul" if _is(a, -1):
            return _fold(neg(b))
        case "mul" if isinstance(b, Const):
            return _fold(mul(b, a))  # constants to the left
        case "mul" if (
            isinstance(a, Const) and isinstance(b, Op) and b.name == "mul" and isinstance(b.args[0], Const)
        ):
            return _fold(mul(_fold(mul(a, b.args[0])), b.args[1]))
        case "mul" if isinstance(a, Const) and isinstance(b, Op) and b.name == "neg":
            return _fold(mul(_python(-a.value, expr.type), b.args[0]))
        case "div" if isinstance(b, Const) and _by_reciprocal(a, float(b.value)):
            return _fold(mul(const(1.0 / float(b.value)), a))
        case "neg" if isinstance(a, Op) and a.name == "neg":
            return a.args[0]
        case "and" | "or" if isinstance(a, Const):
            absorbing = expr.name == "or"
            return a if a.value is absorbing else b
        case "and" | "or" if isinstance(b, Const) and b.value is (expr.name == "and"):
            return a
        case "select" if isinstance(a, Const):
            return expr.args[1] if a.value else expr.args[2]
        case _:
            return expr
