# SPDX-License-Identifier: Apache-2.0
"""The three-valued test of a mask: is an element of a box of queries x keys kept, are all?

Interval arithmetic on the formula, over many boxes at once. It is sound for every compute type: integers are
exact or widened, the result of a float operation is widened by more than float32 rounds, NaN and reads
outside a tensor are followed. It may call an empty or a full box partial, never the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from afc.expr.nodes import Const, Expr, Load, Op, Type, Var, variables, walk
from afc.masks.tables import LARGEST_EXACT, Bounds, Captured, enclose, everything

OVERFLOW = 2.0**62  # of an int: nothing is claimed beyond
# More than an operation in float32 rounds, or flushes to zero; float64 rounds less.
RELATIVE, ABSOLUTE = 2.0**-22, 2.0**-120
FLOAT32_MAX = float(np.finfo(np.float32).max) * (1 - RELATIVE)
POSITIONS = frozenset({"m", "i", "n", "j"})


class Truth(NamedTuple):
    """`may`: some element of the box may satisfy the condition; `must`: every element does."""

    may: Any
    must: Any


class Read(NamedTuple):
    """How a mask reads a captured tensor: the type of its values, and the axis whose index alone changes
    within a batch and head (None: no index does, or several do)."""

    tensor: str
    type: Type
    axis: int | None


def reads(predicate: Expr) -> tuple[Read, ...]:
    """What a mask reads, in order of first use."""
    loads = [e for e in walk(predicate) if isinstance(e, Load)]
    return tuple(dict.fromkeys(Read(e.tensor, e.type, moving_axis(e)) for e in loads))


def moving_axis(expr: Load) -> int | None:
    """The only axis whose index depends on the query or the key: a table along it answers long ranges."""
    moving = [k for k, index in enumerate(expr.indices) if variables(index) & POSITIONS]
    return moving[0] if len(moving) == 1 else None


class BoxTest:
    """A mask at one call: sizes, origins and scalars by name, captured tensors as arrays.

    A captured tensor that is absent (a picture without data) may hold anything.
    """

    def __init__(
        self, predicate: Expr, values: Mapping[str, Any], tensors: Mapping[str, Any] | None = None
    ) -> None:
        self.predicate, self.values = predicate, values
        self.arrays = tensors or {}
        self.captured: dict[tuple[str, Type], Captured] = {}

    def __call__(self, rows: tuple[Any, Any], keys: tuple[Any, Any], b: int, h: int) -> Truth:
        """Test of boxes: first and last query, first and last key (arrays of one shape, both included)."""
        scope = {name: _range(value, value) for name, value in (("b", b), ("h", h))}
        for ends, index, position, origin in ((rows, "m", "i", "q_origin"), (keys, "n", "j", "k_origin")):
            scope[index] = _range(*ends)
            scope[position] = _range(*(x + self.values[origin] for x in ends))
        with np.errstate(all="ignore"):
            found = _Box(self, scope).truth(self.predicate)
        shape = np.broadcast_shapes(*(np.shape(x) for x in (*rows, *keys)))
        return Truth(np.broadcast_to(found.may, shape), np.broadcast_to(found.must, shape))

    def tensor(self, name: str, kind: Type) -> Captured | None:
        """Bounds of a captured tensor, or None where it is not known."""
        if name not in self.arrays:
            return None
        key = name, kind
        if key not in self.captured:
            self.captured[key] = Captured(self.arrays[name], kind)
        return self.captured[key]


class _Box:
    """One evaluation; values of shared subexpressions are kept."""

    def __init__(self, test: BoxTest, scope: Mapping[str, Bounds]) -> None:
        self.test, self.scope = test, scope
        self.known: dict[int, Bounds | Truth] = {}

    def truth(self, expr: Expr) -> Truth:
        found = self._value(expr)
        assert isinstance(found, Truth)
        return found

    def bounds(self, expr: Expr) -> Bounds:
        found = self._value(expr)
        assert isinstance(found, Bounds)
        return found

    def _value(self, expr: Expr) -> Bounds | Truth:
        if id(expr) not in self.known:
            self.known[id(expr)] = self._compute(expr)
        return self.known[id(expr)]

    def _compute(self, expr: Expr) -> Bounds | Truth:
        match expr:
            case Const(value=value, type=kind):
                return _known(value, kind)
            case Var(name=name, type=kind):
                if name in self.scope:
                    return self.scope[name]
                if name in self.test.values:
                    return _known(self.test.values[name], kind)
                return _anything(kind)
            case Load():
                return self._load(expr)
            case Op(name=name, args=args, type=kind):
                if name in LOGIC:
                    return LOGIC[name](*(self.truth(a) for a in args))
                if name in COMPARISONS:
                    return self._compare(name, args)
                if name == "select":
                    return self._select(args, kind)
                if name not in NUMBERS:
                    return everything(kind)
                parts = [self.bounds(a) for a in args]
                return _rounded(NUMBERS[name](*parts), kind, name in EXACT_OPERATORS)

    def _load(self, expr: Load) -> Bounds | Truth:
        captured = self.test.tensor(expr.tensor, expr.type)
        if captured is None:
            return _anything(expr.type)
        index = [self.bounds(i) for i in expr.indices]
        found = captured.bounds([x.lo for x in index], [x.hi for x in index], moving_axis(expr))
        return Truth(found.hi > 0, found.lo > 0) if expr.type is Type.BOOL else found

    def _compare(self, name: str, args: tuple[Expr, ...]) -> Truth:
        if args[0].type is Type.BOOL:
            a, b = self.truth(args[0]), self.truth(args[1])
            equal = Truth((a.may & b.may) | (~a.must & ~b.must), (a.must & b.must) | ~(a.may | b.may))
            return equal if name == "eq" else _not(equal)
        return COMPARISONS[name](self.bounds(args[0]), self.bounds(args[1]))

    def _select(self, args: tuple[Expr, ...], kind: Type) -> Bounds | Truth:
        may, must = self.truth(args[0])
        if kind is Type.BOOL:
            x, y = self.truth(args[1]), self.truth(args[2])
            return Truth(
                np.where(must, x.may, np.where(may, x.may | y.may, y.may)),
                np.where(must, x.must, np.where(may, x.must & y.must, y.must)),
            )
        a, b = self.bounds(args[1]), self.bounds(args[2])
        return Bounds(
            np.where(must, a.lo, np.where(may, np.minimum(a.lo, b.lo), b.lo)),
            np.where(must, a.hi, np.where(may, np.maximum(a.hi, b.hi), b.hi)),
            np.where(must, a.nan, np.where(may, a.nan | b.nan, b.nan)),
        )


def _range(first: Any, last: Any) -> Bounds:
    return Bounds(np.asarray(first, np.float64), np.asarray(last, np.float64), np.False_)


def _known(value: Any, kind: Type) -> Bounds | Truth:
    if kind is Type.BOOL:
        return Truth(np.bool_(value), np.bool_(value))
    if kind is Type.FLOAT and np.isnan(value):
        return everything(kind)
    return Bounds(*enclose(value, value, kind), np.False_)


def _anything(kind: Type) -> Bounds | Truth:
    return Truth(np.True_, np.False_) if kind is Type.BOOL else everything(kind)


# ---- numbers ---------------------------------------------------------------------------------------------


def _rounded(found: Bounds, kind: Type, exact: bool) -> Bounds:
    """What the operation gives in any compute type, from its bounds in exact arithmetic."""
    lo, hi, nan = found
    lost = np.isnan(lo) | np.isnan(hi)
    if kind is Type.INT:
        lo = np.where(np.abs(lo) >= LARGEST_EXACT, np.nextafter(lo, -np.inf), lo)
        hi = np.where(np.abs(hi) >= LARGEST_EXACT, np.nextafter(hi, np.inf), hi)
        lost = lost | ~(lo > -OVERFLOW) | ~(hi < OVERFLOW)
        return Bounds(np.where(lost, -np.inf, lo), np.where(lost, np.inf, hi), np.False_)
    if not exact:
        lo = lo - (np.abs(lo) * RELATIVE + ABSOLUTE)
        hi = hi + (np.abs(hi) * RELATIVE + ABSOLUTE)
        lost = lost | np.isnan(lo) | np.isnan(hi)
    lo = np.where(lost | (lo < -FLOAT32_MAX), -np.inf, lo)
    return Bounds(lo, np.where(lost | (hi > FLOAT32_MAX), np.inf, hi), nan | lost)


def _infinite(a: Bounds) -> Any:
    return np.isinf(a.lo) | np.isinf(a.hi)


def _zero(a: Bounds) -> Any:
    return (a.lo <= 0) & (a.hi >= 0)


def _add(a: Bounds, b: Bounds) -> Bounds:
    opposite = ((a.hi == np.inf) & (b.lo == -np.inf)) | ((a.lo == -np.inf) & (b.hi == np.inf))
    return Bounds(a.lo + b.lo, a.hi + b.hi, a.nan | b.nan | opposite)


def _neg(a: Bounds) -> Bounds:
    return Bounds(-a.hi, -a.lo, a.nan)


def _corners(values: Sequence[Any], nan: Any) -> Bounds:
    return Bounds(np.minimum.reduce(values), np.maximum.reduce(values), nan)


def _mul(a: Bounds, b: Bounds) -> Bounds:
    products = [np.where((x == 0) | (y == 0), 0.0, x * y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    undefined = (_infinite(a) & _zero(b)) | (_infinite(b) & _zero(a))
    return _corners(np.broadcast_arrays(*products), a.nan | b.nan | undefined)


def _div(a: Bounds, b: Bounds) -> Bounds:
    lost = _zero(b) | _infinite(b)
    quotients = [np.where(lost, np.nan, x / y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return _corners(np.broadcast_arrays(*quotients), a.nan | b.nan)


def _floordiv(a: Bounds, b: Bounds) -> Bounds:
    lost = ~(b.lo > 0) | _infinite(a) | _infinite(b)
    quotients = [np.where(lost, np.nan, np.floor_divide(x, y)) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return _corners(np.broadcast_arrays(*quotients), np.False_)


def _mod(a: Bounds, b: Bounds) -> Bounds:
    known = (b.lo > 0) & ~_infinite(b)
    quotient = np.floor_divide(a.lo, b.lo)
    same = known & ~_infinite(a) & (b.lo == b.hi) & (quotient == np.floor_divide(a.hi, b.lo))
    small = known & (a.lo >= 0) & (a.hi < b.lo)
    start = np.where(small, 0.0, quotient * b.lo)
    within = small | same
    return Bounds(
        np.where(within, a.lo - start, np.where(known, 0.0, np.nan)),
        np.where(within, a.hi - start, b.hi - 1),
        np.False_,
    )


def _ipow(a: Bounds, b: Bounds) -> Bounds:
    powers = np.broadcast_arrays(a.lo**b.lo, a.hi**b.lo)
    low = np.where(_zero(a) & (b.lo > 0) & (b.lo % 2 == 0), 0.0, np.minimum(*powers))
    known = (b.lo == b.hi) & (b.lo >= 0)
    return Bounds(np.where(known, low, np.nan), np.maximum(*powers), np.False_)


def _abs(a: Bounds) -> Bounds:
    least = np.where(_zero(a), 0.0, np.minimum(np.abs(a.lo), np.abs(a.hi)))
    return Bounds(least, np.maximum(np.abs(a.lo), np.abs(a.hi)), a.nan)


def _to_int(a: Bounds) -> Bounds:
    """A value that no 32-bit int holds converts to anything."""
    lost = a.nan | ~(a.lo > -(2.0**31)) | ~(a.hi < 2.0**31)
    return Bounds(np.where(lost, np.nan, np.trunc(a.lo)), np.trunc(a.hi), np.False_)


NUMBERS: dict[str, Callable[..., Bounds]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, _neg(b)),
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "max": lambda a, b: Bounds(np.maximum(a.lo, b.lo), np.maximum(a.hi, b.hi), a.nan | b.nan),
    "min": lambda a, b: Bounds(np.minimum(a.lo, b.lo), np.minimum(a.hi, b.hi), a.nan | b.nan),
    "abs": _abs,
    "floor": lambda a: Bounds(np.floor(a.lo), np.floor(a.hi), a.nan),
    "ceil": lambda a: Bounds(np.ceil(a.lo), np.ceil(a.hi), a.nan),
    "floordiv": _floordiv,
    "mod": _mod,
    "ipow": _ipow,
    "to_float": lambda a: Bounds(*enclose(a.lo, a.hi, Type.FLOAT), a.nan),
    "to_int": _to_int,
}
EXACT_OPERATORS = frozenset({"neg", "max", "min", "abs", "floor", "ceil", "to_float"})


# ---- conditions ------------------------------------------------------------------------------------------


def _not(a: Truth) -> Truth:
    return Truth(~a.must, ~a.may)


def _less(a: Bounds, b: Bounds) -> Truth:
    return Truth(a.lo < b.hi, (a.hi < b.lo) & ~(a.nan | b.nan))


def _at_most(a: Bounds, b: Bounds) -> Truth:
    return Truth(a.lo <= b.hi, (a.hi <= b.lo) & ~(a.nan | b.nan))


def _equal(a: Bounds, b: Bounds) -> Truth:
    return Truth((a.lo <= b.hi) & (b.lo <= a.hi), (a.lo == b.hi) & (a.hi == b.lo) & ~(a.nan | b.nan))


LOGIC: dict[str, Callable[..., Truth]] = {
    "and": lambda a, b: Truth(a.may & b.may, a.must & b.must),
    "or": lambda a, b: Truth(a.may | b.may, a.must | b.must),
    "not": _not,
}
COMPARISONS: dict[str, Callable[..., Truth]] = {
    "lt": _less,
    "le": _at_most,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _at_most(b, a),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),  # NaN differs from everything
}
