# SPDX-License-Identifier: Apache-2.0
"""Schedule for the sm_80 family: one backward kernel that adds dQ in float32, between small kernels over
rows.
"""

from __future__ import annotations

from dataclasses import replace

from afc.errors import UsageError
from afc.expr.nodes import Expr, Op, Type, Var, const
from afc.expr.operators import add, call, mul
from afc.expr.simplify import simplify
from afc.ir.program import Program, Rotation
from afc.ir.rotation import dependence
from afc.ir.tiled import Binding, Buffer, Launch, LaunchPlan, Pass, Semantics, Tile, TiledKernel
from afc.schedule import ops
from afc.schedule.common import (
    check_features,
    check_heads,
    check_storage,
    items,
    rotation_buffers,
    semantics,
    size,
    tiles,
    value,
)
from afc.schedule.targets import sm80


def plan(program: Program, storage: str) -> LaunchPlan:
    """The plan of a program on the sm_80 family. Raises UsageError E0405, E0406, E0409, E0410, E0411."""
    check_storage("cuda", storage, sm80.STORAGES)
    check_heads(program, "cuda", sm80.HEAD_MULTIPLE, sm80.HEAD_MAX)
    check_features(program, "cuda")
    meaning = semantics(program, storage, "float")
    disjoint(meaning.q_rotations)
    disjoint(meaning.k_rotations)
    head = max(meaning.head_qk, meaning.head_v)
    _check_weights(program, head)
    front = sm80.forward_tile(head, bool(meaning.weight_steps))
    back = sm80.backward_tile(head, bool(meaning.weight_steps))
    scale, prefix, has_weight = meaning.gradient_scale, program.name, bool(meaning.weight_steps)
    forward = replace(
        ops.forward(f"{prefix}_forward", Tile(front.queries, front.keys), has_weight=has_weight),
        binding=_forward_binding(meaning, front),
    )
    backward = replace(
        ops.backward_keys(
            f"{prefix}_backward", Tile(back.queries, back.keys), scale, add_dq=True, has_weight=has_weight
        ),
        binding=_backward_binding(meaning, back),
    )
    pre = _row_kernel(
        ops.preprocess(f"{prefix}_preprocess", Tile(sm80.PREPROCESS_ROWS, 0)), 8 * sm80.PREPROCESS_ROWS
    )
    post = _row_kernel(
        ops.postprocess(f"{prefix}_postprocess", Tile(sm80.POSTPROCESS_ROWS, 0), scale),
        sm80.POSTPROCESS_THREADS,
        shared_bytes=4 * sm80.POSTPROCESS_ROWS * (meaning.head_qk + 4),
    )
    first = _rotate(f"{prefix}_rotate_forward", meaning, ("k",))
    again = _rotate(f"{prefix}_rotate_backward", meaning, ("q", "k"))
    return LaunchPlan(
        program.name,
        "sm80",
        meaning,
        forward=(*first, _over_queries(forward, *first)),
        backward=(
            *again,
            _over_queries(pre),
            Launch(
                backward,
                (*(x.kernel.name for x in again), pre.name),
                (items(tiles("N", back.keys), "Hk", "B"), const(1)),
            ),
            Launch(post, (backward.name,), (items(tiles("M", sm80.POSTPROCESS_ROWS), "H", "B"), const(1))),
        ),
        buffers=_buffers(meaning),
    )


def _check_weights(program: Program, head: int) -> None:
    """Raises UsageError E0411 for a weight block on heads wider than the kernels have registers for."""
    if program.weight_steps and head > sm80.HEAD_MAX_WEIGHTED:
        raise UsageError.of(
            "E0411",
            f"weight block `{program.weight_steps[0].call}` of `{program.name}`: target `cuda` computes it "
            f"for heads up to {sm80.HEAD_MAX_WEIGHTED}, not {head}",
            hint="build for the CPU with `--backend cpu`, or use narrower heads",
        )


def _over_queries(kernel: TiledKernel, *after: Launch) -> Launch:
    """A launch with a block per tile of queries of each head."""
    grid = (items(tiles("M", kernel.tile.queries), "H", "B"), const(1))
    return Launch(kernel, tuple(x.kernel.name for x in after), grid)


