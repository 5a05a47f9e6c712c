# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors: the derivative of a score step, of the extra term or of the factor of the
weight blocks by each read of a tensor marked `grad`.

With O = sum_j f P v and dP' = dO v, a tensor t that the factor f reads gets sum P dP' df/dt.
"""

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
    reads: list[CapturedRead] = _weight_reads(program, wanted)[::-1]
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


def _weight_reads(program: Program, wanted: Collection[str]) -> list[CapturedRead]:
    """The reads of weight blocks; the coefficient has the factors of the other blocks."""
    factors = [inline_lets(s.factor)[0] for s in program.weight_steps if s.factor is not None]
    reads = []
    for index, (step, factor) in enumerate(zip(program.weight_steps, factors, strict=True)):
        loads = dict.fromkeys(e for e in walk(factor) if isinstance(e, Load) and e.tensor in wanted)
        for load in loads:
            value = inline_lets(_coefficient(step, factor, load, 1.0))[0]
            for other in (*factors[:index], *factors[index + 1 :]):
                value = mul(value, other)
            reads.append(CapturedRead(load, index, share_calls(Formula((simplify(value),))), weight=True))
    return reads


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
