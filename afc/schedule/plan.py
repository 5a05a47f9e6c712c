# SPDX-License-Identifier: Apache-2.0
"""Program to LaunchPlan: which kernels, in which order, over which workspace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from afc.errors import UsageError
from afc.ir.program import Program
from afc.ir.tiled import LaunchPlan
from afc.schedule import cpu, sm80, sm90
from afc.schedule.targets import sm80 as sm80_family

TARGETS: dict[str, Callable[[Program, str], LaunchPlan]] = {
    "cpu": cpu.plan,
    **{name: partial(sm80.plan, target=name) for name in sm80_family.NAMES},
    "sm90": sm90.plan,
}


def next_tiles(plan: LaunchPlan, forward: bool, backward: bool) -> tuple[int, int] | None:
    """Steps that give the named kernels of a plan the next smaller tile; None where one has no smaller."""
    if plan.target not in sm80_family.NAMES:
        return None
    steps = (plan.tile_steps[0] + forward, plan.tile_steps[1] + backward)
    s = plan.semantics
    tiles = sm80_family.tiles_of(plan.target, s.head_qk, s.head_v, steps, bool(s.weight_steps))
    return None if None in tiles else steps


def schedule(program: Program, target: str, storage: str, steps: tuple[int, int] = (0, 0)) -> LaunchPlan:
    """The plan of a program that the passes have been run on; `steps` as `next_tiles` gives them.

    Raises UsageError: E0405 dtype, E0406 head dimension, E0408 target, E0409 and E0410 rotated columns.
    """
    if target not in TARGETS:
        raise UsageError.of("E0408", f"unknown target `{target}`", hint=f"targets: {', '.join(TARGETS)}")
    if any(steps):
        return sm80.plan(program, storage, steps, target)
    return TARGETS[target](program, storage)