def _row_kernel(kernel: TiledKernel, threads: int, shared_bytes: int = 0) -> TiledKernel:
    return replace(kernel, binding=Binding("sm80", warps=threads // 32, shared_bytes=shared_bytes))


def _rotate(name: str, meaning: Semantics, written: tuple[str, ...]) -> tuple[Launch, ...]:
    """The kernel of coefficients and rotated rows, if the program rotates. `written`: operands whose rows it
    writes.

    Blocks in x: tiles of the rows of q, then of k; in y: shares of the (batch, head)s, of rows to write or of
    tables that depend on them.
    """
    operands = [
        (operand, rows, heads)
        for operand, rows, heads, rotations in (
            ("q", "M", "H", meaning.q_rotations),
            ("k", "N", "Hk", meaning.k_rotations),
        )
        if rotations and (operand == "q" or operand in written)
    ]
    if not operands:
        return ()
    x: Expr = const(0)
    for _, rows, _ in operands:
        x = simplify(add(x, tiles(rows, sm80.ROTATE_ROWS)))
    several = {"q": not dependence(meaning.q_rotations).plain, "k": not dependence(meaning.k_rotations).plain}
    heads = [h for operand, _, h in operands if operand in written or several[operand]]
    most: Expr = const(0) if not heads else Var(heads[0], Type.INT)  # H is a multiple of Hk
    shares = call("max", const(1), _shares(most)) if heads else const(1)
    kernel = ops.rotate(name, Tile(sm80.ROTATE_ROWS, sm80.ROTATE_ROWS))
    return (
        Launch(replace(kernel, binding=Binding("sm80", warps=sm80.ROTATE_THREADS // 32)), (), (x, shares)),
    )


def _shares(heads: Expr) -> Expr:
    count = add(mul(Var("B", Type.INT), heads), const(sm80.BATCH_HEADS_PER_SHARE - 1))
    return Op("floordiv", (count, const(sm80.BATCH_HEADS_PER_SHARE)), Type.INT)


def _forward_binding(meaning: Semantics, tile: sm80.ForwardTile) -> Binding:
    homes = (
        ("Q", "registers" if tile.q_in_registers else "shared"),
        ("K", "shared"),
        ("V", "shared"),
        ("S", "registers"),
        ("P", "registers"),
        ("O", "registers"),
    )
    return Binding(
        "sm80",
        homes,
        warps=tile.warps,
        stages=2,
        min_blocks=tile.min_blocks,
        shared_bytes=tile.shared_bytes(meaning.head_qk, meaning.head_v),
        section=sm80.section_heads(meaning.head_qk, meaning.head_v),
    )


def _backward_binding(meaning: Semantics, tile: sm80.BackwardTile) -> Binding:
    homes = (
        ("K", "shared"),
        ("V", "shared"),
        ("Q", "shared"),
        ("dO", "shared"),
        ("P", "registers"),
        ("dS", "registers, shared"),
        ("dK", "registers"),
        ("dV", "registers"),
    )
    return Binding(
        "sm80",
        homes,
        warps=tile.warps,
        stages=tile.q_stages,
        min_blocks=tile.min_blocks,
        shared_bytes=tile.shared_bytes(meaning.head_qk, meaning.head_v, float_rows(meaning, tile)),
        section=sm80.section_heads(meaning.head_qk, meaning.head_v),
    )


def _buffers(meaning: Semantics) -> tuple[Buffer, ...]:
    both: tuple[Pass, ...] = ("forward", "backward")
    late: tuple[Pass, ...] = ("backward",)
    buffers = rotation_buffers(meaning, late, both, both, late)
    buffers.append(Buffer("row_terms", "float", size("B", "H", "M", 2), late))
    padded = mul(size("B", "H"), mul(tiles("M", 16), const(16 * meaning.head_qk)))
    buffers.append(Buffer("dq_sum", "float", padded, late, zeroed=True))
    return tuple(buffers)


def in_registers(rotation: Rotation, column_warps: int) -> bool:
    """Whether an accumulator can be rotated back without shared memory: both members of a pair are in one
    thread.
    """
    first, width = value(rotation.first), value(rotation.width)
    if first % 8 or width % 8:
        return False
    return (
        rotation.pairing == "adjacent" or (width // 2) % (8 if column_warps == 1 else 16 * column_warps) == 0
    )


def float_rows(meaning: Semantics, tile: sm80.BackwardTile) -> bool:
    """Whether dK must pass through shared memory in float32 to be rotated back."""
    return any(not in_registers(r, tile.column_warps) for r in meaning.k_rotations)


def disjoint(rotations: tuple[Rotation, ...]) -> None:
    """Raises UsageError E0410 where two rotations of one operand share columns, which the GPU kernels cannot
    run.
    """
    taken: set[int] = set()
    for step in rotations:
        columns = set(range(value(step.first), value(step.first) + value(step.width)))
        if columns & taken:
            raise UsageError.of(
                "E0410",
                f"`{step.call}` rotates columns that another rotation has rotated already; "
                "the GPU kernels rotate a column once",
                hint="use the CPU backend, or combine the rotations",
            )
        taken |= columns
