# SPDX-License-Identifier: Apache-2.0
"""Schedule for the CPU: two backward kernels, so that nothing is added across work items."""

from __future__ import annotations

from dataclasses import replace

from afc.ir.program import Program
from afc.ir.tiled import Binding, Buffer, Launch, LaunchPlan, Pass, TiledKernel
from afc.schedule import ops
from afc.schedule.common import check_heads, check_storage, rotation_buffers, semantics, size
from afc.schedule.targets import cpu


def plan(program: Program, storage: str) -> LaunchPlan:
    """The plan of a program on the CPU. Raises UsageError E0405, E0406, E0409."""
    check_storage("cpu", storage, cpu.STORAGES)
    check_heads(program, "cpu", cpu.HEAD_MULTIPLE, cpu.HEAD_MAX)
    meaning = semantics(program, storage, cpu.COMPUTE[storage])
    tiles = cpu.TILES[meaning.compute]
    binding = Binding("cpu", homes=(("Q", "panel"), ("K", "streamed"), ("S", "panel"), ("O", "panel")))
    prefix = program.name
    rotates = bool(meaning.q_rotations or meaning.k_rotations)
    scale = meaning.gradient_scale

    def launch(kernel: TiledKernel, *after: str) -> Launch:
        walk = None if kernel.walk is None else replace(kernel.walk, aligned=False)
        return Launch(replace(kernel, binding=binding, walk=walk), after)

    rotate = (launch(ops.rotate(f"{prefix}_rotate", tiles.rows)),) if rotates else ()
    first = (f"{prefix}_rotate",) if rotates else ()
    forward = (*rotate, launch(ops.forward(f"{prefix}_forward", tiles.rows), *first))
    backward = (
        *rotate,
        launch(ops.preprocess(f"{prefix}_preprocess", tiles.rows)),
        launch(
            ops.backward_queries(f"{prefix}_backward_queries", tiles.rows, scale),
            *first,
            f"{prefix}_preprocess",
        ),
        launch(
            ops.backward_keys(f"{prefix}_backward_keys", tiles.keys, scale, add_dq=False),
            *first,
            f"{prefix}_preprocess",
        ),
    )
    both: tuple[Pass, ...] = ("forward", "backward")
    buffers = rotation_buffers(meaning, both, both, both, both)
    buffers.append(Buffer("delta", meaning.compute, size("B", "H", "M"), ("backward",)))
    return LaunchPlan(program.name, "cpu", meaning, forward, backward, tuple(buffers))
