# SPDX-License-Identifier: Apache-2.0
"""Runs `example` lines: numbers from outside that the formulas must reproduce.

The tolerance is half a unit of the last digit written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from afc.expr.evaluate import evaluate, evaluate_formula
from afc.expr.nodes import Const, Expr, Type, Var
from afc.frontend import ast
from afc.frontend.blocks import SLOTS, Blocks, convertible, new_dimensions, option_type
from afc.frontend.normalizers import split
from afc.frontend.report import did_you_mean
from afc.frontend.scalars import Binding, Scope, TensorRef, expression
from afc.ir.program import DIMENSIONS


@dataclass(frozen=True)
class Outcome:
    """Result of one example. `got` is None where it could not be evaluated (a reported mistake)."""

    example: ast.Example
    got: tuple[float | bool, ...] | None
    passed: bool


class ExampleRunner:
    """Evaluates examples against the declarations of `blocks`; mistakes go to its report."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.report = blocks.report

    def run(self, example: ast.Example) -> Outcome:
        """Evaluate and compare; a wrong number is reported as E0310."""
        got = self.value(example.call)
        expected = example.expected.items if isinstance(example.expected, ast.Items) else (example.expected,)
        if got is None:
            return Outcome(example, None, False)
        close = len(got) == len(expected) and all(
            self.close(value, node) for value, node in zip(got, expected, strict=True)
        )
        if not close:
            shown = ", ".join(f"{v:.10g}" if isinstance(v, float) else str(v).lower() for v in got)
            self.report.error("E0310", f"this example does not hold: the formula gives {shown}", example.span)
        return Outcome(example, got, close)

    def close(self, value: float | bool, node: ast.Node) -> bool:
        literal, sign = (node.operand, -1) if isinstance(node, ast.Unary) else (node, 1)
        if not isinstance(literal, ast.Literal):
            self.report.error("E0311", "the expected value of an example is a literal", node.span)
            return False
        if isinstance(literal.value, bool) or isinstance(value, bool):
            return value is literal.value
        mantissa, _, exponent = literal.text.lower().partition("e")
        digits = len(mantissa.partition(".")[2])
        return abs(value - sign * literal.value) <= 0.5 * 10.0 ** (int(exponent or 0) - digits) * (1 + 1e-9)

    def value(self, call: ast.Node) -> tuple[float | bool, ...] | None:
        declaration = self.blocks.declarations.get(call.function) if isinstance(call, ast.Call) else None
        if declaration is None or not isinstance(call, ast.Call):
            self.report.error("E0312", "an example calls a block of this file or of the prelude", call.span)
            return None
        if declaration.kind == "normalizer":
            return self.normalizer(declaration, call)
        if declaration.kind in ("row", "output"):
            return self.row(declaration, call)
        if declaration.kind == "fn" and self.blocks.is_macro(declaration):
            result = self.macro(declaration, call)
            return None if result is None else (float(result),)
        if declaration.kind not in (*SLOTS, "fn"):
            return None
        return self.block(declaration, call)

    def constants(self, call: ast.Call, skip: frozenset[str] = frozenset()) -> dict[str, Any] | None:
        """Named arguments of a call as numbers or arrays."""
        found = {k.name: self.literal(k.value) for k in call.keywords if k.name not in skip}
        return None if any(v is None for v in found.values()) else found

    def literal(self, node: ast.Node) -> Any:
        """A number, or an array from a list of numbers or of lists of equal shape; None after a mistake."""
        if isinstance(node, ast.Items):
            parts = [self.literal(i) for i in node.items]
            if any(p is None for p in parts):
                return None
            if len({np.shape(p) for p in parts}) > 1:
                self.report.error("E0315", "the parts of a list must have one shape", node.span)
                return None
            return np.array(parts)
        expr = expression(node, Scope({}, self.report, self.blocks.functions, self.blocks.inline))
        return None if expr is None else evaluate(expr, {})

    def block(self, declaration: ast.Declaration, call: ast.Call) -> tuple[float | bool, ...] | None:
        arguments = self.arguments(declaration, call)
        if arguments is None:
            return None
        env, bindings, tensors = arguments
        formula = self.blocks.instantiate(declaration, bindings, {})
        if formula is None:
            return None
        try:
            values = evaluate_formula(formula, env, tensors)
        except KeyError as missing:
            self.missing(missing, call)
            return None
        return tuple(bool(v) if declaration.kind == "mask" else float(v) for v in values)

    def arguments(
        self, declaration: ast.Declaration, call: ast.Call
    ) -> tuple[dict[str, Any], dict[str, Binding], dict[str, Any]] | None:
        """What an example's call gives a block: values by name, bindings of its options, captured tensors."""
        given = self.constants(call)
        args = [self.literal(a) for a in call.args]
        # A row or output block computes all columns.
        all_columns = declaration.kind in ("row", "output")
        inputs = [p for p in declaration.inputs if not all_columns or p.name != "c"]
        if given is None or any(a is None for a in args):
            return None
        if len(args) != len(inputs):
            self.report.error(
                "E0106",
                f"`{declaration.name}` has {len(inputs)} input(s), the example gives {len(args)}",
                call.span,
            )
            return None
        bindings, tensors = self.bindings(declaration, given, call)
        if bindings is None:
            return None
        env: dict[str, Any] = {p.name: a for p, a in zip(inputs, args, strict=True)}
        env |= self.dimensions(declaration, tensors)
        env |= {n: v for n, v in given.items() if n not in tensors}
        return env, bindings, tensors

    def missing(self, name: KeyError, call: ast.Call) -> None:
        """Report a name that the formula reads and the example does not give."""
        self.report.error(
            "E0313",
            f"the example needs a value for {name}",
            call.span,
            hint=f"write `; {str(name).strip(chr(39))} = ...`",
        )

    def bindings(
        self, declaration: ast.Declaration, given: Mapping[str, Any], call: ast.Call
    ) -> tuple[dict[str, Binding] | None, dict[str, Any]]:
        """Options as variables or tensors; a default applies where the example gives nothing."""
        bound: dict[str, Binding] = {}
        tensors: dict[str, Any] = {}
        slot = SLOTS.get(declaration.kind)
        names = {p.name for p in declaration.options} | set(slot.dimensions if slot else ())
        for name in given:
            if name not in names and not name[0].isupper():
                self.report.error(
                    "E0118",
                    f"`{declaration.name}` has no option `{name}`",
                    call.span,
                    hint=did_you_mean(name, names),
                )
                return None, {}
        for option in declaration.options:
            if option.shape is not None:
                if not self.tensor_fits(declaration, option, given.get(option.name), call):
                    return None, {}
                bound[option.name] = TensorRef(option.name, len(option.shape), option_type(option))
                tensors[option.name] = given[option.name]
            elif option.name in given:
                bound[option.name] = Var(option.name, option_type(option))
            elif option.default is not None:
                value = self.default(option, bound)
                if value is None:
                    return None, {}
                bound[option.name] = value
            elif slot is None or option.name not in slot.inputs:
                self.report.error(
                    "E0120", f"`{declaration.name}` needs a value for `{option.name}`", call.span
                )
                return None, {}
        return bound, tensors

    def tensor_fits(
        self, declaration: ast.Declaration, option: ast.Parameter, value: Any, call: ast.Call
    ) -> bool:
        """Whether an example gives a captured tensor, with the rank and type of the declaration."""
        assert option.shape is not None
        if value is None:
            self.report.error(
                "E0120",
                f"`{declaration.name}` needs a value for `{option.name}`",
                call.span,
                hint=f"write `; {option.name} = [...]`",
            )
            return False
        kind = {"b": Type.BOOL, "i": Type.INT, "f": Type.FLOAT}.get(np.asarray(value).dtype.kind)
        rank = len(option.shape)
        if kind is not None and np.ndim(value) == rank and convertible(kind, option_type(option)):
            return True
        self.report.error(
            "E0201",
            f"`{option.name}` of `{declaration.name}` is a {option_type(option).value} tensor of rank "
            f"{rank}; the example gives {kind.value if kind else 'integers beyond 64 bits'} of rank "
            f"{np.ndim(value)}",
            call.span,
        )
        return False

    @staticmethod
    def dimensions(declaration: ast.Declaration, tensors: Mapping[str, Any]) -> dict[str, int]:
        """Dimensions of the block's own that the shapes of its tensors bind, such as T of `up[B, M, T]`."""
        own = new_dimensions(declaration)
        found: dict[str, int] = {}
        for option in declaration.options:
            for axis, extent in enumerate(option.shape or ()):
                if isinstance(extent.size, ast.Name) and extent.size.id in own:
                    found.setdefault(extent.size.id, np.shape(tensors[option.name])[axis])
        return found

    def default(self, option: ast.Parameter, bound: Mapping[str, Binding]) -> Expr | None:
        assert option.default is not None
        dims: dict[str, Binding] = {"Dqk": Var("Dqk", Type.INT), "Dv": Var("Dv", Type.INT)}
        value = expression(
            option.default, Scope({**dims, **bound}, self.report, self.blocks.functions, self.blocks.inline)
        )
        if isinstance(value, Const) and option_type(option) is Type.FLOAT:
            return Const(float(value.value), Type.FLOAT)
        return value

    def row(self, declaration: ast.Declaration, call: ast.Call) -> tuple[float, ...] | None:
        """All columns of a row, from a list of its columns x (of an output: o, as wide as v); D is its
        length.
        """
        arguments = self.arguments(declaration, call)
        if arguments is None:
            return None
        env, bindings, tensors = arguments
        row = "x" if declaration.kind == "row" else "o"
        if np.ndim(env.get(row, 0.0)) != 1:
            message = f"an example of `{declaration.name}` gives a list for {row}"
            self.report.error("E0314", message, call.span)
            return None
        formula = self.blocks.instantiate(declaration, bindings, {})
        if formula is None:
            return None
        width = np.size(env[row])
        try:
            widths = {"D": width} if row == "x" else {"D": width, "Dv": width}
            env = {**widths, "c": np.arange(width), **env}
            [value] = evaluate_formula(formula, env, tensors)
        except KeyError as missing:
            self.missing(missing, call)
            return None
        return tuple(float(x) for x in np.broadcast_to(value, (width,)))

    def normalizer(self, declaration: ast.Declaration, call: ast.Call) -> tuple[float, ...] | None:
        """The weights of a row, from a list of its scores; N is its length."""
        parts, arguments = split(declaration.result), self.arguments(declaration, call)
        if parts is None or arguments is None:
            return None
        env, bindings, tensors = arguments
        names: dict[str, Binding] = {n: Var(n, t) for n, t in SLOTS["normalizer"].inputs.items()}
        names |= {d: Var(d, Type.INT) for d in DIMENSIONS}
        scope = Scope({**names, **bindings}, self.report, self.blocks.functions, self.blocks.inline)
        weight = expression(parts[0], scope)
        extra = expression(parts[2], scope) if parts[2] is not None else Const(0.0, Type.FLOAT)
        if weight is None or extra is None:
            return None
        try:
            env = {"N": np.size(env["s"]), **env}
            w = np.atleast_1d(evaluate(weight, env, tensors))
            total = w.sum() + evaluate(extra, env, tensors) if parts[1] is not None else 1.0
        except KeyError as missing:
            self.missing(missing, call)
            return None
        with np.errstate(all="ignore"):  # 0 / 0 is NaN, which no literal equals
            return tuple(float(x) for x in w / total)

    def macro(self, declaration: ast.Declaration, call: ast.Call) -> float | None:
        """A function over rows: `q` and `k` are lists, `dot` is their inner product."""
        args = [self.literal(a) for a in call.args]
        if len(args) != len(declaration.inputs) or any(not isinstance(a, np.ndarray) for a in args):
            self.report.error(
                "E0314", f"an example of `{declaration.name}` gives a list for each row", call.span
            )
            return None
        options = self.constants(call)
        if options is None:
            return None
        env = {"Dqk": len(args[0]), "Dv": len(args[-1]), **options}
        for option in declaration.options:
            if option.name not in env and option.default is not None:
                value = self.default(option, {})
                if value is None:
                    return None
                env[option.name] = evaluate(value, env)
        rows = {p.name: a for p, a in zip(declaration.inputs, args, strict=True)}
        return self.macro_value(declaration.result, rows, env)

    def macro_value(self, node: ast.Node, rows: Mapping[str, Any], env: Mapping[str, Any]) -> float | None:
        if not isinstance(node, ast.Call):
            return None
        if node.function == "dot":
            q, k = (rows.get(a.id) if isinstance(a, ast.Name) else None for a in (*node.args, None, None)[:2])
            if q is None or k is None or np.shape(q) != np.shape(k) or len(node.args) != 2:
                self.report.error("E0314", "an example's `dot` takes two rows of one length", node.span)
                return None
            return float(q @ k)
        inner = self.macro_value(node.args[0], rows, env) if node.args else None
        declaration = self.blocks.declarations.get(node.function)
        if declaration is None:
            return None
        scope = Scope(
            {n: Var(n, Type.FLOAT) for n in env}, self.report, self.blocks.functions, self.blocks.inline
        )
        options = self.blocks.bind_options(declaration, node, scope)
        formula = self.blocks.instantiate(declaration, options or {}, {})
        self.blocks.runtime_bounds.clear()
        if formula is None or inner is None:
            return None
        try:
            return float(evaluate_formula(formula, {"s": inner, **env})[0])
        except KeyError as missing:
            self.missing(missing, node)
            return None
