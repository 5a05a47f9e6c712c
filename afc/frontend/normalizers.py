# SPDX-License-Identifier: Apache-2.0
"""Normalizers: `w(s)` or `w(s) / (sum(w(s)) + extra)`, the forms an online pass over the keys can compute.

Both have one derivative: with P = w / Z, dS = (w'/Z) (dP - delta + dLSE); without a sum, dS = w' dP.
"""

from __future__ import annotations

from collections.abc import Mapping

from afc.expr.nodes import Formula, Op, Type, Var, formula_variables
from afc.frontend import ast
from afc.frontend.blocks import SLOTS, Blocks, call_text, option_type
from afc.frontend.scalars import Binding, Scope, TensorRef, closed, expression
from afc.ir.program import DIMENSIONS, Normalizer

FORMS = "w(s) or w(s) / (sum(w(s)) + extra)"


def classify(
    declaration: ast.Declaration, node: ast.Call, options: Mapping[str, Binding], blocks: Blocks
) -> Normalizer | None:
    """The normalizer's parts; reports E0304 for a form that is not one pass over the keys."""
    scope = _scope(options, blocks)
    parts = split(declaration.result)
    if declaration.body or parts is None:
        blocks.report.error(
            "E0304",
            f"`{declaration.name}` is not of the form {FORMS}",
            declaration.result.span,
            hint="anything else is not an online normalizer",
        )
        return None
    weight_node, sum_node, extra_node = parts
    weight = expression(weight_node, scope)
    if weight is None:
        return None
    if sum_node is not None and expression(sum_node, scope) != weight:
        blocks.report.error(
            "E0305", "the sum must be over the same weights as the numerator", declaration.result.span
        )
        return None
    extra = None
    if extra_node is not None:
        value = expression(extra_node, scope)
        extra = None if value is None else Formula((closed(value, scope),))
        if extra is None or "s" in formula_variables(extra):
            blocks.report.error(
                "E0306", "what is added to the sum may not depend on the key", declaration.result.span
            )
            return None
    exponential = sum_node is not None and weight == Op("exp", (Var("s", Type.FLOAT),), Type.FLOAT)
    if sum_node is not None and not exponential:
        blocks.report.error(
            "E0404",
            f"`{declaration.name}` divides by a sum of weights other than exp(s), which is outside what this "
            "version compiles",
            node.span,
            hint="exp(s) / (sum(exp(s)) + extra), or a weight without a sum",
        )
        return None
    return Normalizer(
        declaration.name,
        Formula((closed(weight, scope),)),
        exponential,
        sum_node is not None,
        extra,
        call_text(declaration, dict(options)),
        declaration.doc,
        node.span,
        declaration.span,
    )


def check_alone(declaration: ast.Declaration, blocks: Blocks) -> None:
    """Check a normalizer without a caller: its form, and the names in its parts."""
    parts = split(declaration.result)
    if declaration.body or parts is None:
        blocks.report.error(
            "E0304", f"`{declaration.name}` is not of the form {FORMS}", declaration.result.span
        )
        return
    options: dict[str, Binding] = {}
    for option in declaration.options:
        kind = option_type(option)
        options[option.name] = (
            Var(option.name, kind)
            if option.shape is None
            else TensorRef(option.name, len(option.shape), kind)
        )
    for part in parts:
        if part is not None:
            expression(part, _scope(options, blocks))


def split(result: ast.Node) -> tuple[ast.Node, ast.Node | None, ast.Node | None] | None:
    """(weight, summed weight or None, extra or None), or None if `sum` stands elsewhere."""
    if not _has_sum(result):
        return result, None, None
    if not (isinstance(result, ast.Binary) and result.op == "/" and not _has_sum(result.left)):
        return None
    return _denominator(result.left, result.right)


def _denominator(
    weight: ast.Node, node: ast.Node
) -> tuple[ast.Node, ast.Node | None, ast.Node | None] | None:
    if (
        isinstance(node, ast.Call)
        and node.function == "sum"
        and len(node.args) == 1
        and not _has_sum(node.args[0])
    ):
        return weight, node.args[0], None
    if isinstance(node, ast.Binary) and node.op == "+":
        for summed, extra in ((node.left, node.right), (node.right, node.left)):
            if (
                isinstance(summed, ast.Call)
                and summed.function == "sum"
                and not _has_sum(extra)
                and len(summed.args) == 1
            ):
                return weight, summed.args[0], extra
    return None


def _has_sum(node: ast.Node) -> bool:
    match node:
        case ast.Call(function=function, args=args):
            return function == "sum" or any(map(_has_sum, args))
        case ast.Unary(operand=operand):
            return _has_sum(operand)
        case ast.Binary(left=left, right=right):
            return _has_sum(left) or _has_sum(right)
        case ast.Conditional(condition=c, then=a, otherwise=b):
            return any(map(_has_sum, (c, a, b)))
        case _:
            return False


def _scope(options: Mapping[str, Binding], blocks: Blocks) -> Scope:
    slot = SLOTS["normalizer"]
    names: dict[str, Binding] = {n: Var(n, t) for n, t in slot.inputs.items()}
    names |= {d: Var(d, Type.INT) for d in DIMENSIONS}
    return Scope(
        {**names, **options}, blocks.report, blocks.functions, blocks.inline, reserved=blocks.reserved
    )
