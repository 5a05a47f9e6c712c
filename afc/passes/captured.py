# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors: the derivative of a score step by each read of a tensor marked `grad`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from afc.errors import SourceError
from afc.expr.differentiate import NotDifferentiable, gradient
from afc.expr.nodes import Expr, Formula, Load, Type, Var, const, inline_lets, rewrite, substitute, walk
from afc.expr.operators import mul
from afc.expr.simplify import logarithm, share_calls, simplify
from afc.ir.program import CapturedRead, Program, Step
from afc.passes.scores import split_derivative

READ = Var("read_value", Type.FLOAT)


def captured(program: Program) -> Program:
    """Set `captured_reads`: every read of a tensor marked `grad`, in the order of the steps.

    Raises SourceError E0303 where a step has no derivative by the value read.
    """
    wanted = {t.name for t in program.tensors if t.grad}
    reads: list[CapturedRead] = []
    extra = program.normalizer.extra
    if extra is not None:
        n = program.normalizer
        step = Step(n.block, logarithm(extra), n.call, n.doc, n.span, n.origin)
        reads += _reads(step, None, wanted, 1.0)
    behind = program.normalizer.factor
    for index in reversed(range(len(program.scores))):
        step = program.scores[index]
        reads += reversed(_reads(step, index, wanted, behind))
        behind *= split_derivative(step)[0]
    return replace(program, captured_reads=tuple(reversed(reads)))


def _reads(step: Step, index: int | None, wanted: Collection[str], behind: float) -> list[CapturedRead]:
    """The reads of one step; `behind`: the constant derivatives of the steps behind it."""
    [value] = inline_lets(step.formula)
    loads = dict.fromkeys(e for e in walk(value) if isinstance(e, Load) and e.tensor in wanted)
    return [CapturedRead(load, index, _coefficient(step, value, load, behind)) for load in loads]


def _coefficient(step: Step, value: Expr, load: Load, behind: float) -> Formula:
    formula = Formula((rewrite(value, lambda e: READ if e == load else e),))
    try:
        derivative = gradient(formula, (READ.name,)).result
    except NotDifferentiable as missing:
        raise SourceError.of(
            "E0303", f"`{step.block}` has no derivative through `{missing.operator}`", step.span
        ) from None
    scaled = simplify(mul(const(behind), substitute(derivative, {READ.name: load})))
    return share_calls(Formula((scaled,)))
