# SPDX-License-Identifier: Apache-2.0
"""Scalar formulas: the meaning of every block, as a small typed tree.

An expression is `Const`, `Var`, `Load` or `Op`; a `Formula` adds named intermediate values in the author's
order.
Everything afc derives from a block (value, derivative, range, C++ text) is an interpreter of these nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Union


class Type(Enum):
    """Type of a scalar. `FLOAT` is the compute type of the kernel, `INT` means 64 bits."""

    FLOAT = "float"
    INT = "int"
    BOOL = "bool"


@dataclass(frozen=True)
class Const:
    """A literal."""

    value: float | int | bool
    type: Type


@dataclass(frozen=True)
class Var:
    """A name: an index (`i`), a dimension (`N`), the score `s`, a run-time parameter, or an intermediate
    value.
    """

    name: str
    type: Type


@dataclass(frozen=True)
class Load:
    """An element of a captured tensor."""

    tensor: str
    indices: tuple[Expr, ...]
    type: Type


@dataclass(frozen=True)
class Op:
    """An operator of `afc.expr.operators.OPERATORS` applied to arguments."""

    name: str
    args: tuple[Expr, ...]
    type: Type


Expr = Union[Const, Var, Load, Op]  # noqa: UP007  (a runtime alias of a recursive type)


@dataclass(frozen=True)
class Let:
    """An intermediate value with the author's name."""

    name: str
    value: Expr


@dataclass(frozen=True)
class Formula:
    """Named intermediate values in order, then the results (one, or a pair for a rotation)."""

    results: tuple[Expr, ...]
    lets: tuple[Let, ...] = ()

    @property
    def result(self) -> Expr:
        """The only result."""
        (single,) = self.results
        return single


def const(value: float | int | bool) -> Const:
    """A literal with the type of the Python value."""
    kind = Type.BOOL if isinstance(value, bool) else Type.INT if isinstance(value, int) else Type.FLOAT
    return Const(value, kind)


def children(expr: Expr) -> tuple[Expr, ...]:
    """Direct subexpressions."""
    match expr:
        case Op(args=args):
            return args
        case Load(indices=indices):
            return indices
        case Const() | Var():
            return ()


def with_children(expr: Expr, parts: tuple[Expr, ...]) -> Expr:
    """The same node over other subexpressions."""
    match expr:
        case Op():
            return replace(expr, args=parts)
        case Load():
            return replace(expr, indices=parts)
        case Const() | Var():
            return expr


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and all its subexpressions, parents first."""
    yield expr
    for part in children(expr):
        yield from walk(part)


def rewrite(expr: Expr, rule: Callable[[Expr], Expr]) -> Expr:
    """Apply `rule` to every node, children first."""
    return rule(with_children(expr, tuple(rewrite(part, rule) for part in children(expr))))


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """Replace variables by expressions."""
    return rewrite(expr, lambda e: values.get(e.name, e) if isinstance(e, Var) else e)


def map_formula(formula: Formula, rule: Callable[[Expr], Expr]) -> Formula:
    """Apply `rule` to each intermediate value and result."""
    lets = tuple(Let(let.name, rule(let.value)) for let in formula.lets)
    return Formula(tuple(rule(e) for e in formula.results), lets)


def inline_lets(formula: Formula) -> tuple[Expr, ...]:
    """The results with every intermediate value substituted."""
    values: dict[str, Expr] = {}
    for let in formula.lets:
        values[let.name] = substitute(let.value, values)
    return tuple(substitute(e, values) for e in formula.results)


def variables(expr: Expr) -> frozenset[str]:
    """Names of the variables an expression reads."""
    return frozenset(e.name for e in walk(expr) if isinstance(e, Var))


def formula_exprs(formula: Formula) -> Iterator[Expr]:
    """Every node of a formula."""
    for let in formula.lets:
        yield from walk(let.value)
    for result in formula.results:
        yield from walk(result)


def formula_variables(formula: Formula) -> frozenset[str]:
    """Names a formula reads from outside (its own intermediate values excluded)."""
    names = {e.name for e in formula_exprs(formula) if isinstance(e, Var)}
    return frozenset(names - {let.name for let in formula.lets})


def formula_tensors(formula: Formula) -> tuple[str, ...]:
    """Captured tensors a formula reads, in order of first use."""
    return tuple(dict.fromkeys(e.tensor for e in formula_exprs(formula) if isinstance(e, Load)))


def drop_unused_lets(formula: Formula) -> Formula:
    """Remove intermediate values that nothing reads."""
    kept: list[Let] = []
    needed = set().union(*(variables(e) for e in formula.results))
    for let in reversed(formula.lets):
        if let.name in needed:
            kept.append(let)
            needed |= variables(let.value)
    return Formula(formula.results, tuple(reversed(kept)))
