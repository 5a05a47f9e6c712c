# SPDX-License-Identifier: Apache-2.0
"""Algebra before scheduling: a literal list of named passes, each Program -> Program, verified after each.

Derivatives are taken of the formulas as written and simplified afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from afc.ir.program import Program
from afc.ir.verify import verify
from afc.passes.captured import captured
from afc.passes.rotations import matrices
from afc.passes.rows import rows
from afc.passes.scores import differentiate, factor, merge_linear, weigh
from afc.passes.specialise import fold, specialise
from afc.passes.weights import weights


@dataclass(frozen=True)
class Pass:
    """`name` appears in dumps and in blame; `run` is a pure function."""

    name: str
    run: Callable[[Program], Program]


# Order: `weigh` may add the last score step; `matrices`, `rows`, `weights` and `merge_linear` need folded
# constants;
# `factor` looks at the last step, so linear steps must have merged first; `differentiate` and `captured` are
# last because they derive the steps that are emitted.
PASSES: tuple[Pass, ...] = (
    Pass("fold", fold),
    Pass("matrices", matrices),
    Pass("rows", rows),
    Pass("weights", weights),
    Pass("weigh", weigh),
    Pass("merge_linear", merge_linear),
    Pass("factor", factor),
    Pass("differentiate", differentiate),
    Pass("captured", captured),
)


def stages(program: Program, constants: Mapping[str, int | float | bool]) -> Iterator[tuple[str, Program]]:
    """The program after each pass, `specialise` (binding `constants`) first."""
    program = specialise(program, constants)
    verify(program, "specialise")
    yield "specialise", program
    for step in PASSES:
        program = step.run(program)
        verify(program, step.name)
        yield step.name, program


def run(program: Program, constants: Mapping[str, int | float | bool]) -> Program:
    """The program after all passes. `constants` must bind Dqk and Dv."""
    *_, (_, result) = stages(program, constants)
    return result
