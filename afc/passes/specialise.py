# SPDX-License-Identifier: Apache-2.0
"""Bind what is known at compile time, then fold constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from afc.errors import UsageError
from afc.expr.nodes import Const, Expr, Type, const, map_formula, substitute
from afc.expr.simplify import simplify, simplify_formula
from afc.frontend.report import did_you_mean
from afc.ir.program import Extent, Param, Program, ScalarParam, TensorParam, Transform

StepT = TypeVar("StepT", bound=Transform)


def specialise(program: Program, constants: Mapping[str, int | float | bool]) -> Program:
    """Replace dimensions (Dqk, Dv) and run-time scalars by constants; a bound scalar leaves the signature.

    Raises UsageError: E0621 for a name the attention does not have, E0622 for a value of the wrong type or
    sign.
    """
    scalars = {p.name: p for p in program.scalars}
    values: dict[str, Expr] = {}
    for name, value in constants.items():
        values[name] = const(value) if name in ("Dqk", "Dv") else _scalar(program, scalars, name, value)
    params: list[Param] = [p for p in program.params if p.name not in values]
    params = [replace(p, shape=_shape(p, values)) if isinstance(p, TensorParam) else p for p in params]

    def transform(step: StepT) -> StepT:
        return replace(
            step,
            first=simplify(substitute(step.first, values)),
            width=simplify(substitute(step.width, values)),
        )

    bound = program.map_formulas(lambda f: map_formula(f, lambda e: substitute(e, values)))
    return replace(
        bound,
        params=tuple(params),
        constants=tuple(sorted(constants.items())),
        q_steps=tuple(map(transform, bound.q_steps)),
        k_steps=tuple(map(transform, bound.k_steps)),
        output_steps=tuple(map(transform, bound.output_steps)),
    )


def _shape(param: TensorParam, values: Mapping[str, Expr]) -> tuple[Extent, ...]:
    return tuple(Extent(simplify(substitute(e.size, values)), e.broadcast) for e in param.shape)


def _scalar(
    program: Program, scalars: Mapping[str, ScalarParam], name: str, value: int | float | bool
) -> Const:
    param = scalars.get(name)
    if param is None:
        raise UsageError.of(
            "E0621",
            f"`{program.name}` has no run-time parameter `{name}` to fix",
            hint=did_you_mean(name, scalars) or f"its parameters: {', '.join(scalars) or 'none'}",
        )
    expected = {Type.INT: int, Type.FLOAT: (int, float), Type.BOOL: bool}[param.type]
    if not isinstance(value, expected) or (isinstance(value, bool) and param.type is not Type.BOOL):  # type: ignore[arg-type]
        raise UsageError.of("E0622", f"`{name}` of `{program.name}` is {param.type.value}, not {value!r}")
    if param.positive and value <= 0:
        raise UsageError.of("E0622", f"`{name}` of `{program.name}` must be greater than 0, not {value!r}")
    return const(float(value)) if param.type is Type.FLOAT else const(value)


def fold(program: Program) -> Program:
    """Constant folding in every formula; constant intermediate values disappear."""
    return program.map_formulas(simplify_formula)
