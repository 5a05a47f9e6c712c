# SPDX-License-Identifier: Apache-2.0
"""Schedule for the CPU: two backward kernels, so that nothing is added across work items."""

from __future__ import annotations

from dataclasses import replace

from afc.expr.nodes import const
from afc.expr.operators import add, call, mul
from afc.expr.simplify import simplify
from afc.ir.program import Program
from afc.ir.tiled import Binding, Buffer, Launch, LaunchPlan, Pass, Semantics, TiledKernel
from afc.masks.boxes import Read
from afc.schedule import ops
from afc.schedule.common import check_heads, check_storage, rotation_buffers, semantics, size
from afc.schedule.stored import tabled
from afc.schedule.targets import cpu


def plan(program: Program, storage: str) -> LaunchPlan:
    """The plan of a program on the CPU. Raises UsageError E0405, E0406, E0409."""
    check_storage("cpu", storage, cpu.STORAGES)
    check_heads(program, "cpu", cpu.HEAD_MULTIPLE, cpu.HEAD_MAX)
    meaning = semantics(program, storage, cpu.COMPUTE[storage])
    tiles = cpu.TILES[meaning.compute]
    binding = Binding("cpu", homes=(("Q", "panel"), ("K", "streamed"), ("S", "panel"), ("O", "panel")))
    prefix = program.name
    rotates = bool(meaning.q_steps or meaning.k_steps)
    scale = meaning.gradient_scale

    stored = meaning.mask.residual

    def launch(kernel: TiledKernel, *after: str) -> Launch:
        walk = None if kernel.walk is None else replace(kernel.walk, aligned=False, stored=stored)
        return Launch(replace(kernel, binding=binding, walk=walk), after)

    rotate = (launch(ops.rotate(f"{prefix}_rotate", tiles.rows)),) if rotates else ()
    first = (f"{prefix}_rotate",) if rotates else ()
    has_sum = meaning.has_sum
    has_output, has_weight = bool(meaning.output_steps), bool(meaning.weight_steps)
    main = ops.forward(
        f"{prefix}_forward", tiles.rows, has_sum=has_sum, has_output=has_output, has_weight=has_weight
    )
    forward = (*rotate, launch(main, *first))
    output = (launch(ops.output(f"{prefix}_output", tiles.rows, has_sum)),) if has_output else ()
    after_output = (f"{prefix}_output",) if has_output else ()
    # delta belongs to the gradient of the sum over the keys.
    delta = ops.preprocess(f"{prefix}_preprocess", tiles.rows)
    preprocess = (launch(delta, *after_output),) if has_sum else ()
    before = (*first, f"{prefix}_preprocess") if has_sum else (*first, *after_output)
    dq = ops.backward_queries(f"{prefix}_backward_queries", tiles.rows, scale, has_sum, has_weight)
    dkv = ops.backward_keys(f"{prefix}_backward_keys", tiles.keys, scale, False, has_sum, has_weight)
    backward = (*rotate, *output, *preprocess, launch(dq, *before), launch(dkv, *before))
    if meaning.captured:
        captured = ops.captured(f"{prefix}_captured", tiles.rows, meaning.captured, has_sum, has_weight)
        backward = (*backward, launch(captured, *before))
    if meaning.output_reads:
        backward = (*backward, launch(ops.output_captured(f"{prefix}_output_captured", tiles.rows)))
    both: tuple[Pass, ...] = ("forward", "backward")
    buffers = rotation_buffers(meaning, both, both, both, both)
    if has_sum:
        buffers.append(Buffer("delta", meaning.compute, size("B", "H", "M"), ("backward",)))
    if stored:
        buffers += _extents(program, meaning)
    if has_output:
        count = size("B", "H", "M", meaning.head_v)
        buffers.append(Buffer("d_raw", meaning.storage, count, ("backward",)))
    return LaunchPlan(program.name, "cpu", meaning, forward, backward, tuple(buffers))


def extents_name(read: Read) -> str:
    """Name of the buffer with the extents of a captured tensor."""
    return f"extents_{read.tensor}_{read.axis}"


def _extents(program: Program, meaning: Semantics) -> list[Buffer]:
    """Least and largest values of ranges of what the mask reads."""
    shapes = {t.name: [e.size for e in t.shape] for t in program.tensors}
    buffers = []
    for read in (one.read for one in tabled(program, meaning)):
        shape = shapes[read.tensor]
        assert read.axis is not None
        padded = add(shape[read.axis], const(cpu.EXTENT_BLOCK - 1))
        count = mul(call("floordiv", padded, const(cpu.EXTENT_BLOCK)), const(cpu.EXTENT_LEVELS))
        for axis, size_of_axis in enumerate(shape):
            count = count if axis == read.axis else mul(size_of_axis, count)
        buffers.append(Buffer(extents_name(read), "extent", simplify(count), ("forward", "backward")))
    return buffers
