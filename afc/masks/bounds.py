# SPDX-License-Identifier: Apache-2.0
"""From a mask formula to affine bounds: normalise each conjunct to `j <= a*i + c` or `j >= a*i + c`, or to a
few alternatives of such.

What does not fit (a modulus, a captured tensor) stays with the predicate: the plan is then `residual`, and
tiles inside the bounds are tested one by one, or element by element. Bounds over-approximate, never cut a
key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afc.expr.nodes import Const, Expr, Formula, Load, Op, Type, Var, const, inline_lets, variables, walk
from afc.expr.operators import add, call, neg, sub
from afc.expr.simplify import simplify
from afc.ir.masks import Bound, MaskPlan

POSITIONS = frozenset({"i", "j", "m", "n"})
NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
DUAL = {"and": "or", "or": "and"}
MOST = 4  # alternatives of a plan: runs that a kernel merges for each tile

Alternatives = list[list[Bound]]  # some one of these conjunctions holds


@dataclass(frozen=True)
class _Linear:
    """a*i + b*j + rest with integer constants a, b; with a step, i // step and j // step for i and j."""

    a: int
    b: int
    rest: Expr
    step: Expr | None = None


def derive(masks: Iterable[Formula]) -> MaskPlan:
    """The plan of a conjunction of masks."""
    conjuncts = [c for m in masks for c in _conjuncts(simplify(inline_lets(m)[0]))]
    conjuncts = [c for c in conjuncts if c != const(True)]
    if not conjuncts:
        return MaskPlan(None, (), False)
    bounds: list[Bound] = []
    alternatives: Alternatives = [[]]
    residual = False
    for conjunct in conjuncts:
        found = _alternatives(conjunct)
        if found is not None and len(found) == 1:
            bounds += [b for b in found[0] if b not in bounds]
            continue
        both = None if found is None else _all_of(alternatives, found)
        residual |= both is None
        alternatives = alternatives if both is None else both
    predicate = conjuncts[0]
    for conjunct in conjuncts[1:]:
        predicate = call("and", predicate, conjunct)
    several = tuple(map(tuple, alternatives)) if len(alternatives) > 1 else ()
    return MaskPlan(predicate, tuple(bounds), residual, several)


def _conjuncts(expr: Expr) -> list[Expr]:
    match expr:
        case Op(name="and", args=(a, b)):
            return _conjuncts(a) + _conjuncts(b)
        case Op(name="not", args=(inner,)) if (pushed := _negated(inner)) is not None:
            return _conjuncts(pushed) if isinstance(pushed, Op) and pushed.name == "and" else [pushed]
        case _:
            return [expr]


def _negated(expr: Expr) -> Expr | None:
    """`not expr` with the negation moved inwards; None where it must stay. A comparison of floats stays: NaN
    fails it and its opposite."""
    match expr:
        case Op(name="and" | "or" as name, args=(a, b)):
            return call(DUAL[name], call("not", a), call("not", b))
        case Op(name="not", args=(a,)):
            return a
        case Op(name="select", args=(c, a, b)):
            return call("select", c, call("not", a), call("not", b))
        case Op(name=name, args=args) if name in NEGATED and args[0].type is Type.INT:
            return call(NEGATED[name], *args)
        case _:
            return None


def _alternatives(expr: Expr) -> Alternatives | None:
    """Conjunctions of bounds whose union is the condition, at most MOST; None where there are none."""
    match expr:
        case Op(name="and", args=(a, b)):
            return _all_of(_alternatives(a), _alternatives(b))
        case Op(name="or", args=(a, b)):
            return _any_of(_alternatives(a), _alternatives(b))
        case Op(name="not", args=(a,)):
            inner = _negated(a)
            return None if inner is None else _alternatives(inner)
        case Op(name="select", args=(c, a, b)):
            chosen = _all_of(_alternatives(c), _alternatives(a))
            return _any_of(chosen, _all_of(_alternatives(call("not", c)), _alternatives(b)))
        case Op(name="lt" | "le" | "gt" | "ge" | "eq" | "ne" as name, args=(left, right)):
            return _comparison(name, left, right) if left.type is Type.INT else None
        case _:
            return None


