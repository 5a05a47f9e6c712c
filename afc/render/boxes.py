# SPDX-License-Identifier: Apache-2.0
"""The three-valued test of a mask as C++: the text of the formula over bounds in place of numbers
(`runtime/abi/afc_bounds.h` overloads the operators).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from afc.expr.nodes import Expr, Load, Op, Type, variables, walk
from afc.expr.operators import OPERATORS
from afc.expr.printer import Cpp
from afc.masks.boxes import NUMBERS, Read, moving_axis, reads

BOUNDS = {Type.INT: "afc::Ints", Type.FLOAT: "afc::Reals", Type.BOOL: "afc::Truth"}
TABLE_TYPES = {Type.FLOAT: "Real", Type.INT: "int64_t", Type.BOOL: "bool"}
FUNCTIONS = {"select": "afc::select", "to_float": "afc::Reals", "to_int": "afc::to_int"}


@dataclass(frozen=True)
class _Bounds(Cpp):
    """Prints a formula whose indices and scalars are bounds."""

    reads: tuple[Read, ...] = ()
    axes: Sequence[int] | None = None
    known: Mapping[Expr, str] = field(default_factory=dict)  # reads that stand in a variable
    plain: frozenset[str] = frozenset()  # variables that are numbers

    def _load(self, expr: Load) -> str:
        if expr in self.known:
            return self.known[expr]
        table = self.reads.index(Read(expr.tensor, expr.type, moving_axis(expr)))
        arguments = [f"tables[{table}]", *map(self.text, expr.indices)]
        axis = "" if self.axes is None else f", {self.axes[table]}"
        return f"afc::bounds_at<{TABLE_TYPES[expr.type]}{axis}>({', '.join(arguments)})"

    def _operator(self, expr: Op) -> tuple[str, int]:
        """Functions take bounds: their templates for numbers would match a bound and a number."""
        row = OPERATORS[expr.name]
        parts = [self._bound(a) for a in expr.args]
        if expr.name in FUNCTIONS:
            return f"{FUNCTIONS[expr.name]}({', '.join(parts)})", 100
        if expr.name == "ipow":
            return f"afc::ipow({parts[0]}, {self.text(expr.args[1])})", 100
        if expr.type is not Type.BOOL and expr.name not in NUMBERS:
            return f"{BOUNDS[expr.type]}::anything()", 100
        if row.precedence == 100:
            return row.text.format(**dict(zip("abc", parts, strict=False))), 100
        return super()._operator(expr)

    def _bound(self, expr: Expr) -> str:
        plain = variables(expr) <= self.plain and not any(isinstance(e, Load) for e in walk(expr))
        return f"{BOUNDS[expr.type]}({self.text(expr)})" if plain else self.text(expr)


def box_function(
    predicate: Expr,
    dimensions: Mapping[str, str],
    scalars: Mapping[str, tuple[str, str, Type]],
    axes: Sequence[int] | None = None,
    places: str = "",
) -> str:
    """Text of `keep_box`; `tables[k]` is the k-th of the mask's `reads`.

    `dimensions`: C++ spelling, in 64 bits; `scalars`: C++ name, text of the value, and type; `axes`: along
    which each table has extents (-1: it has none), where that is part of the text; `places`: a parameter with
    the origins of the batch entry.
    """
    used = variables(predicate)
    lines = []
    for position, index, origin in (("i", "m", "q_origin"), ("j", "n", "k_origin")):
        if position in used:
            lines.append(
                f"const afc::Ints {position} = {index} + {dimensions.get(origin, f'args.{origin}')};"
            )
    for name, (local, text, kind) in scalars.items():
        if name in used:
            number = {Type.INT: text, Type.FLOAT: f"Real({text})", Type.BOOL: f"{text} != 0"}[kind]
            lines.append(f"const {BOUNDS[kind]} {local}({number});")
    printer = _Bounds(
        names={**dimensions, **{name: local for name, (local, _, _) in scalars.items()}},
        native64=True,
        mixes=True,
        reads=reads(predicate),
        axes=axes,
        plain=frozenset((*dimensions, "b", "h")),
    )
    loads = [e for e in walk(predicate) if isinstance(e, Load)]
    for expr in dict.fromkeys(e for e in loads if loads.count(e) > 1):
        name = f"read_{len(printer.known)}"
        lines.append(f"const auto {name} = {printer.text(expr)};")
        printer = replace(printer, known={**printer.known, expr: name})
    parts = []
    for part in conjuncts(predicate):
        text = printer.text(part)
        loose = isinstance(part, Op) and part.name == "or"
        parts.append(f"({text})" if loose and part != predicate else text)
    separator = "\n         && "
    lines.append(f"return {separator.join(parts)};")
    body = "\n  ".join(lines)
    return (
        "// The mask on a box of queries m x keys n: may it keep an element, must it keep all?\n"
        "AFC_FN afc::Truth keep_box(const afc_args &args, const afc::Table *tables, "
        f"{places + ', ' if places else ''}int b, int h, "
        f"const afc::Ints &m,\n{' ' * 27}const afc::Ints &n) {{\n  {body}\n}}"
    )


def conjuncts(expr: Expr) -> list[Expr]:
    """The parts that must all hold."""
    match expr:
        case Op(name="and", args=(a, b)):
            return conjuncts(a) + conjuncts(b)
        case _:
            return [expr]
