# SPDX-License-Identifier: Apache-2.0
"""From a mask formula to affine bounds: normalise each conjunct to `j <= a*i + c` or `j >= a*i + c`.

What does not fit (a modulus, a captured tensor, a disjunction) stays with the element predicate: the plan
is then `residual`, and every tile inside the bounds is tested element by element. Bounds over-approximate,
never cut a key.
"""

from __future__ import annotations

from collections.abc import Iterable

from afc.expr.nodes import Const, Expr, Formula, Load, Op, Type, Var, const, inline_lets, variables, walk
from afc.expr.operators import add, call, neg, sub
from afc.expr.simplify import simplify
from afc.ir.masks import Bound, MaskPlan

Linear = tuple[int, int, Expr]  # a*i + b*j + rest

POSITIONS = frozenset({"i", "j", "m", "n"})
NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def derive(masks: Iterable[Formula]) -> MaskPlan:
    """The plan of a conjunction of masks."""
    conjuncts = [c for m in masks for c in _conjuncts(simplify(inline_lets(m)[0]))]
    conjuncts = [c for c in conjuncts if c != const(True)]
    if not conjuncts:
        return MaskPlan(None, (), False)
    bounds: list[Bound] = []
    residual = False
    for conjunct in conjuncts:
        found = _bounds(conjunct)
        residual |= found is None
        bounds += [b for b in found or () if b not in bounds]
    predicate = conjuncts[0]
    for conjunct in conjuncts[1:]:
        predicate = call("and", predicate, conjunct)
    return MaskPlan(predicate, tuple(bounds), residual)


def _conjuncts(expr: Expr) -> list[Expr]:
    match expr:
        case Op(name="and", args=(a, b)):
            return _conjuncts(a) + _conjuncts(b)
        case Op(name="not", args=(Op(name="or", args=(a, b)),)):
            return _conjuncts(call("not", a)) + _conjuncts(call("not", b))
        case Op(name="not", args=(Op(name=name, args=args),)) if name in NEGATED:
            return [call(NEGATED[name], *args)]
        case _:
            return [expr]


def _bounds(expr: Expr) -> list[Bound] | None:
    """Bounds equivalent to a comparison, or None."""
    if not (isinstance(expr, Op) and expr.name in ("lt", "le", "gt", "ge", "eq")):
        return None
    left, right = expr.args
    if left.type is not Type.INT or right.type is not Type.INT:
        return None
    if expr.name in ("gt", "ge"):
        left, right = right, left
    strict = 1 if expr.name in ("lt", "gt") else 0
    sides = [_at_most_zero(left, right, strict)]
    if expr.name == "eq":
        sides.append(_at_most_zero(right, left, 0))
    if any(s is None for s in sides):
        return None
    return [bound for side in sides for bound in side or ()]


def _at_most_zero(left: Expr, right: Expr, strict: int) -> list[Bound] | None:
    """Bounds of `left + strict <= right`; `abs` on the left gives two."""
    if isinstance(left, Op) and left.name == "abs":
        parts = (_at_most_zero(left.args[0], right, strict), _at_most_zero(neg(left.args[0]), right, strict))
        return None if None in parts else [b for part in parts for b in part or ()]
    linear = _linear(sub(left, right))
    if linear is None:
        return None
    a, b, rest = linear
    rest = simplify(add(rest, const(strict)))
    if abs(b) != 1 or abs(a) > 1:
        return None
    if b == 1:  # a*i + j + rest <= 0
        return [Bound("upper", -a, simplify(neg(rest)))]
    return [Bound("lower", a, rest)]


def _linear(expr: Expr) -> Linear | None:
    """a*i + b*j + rest with integer constants a, b; m and n are positions less the origins."""
    match expr:
        case Var(name="i"):
            return 1, 0, const(0)
        case Var(name="j"):
            return 0, 1, const(0)
        case Var(name="m"):
            return 1, 0, neg(Var("q_origin", Type.INT))
        case Var(name="n"):
            return 0, 1, neg(Var("k_origin", Type.INT))
        case Op(name="add" | "sub" | "neg" as name, args=args):
            return _combine(name, [_linear(a) for a in args])
        case (
            Op(name="mul", args=(Const(value=factor), other))
            | Op(name="mul", args=(other, Const(value=factor)))
        ):
            inner = _linear(other)
            if inner is None:
                return None
            return (
                int(factor) * inner[0],
                int(factor) * inner[1],
                simplify(call("mul", const(int(factor)), inner[2])),
            )
        case _ if variables(expr) & (POSITIONS | {"b", "h"}) or _reads_tensor(expr):
            return None
        case _:
            return 0, 0, expr


def _combine(name: str, parts: list[Linear | None]) -> Linear | None:
    if any(p is None for p in parts):
        return None
    first = parts[0]
    assert first is not None
    if name == "neg":
        return -first[0], -first[1], simplify(neg(first[2]))
    second = parts[1]
    assert second is not None
    sign = 1 if name == "add" else -1
    return first[0] + sign * second[0], first[1] + sign * second[1], simplify(call(name, first[2], second[2]))


def _reads_tensor(expr: Expr) -> bool:
    return any(isinstance(e, Load) for e in walk(expr))
