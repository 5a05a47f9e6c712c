# SPDX-License-Identifier: Apache-2.0
"""The operator table: one row per operator with its type rule, meaning, derivative, range and spelling.

| column       | meaning |
|---|---|
| `arity`      | number of arguments |
| `types`      | argument rule: `number` (promoted), `float`, `int`, `bool`, `compare`, `select`, `counter` |
| `numpy`      | value on NumPy arrays in float64 / int64 |
| `partials`   | partial derivatives as expressions of the arguments; None: the result is no float |
| `interval`   | bounds of the value from bounds of the arguments (`afc.expr.interval`) |
| `text`       | C++ spelling, same on every target; `afc::f` lives in each target's math header |
| `precedence` | of the C++ spelling; a call is 100 |

Meaning of the numbers (`docs/language.md`): `/` is a float division; `//` and `%` floor; `max` and `min`
propagate NaN; `and`, `or`, `if` are lazy and guard reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from afc.expr.nodes import Const, Expr, Op, Type, const
from afc.expr.random import random

Partials = Callable[[tuple[Expr, ...], Expr], tuple[Expr | None, ...]]


@dataclass(frozen=True)
class Operator:
    """A row of the table. `text` is a format string over the printed arguments, `{a}` to `{e}`, and over the
    compute type, `{real}`.
    """

    name: str
    arity: int
    types: str
    numpy: Callable[..., Any]
    partials: Partials | None
    text: str
    precedence: int = 100
    attn: str = ""  # spelling in the language, where it is not a call


def _f(value: float) -> Const:
    return Const(float(value), Type.FLOAT)


def _op(name: str, *args: Expr) -> Expr:
    return Op(name, args, result_type(name, tuple(a.type for a in args)))


def add(a: Expr, b: Expr) -> Expr:
    """a + b."""
    return _op("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    """a - b."""
    return _op("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    """a * b."""
    return _op("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    """a / b, a float division."""
    return _op("div", a, b)


def neg(a: Expr) -> Expr:
    """-a."""
    return _op("neg", a)


def select(condition: Expr, a: Expr, b: Expr) -> Expr:
    """`if condition then a else b`."""
    return _op("select", condition, a, b)


def call(name: str, *args: Expr) -> Expr:
    """Any operator by name, with its result type."""
    return _op(name, *args)


def _safe_power(a: Any, b: Any) -> Any:
    return np.power(np.asarray(a, np.float64), b)


def _sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(np.asarray(x) >= 0, 1 / (1 + e), e / (1 + e))


def _row_mean(x: Any) -> Any:
    return np.mean(x, -1, keepdims=True) if np.ndim(x) else x


def _kink(a: Expr, b: Expr, name: str) -> tuple[Expr, Expr]:
    """max and min: the derivative goes to the larger (smaller) argument; at a tie, to the first."""
    first = call("ge" if name == "max" else "le", a, b)
    return select(first, _f(1), _f(0)), select(first, _f(0), _f(1))


ROWS: tuple[Operator, ...] = (
    Operator("add", 2, "number", np.add, lambda a, y: (_f(1), _f(1)), "{a} + {b}", 60, "+"),
    Operator("sub", 2, "number", np.subtract, lambda a, y: (_f(1), _f(-1)), "{a} - {b}", 60, "-"),
    Operator("mul", 2, "number", np.multiply, lambda a, y: (a[1], a[0]), "{a} * {b}", 70, "*"),
    Operator(
        "div",
        2,
        "float",
        np.true_divide,
        lambda a, y: (div(_f(1), a[1]), neg(div(y, a[1]))),
        "{a} / {b}",
        70,
        "/",
    ),
    Operator("neg", 1, "number", np.negative, lambda a, y: (_f(-1),), "-{a}", 80, "-"),
    Operator(
        "pow",
        2,
        "float",
        _safe_power,
        lambda a, y: (mul(a[1], call("pow", a[0], sub(a[1], _f(1)))), mul(y, call("log", a[0]))),
        "afc::pow({a}, {b})",
        100,
        "**",
    ),
    Operator("ipow", 2, "int", np.power, None, "afc::ipow({a}, {b})", 100, "**"),
    Operator("floordiv", 2, "int", np.floor_divide, None, "afc::floor_div({a}, {b})", 100, "//"),
    Operator("mod", 2, "int", np.mod, None, "afc::floor_mod({a}, {b})", 100, "%"),
    Operator("max", 2, "number", np.maximum, lambda a, y: _kink(a[0], a[1], "max"), "afc::max({a}, {b})"),
    Operator("min", 2, "number", np.minimum, lambda a, y: _kink(a[0], a[1], "min"), "afc::min({a}, {b})"),
    Operator(
        "abs",
        1,
        "number",
        np.abs,
        lambda a, y: (select(call("ge", a[0], _f(0)), _f(1), _f(-1)),),
        "afc::abs({a})",
    ),
    Operator("floor", 1, "float", np.floor, lambda a, y: (_f(0),), "afc::floor({a})"),
    Operator("ceil", 1, "float", np.ceil, lambda a, y: (_f(0),), "afc::ceil({a})"),
    Operator("exp", 1, "float", np.exp, lambda a, y: (y,), "afc::exp({a})"),
    Operator("log", 1, "float", np.log, lambda a, y: (div(_f(1), a[0]),), "afc::log({a})"),
    Operator("tanh", 1, "float", np.tanh, lambda a, y: (sub(_f(1), mul(y, y)),), "afc::tanh({a})"),
    Operator("sigmoid", 1, "float", _sigmoid, lambda a, y: (mul(y, sub(_f(1), y)),), "afc::sigmoid({a})"),
    Operator("sin", 1, "float", np.sin, lambda a, y: (call("cos", a[0]),), "afc::sin({a})"),
    Operator("cos", 1, "float", np.cos, lambda a, y: (neg(call("sin", a[0])),), "afc::cos({a})"),
    Operator("sqrt", 1, "float", np.sqrt, lambda a, y: (div(_f(0.5), y),), "afc::sqrt({a})"),
    Operator(
        "rsqrt",
        1,
        "float",
        lambda x: 1 / np.sqrt(x),
        lambda a, y: (mul(_f(-0.5), div(y, a[0])),),
        "afc::rsqrt({a})",
    ),
    Operator("to_float", 1, "any", lambda x: np.asarray(x, np.float64), lambda a, y: (None,), "Real({a})"),
    Operator("to_int", 1, "float", lambda x: np.asarray(np.trunc(x), np.int64), None, "int({a})"),
    Operator("lt", 2, "compare", np.less, None, "{a} < {b}", 50, "<"),
    Operator("le", 2, "compare", np.less_equal, None, "{a} <= {b}", 50, "<="),
    Operator("gt", 2, "compare", np.greater, None, "{a} > {b}", 50, ">"),
    Operator("ge", 2, "compare", np.greater_equal, None, "{a} >= {b}", 50, ">="),
    Operator("eq", 2, "compare", np.equal, None, "{a} == {b}", 45, "=="),
    Operator("ne", 2, "compare", np.not_equal, None, "{a} != {b}", 45, "!="),
    Operator("and", 2, "bool", np.logical_and, None, "{a} && {b}", 40, "and"),
    Operator("or", 2, "bool", np.logical_or, None, "{a} || {b}", 30, "or"),
    Operator("not", 1, "bool", np.logical_not, None, "!{a}", 80, "not"),
    Operator(
        "select",
        3,
        "select",
        np.where,
        lambda a, y: (None, select(a[0], _f(1), _f(0)), select(a[0], _f(0), _f(1))),
        "{a} ? {b} : {c}",
        20,
    ),
)

# The mean over a row of q or k, between the front end and the pass that takes it out of the formula. The mean
# of a number is the number.
ROW_MEAN = Operator("row_mean", 1, "float", _row_mean, None, "", attn="mean")

# A number in [0, 1) of the element that b, h, m, n name: of ints, so that nothing passes a gradient.
RANDOM = Operator(
    "random",
    5,
    "counter",
    random,
    lambda a, y: (None,) * 5,
    "{real}(afc::random({a}, {b}, {c}, {d}, {e}))",
)

OPERATORS: dict[str, Operator] = {row.name: row for row in (*ROWS, ROW_MEAN, RANDOM)}

# Functions a source may call by name; `clamp` is `min(max(x, lo), hi)`.
FUNCTIONS: frozenset[str] = frozenset(
    {
        "max",
        "min",
        "abs",
        "floor",
        "ceil",
        "exp",
        "log",
        "tanh",
        "sigmoid",
        "sin",
        "cos",
        "sqrt",
        "rsqrt",
        "random",
    }
)

BINARY: dict[str, str] = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "//": "floordiv",
    "%": "mod",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
    "==": "eq",
    "!=": "ne",
    "and": "and",
    "or": "or",
}


def result_type(name: str, types: tuple[Type, ...]) -> Type:
    """Type of an operator's value; the arguments are already promoted."""
    rule = OPERATORS[name].types
    if rule in ("compare", "bool"):
        return Type.BOOL
    if name in ("to_int", "ipow") or rule == "int":
        return Type.INT
    if rule in ("float", "any", "counter"):
        return Type.FLOAT
    values = types[1:] if rule == "select" else types
    if Type.FLOAT in values:
        return Type.FLOAT
    return Type.BOOL if values[0] is Type.BOOL else Type.INT


def to_float(expr: Expr) -> Expr:
    """Convert an int expression to float; literals convert at once."""
    if expr.type is Type.FLOAT:
        return expr
    if isinstance(expr, Const):
        return const(float(expr.value))
    return Op("to_float", (expr,), Type.FLOAT)
