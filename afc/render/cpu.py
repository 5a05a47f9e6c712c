# SPDX-License-Identifier: Apache-2.0
"""LaunchPlan to the text of one C++ unit for the CPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from afc.ir.program import Program, Rotation, RowStep, Transform
from afc.ir.rotation import dependence
from afc.ir.tiled import Buffer, LaunchPlan, Semantics
from afc.masks import boxes
from afc.render.blocks import CPU, Axes, BlockText, CapturedText, RotationText, RowText, render_blocks
from afc.render.boxes import TABLE_TYPES
from afc.render.cpu_context import (
    CpuBuffer,
    CpuCapturedGradient,
    CpuCapturedRead,
    CpuContext,
    CpuOutputRead,
    CpuRotated,
    CpuRotation,
    CpuRotationRead,
    CpuRow,
    CpuRowGradient,
    CpuRowRead,
    CpuTable,
)
from afc.render.text import LOG2_E, provenance, real_literal, render, scalar_checks, size_text
from afc.schedule.common import table_part, value
from afc.schedule.cpu import extents_name

ELEMENTS = {"float64": "double", "float32": "float", "bfloat16": "afc::bfloat16", "float16": "afc::float16"}


def render_cpu(program: Program, plan: LaunchPlan, symbol: str) -> str:
    """Text of the unit; its entry functions are `<symbol>_workspace`, `<symbol>_forward`,
    `<symbol>_backward`.
    """
    return render("cpu", "module.cpp.j2", unit=context(program, plan, symbol))


def context(program: Program, plan: LaunchPlan, symbol: str) -> CpuContext:
    """Everything the templates print."""
    s = plan.semantics
    walk = plan.forward[-1].kernel.walk
    stored = walk is not None and walk.stored
    blocks = render_blocks(program, s, CPU, stored)
    rows = plan.forward[-1].kernel.tile
    # Without a backward nothing prints it.
    walks = [x.kernel for x in plan.backward if x.kernel.stationary == "keys" and x.kernel.walk]
    keys = walks[0].tile if walks else rows
    schedule = f"{rows.queries} queries in lanes x {rows.keys} keys"
    if plan.backward:
        schedule += f"; dK, dV: {keys.keys} keys in lanes x {keys.queries} queries"
    rotated = [
        _rotated("q", "Hq", "M", s.q_steps, blocks.q_rotations, blocks.q_rows),
        _rotated("k", "Hk", "N", s.k_steps, blocks.k_rotations, blocks.k_rows),
    ]
    buffers = tuple(
        CpuBuffer(
            b.name,
            _c_type(b),
            _count(b),
            "forward" not in b.passes,
        )
        for b in plan.buffers
    )
    reads = blocks.captured if plan.backward else ()
    gradients = _captured_gradients(program, reads)
    of_scores = {g.slot for g in gradients}
    outputs, output_reads = _outputs(s, blocks)
    output_gradients = _output_gradients(program, blocks, of_scores) if plan.backward else ()
    others = of_scores | {g.slot for g in output_gradients}
    row_gradients = _row_gradients(program, s, blocks, others) if plan.backward else ()
    slots = {*others, *(g.slot for g in row_gradients)}
    rotated = [
        r and _with_learned(r, program, t, rows, slots)
        for r, t, rows in zip(
            rotated,
            (blocks.q_rotations, blocks.k_rotations),
            (blocks.q_rows, blocks.k_rows),
            strict=True,
        )
    ]
    places = {g.slot: n for n, g in enumerate(gradients)}
    real = s.compute
    return CpuContext(
        name=symbol,
        provenance=provenance(program, plan, schedule),
        blocks=blocks.text,
        element=ELEMENTS[s.storage],  # type: ignore[arg-type]
        real=real,  # type: ignore[arg-type]
        head_qk=s.head_qk,
        head_v=s.head_v,
        query_tile=rows.queries,
        key_tile=rows.keys,
        stream_query_tile=keys.queries,
        lane_key_tile=keys.keys,
        scale_log2=real_literal(s.softmax_scale * LOG2_E, real),
        softmax_scale=real_literal(s.softmax_scale, real),
        gradient_scale=real_literal(s.gradient_scale, real),
        has_score=blocks.has_score,
        has_score_gradient=blocks.has_score_gradient,
        has_mask=blocks.has_mask,
        has_extra=blocks.has_extra,
        has_weight=blocks.has_weight,
        pointwise=not s.has_sum,
        rotated=tuple(r for r in rotated if r is not None),
        buffers=buffers,
        captured=len(program.tensors),
        captured_gradients=gradients,
        captured_reads=tuple(
            CpuCapturedRead(n, places[r.slot], r.offset, r.by_row, r.reads_position, r.extra, r.weight)
            for n, r in enumerate(reads)
        ),
        outputs=outputs,
        output_gradients=output_gradients,
        output_reads=output_reads if plan.backward else (),
        row_gradients=row_gradients,
        gradient_slots=sum(1 << slot for slot in slots) if plan.backward else 0,
        scalar_checks=scalar_checks(program),
        backward=bool(plan.backward),
        run_type=f"Runs<{len(s.mask.alternatives)}>" if s.mask.alternatives else "Run",
        stored=stored,
        tables=_tables(program, plan) if stored else (),
    )


def _tables(program: Program, plan: LaunchPlan) -> tuple[CpuTable, ...]:
    """The captured tensors that the mask reads, in the order of `reads`."""
    predicate = plan.semantics.mask.predicate
    assert predicate is not None
    slots = {t.name: n for n, t in enumerate(program.tensors)}
    buffers = {b.name: size_text(b.count) for b in plan.buffers}
    tables = []
    for read in boxes.reads(predicate):
        extents = extents_name(read)
        tables.append(
            CpuTable(
                slots[read.tensor],
                read.tensor,
                TABLE_TYPES[read.type],
                -1 if read.axis is None else read.axis,
                extents if extents in buffers else "",
                buffers.get(extents, "0"),
            )
        )
    return tuple(tables)


def _count(buffer: Buffer) -> str:
    """Values of a buffer; a call with an origin for each batch has more tables than the plan says."""
    if not buffer.name.endswith("_table"):
        return size_text(buffer.count)
    operand, rows = buffer.name[0], "M" if buffer.name[0] == "q" else "N"
    return f"{operand}_tables(args).count() * args.{rows} * {operand.upper()}_TABLE_WIDTH"


def _captured_gradients(program: Program, reads: tuple[CapturedText, ...]) -> tuple[CpuCapturedGradient, ...]:
    found = []
    for slot in dict.fromkeys(r.slot for r in reads):
        axes = _common_axes([r.axes for r in reads if r.slot == slot])
        found.append(CpuCapturedGradient(program.tensors[slot].name, slot, axes))
    return tuple(found)


def _common_axes(axes: Sequence[Axes]) -> tuple[int, int, int]:
    """The dimensions that the batch, the query head, the query row index in every read; -1 where none.

    Row m of one tile may be row i of another: reads by either do not share a dimension.
    """
    b, h, m, i = (one[0] if len(set(one)) == 1 else -1 for one in zip(*axes, strict=True))
    return b, h, max(m, i)


def _c_type(buffer: Buffer) -> Literal["Element", "Real", "afc::Extent"]:
    if buffer.dtype == "extent":
        return "afc::Extent"
    return "Element" if buffer.name.endswith("_rotated") or buffer.name == "d_raw" else "Real"


def _outputs(semantics: Semantics, blocks: BlockText) -> tuple[tuple[CpuRow, ...], tuple[CpuOutputRead, ...]]:
    """Output blocks, and their reads of captured tensors whose gradient is asked for."""
    slots = _output_slots(blocks)
    rows: list[CpuRow] = []
    reads: list[CpuOutputRead] = []
    for step, text in zip(semantics.output_steps, blocks.outputs, strict=True):
        rows.append(CpuRow(text.name, step.call, len(reads) * semantics.head_v))
        for read in text.reads:
            start = len(reads) * semantics.head_v
            reads.append(CpuOutputRead(slots.index(read.slot), start, read.offset))
    return tuple(rows), tuple(reads)


def _output_slots(blocks: BlockText) -> tuple[int, ...]:
    return tuple(dict.fromkeys(r.slot for text in blocks.outputs for r in text.reads))


def _output_gradients(
    program: Program, blocks: BlockText, of_scores: Collection[int]
) -> tuple[CpuCapturedGradient, ...]:
    """Captured tensors that output blocks read; `of_scores`: slots that scores read too."""
    reads = [r for text in blocks.outputs for r in text.reads]
    return tuple(
        CpuCapturedGradient(
            program.tensors[slot].name,
            slot,
            _common_axes([r.axes for r in reads if r.slot == slot]),
            slot in of_scores,
        )
        for slot in _output_slots(blocks)
    )


def _row_gradients(
    program: Program, semantics: Semantics, blocks: BlockText, others: Collection[int]
) -> tuple[CpuRowGradient, ...]:
    """Reads of the row blocks of q and k by captured tensor; `others`: slots that scores or output blocks
    read too.
    """
    found: dict[int, list[CpuRowRead]] = {}
    for operand, heads, rows, tile, steps, texts in (
        ("q", "Hq", "M", "QUERY_TILE", semantics.q_steps, blocks.q_rows),
        ("k", "Hk", "N", "LANE_KEY_TILE", semantics.k_steps, blocks.k_rows),
    ):
        start = 0
        if by_row(texts):
            continue
        for step, text in zip((s for s in steps if isinstance(s, RowStep)), texts, strict=True):
            for read in text.reads:
                one = CpuRowRead(operand, heads, rows, tile, start, value(step.width), read.offset)
                found.setdefault(read.slot, []).append(one)
                start += one.width
    return tuple(
        CpuRowGradient(program.tensors[slot].name, slot, slot in others, tuple(reads))
        for slot, reads in found.items()
    )


def by_row(texts: Sequence[RowText]) -> bool:
    """Whether row blocks read a learned tensor by row."""
    return any(read.by_row for text in texts for read in text.reads)


def _learned_slots(texts: Sequence[RotationText], row_texts: Sequence[RowText]) -> tuple[int, ...]:
    """Captured tensors whose gradients take one more walk over the rows of an operand."""
    slots = [r.slot for text in texts for r in text.reads]
    if by_row(row_texts):
        slots += [r.slot for text in row_texts for r in text.reads]
    return tuple(dict.fromkeys(slots))


def _with_learned(
    rotated: CpuRotated,
    program: Program,
    texts: Sequence[RotationText],
    row_texts: Sequence[RowText],
    others: set[int],
) -> CpuRotated:
    """With the captured tensors that its rotations read and, by row, its row blocks; `others`: slots that
    something ahead of it adds to, to which its own are added.
    """
    found = [(r.slot, r.axes) for text in texts for r in text.reads]
    if rotated.by_row:
        found += [(r.slot, r.axes) for text in row_texts for r in text.reads]
    learned = []
    for slot in _learned_slots(texts, row_texts):
        axes = _common_axes([one for of, one in found if of == slot])
        learned.append(CpuCapturedGradient(program.tensors[slot].name, slot, axes, slot in others))
        others.add(slot)
    return replace(rotated, learned=tuple(learned))


def _rotated(
    name: Literal["q", "k"],
    heads: str,
    rows: str,
    steps: tuple[Transform, ...],
    texts: tuple[RotationText, ...],
    row_texts: tuple[RowText, ...],
) -> CpuRotated | None:
    if not steps:
        return None
    parts: list[CpuRotation | CpuRow] = []
    offset = sums = index = 0
    rotation_texts, of_rows = iter(texts), iter(row_texts)
    learned, alone = _learned_slots(texts, row_texts), by_row(row_texts)
    for step in steps:
        if isinstance(step, RowStep):
            row, width = next(of_rows), value(step.width)
            reads_of = tuple(
                CpuOutputRead(learned.index(r.slot), sums + n * width, r.offset)
                for n, r in enumerate(row.reads if alone else ())
            )
            parts.append(CpuRow(row.name, step.call, sums, reads_of, width))
            sums += len(row.reads) * width
            continue
        text, pairs = next(rotation_texts), value(step.width) // 2
        parts.append(
            CpuRotation(
                index,
                value(step.first),
                pairs,
                step.pairing,
                text.coefficients,
                text.a00,
                text.a01,
                text.a10,
                text.a11,
                offset,
                step.call,
                text.plain,
                tuple(CpuRotationRead(learned.index(r.slot), r.gradient, r.offset) for r in text.reads),
            )
        )
        offset += table_part(step)
        index += 1
    reads = dependence([s for s in steps if isinstance(s, Rotation)])
    return CpuRotated(
        name,
        heads,
        rows,
        f"{name}_origin",
        tuple(p for p in parts if isinstance(p, CpuRotation)),
        offset,
        reads.batch,
        reads.head,
        reads.plain,
        tuple(parts),
        tuple(p for p in parts if isinstance(p, CpuRow)),
        sums,
        alone,
    )
