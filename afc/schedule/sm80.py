# SPDX-License-Identifier: Apache-2.0
"""Schedule for the sm_80 family: one backward kernel that adds dQ in float32, between small kernels over
rows. In its deterministic form dQ has a kernel of its own.

Row blocks act in a kernel of their own, on q and k in the workspace, and are differentiated in kernels over
the rows of dQ and dK; output blocks act in the forward's epilogue and are differentiated ahead of everything
else. Gradients of captured tensors that scores read take one more walk over the scores. A kernel that adds to
gradients of captured tensors is followed by one that adds up its copies (runtime/abi/afc_shares.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from afc.errors import UsageError
from afc.expr.nodes import Expr, Op, Type, Var, const
from afc.expr.operators import add, call, mul
from afc.expr.simplify import simplify
from afc.ir.program import Program, Rotation, RowStep, Transform
from afc.ir.rotation import dependence
from afc.ir.tiled import Binding, Buffer, Launch, LaunchPlan, Pass, Semantics, Tile, TiledKernel
from afc.schedule import ops
from afc.schedule.captured import PLACED, score_sum
from afc.schedule.common import (
    check_heads,
    check_storage,
    items,
    rotation_buffers,
    semantics,
    size,
    tiles,
    value,
)
from afc.schedule.stored import buffers as plan_buffers
from afc.schedule.stored import with_plan
from afc.schedule.targets import sm80


def plan(program: Program, storage: str, steps: tuple[int, int] = (0, 0), target: str = "sm80") -> LaunchPlan:
    """The plan of a program on the sm_80 family, with the tiles of one of its targets, `steps` (forward,
    backward) further down the lists than the first that fit.

    Raises UsageError E0405, E0406, E0409, E0410, E0411.
    """
    check_storage("cuda", storage, sm80.STORAGES)
    check_heads(program, "cuda", sm80.HEAD_MULTIPLE, sm80.HEAD_MAX)
    meaning = semantics(program, storage, "float")
    for operand_steps, rotations in (
        (meaning.q_steps, meaning.q_rotations),
        (meaning.k_steps, meaning.k_rotations),
    ):
        if not row_steps(operand_steps):  # with row blocks, steps act on a row one after the other
            disjoint(rotations)
    _check_rotations(program)
    has_weight = bool(meaning.weight_steps)
    front, back = sm80.tiles_of(target, meaning.head_qk, meaning.head_v, steps, has_weight)
    assert front is not None and back is not None, "steps past the end of the lists"
    head = max(meaning.head_qk, meaning.head_v)
    ordered = next(t for t in sm80.QUERY_GRADIENT if head <= t.head_max)
    scale, prefix, has_sum = meaning.gradient_scale, program.name, meaning.has_sum
    blocks = Blocks.of(meaning)
    forward = replace(
        ops.forward(
            f"{prefix}_forward",
            Tile(front.queries, front.keys),
            has_sum=has_sum,
            has_weight=has_weight,
            has_output=bool(meaning.output_steps),
        ),
        binding=_forward_binding(meaning, front),
    )

    def over_keys(add_dq: bool, *before: Launch) -> Launch:
        tile = Tile(back.queries, back.keys)
        kernel = ops.backward_keys(
            f"{prefix}_backward", tile, scale, add_dq, has_sum, has_weight=has_weight, raw_dk=blocks.k > 0
        )
        grid = (items(tiles("N", back.keys), "Hk", "B"), const(1))
        return Launch(replace(kernel, binding=_backward_binding(meaning, back)), _names(before), grid)

    rows = Tile(sm80.PREPROCESS_ROWS, 0)
    outputs = _output(f"{prefix}_output", meaning)
    pre = _over_queries(
        _row_kernel(
            (ops.preprocess if has_sum else ops.clear)(f"{prefix}_preprocess", rows), 8 * sm80.PREPROCESS_ROWS
        ),
        *(outputs if has_sum else ()),
    )
    post = _row_kernel(
        ops.postprocess(f"{prefix}_postprocess", Tile(sm80.POSTPROCESS_ROWS, 0), scale),
        sm80.POSTPROCESS_THREADS,
        shared_bytes=4 * sm80.POSTPROCESS_ROWS * (sm80.padded(meaning.head_qk) + 4),
    )
    queries = replace(
        ops.backward_queries(
            f"{prefix}_backward_queries",
            Tile(ordered.queries, ordered.keys),
            scale,
            has_sum,
            has_weight,
            raw_dq=blocks.q > 0,
        ),
        binding=_query_gradient_binding(meaning, ordered),
    )
    first = _before(prefix, "forward", meaning, blocks)
    again = _before(prefix, "backward", meaning, blocks)
    terms = (pre,) if has_sum else ()
    before = (*again, *outputs, *terms)
    added = over_keys(True, *again, *outputs, pre)
    apart, dq = over_keys(False, *before), _over_queries(queries, *before)

    def behind(keys: Launch, of_q: Launch) -> tuple[Launch, ...]:
        """What follows the kernels of dK, dV and dQ."""
        steps_of_q: tuple[Launch, ...] = ()
        if blocks.q:
            steps_of_q = (_rows_back(ops.postprocess, post.name, meaning, "q", of_q.kernel.name),)
        return (
            *steps_of_q,
            *_postprocess_keys(prefix, meaning, blocks, keys.kernel.name),
            *_captured(prefix, meaning, head, *before),
            *_sums(prefix, "sum", meaning),
        )

    def planned(*launches: Launch) -> tuple[Launch, ...]:
        return with_plan(program, meaning, launches, "sm80")

    clear = _sums(prefix, "clear", meaning)
    add_up = () if blocks.q else (_over_queries(post, added),)
    ahead = planned(*first, _over_queries(forward, *first))
    back_again = planned(*again, *clear, *outputs, pre, added, *add_up, *behind(added, added))
    in_order = planned(*again, *clear, *outputs, *terms, apart, dq, *behind(apart, dq))
    found = plan_buffers(program, meaning, {"forward": ahead, "backward": (*back_again, *in_order)})
    return LaunchPlan(
        program.name,
        target,
        meaning,
        forward=ahead,
        backward=back_again,
        buffers=(*_buffers(meaning, blocks, back), *found),
        tile_steps=steps,
        deterministic_backward=in_order,
    )


def _check_rotations(program: Program) -> None:
    """Raises UsageError E0411 for a gradient of a captured tensor that a rotation reads."""
    for step in (*program.q_steps, *program.k_steps):
        if isinstance(step, Rotation) and step.reads:
            raise UsageError.of(
                "E0411",
                f"gradient of `{step.reads[0].load.tensor}`, which `{step.call}` of `{program.name}` reads: "
                "target `cuda` computes none of tensors that rotations read",
                hint="build for the CPU with `--backend cpu`, or drop `grad`",
            )


def _names(launches: tuple[Launch, ...]) -> tuple[str, ...]:
    return tuple(x.kernel.name for x in launches)


@dataclass(frozen=True)
class Blocks:
    """Row blocks of q and k: their number."""

    q: int
    k: int

    @staticmethod
    def of(meaning: Semantics) -> Blocks:
        """Those of a plan."""
        return Blocks(len(row_steps(meaning.q_steps)), len(row_steps(meaning.k_steps)))


def row_steps(steps: tuple[Transform, ...]) -> tuple[RowStep, ...]:
    """The row blocks among the steps of an operand."""
    return tuple(s for s in steps if isinstance(s, RowStep))


def row_terms(steps: tuple[RowStep, ...]) -> int:
    """Terms of a row for gradients of captured tensors: a read marked `grad` has one for each column."""
    return sum(len(s.backward.reads) * value(s.width) for s in steps if s.backward is not None)


def _before(prefix: str, which: Pass, meaning: Semantics, blocks: Blocks) -> tuple[Launch, ...]:
    """The kernels that rotate q and k, and that apply row blocks to them, ahead of a pass.

    Without row blocks, q is rotated by the forward kernel itself.
    """
    written = tuple(
        operand
        for operand, count, always in (("q", blocks.q, which == "backward"), ("k", blocks.k, True))
        if not count and always
    )
    tables = tuple(operand for operand, count in (("q", blocks.q), ("k", blocks.k)) if count)
    rotate = _rotate(f"{prefix}_rotate_{which}", meaning, written, tables)
    if not tables:
        return rotate
    rows = [
        items(
            tiles("M" if operand == "q" else "N", sm80.TRANSFORM_ROWS), "H" if operand == "q" else "Hk", "B"
        )
        for operand in tables
    ]
    kernel = _row_kernel(
        ops.rotate(f"{prefix}_transform_{which}", Tile(sm80.TRANSFORM_ROWS, sm80.TRANSFORM_ROWS)),
        8 * sm80.TRANSFORM_ROWS,
        shared_bytes=4 * sm80.TRANSFORM_ROWS * (meaning.head_qk + 4),
    )
    x = rows[0] if len(rows) == 1 else simplify(add(*rows))
    return (*rotate, Launch(kernel, tuple(r.kernel.name for r in rotate), (x, const(1))))


def _rows_back(
    make: Callable[[str, Tile, float], TiledKernel], name: str, meaning: Semantics, operand: str, after: str
) -> Launch:
    """The kernel that differentiates the steps of q or k, with row blocks among them."""
    steps = row_steps(meaning.q_steps if operand == "q" else meaning.k_steps)
    terms = row_terms(steps)
    rows = sm80.row_tile(meaning.head_qk, len(steps), terms)
    tile = Tile(rows, 0) if operand == "q" else Tile(0, rows)
    shared = sm80.row_bytes(rows, meaning.head_qk, len(steps), terms)
    kernel = _row_kernel(make(name, tile, meaning.gradient_scale), 8 * rows, shared)
    return Launch(kernel, (after,))


def _postprocess_keys(prefix: str, meaning: Semantics, blocks: Blocks, after: str) -> tuple[Launch, ...]:
    if not blocks.k:
        return ()
    return (_rows_back(ops.postprocess_keys, f"{prefix}_postprocess_keys", meaning, "k", after),)


def _output(name: str, meaning: Semantics) -> tuple[Launch, ...]:
    """The kernel that differentiates output blocks, if there are some."""
    steps = meaning.output_steps
    if not steps:
        return ()
    terms = row_terms(steps)
    rows = sm80.row_tile(meaning.head_v, len(steps), terms)
    shared = sm80.row_bytes(rows, meaning.head_v, len(steps), terms)
    kernel = ops.output(name, Tile(rows, 0), meaning.has_sum, captured=terms > 0)
    return (Launch(_row_kernel(kernel, 8 * rows, shared)),)


def _captured(prefix: str, meaning: Semantics, head: int, *after: Launch) -> tuple[Launch, ...]:
    """The kernel of gradients of captured tensors that scores or the extra term read."""
    if not meaning.captured:
        return ()
    tile = next(t for t in sm80.CAPTURED if head <= t.head_max)
    kinds = {score_sum(r.load) for r in meaning.captured if r.step is not None}
    kernel = replace(
        ops.captured(
            f"{prefix}_captured",
            Tile(tile.queries, tile.keys),
            meaning.captured,
            meaning.has_sum,
            bool(meaning.weight_steps),
        ),
        binding=Binding(
            "sm80",
            warps=tile.warps,
            shared_bytes=tile.shared_bytes(
                meaning.head_qk, meaning.head_v, bool(kinds), bool(kinds - {"row"}), bool(kinds & PLACED)
            ),
        ),
    )
    return (Launch(kernel, _names(after)),)


def adding(prefix: str, meaning: Semantics) -> tuple[str, ...]:
    """The kernels that add to gradients of captured tensors, in the order of their launches."""
    groups = (
        ("output", row_terms(meaning.output_steps)),
        ("postprocess", row_terms(row_steps(meaning.q_steps))),
        ("postprocess_keys", row_terms(row_steps(meaning.k_steps))),
        ("captured", len(meaning.captured)),
    )
    return tuple(f"{prefix}_{name}" for name, terms in groups if terms)


def _sums(prefix: str, kind: Literal["clear", "sum"], meaning: Semantics) -> tuple[Launch, ...]:
    """The kernel that sets gradients and copies to 0, or those that add up copies."""
    names = adding(prefix, meaning)
    if not names:
        return ()
    if kind == "clear":
        clear = _row_kernel(ops.sums(f"{prefix}_clear", kind), sm80.CLEAR_THREADS)
        return (Launch(clear, (), (const(sm80.CLEAR_BLOCKS), const(1))),)
    return tuple(
        Launch(_row_kernel(ops.sums(f"{name}_sum", kind), sm80.SUM_THREADS), (name,)) for name in names
    )


def _over_queries(kernel: TiledKernel, *after: Launch) -> Launch:
    """A launch with a block per tile of queries of each head."""
    grid = (items(tiles("M", kernel.tile.queries), "H", "B"), const(1))
    return Launch(kernel, _names(after), grid)


def _row_kernel(kernel: TiledKernel, threads: int, shared_bytes: int = 0) -> TiledKernel:
    return replace(kernel, binding=Binding("sm80", warps=threads // 32, shared_bytes=shared_bytes))


def _rotate(
    name: str, meaning: Semantics, written: tuple[str, ...], tables: tuple[str, ...]
) -> tuple[Launch, ...]:
    """The kernel of coefficients and rotated rows, if the program rotates. `written`: operands whose rows it
    writes; `tables`: those of which it writes the table alone, as q's in any case.

    Blocks in x: tiles of the rows of q, then of k; in y: shares of the (batch, head)s, of rows to write or of
    tables that depend on them.
    """
    operands = [
        (operand, rows, heads)
        for operand, rows, heads, rotations in (
            ("q", "M", "H", meaning.q_rotations),
            ("k", "N", "Hk", meaning.k_rotations),
        )
        if rotations and (operand == "q" or operand in written + tables)
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
        shared_bytes=tile.shared_bytes(meaning.head_qk, meaning.head_v, bool(meaning.output_steps)),
        section=sm80.section_heads(meaning.head_qk, meaning.head_v),
    )


def _backward_binding(meaning: Semantics, tile: sm80.BackwardTile) -> Binding:
    kept = "registers" if tile.keeps_v(meaning.head_qk, meaning.head_v) else "shared"
    homes = (
        ("K", "registers, shared" if tile.k_in_registers else "shared"),
        ("V", kept),
        ("Q", "shared"),
        ("dO", "shared"),
        ("P", "registers, shared"),
        ("dS", "registers, shared"),
        ("dK", "registers"),
        ("dV", "registers"),
    )
    return Binding(
        "sm80",
        homes,
        warps=tile.warps,
        stages=tile.stages,
        min_blocks=tile.min_blocks,
        shared_bytes=tile.shared_bytes(
            meaning.head_qk, meaning.head_v, float_rows(meaning, tile), meaning.has_sum
        ),
        section=sm80.section_heads(meaning.head_qk, meaning.head_v),
    )


def _query_gradient_binding(meaning: Semantics, tile: sm80.QueryGradientTile) -> Binding:
    homes = (
        ("Q", "shared"),
        ("dO", "shared"),
        ("K", "shared"),
        ("V", "shared"),
        ("P", "registers"),
        ("dS", "registers"),
        ("dQ", "registers"),
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


def _buffers(meaning: Semantics, blocks: Blocks, tile: sm80.BackwardTile) -> tuple[Buffer, ...]:
    both: tuple[Pass, ...] = ("forward", "backward")
    late: tuple[Pass, ...] = ("backward",)
    buffers = rotation_buffers(meaning, both if blocks.q else late, both, both, both if blocks.k else late)
    if meaning.has_sum:
        buffers.append(Buffer("row_terms", "float", size("B", "H", "M", 2), late))
    columns = sm80.padded(meaning.head_qk)
    padded = mul(size("B", "H"), mul(tiles("M", 16), const(16 * columns)))
    buffers.append(Buffer("dq_sum", "float", padded, late, zeroed=True))
    if blocks.k:
        buffers.append(Buffer("dk_sum", "float", size("B", "Hk", "N", columns), late))
    if meaning.output_steps:
        buffers.append(Buffer("d_raw", meaning.storage, size("B", "H", "M", meaning.head_v), late))
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
    return not Blocks.of(meaning).k and any(
        not in_registers(r, tile.column_warps) for r in meaning.k_rotations
    )


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
