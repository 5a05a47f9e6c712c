# SPDX-License-Identifier: Apache-2.0
"""Weight blocks as factors: p -> f p, with f read off the formula by differentiation.

With P the normalizer's weights and P' = f P those that meet v, O = P' V. The row sum and the LSE are of P. As
O = sum f P v, delta = rowsum(dO * O) = sum P (f dP'), so dS = P (f dP' - delta), and dV = P'^T dO.
"""

from __future__ import annotations

from dataclasses import replace

from afc.errors import SourceError
from afc.expr.differentiate import gradient
from afc.expr.simplify import share_calls
from afc.ir.program import Program, WeightStep
from afc.passes.linear import linear


def weights(program: Program) -> Program:
    """Set `factor` of every weight step. Raises SourceError E0316 where a block is not linear in p."""
    return replace(program, weight_steps=tuple(map(_with_factor, program.weight_steps)))


def _with_factor(step: WeightStep) -> WeightStep:
    formula = linear(step.formula, ("p",))
    if formula is None:
        raise SourceError.of(
            "E0316",
            f"`{step.block}` is not linear in p; a weight block multiplies the weight of an element",
            step.origin,
            notes=(f"used at {step.span}",),
        )
    return replace(step, factor=share_calls(gradient(formula, ("p",))))
