# SPDX-License-Identifier: Apache-2.0
"""Text of a formula: in the language, for people, and in C++, for every target.

The C++ spelling is the same on every target; `Real` is the compute type and `afc::` functions live in each
target's math header. Integers are 64-bit in the language; 32-bit code is printed where bounds prove that
it is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from afc.expr.interval import INT32, Interval, interval
from afc.expr.nodes import Const, Expr, Load, Op, Type, Var
from afc.expr.operators import OPERATORS

ATTN_PRECEDENCE = {
    "or": 1,
    "and": 2,
    "not": 3,
    "compare": 4,
    "sum": 5,
    "product": 6,
    "neg": 7,
    "pow": 8,
    "atom": 9,
}
ATTN_LEVEL = {
    "or": "or",
    "and": "and",
    "not": "not",
    "add": "sum",
    "sub": "sum",
    "mul": "product",
    "div": "product",
    "floordiv": "product",
    "mod": "product",
    "neg": "neg",
    "pow": "pow",
    "ipow": "pow",
    "lt": "compare",
    "le": "compare",
    "gt": "compare",
    "ge": "compare",
    "eq": "compare",
    "ne": "compare",
}


def number(value: float | int | bool) -> str:
    """Shortest decimal text of a literal, as the language writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else repr(float(value))


def attn(expr: Expr) -> str:
    """The expression in the language."""
    return _attn(expr)[0]


def _attn(expr: Expr) -> tuple[str, int]:
    atom = ATTN_PRECEDENCE["atom"]
    match expr:
        case Const(value=value):
            text = number(value)
            return text, ATTN_PRECEDENCE["neg"] if text.startswith("-") else atom
        case Var(name=name):
            return name, atom
        case Load(tensor=tensor, indices=indices):
            return f"{tensor}[{', '.join(map(attn, indices))}]" if indices else tensor, atom
        case Op(name="select", args=(c, a, b)):
            return f"if {attn(c)} then {attn(a)} else {attn(b)}", 0
        case Op(name="to_float", args=(a,)):
            return _attn(a)
        case Op(name=name, args=args):
            return _attn_operator(name, args)


def _attn_operator(name: str, args: tuple[Expr, ...]) -> tuple[str, int]:
    if name not in ATTN_LEVEL:
        return f"{name}({', '.join(map(attn, args))})", ATTN_PRECEDENCE["atom"]
    level = ATTN_PRECEDENCE[ATTN_LEVEL[name]]
    symbol = OPERATORS[name].attn

    def part(expr: Expr, minimum: int) -> str:
        text, precedence = _attn(expr)
        return text if precedence >= minimum else f"({text})"

    if len(args) == 1:
        return f"{symbol}{' ' if symbol == 'not' else ''}{part(args[0], level)}", level
    right = (
        ATTN_PRECEDENCE["neg"] if name in ("pow", "ipow") else level if name in ("and", "or") else level + 1
    )
    left = level + 1 if name in ("pow", "ipow") else level
    return f"{part(args[0], left)} {symbol} {part(args[1], right)}", level


@dataclass(frozen=True)
class Cpp:
    """Prints C++ for one context: the compute type and what is known of the integers.

    `real`: "Real" or "double"; `suffix`: of float literals ("f" where Real is float for certain, else a
    cast);
    `names`: C++ spelling of variables; `ranges`: bounds of integer variables; `tensors`: captured tensor ->
    slot;
    `native64`: every integer variable is 64-bit already; `mixes`: max and min take integers of two types.
    """

    real: str = "Real"
    suffix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Interval] = field(default_factory=dict)
    tensors: Mapping[str, int] = field(default_factory=dict)
    native64: bool = False
    mixes: bool = False

    def literal(self, value: float | int | bool) -> str:
        """A literal: shortest decimal that reads back to the same float64, marked with the compute type."""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int):
            return str(value) if INT32[0] <= value <= INT32[1] else f"int64_t({value})"
        if value != value or value in (float("inf"), float("-inf")):
            name = "nan" if value != value else "infinity" if value > 0 else "minus_infinity"
            return f"afc::{name}<{self.real}>()"
        if self.suffix:
            return f"{value!r}{self.suffix}"
        return f"{self.real}({value!r})" if self.real != "double" else repr(value)

    def text(self, expr: Expr) -> str:
        """The expression as C++."""
        return self._print(expr)[0]

    def _print(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case Const(value=value):
                text = self.literal(value)
                return text, 80 if text.startswith("-") else 100
            case Var(name=name):
                return self.names.get(name, name), 100
            case Load():
                return self._load(expr), 100
            case Op():
                return self._operator(expr)

    def _load(self, expr: Load) -> str:
        kind = {Type.FLOAT: self.real, Type.INT: "int64_t", Type.BOOL: "bool"}[expr.type]
        indices = "".join(f", {self.text(i)}" for i in expr.indices)
        return f"afc::read<{kind}>(args.captured[{self.tensors[expr.tensor]}]{indices})"

    def _is_wide(self, expr: Expr) -> bool:
        """Whether the text of an integer has type int64_t, or might."""
        match expr:
            case Op(name="to_int"):
                return False
            case Op(args=args, type=Type.INT):
                return not self._fits(expr) or any(map(self._is_wide, args))
            case Load(type=Type.INT):
                return True
            case Const(type=Type.INT):
                return not self._fits(expr)
            case Var(type=Type.INT):
                return self.native64 or not self._fits(expr)
            case _:
                return False

    def _fits(self, expr: Expr) -> bool:
        return interval(expr, self.ranges).within(*INT32)

    def _operator(self, expr: Op) -> tuple[str, int]:
        row = OPERATORS[expr.name]
        if expr.name == "to_float":
            return f"{self.real}({self.text(expr.args[0])})", 100
        wide = expr.type is Type.INT and not self.native64 and not self._fits(expr)
        infix = row.precedence < 100
        extreme = expr.name in ("max", "min") and not self.mixes
        mixed = extreme and any(map(self._is_wide, expr.args))
        parts = {}
        for position, (slot, argument) in enumerate(zip("abcde", expr.args, strict=False)):
            text, precedence = self._print(argument)
            strict = position > 0 and expr.name not in ("and", "or")  # a + (b + c) rounds unlike a + b + c
            if infix and (precedence < row.precedence or (strict and precedence == row.precedence)):
                text = f"({text})"
            if argument.type is Type.INT and (
                (wide and position == 0) or (mixed and not self._is_wide(argument))
            ):
                text = f"int64_t({text})"
            parts[slot] = text
        if expr.name == "neg" and parts["a"].startswith("-"):
            parts["a"] = f"({parts['a']})"
        return row.text.format(**parts, real=self.real), row.precedence
