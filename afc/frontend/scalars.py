# SPDX-License-Identifier: Apache-2.0
"""Scalar expressions: names resolved, types checked, calls of functions inlined.

The result is an `Expr`; a mistake is reported and stands in for itself as None, so that checking goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from afc.errors import Span
from afc.expr.nodes import Const, Expr, Formula, Let, Load, Op, Type, Var, const, inline_lets
from afc.expr.operators import BINARY, FUNCTIONS, OPERATORS, call, neg, select, to_float
from afc.expr.simplify import simplify
from afc.frontend import ast
from afc.frontend.report import Report, did_you_mean
from afc.ir.program import Extent


@dataclass(frozen=True)
class TensorRef:
    """A captured tensor as a block sees it: `name` and sizes in the attention's signature.

    `shape` is empty where a block is looked at without a caller.
    """

    name: str
    rank: int
    type: Type
    shape: tuple[Extent, ...] = ()


Binding = Expr | TensorRef


@dataclass
class Scope:
    """What a formula may read, and where its intermediate values go."""

    names: dict[str, Binding]
    report: Report
    functions: Mapping[str, ast.Declaration]
    inline: Callable[[ast.Declaration, ast.Call, list[Expr], Scope], Expr | None]
    lets: list[Let] = field(default_factory=list)
    prefix: str = ""
    depth: int = 0
    require_positive: Callable[[Expr, str, Span], None] | None = None  # takes note of a divisor
    reserved: frozenset[str] = (
        frozenset()
    )  # names of the attention's parameters: no intermediate value has one
    width: Expr | None = None  # of the row, in a row block: what `mean` and `sum` are over

    def allowed(self) -> str:
        """The names in reach, for messages."""
        return ", ".join(sorted(self.names))


def expression(node: ast.Node, scope: Scope) -> Expr | None:
    """Typed expression of a syntax tree, or None after a reported mistake."""
    match node:
        case ast.Literal(value=value):
            if type(value) is int and value >= 2**63:
                scope.report.error("E0124", "an int has 64 bits, less than this number needs", node.span)
                return None
            return const(value)
        case ast.Name():
            return _name(node, scope)
        case ast.Unary():
            return _unary(node, scope)
        case ast.Binary():
            return _binary(node, scope)
        case ast.Compare():
            return _compare(node, scope)
        case ast.Conditional():
            return _conditional(node, scope)
        case ast.Call():
            return _call(node, scope)
        case ast.Index():
            return _index(node, scope)
        case ast.Slice():
            scope.report.error("E0110", "a slice is not a number", node.span)
        case ast.Items():
            scope.report.error("E0111", "a list or pair is not a number", node.span)
    return None


def _name(node: ast.Name, scope: Scope) -> Expr | None:
    if node.id == "pi":
        return const(3.141592653589793)
    binding = scope.names.get(node.id)
    if binding is None:
        scope.report.error(
            "E0101",
            f"unknown name `{node.id}`",
            node.span,
            hint=did_you_mean(node.id, scope.names) or f"in reach here: {scope.allowed()}",
        )
        return None
    if isinstance(binding, TensorRef):
        if binding.rank == 0:
            return Load(binding.name, (), binding.type)
        scope.report.error(
            "E0102",
            f"`{node.id}` is a tensor of rank {binding.rank} and needs {binding.rank} indices",
            node.span,
            hint=f"write `{node.id}[...]`",
        )
        return None
    return binding


def _require(expr: Expr, wanted: tuple[Type, ...], what: str, span: Span, scope: Scope) -> bool:
    if expr.type in wanted:
        return True
    names = " or ".join(t.value for t in wanted)
    scope.report.error("E0103", f"{what} must be {names}, not {expr.type.value}", span)
    return False


def _unary(node: ast.Unary, scope: Scope) -> Expr | None:
    operand = expression(node.operand, scope)
    if operand is None:
        return None
    if node.op == "not":
        return (
            call("not", operand)
            if _require(operand, (Type.BOOL,), "the operand of `not`", node.span, scope)
            else None
        )
    if not _require(operand, (Type.INT, Type.FLOAT), "the operand of `-`", node.span, scope):
        return None
    return simplify(neg(operand)) if isinstance(operand, Const) else neg(operand)


def _binary(node: ast.Binary, scope: Scope) -> Expr | None:
    if node.op == "@":
        scope.report.error(
            "E0112", "`@` multiplies attention weights by v; it has no meaning inside a formula", node.span
        )
        return None
    left, right = expression(node.left, scope), expression(node.right, scope)
    if left is None or right is None:
        return None
    if node.op == "**":
        return _power(left, right, node, scope)
    return combine(BINARY[node.op], left, right, node.op, node.span, scope)


def combine(name: str, left: Expr, right: Expr, symbol: str, span: Span, scope: Scope) -> Expr | None:
    """Apply a binary operator with promotion of int to float."""
    rule = OPERATORS[name].types
    wanted = {"bool": (Type.BOOL,), "int": (Type.INT,)}.get(rule, (Type.INT, Type.FLOAT))
    if name in ("eq", "ne") and left.type is Type.BOOL and right.type is Type.BOOL:
        wanted = (Type.BOOL,)
    for side, operand in (("left", left), ("right", right)):
        if not _require(operand, wanted, f"the {side} operand of `{symbol}`", span, scope):
            return None
    if name in ("floordiv", "mod") and isinstance(right, Const) and right.value <= 0:
        scope.report.error("E0113", f"the divisor of `{symbol}` must be positive, not {right.value}", span)
        return None
    if name in ("floordiv", "mod") and scope.require_positive is not None:
        scope.require_positive(_spelled_out(right, scope), symbol, span)
    if rule == "float" or (rule in ("number", "compare") and left.type is not right.type):
        left, right = to_float(left), to_float(right)
    return call(name, left, right)


def _spelled_out(expr: Expr, scope: Scope) -> Expr:
    """The expression without intermediate values."""
    return simplify(inline_lets(Formula((expr,), tuple(scope.lets)))[0])


def _power(base: Expr, exponent: Expr, node: ast.Binary, scope: Scope) -> Expr | None:
    """`**` is float unless the exponent is a non-negative integer literal and the base an int."""
    for side, operand in (("base", base), ("exponent", exponent)):
        if not _require(operand, (Type.INT, Type.FLOAT), f"the {side} of `**`", node.span, scope):
            return None
    integral = isinstance(exponent, Const) and exponent.type is Type.INT and exponent.value >= 0
    if base.type is Type.INT and integral:
        return call("ipow", base, exponent)
    return call("pow", to_float(base), to_float(exponent))


def _compare(node: ast.Compare, scope: Scope) -> Expr | None:
    operands = [expression(o, scope) for o in node.operands]
    links = []
    for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
        if left is None or right is None:
            return None
        links.append(combine(BINARY[op], left, right, op, node.span, scope))
    result = links[0]
    for link in links[1:]:
        if result is None or link is None:
            return None
        result = call("and", result, link)
    return result


def _conditional(node: ast.Conditional, scope: Scope) -> Expr | None:
    condition = expression(node.condition, scope)
    then, otherwise = expression(node.then, scope), expression(node.otherwise, scope)
    if condition is None or then is None or otherwise is None:
        return None
    if not _require(condition, (Type.BOOL,), "the condition of `if`", node.condition.span, scope):
        return None
    if (then.type is Type.BOOL) != (otherwise.type is Type.BOOL):
        scope.report.error(
            "E0103",
            f"both branches of `if` must have one type, not {then.type.value} and {otherwise.type.value}",
            node.span,
        )
        return None
    if then.type is not otherwise.type:
        then, otherwise = to_float(then), to_float(otherwise)
    return select(condition, then, otherwise)


def _index(node: ast.Index, scope: Scope) -> Expr | None:
    binding = scope.names.get(node.base)
    if not isinstance(binding, TensorRef):
        known = [n for n, b in scope.names.items() if isinstance(b, TensorRef)]
        what = "unknown tensor" if binding is None else "not a tensor:"
        scope.report.error("E0104", f"{what} `{node.base}`", node.span, hint=did_you_mean(node.base, known))
        return None
    indices = [expression(i, scope) for i in node.indices]
    if len(indices) != binding.rank:
        scope.report.error(
            "E0102", f"`{node.base}` has rank {binding.rank} but {len(indices)} indices are given", node.span
        )
        return None
    checked = []
    for index, source in zip(indices, node.indices, strict=True):
        if index is None or not _require(
            index, (Type.INT,), f"an index of `{node.base}`", source.span, scope
        ):
            return None
        checked.append(index)
    return Load(binding.name, tuple(checked), binding.type)


def _call(node: ast.Call, scope: Scope) -> Expr | None:
    if node.function in scope.functions:
        declaration = scope.functions[node.function]
        args = [expression(a, scope) for a in node.args]
        return (
            None
            if None in args
            else scope.inline(declaration, node, [a for a in args if a is not None], scope)
        )
    args = [expression(a, scope) for a in node.args]
    if None in args:
        return None
    given = [a for a in args if a is not None]
    if scope.width is not None and node.function in ("mean", "sum"):
        return _over_row(node, given, scope, scope.width)
    if node.function == "clamp":
        return _clamp(node, given, scope)
    if node.function not in FUNCTIONS:
        hint = did_you_mean(node.function, [*FUNCTIONS, "clamp", *scope.functions])
        scope.report.error("E0105", f"unknown function `{node.function}`", node.span, hint=hint)
        return None
    return _builtin(node, given, scope)


def _builtin(node: ast.Call, args: list[Expr], scope: Scope) -> Expr | None:
    row = OPERATORS[node.function]
    if node.keywords or len(args) != row.arity:
        scope.report.error(
            "E0106",
            f"`{node.function}` takes {row.arity} argument(s), not {len(args)}"
            f"{' and no named ones' if node.keywords else ''}",
            node.span,
        )
        return None
    numbers = (Type.INT,) if row.types == "counter" else (Type.INT, Type.FLOAT)
    for arg, source in zip(args, node.args, strict=True):
        if not _require(arg, numbers, f"an argument of `{node.function}`", source.span, scope):
            return None
    if row.types == "float" or len({a.type for a in args}) > 1:
        args = [to_float(a) for a in args]
    return call(node.function, *args)


def _over_row(node: ast.Call, args: list[Expr], scope: Scope, width: Expr) -> Expr | None:
    """`mean(e)` and `sum(e)` over the columns of a row: the sum is the mean times the width."""
    if len(args) != 1 or node.keywords:
        scope.report.error("E0106", f"`{node.function}` takes 1 argument, not {len(args)}", node.span)
        return None
    if not _require(
        args[0], (Type.INT, Type.FLOAT), f"the argument of `{node.function}`", node.args[0].span, scope
    ):
        return None
    mean = call("row_mean", to_float(args[0]))
    return mean if node.function == "mean" else call("mul", mean, to_float(width))


def _clamp(node: ast.Call, args: list[Expr], scope: Scope) -> Expr | None:
    if len(args) != 3 or node.keywords:
        scope.report.error(
            "E0106", f"`clamp` takes 3 arguments (value, lowest, highest), not {len(args)}", node.span
        )
        return None
    for arg, source in zip(args, node.args, strict=True):
        if not _require(arg, (Type.INT, Type.FLOAT), "an argument of `clamp`", source.span, scope):
            return None
    if len({a.type for a in args}) > 1:
        args = [to_float(a) for a in args]
    return call("min", call("max", args[0], args[1]), args[2])


def formula(declaration: ast.Declaration, scope: Scope) -> Formula | None:
    """The formula of a declaration's body: assignments become intermediate values."""
    ok = True
    for assignment in declaration.body:
        ok &= _assign(assignment, scope)
    nodes = declaration.result.items if isinstance(declaration.result, ast.Items) else (declaration.result,)
    results = [expression(n, scope) for n in nodes]
    if not ok or None in results:
        return None
    return Formula(tuple(r for r in results if r is not None), tuple(scope.lets))


def _assign(assignment: ast.Assignment, scope: Scope) -> bool:
    target = assignment.targets[0]
    if len(assignment.targets) != 1 or not target.whole:
        scope.report.error("E0114", "inside a block an assignment names one value", assignment.span)
        return False
    value = expression(assignment.value, scope)
    if target.base in scope.names:
        scope.report.error(
            "E0107",
            f"`{target.base}` already has a value",
            target.span,
            hint="give the new value another name",
        )
        return False
    if value is None:
        return False
    name, taken = scope.prefix + target.base, scope.reserved | {let.name for let in scope.lets}
    while name in taken:
        name += "_"
    scope.lets.append(Let(name, value))
    scope.names[target.base] = Var(name, value.type)
    return True


def closed(expr: Expr, scope: Scope) -> Expr:
    """The expression with the intermediate values of its scope substituted: it then stands alone."""
    return inline_lets(Formula((expr,), tuple(scope.lets)))[0]


def as_int_result(expr: Expr) -> Expr:
    """Value of a function declared `: int`; a float result is one by construction (floor, ceil) and is
    converted.
    """
    return expr if expr.type is Type.INT else Op("to_int", (expr,), Type.INT)
