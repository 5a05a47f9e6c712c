# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors on GPUs: which kernel sums which reads, and how the work is shared out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from afc.expr.nodes import Load
from afc.expr.printer import attn
from afc.ir.program import Program
from afc.ir.tiled import Semantics
from afc.render.blocks import BlockText, CapturedText, RowReadText, RowText
from afc.render.sm80_context import SharedGradient, SharesContext, SumRead
from afc.schedule.captured import Sum, axis, column_sum, score_sum
from afc.schedule.common import value
from afc.schedule.sm80 import row_steps


def shares(
    name: str,
    heads: str,
    rows: str,
    tile_rows: int,
    gradients: tuple[SharedGradient, ...],
    reads: Sequence[SumRead],
    buffer: int | None,
) -> SharesContext:
    """How the kernel `name` over tiles of `tile_rows` rows shares out its work."""
    lines = [
        f"  shares.begin(args.B, args.{heads}, (args.{rows} + {tile_rows - 1}) / {tile_rows});",
        *(
            f"  shares.add(args.grad_captured[{g.slot}], {g.batch}, {g.head}, {g.row}, args.{rows});"
            f"  // {g.name}"
            for g in gradients
        ),
        "  shares.split();",
    ]
    text = (
        f"// How the blocks of {name} share out its rows.\n"
        f"AFC_FN void {name}_shares(const afc_args &args, Shares &shares) {{\n" + "\n".join(lines) + "\n}"
    )
    placed = tuple(
        (gradients[r.gradient].slot, f"!({r.one_to_one})" if r.kind == "each" else "true") for r in reads
    )
    return SharesContext(name, text, gradients, buffer, placed)


def score_reads(
    program: Program, texts: tuple[CapturedText, ...]
) -> tuple[tuple[SharedGradient, ...], tuple[SumRead, ...]]:
    """The gradients and reads of score steps, the extra term and weight blocks."""
    gradients = _gradients(program, texts)
    slots = [g.slot for g in gradients]
    reads: list[SumRead] = []
    for index, text in enumerate(texts):
        kind = "row" if text.extra else score_sum(text.load)
        unique = _one_to_one(text.slot, text.load, kind, ("n", "j"), "args.N")
        place = slots.index(text.slot)
        read = SumRead(index, place, kind, text.offset, unique, attn(text.load), text.extra)
        reads.append(replace(read, weight=text.weight))
    return gradients, tuple(reads)


def row_reads_of(
    program: Program, texts: tuple[RowText, ...], widths: Sequence[int], rows: str
) -> tuple[tuple[SharedGradient, ...], tuple[SumRead, ...]]:
    """The gradients and reads of the row blocks of an operand, or of output blocks, with their columns;
    `rows`: the operand's.
    """
    all_reads = [read for text in texts for read in text.reads]
    gradients = _gradients(program, all_reads)
    slots = [g.slot for g in gradients]
    reads: list[SumRead] = []
    start = 0
    for text, width in zip(texts, widths, strict=True):
        for read in text.reads:
            kind = column_sum(read.load)
            unique = _one_to_one(read.slot, read.load, kind, ("c",), str(width), rows)
            place = slots.index(read.slot)
            reads.append(
                SumRead(
                    len(reads), place, kind, read.offset, unique, attn(read.load), start=start, width=width
                )
            )
            start += width
    return gradients, tuple(reads)


def widths(semantics: Semantics, operand: str) -> tuple[int, ...]:
    """Columns of each row block of q or k, or of each output block."""
    steps = {"q": semantics.q_steps, "k": semantics.k_steps, "o": semantics.output_steps}[operand]
    return tuple(value(s.width) for s in row_steps(steps))


def row_texts(blocks: BlockText, operand: str) -> tuple[RowText, ...]:
    """The texts of the row blocks of q or k, or of the output blocks."""
    return {"q": blocks.q_rows, "k": blocks.k_rows, "o": blocks.outputs}[operand]


def _one_to_one(
    slot: int, load: Load, kind: Sum, columns: tuple[str, ...], width: str, rows: str = "args.M"
) -> str:
    """C condition that rows, columns or both of a tile name elements of their own, as `kind` has it."""
    tensor = f"args.grad_captured[{slot}]"
    row = f"one_to_one({tensor}, {axis(load, 'm', 'i', 'r')}, {rows})"
    column = f"one_to_one({tensor}, {axis(load, *columns)}, {width})"
    match kind:
        case "each":
            return f"{row} && {column}"
        case "gather in rows":
            return row
        case "gather in columns":
            return column
        case _:
            return "false"


def _gradients(
    program: Program, reads: Sequence[CapturedText] | Sequence[RowReadText]
) -> tuple[SharedGradient, ...]:
    """Captured tensors in the order of their first read.

    Row m of one tile may be row i of another: reads by either do not share a dimension.
    """
    found = []
    for slot in dict.fromkeys(r.slot for r in reads):
        axes = [r.axes for r in reads if r.slot == slot]
        b, h, m, i = (one[0] if len(set(one)) == 1 else -1 for one in zip(*axes, strict=True))
        found.append(SharedGradient(program.tensors[slot].name, slot, b, h, max(m, i)))
    return tuple(found)