def _all_of(one: Alternatives | None, other: Alternatives | None) -> Alternatives | None:
    if one is None or other is None or len(one) * len(other) > MOST:
        return None
    return [[*a, *(b for b in more if b not in a)] for a in one for more in other]


def _any_of(one: Alternatives | None, other: Alternatives | None) -> Alternatives | None:
    if one is None or other is None:
        return None
    together = [*one, *(b for b in other if b not in one)]
    return together if len(together) <= MOST else None


def _comparison(name: str, left: Expr, right: Expr) -> Alternatives | None:
    match name:
        case "lt":
            return _at_most_zero(left, right, 1)
        case "le":
            return _at_most_zero(left, right, 0)
        case "gt":
            return _at_most_zero(right, left, 1)
        case "ge":
            return _at_most_zero(right, left, 0)
        case "eq":
            return _all_of(_at_most_zero(left, right, 0), _at_most_zero(right, left, 0))
        case _:
            return _any_of(_at_most_zero(left, right, 1), _at_most_zero(right, left, 1))


def _at_most_zero(left: Expr, right: Expr, strict: int) -> Alternatives | None:
    """`left + strict <= right`; `abs` on the left means both signs, on the right either."""
    if isinstance(left, Op) and left.name == "abs":
        inner = left.args[0]
        return _all_of(_at_most_zero(inner, right, strict), _at_most_zero(neg(inner), right, strict))
    if isinstance(right, Op) and right.name == "abs":
        inner = right.args[0]
        return _any_of(_at_most_zero(left, inner, strict), _at_most_zero(left, neg(inner), strict))
    linear = _linear(sub(left, right))
    if linear is None:
        return None
    rest, step = simplify(add(linear.rest, const(strict))), linear.step or const(1)
    match linear.a, linear.b:
        case (1 | 0 | -1 as a, 1):  # a*i + j + rest <= 0
            return [[Bound("upper", -a, simplify(neg(rest)), step)]]
        case (1 | 0 | -1 as a, -1):
            return [[Bound("lower", a, rest, step)]]
        case (1, 0):
            return [[Bound("upper", 0, simplify(neg(rest)), step, "i")]]
        case (-1, 0):
            return [[Bound("lower", 0, rest, step, "i")]]
        case _:
            return None


def _linear(expr: Expr) -> _Linear | None:
    """The affine form; m and n are positions less the origins."""
    match expr:
        case Var(name="i"):
            return _Linear(1, 0, const(0), const(1))
        case Var(name="j"):
            return _Linear(0, 1, const(0), const(1))
        case Var(name="m"):
            return _Linear(1, 0, neg(Var("q_origin", Type.INT)), const(1))
        case Var(name="n"):
            return _Linear(0, 1, neg(Var("k_origin", Type.INT)), const(1))
        case Op(name="floordiv", args=(Var(name="i" | "j") as position, step)) if _uniform(step):
            return _Linear(int(position.name == "i"), int(position.name == "j"), const(0), step)
        case Op(name="add" | "sub" | "neg" as name, args=args):
            return _combine(name, [_linear(a) for a in args])
        case (
            Op(name="mul", args=(Const(value=factor), other))
            | Op(name="mul", args=(other, Const(value=factor)))
        ):
            inner = _linear(other)
            if inner is None:
                return None
            rest = simplify(call("mul", const(int(factor)), inner.rest))
            return _Linear(int(factor) * inner.a, int(factor) * inner.b, rest, inner.step)
        case _ if _uniform(expr):
            return _Linear(0, 0, expr)
        case _:
            return None


def _combine(name: str, parts: list[_Linear | None]) -> _Linear | None:
    first, second = parts[0], parts[-1]
    if first is None or second is None:
        return None
    if name == "neg":
        return _Linear(-first.a, -first.b, simplify(neg(first.rest)), first.step)
    if first.step is not None and second.step is not None and first.step != second.step:
        return None  # steps of two lengths
    sign = 1 if name == "add" else -1
    a, b = first.a + sign * second.a, first.b + sign * second.b
    return _Linear(a, b, simplify(call(name, first.rest, second.rest)), first.step or second.step)


def _uniform(expr: Expr) -> bool:
    """Whether a value is the same for all elements of a call, and known without reading a tensor."""
    return not (variables(expr) & (POSITIONS | {"b", "h"}) or any(isinstance(e, Load) for e in walk(expr)))
