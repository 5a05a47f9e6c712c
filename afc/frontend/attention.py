# SPDX-License-Identifier: Apache-2.0
"""An attention's body, statement by statement, to a Program."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, Union

from afc.expr.nodes import (
    Const,
    Expr,
    Formula,
    Op,
    Type,
    Var,
    const,
    inline_lets,
    substitute,
    variables,
)
from afc.expr.operators import to_float
from afc.expr.printer import attn
from afc.expr.simplify import simplify
from afc.frontend import ast
from afc.frontend.blocks import Blocks, call_text, convertible, new_dimensions, option_type
from afc.frontend.normalizers import classify
from afc.frontend.report import Report, did_you_mean
from afc.frontend.scalars import Binding, Scope, TensorRef, closed, expression
from afc.ir.program import (
    DIMENSIONS,
    INDEX_NAMES,
    Extent,
    Normalizer,
    Param,
    Program,
    Rotation,
    RowStep,
    ScalarParam,
    Step,
    TensorParam,
    Transform,
    WeightStep,
)

RESERVED_OPTIONS = ("q_origin", "k_origin", "kv_len", "return_lse", "deterministic")
# A run-time number shares the namespace of formulas with their inputs and with the values that passes name.
FORMULA_NAMES = (*INDEX_NAMES, "s", "r", "p", "c", "x", "x0", "x1", "o")
GENERATED_NAME = re.compile(r"d_\w+|\w+_value(_\d+)?")


@dataclass(frozen=True)
class Rows:
    """q, k or v after some row steps; a slice has `lo`, `hi`."""

    operand: Literal["q", "k", "v"]
    steps: tuple[Transform, ...] = ()
    lo: Expr | None = None
    hi: Expr | None = None


@dataclass(frozen=True)
class Scores:
    """dot(q, k) after some score steps and masks."""

    q: Rows
    k: Rows
    steps: tuple[Step, ...] = ()
    masks: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Weights:
    """Normalised scores after some weight blocks."""

    scores: Scores
    normalizer: Normalizer
    steps: tuple[WeightStep, ...] = ()


@dataclass(frozen=True)
class Output:
    """weights @ v after some output blocks."""

    weights: Weights
    steps: tuple[RowStep, ...] = ()


Value = Union[Rows, Scores, Weights, Output]  # noqa: UP007


class AttentionChecker:
    """Checks one attention. Reports go to the report of `blocks`."""

    def __init__(self, declaration: ast.Declaration, blocks: Blocks, source: str) -> None:
        self.declaration = declaration
        self.blocks = blocks
        self.report: Report = blocks.report
        self.source = source
        self.values: dict[str, Value] = {"q": Rows("q"), "k": Rows("k"), "v": Rows("v")}
        self.names: dict[str, Binding] = {d: Var(d, Type.INT) for d in DIMENSIONS}

    def scope(self, names: dict[str, Binding] | None = None) -> Scope:
        """Scalars in reach of the attention's statements."""
        return Scope(
            dict(self.names if names is None else names),
            self.report,
            self.blocks.functions,
            self.blocks.inline,
            require_positive=self.blocks.require_positive,
        )

    def options(
        self,
        declaration: ast.Declaration,
        node: ast.Call,
        names: dict[str, Binding] | None = None,
        dimensions: dict[str, Expr] | None = None,
    ) -> dict[str, Binding] | None:
        """What a statement gives the options of a block, or None after reported mistakes.

        `dimensions`: D and L of the operand that a rotation is called on.
        """
        scope = self.scope(names)
        bound = self.blocks.bind_options(declaration, node, scope, dimensions=dimensions)
        if bound is None:
            return None
        return {n: b if isinstance(b, TensorRef) else closed(b, scope) for n, b in bound.items()}

    def columns(self) -> Scope:
        """Scalars in reach of a slice, where D is the width of q and k."""
        return self.scope({"D": Var("Dqk", Type.INT), **self.names})

    def program(self) -> Program | None:
        """The checked program, or None after reported mistakes."""
        if tuple(p.name for p in self.declaration.inputs) != ("q", "k", "v"):
            self.report.error(
                "E0130",
                "an attention's inputs are `q, k, v`, in this order",
                self.declaration.span,
                hint=f"write `attention {self.declaration.name}(q, k, v; ...)`",
            )
            return None
        before = len(self.report.errors)
        params = self.signature()
        self.blocks.reserved = frozenset(self.names)
        for assignment in self.declaration.body:
            self.assign(assignment)
        result = self.value(self.declaration.result, self.values, self.names)
        if result is not None and not isinstance(result, Output):
            self.report.error(
                "E0131",
                "an attention returns `normalizer(scores) @ v`, with weight blocks before `@ v` and output "
                "blocks behind it",
                self.declaration.result.span,
            )
        params = self.require_bounds(params)
        if len(self.report.errors) > before or not isinstance(result, Output):
            return None
        return self.assemble(result, params)

    def assemble(self, result: Output, params: tuple[Param, ...]) -> Program:
        scores = result.weights.scores
        d = self.declaration
        return Program(
            d.name,
            d.doc,
            self.source,
            d.span,
            params,
            scores.q.steps,
            scores.k.steps,
            scores.steps,
            scores.masks,
            result.weights.normalizer,
            output_steps=result.steps,
            weight_steps=result.weights.steps,
        )

    # ---- signature ----------------------------------------------------------------------------------------

    def signature(self) -> tuple[Param, ...]:
        """Parameters after `;`, declared in `names`."""
        params: list[Param] = []
        for parameter in self.declaration.options:
            if parameter.name in (*self.names, *self.values, *RESERVED_OPTIONS) or parameter.name in {
                p.name for p in params
            }:
                self.report.error(
                    "E0132",
                    f"the name `{parameter.name}` is taken",
                    parameter.span,
                    hint=f"reserved: q, k, v, {', '.join((*DIMENSIONS, *RESERVED_OPTIONS))}",
                )
            elif parameter.shape is not None:
                params.append(self.tensor(parameter))
            else:
                params.append(self.scalar(parameter))
                if parameter.name in FORMULA_NAMES or GENERATED_NAME.fullmatch(parameter.name):
                    self.report.error(
                        "E0132",
                        f"the name `{parameter.name}` has a meaning in formulas",
                        parameter.span,
                        hint=f"a number may not be called {', '.join(FORMULA_NAMES)}, d_* or *_value",
                    )
        for name in sorted(new_dimensions(self.declaration)):
            self.names.setdefault(name, Var(name, Type.INT))
        for param in params:
            if isinstance(param, TensorParam):
                self.names[param.name] = TensorRef(param.name, len(param.shape), param.type, param.shape)
            else:
                self.names[param.name] = Var(param.name, param.type)
        return tuple(params)

    def tensor(self, parameter: ast.Parameter) -> TensorParam:
        known = {d: Var(d, Type.INT) for d in (*DIMENSIONS, *new_dimensions(self.declaration))}
        scalars = {
            p.name: Var(p.name, Type.INT)
            for p in self.declaration.options
            if p.type == "int" and p.shape is None
        }
        alone = {
            extent.size.id
            for option in self.declaration.options
            for extent in option.shape or ()
            if isinstance(extent.size, ast.Name)
        }
        extents = []
        for extent in parameter.shape or ():
            size = expression(extent.size, self.scope({**known, **scalars}))
            for name in sorted(variables(size) - {*DIMENSIONS, *scalars} - alone if size is not None else ()):
                self.report.error(
                    "E0202",
                    f"nothing says what `{name}` is in the size of `{parameter.name}`",
                    extent.size.span,
                    hint=f"make it a number: `{name}: int`, or the size of a dimension by itself",
                )
            if size is not None and size.type is not Type.INT:
                self.report.error("E0202", "a size must be an int", extent.size.span)
            extents.append(Extent(simplify(size) if size is not None else const(0), extent.broadcast))
        if len(extents) > 4:
            self.report.error(
                "E0203",
                f"`{parameter.name}` has rank {len(extents)}; a captured tensor has rank 4 at most",
                parameter.span,
            )
        if parameter.grad and option_type(parameter) is not Type.FLOAT:
            self.report.error(
                "E0402",
                f"`{parameter.name}` is {option_type(parameter).value}; only a float tensor has a gradient",
                parameter.span,
                hint="drop `grad`",
            )
        return TensorParam(
            parameter.name, tuple(extents), option_type(parameter), parameter.grad, parameter.span
        )

    def scalar(self, parameter: ast.Parameter) -> ScalarParam:
        default = expression(parameter.default, self.scope()) if parameter.default is not None else None
        kind = option_type(parameter)
        if default is not None and (not isinstance(default, Const) or not convertible(default.type, kind)):
            self.report.error(
                "E0133", f"the default of `{parameter.name}` must be a {kind.value} literal", parameter.span
            )
            default = None
        if isinstance(default, Const) and kind is Type.FLOAT:
            default = to_float(default)
        bound = expression(parameter.bound, self.scope()) if parameter.bound is not None else None
        if bound is not None and not (isinstance(bound, Const) and bound.value == 0):
            self.report.error("E0134", "a run-time parameter may only be bounded as `> 0`", parameter.span)
        return ScalarParam(
            parameter.name,
            kind,
            default if isinstance(default, Const) else None,
            bound is not None,
            parameter.span,
        )

    def require_bounds(self, params: tuple[Param, ...]) -> tuple[Param, ...]:
        """Turn bounds on run-time values into `positive` parameters, checked at each call."""
        positive = set()
        names = {p.name for p in params}
        for bound in self.blocks.runtime_bounds:
            inner = bound.value
            if isinstance(inner, Op) and inner.name == "to_float":
                inner = inner.args[0]
            name = inner.name if isinstance(inner, Var) and bound.limit == 0 else ""
            if name in names:
                positive.add(name)
            elif name not in DIMENSIONS:  # where a formula is evaluated, there are rows
                self.report.error(
                    "E0302",
                    f"{bound.what} must be greater than {bound.limit:g}, which cannot be checked for "
                    f"`{attn(bound.value)}`",
                    bound.span,
                    hint="pass a parameter or a literal",
                )
        self.blocks.runtime_bounds.clear()
        return tuple(
            replace(p, positive=True) if p.name in positive and isinstance(p, ScalarParam) else p
            for p in params
        )

    # ---- statements ---------------------------------------------------------------------------------------

    def assign(self, assignment: ast.Assignment) -> None:
        targets, value = assignment.targets, assignment.value
        if isinstance(value, ast.Call) and self.kind(value.function) in ("rotate", "row"):
            self.transform(targets, value)
            return
        if len(targets) != 1 or not targets[0].whole:
            if isinstance(value, ast.Call) and self.kind(value.function) is None and value.function != "dot":
                self.unknown_block(value)
                return
            self.report.error(
                "E0135", "only a rotation or a row block gives several values or a slice", assignment.span
            )
            return
        target = targets[0]
        if self.is_scalar(value):
            self.bind_scalar(target, value)
            return
        result = self.value(value, self.values, self.names)
        if result is None:
            return
        if target.base in ("q", "k", "v") and not isinstance(result, Rows):
            self.report.error(
                "E0136", f"`{target.base}` is a tensor of rows; give the scores another name", target.span
            )
            return
        self.values[target.base] = result

    def bind_scalar(self, target: ast.Slice, value: ast.Node) -> None:
        scalar = expression(value, self.scope())
        if target.base in self.names or target.base in self.values:
            self.report.error("E0107", f"`{target.base}` already has a value", target.span)
        elif scalar is not None:
            self.names[target.base] = simplify(scalar)

    def is_scalar(self, node: ast.Node) -> bool:
        """Whether an assignment names a number: nothing in it is a row, a score or a block."""
        match node:
            case ast.Name(id=name):
                return name not in self.values
            case ast.Literal() | ast.Index():
                return True
            case ast.Unary(operand=a):
                return self.is_scalar(a)
            case ast.Binary(op=op, left=a, right=b):
                return op != "@" and self.is_scalar(a) and self.is_scalar(b)
            case ast.Compare() | ast.Conditional():
                return True
            case ast.Call(function=f, args=args):
                known = self.blocks.declarations.get(f)
                block = f == "dot" or (known is not None and known.kind != "fn")
                return not block and all(map(self.is_scalar, args))
            case _:
                return False

    def kind(self, function: str) -> str | None:
        declaration = self.blocks.declarations.get(function)
        return declaration.kind if declaration else None

    def unknown_block(self, node: ast.Call) -> None:
        blocks = [n for n, d in self.blocks.declarations.items() if d.kind != "attention"]
        self.report.error(
            "E0105",
            f"unknown block `{node.function}`",
            node.span,
            hint=did_you_mean(node.function, [*blocks, "dot"]),
        )

    # ---- rotations ----------------------------------------------------------------------------------------

    def transform(self, targets: tuple[ast.Slice, ...], node: ast.Call) -> None:
        declaration = self.blocks.declarations[node.function]
        if len(node.args) != len(targets):
            self.report.error(
                "E0137", f"{len(targets)} target(s) but {len(node.args)} row(s) given", node.span
            )
            return
        for target, source in zip(targets, node.args, strict=True):
            rows = self.rows(source)
            if rows is None:
                return
            if not self.same_columns(target, source):
                self.report.error(
                    "E0138",
                    "a slice goes back where it came from",
                    target.span,
                    hint="write `q[a:b], k[a:b] = f(q[a:b], k[a:b])`",
                )
                return
            step = self.step(declaration, node, rows)
            if step is None:
                return
            whole = Rows(rows.operand, (*rows.steps, step))
            self.values[target.base] = whole

    def rows(self, node: ast.Node) -> Rows | None:
        """A row value, with the columns that a slice selects."""
        name = node.id if isinstance(node, ast.Name) else node.base if isinstance(node, ast.Slice) else None
        value = self.values.get(name) if name else None
        if not isinstance(value, Rows) or value.operand == "v":
            self.report.error("E0139", "a rotation or a row block applies to q or k", node.span)
            return None
        if isinstance(node, ast.Slice):
            lo = expression(node.lo, self.columns()) if node.lo is not None else const(0)
            hi = expression(node.hi, self.columns()) if node.hi is not None else Var("Dqk", Type.INT)
            return None if lo is None or hi is None else replace(value, lo=simplify(lo), hi=simplify(hi))
        return replace(value, lo=const(0), hi=Var("Dqk", Type.INT))

    def same_columns(self, target: ast.Slice, source: ast.Node) -> bool:
        def bounds(node: ast.Slice) -> tuple[object, object]:
            return tuple(None if n is None else expression(n, self.columns()) for n in (node.lo, node.hi))  # type: ignore[return-value]

        if isinstance(source, ast.Name):
            return target.whole and (
                target.base not in ("q", "k", "v") or self.values.get(source.id) is not None
            )
        assert isinstance(source, ast.Slice)
        return target.base == source.base and bounds(target) == bounds(source)

    def step(self, declaration: ast.Declaration, node: ast.Call, rows: Rows) -> Transform | None:
        """A rotation or a row block, with its options bound, on the columns of `rows`."""
        assert rows.lo is not None and rows.hi is not None
        width = rows.hi if rows.lo == const(0) else simplify(Op("sub", (rows.hi, rows.lo), Type.INT))
        if declaration.kind == "rotate" and declaration.pairing not in ("half", "adjacent"):
            self.report.error(
                "E0123", f"`{declaration.name}` must say `over half` or `over adjacent`", declaration.span
            )
            return None
        dimensions: dict[str, Expr] = {"D": width, "L": Var("M" if rows.operand == "q" else "N", Type.INT)}
        options = self.options(declaration, node, dimensions=dimensions)
        if options is None:
            return None
        formula = self.blocks.instantiate(declaration, options, dimensions)
        if formula is None:
            return None
        call = call_text(declaration, options)
        if declaration.kind == "row":
            return self.row_step(declaration, formula, call, node, rows.lo, width)
        return Rotation(
            declaration.name,
            formula,
            call,
            declaration.doc,
            node.span,
            declaration.span,
            first=rows.lo,
            width=width,
            pairing="half" if declaration.pairing == "half" else "adjacent",
        )

    def row_step(
        self,
        declaration: ast.Declaration,
        formula: Formula,
        call: str,
        node: ast.Call,
        first: Expr,
        width: Expr,
    ) -> RowStep | None:
        """A row block."""
        doc, origin = declaration.doc, declaration.span
        return RowStep(declaration.name, formula, call, doc, node.span, origin, first=first, width=width)

    # ---- scores, weights, output --------------------------------------------------------------------------

    def value(self, node: ast.Node, values: dict[str, Value], names: dict[str, Binding]) -> Value | None:
        """A row, score, weight or output value."""
        match node:
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.Name(id=name):
                self.report.error(
                    "E0101", f"unknown value `{name}`", node.span, hint=did_you_mean(name, values)
                )
            case ast.Binary(op="@"):
                return self.output(node, values, names)
            case ast.Call():
                return self.call(node, values, names)
            case ast.Binary(op=op):
                self.report.error(
                    "E0140",
                    f"`{op}` does not combine rows, scores or weights; an attention is one softmax over one "
                    "score matrix",
                    node.span,
                    hint="put arithmetic into a `score` block",
                )
            case _:
                self.report.error("E0141", "this is not a row, score or weight value", node.span)
        return None

    def output(self, node: ast.Binary, values: dict[str, Value], names: dict[str, Binding]) -> Value | None:
        left = self.value(node.left, values, names)
        right = self.value(node.right, values, names)
        if left is None or right is None:
            return None
        if not isinstance(left, Weights):
            self.report.error(
                "E0142", "the left side of `@` is a normalizer's result, such as `softmax(s)`", node.left.span
            )
            return None
        if not (isinstance(right, Rows) and right.operand == "v" and not right.steps):
            self.report.error("E0143", "the right side of `@` is `v`", node.right.span)
            return None
        return Output(left)

    def output_block(
        self,
        declaration: ast.Declaration,
        node: ast.Call,
        values: dict[str, Value],
        names: dict[str, Binding],
    ) -> Output | None:
        """An output block: a row step on all columns, with `o` as the column `x`."""
        if len(node.args) != 1:
            self.report.error(
                "E0106",
                f"`{declaration.name}` takes the output, and options after `;`",
                node.span,
                hint=f"write `{declaration.name}(softmax(s) @ v; ...)`",
            )
            return None
        value = self.value(node.args[0], values, names)
        dimensions: dict[str, Expr] = {"D": Var("Dv", Type.INT)}
        options = self.options(declaration, node, names, dimensions)
        if value is None or options is None:
            return None
        if not isinstance(value, Output):
            self.report.error(
                "E0146", f"`{declaration.name}` applies to an output, after `@ v`", node.args[0].span
            )
            return None
        formula = self.blocks.instantiate(declaration, options, dimensions)
        if formula is None:
            return None
        # Without intermediate values, of which one may be called x.
        result = substitute(inline_lets(formula)[0], {"o": Var("x", Type.FLOAT)})
        step = RowStep(
            declaration.name,
            Formula((result,)),
            call_text(declaration, options),
            declaration.doc,
            node.span,
            declaration.span,
            first=const(0),
            width=dimensions["D"],
        )
        return Output(value.weights, (*value.steps, step))

    def call(self, node: ast.Call, values: dict[str, Value], names: dict[str, Binding]) -> Value | None:
        if node.function == "dot":
            return self.dot(node, values, names)
        declaration = self.blocks.declarations.get(node.function)
        if declaration is None:
            self.unknown_block(node)
            return None
        if declaration.kind == "fn":
            return self.macro(declaration, node, values, names)
        if declaration.kind == "weight":
            return self.weight(declaration, node, values, names)
        if declaration.kind == "output":
            return self.output_block(declaration, node, values, names)
        if declaration.kind not in ("score", "mask", "normalizer"):
            self.report.error(
                "E0144",
                f"a {declaration.kind} cannot be used here",
                node.span,
                hint="assign its result: `q, k = rope(q, k)`"
                if declaration.kind in ("rotate", "row")
                else None,
            )
            return None
        return self.block(declaration, node, values, names)

    def dot(self, node: ast.Call, values: dict[str, Value], names: dict[str, Binding]) -> Value | None:
        rows = [self.value(a, values, names) for a in node.args]
        if node.keywords or len(rows) != 2:
            self.report.error("E0106", "`dot` takes q and k", node.span)
            return None
        q, k = rows
        if q is None or k is None:
            return None
        if not (isinstance(q, Rows) and q.operand == "q" and isinstance(k, Rows) and k.operand == "k"):
            self.report.error("E0145", "`dot` takes a row of q and a row of k, in this order", node.span)
            return None
        return Scores(replace(q, lo=None, hi=None), replace(k, lo=None, hi=None))

    def block(
        self,
        declaration: ast.Declaration,
        node: ast.Call,
        values: dict[str, Value],
        names: dict[str, Binding],
    ) -> Value | None:
        if len(node.args) != 1:
            self.report.error(
                "E0106",
                f"`{declaration.name}` takes the scores, and options after `;`",
                node.span,
                hint=f"write `{declaration.name}(s; ...)`",
            )
            return None
        scores = self.value(node.args[0], values, names)
        options = self.options(declaration, node, names)
        if scores is None or options is None:
            return None
        if not isinstance(scores, Scores):
            self.report.error("E0146", f"`{declaration.name}` applies to scores", node.args[0].span)
            return None
        if declaration.kind == "normalizer":
            normalizer = classify(declaration, node, options, self.blocks)
            return None if normalizer is None else Weights(scores, normalizer)
        formula = self.blocks.instantiate(declaration, options, {})
        if formula is None:
            return None
        step = Step(
            declaration.name,
            formula,
            call_text(declaration, options),
            declaration.doc,
            node.span,
            declaration.span,
        )
        if declaration.kind == "mask":
            return replace(scores, masks=(*scores.masks, step))
        return replace(scores, steps=(*scores.steps, step))

    def weight(
        self,
        declaration: ast.Declaration,
        node: ast.Call,
        values: dict[str, Value],
        names: dict[str, Binding],
    ) -> Weights | None:
        """A weight block, between the normalizer and `@ v`."""
        if len(node.args) != 1:
            self.report.error(
                "E0106",
                f"`{declaration.name}` takes the weights, and options after `;`",
                node.span,
                hint=f"write `{declaration.name}(softmax(s); ...) @ v`",
            )
            return None
        value = self.value(node.args[0], values, names)
        options = self.options(declaration, node, names)
        if value is None or options is None:
            return None
        if not isinstance(value, Weights):
            self.report.error(
                "E0146",
                f"`{declaration.name}` applies to a normalizer's result, before `@ v`",
                node.args[0].span,
            )
            return None
        formula = self.blocks.instantiate(declaration, options, {})
        if formula is None:
            return None
        call, doc = call_text(declaration, options), declaration.doc
        step = WeightStep(declaration.name, formula, call, doc, node.span, declaration.span)
        return replace(value, steps=(*value.steps, step))

    def macro(
        self,
        declaration: ast.Declaration,
        node: ast.Call,
        values: dict[str, Value],
        names: dict[str, Binding],
    ) -> Value | None:
        """A `fn` over rows and scores, such as `scaled_dot_product`: its body is evaluated in place."""
        if len(node.args) != len(declaration.inputs):
            self.report.error(
                "E0106",
                f"`{declaration.name}` takes {len(declaration.inputs)} value(s) before `;`, "
                f"not {len(node.args)}",
                node.span,
            )
            return None
        args = [self.value(a, values, names) for a in node.args]
        options = self.options(declaration, node, names)
        if None in args or options is None:
            return None
        inner = {p.name: a for p, a in zip(declaration.inputs, args, strict=True) if a is not None}
        dims: dict[str, Binding] = {d: Var(d, Type.INT) for d in DIMENSIONS}
        result = self.value(declaration.result, inner, {**dims, **options})
        if isinstance(result, Scores):  # messages and text name what the user wrote
            used = isinstance(declaration.result, ast.Call)
            steps = tuple(
                replace(
                    s,
                    block=declaration.name,
                    call=call_text(declaration, options),
                    doc=declaration.doc,
                    span=node.span,
                )
                if used and n == len(result.steps) - 1
                else s
                for n, s in enumerate(result.steps)
            )
            return replace(result, steps=steps)
        return result
