# SPDX-License-Identifier: Apache-2.0
"""Whether a formula is linear in some of its names, by its form: what rotations and weight blocks must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from afc.expr.nodes import Const, Expr, Formula, Let, Load, Op, Type, Var, substitute


class Kind(Enum):
    """How a formula depends on the names."""

    ZERO = "the number 0"
    FREE = "does not read the names"
    LINEAR = "linear, and 0 where the names are 0"
    OTHER = "anything else"


def linear(formula: Formula, names: Iterable[str]) -> Formula | None:
    """The formula without intermediate values that read one of the names, or None where a result is not
    linear in them.

    Two results would name the derivative of such a value alike. A term without the names has no derivative:
    it must be refused here, or it would be dropped.
    """
    kinds = dict.fromkeys(names, Kind.LINEAR)
    lets: list[Let] = []
    values: dict[str, Expr] = {}
    for let in formula.lets:
        value = substitute(let.value, values)
        kinds[let.name] = kind(value, kinds)
        if kinds[let.name] in (Kind.ZERO, Kind.FREE):
            lets.append(Let(let.name, value))
        else:
            values[let.name] = value
    results = tuple(substitute(e, values) for e in formula.results)
    if any(kind(result, kinds) not in (Kind.ZERO, Kind.LINEAR) for result in results):
        return None
    return Formula(results, tuple(lets))


def kind(expr: Expr, kinds: Mapping[str, Kind]) -> Kind:
    """How an expression depends on the names, by its form; `kinds` has those that do."""
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
    """An operator of which an argument reads a name."""
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
