# SPDX-License-Identifier: Apache-2.0
"""Program to LaunchPlan: which kernels, in which order, over which workspace."""

from __future__ import annotations

from collections.abc import Callable

from afc.errors import UsageError
from afc.ir.program import Program
from afc.ir.tiled import LaunchPlan
from afc.schedule import cpu, sm80, sm90

TARGETS: dict[str, Callable[[Program, str], LaunchPlan]] = {
    "cpu": cpu.plan,
    "sm80": sm80.plan,
    "sm90": sm90.plan,
}


def schedule(program: Program, target: str, storage: str) -> LaunchPlan:
    """The plan of a program that the passes have been run on.

    Raises UsageError: E0405 dtype, E0406 head dimension, E0408 target, E0409 and E0410 rotated columns.
    """
    if target not in TARGETS:
        raise UsageError.of("E0408", f"unknown target `{target}`", hint=f"targets: {', '.join(TARGETS)}")
    return TARGETS[target](program, storage)
