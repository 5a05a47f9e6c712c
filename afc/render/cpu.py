# SPDX-License-Identifier: Apache-2.0
"""LaunchPlan to the text of one C++ unit for the CPU."""

from __future__ import annotations

from typing import Literal

from afc.expr.nodes import Const
from afc.ir.program import Program, Rotation
from afc.ir.tiled import LaunchPlan
from afc.masks.boxes import reads
from afc.render.blocks import CPU, RotationText, render_blocks
from afc.render.boxes import TABLE_TYPES
from afc.render.cpu_context import CpuBuffer, CpuContext, CpuRotated, CpuRotation, CpuTable
from afc.render.text import LOG2_E, provenance, real_literal, render, scalar_checks, size_text
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
    keys = plan.backward[-1].kernel.tile if plan.backward else rows  # without a backward nothing prints it
    schedule = f"{rows.queries} queries in lanes x {rows.keys} keys"
    if plan.backward:
        schedule += f"; dK, dV: {keys.keys} keys in lanes x {keys.queries} queries"
    rotated = [
        _rotated("q", "Hq", "M", s.q_rotations, blocks.q_rotations),
        _rotated("k", "Hk", "N", s.k_rotations, blocks.k_rotations),
    ]
    buffers = tuple(
        CpuBuffer(
            b.name,
            "afc::Extent" if b.dtype == "extent" else "Element" if b.name.endswith("_rotated") else "Real",
            size_text(b.count),
            "forward" not in b.passes,
        )
        for b in plan.buffers
    )
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
        pointwise=not s.has_sum,
        rotated=tuple(r for r in rotated if r is not None),
        buffers=buffers,
        captured=len(program.tensors),
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
    for read in reads(predicate):
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


def _rotated(
    name: Literal["q", "k"],
    heads: str,
    rows: str,
    rotations: tuple[Rotation, ...],
    texts: tuple[RotationText, ...],
) -> CpuRotated | None:
    if not rotations:
        return None
    parts, offset = [], 0
    for index, (rotation, text) in enumerate(zip(rotations, texts, strict=True)):
        assert isinstance(rotation.first, Const) and isinstance(rotation.width, Const)
        pairs = int(rotation.width.value) // 2
        parts.append(
            CpuRotation(
                index,
                int(rotation.first.value),
                pairs,
                rotation.pairing,
                text.coefficients,
                text.a00,
                text.a01,
                text.a10,
                text.a11,
                offset,
                rotation.call,
            )
        )
        offset += text.coefficients * pairs
    return CpuRotated(name, heads, rows, f"{name}_origin", tuple(parts), offset)
