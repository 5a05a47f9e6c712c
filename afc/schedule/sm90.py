# SPDX-License-Identifier: Apache-2.0
"""Schedule for Hopper's own instructions: warp-specialised forward and backward, as the hand-written kernels
have them.

`afc compile` builds sm_90 from the sm_80 family's templates; this plan has no templates. It is
complete all the same: the schedule interpreter executes it, and its protocols are simulated.
"""

from __future__ import annotations

from dataclasses import replace

from afc.expr.nodes import const
from afc.ir.program import Program
from afc.ir.protocol import TileRange
from afc.ir.tiled import Binding, Buffer, Launch, LaunchPlan, Pass, Semantics, Tile, TiledKernel
from afc.schedule import ops
from afc.schedule.common import (
    check_features,
    check_heads,
    check_softmax,
    check_storage,
    items,
    rotation_buffers,
    semantics,
    size,
    tiles,
)
from afc.schedule.protocols import BackwardShape, ForwardShape, hopper_backward, hopper_forward
from afc.schedule.targets import sm90

ROW_TILE = 32


def plan(program: Program, storage: str) -> LaunchPlan:
    """The plan of a program on Hopper. Raises UsageError E0405, E0406, E0409, E0411."""
    check_storage("sm90", storage, sm90.STORAGES)
    check_heads(program, "sm90", sm90.HEAD_MULTIPLE, sm90.HEAD_MAX)
    check_softmax(program, "sm90")
    check_features(program, "sm90")
    meaning = semantics(program, storage, "float")
    head = max(meaning.head_qk, meaning.head_v)
    front = next(t for t in sm90.FORWARD if head <= t.head_max)
    back = next(t for t in sm90.BACKWARD if head <= t.head_max)
    scale, prefix = meaning.gradient_scale, program.name
    rotate = _rotate(prefix, meaning)
    forward = replace(
        ops.forward(f"{prefix}_forward", Tile(front.queries, front.keys), front.softmax),
        binding=_forward_binding(meaning, front),
    )
    backward = replace(
        ops.backward_keys(f"{prefix}_backward", Tile(back.queries, 128), scale, add_dq=True),
        binding=_backward_binding(meaning, back),
    )
    pre = ops.preprocess(f"{prefix}_preprocess", Tile(ROW_TILE, 0))
    post = ops.postprocess(f"{prefix}_postprocess", Tile(ROW_TILE, 0), scale)
    names = tuple(x.kernel.name for x in rotate)
    rows = (items(tiles("M", ROW_TILE), "H", "B"), const(1))
    return LaunchPlan(
        program.name,
        "sm90",
        meaning,
        forward=(
            *rotate,
            Launch(forward, names, (items(tiles("M", front.queries), "H", "B"), const(1)), bool(rotate)),
        ),
        backward=(
            *rotate,
            Launch(pre, (), rows),
            Launch(backward, (*names, pre.name), (items(tiles("N", 128), "Hk", "B"), const(1)), True),
            Launch(post, (backward.name,), rows, True),
        ),
        buffers=_buffers(meaning),
    )


def _rotate(prefix: str, meaning: Semantics) -> tuple[Launch, ...]:
    if not (meaning.q_rotations or meaning.k_rotations):
        return ()
    kernel: TiledKernel = ops.rotate(f"{prefix}_rotate", Tile(ROW_TILE, ROW_TILE))
    return (Launch(kernel, (), (items(tiles("N", ROW_TILE), "Hk", "B"), const(1))),)


def _forward_binding(meaning: Semantics, tile: sm90.ForwardTile) -> Binding:
    shape = ForwardShape(
        consumers=tile.consumers,
        stages=tile.stages,
        ping_pong=False,
        scheduler="one item",
        store="registers",
        keys=tile.keys,
        head_qk=meaning.head_qk,
        head_v=meaning.head_v,
    )
    protocol = hopper_forward(TileRange("keys"), shape)
    return Binding(
        "sm90",
        homes=(
            ("Q", "shared"),
            ("K", "shared"),
            ("V", "shared"),
            ("S", "registers"),
            ("P", "registers"),
            ("O", "registers"),
        ),
        warps=protocol.threads // 32,
        stages=tile.stages,
        shared_bytes=protocol.shared_bytes,
        issue=("S next", "O"),
        section=_section(meaning.head_qk + meaning.head_v),
        protocol=protocol,
    )


def _backward_binding(meaning: Semantics, tile: sm90.BackwardTile) -> Binding:
    shape = BackwardShape(
        stages=tile.stages,
        ds_stages=tile.ds_stages,
        meet="mbarrier" if tile.ds_stages == 2 else "named",
        dq="red",
        queries=tile.queries,
        head_qk=meaning.head_qk,
        head_v=meaning.head_v,
    )
    protocol = hopper_backward(TileRange("queries"), shape)
    return Binding(
        "sm90",
        homes=(
            ("K", "shared"),
            ("V", "shared"),
            ("Q", "shared"),
            ("dO", "shared"),
            ("P", "registers"),
            ("dS", "registers, shared"),
            ("dK", "registers"),
            ("dV", "registers"),
            ("dQ", "registers"),
        ),
        warps=protocol.threads // 32,
        stages=tile.stages,
        shared_bytes=protocol.shared_bytes,
        issue=("S", "dP", "dV", "dQ", "dK"),
        section=_section(2 * meaning.head_qk + meaning.head_v),
        protocol=protocol,
    )


def _section(columns: int) -> int:
    """Heads whose rows of so many 16-bit columns share the L2 cache, for a typical sequence."""
    return max(1, sm90.L2_SECTION_BYTES // (8192 * columns * 2))


def _buffers(meaning: Semantics) -> tuple[Buffer, ...]:
    both: tuple[Pass, ...] = ("forward", "backward")
    late: tuple[Pass, ...] = ("backward",)
    buffers = rotation_buffers(meaning, late, both, both, late)
    buffers.append(Buffer("row_terms", "float", size("B", "H", "M", 2), late))
    buffers.append(Buffer("dq_sum", "float", size("B", "H", "M", meaning.head_qk), late, zeroed=True))
    return tuple(buffers)
