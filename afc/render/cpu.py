# SPDX-License-Identifier: Apache-2.0
"""LaunchPlan to the text of one C++ unit for the CPU."""

from __future__ import annotations

from typing import Literal

from afc.expr.nodes import Const
from afc.ir.program import Program, Rotation
from afc.ir.tiled import LaunchPlan
from afc.render.blocks import CPU, RotationText, render_blocks
from afc.render.cpu_context import CpuBuffer, CpuContext, CpuRotated, CpuRotation
from afc.render.text import LOG2_E, provenance, real_literal, render, scalar_checks, size_text

ELEMENTS = {"float64": "double", "float32": "float", "bfloat16": "afc::bfloat16", "float16": "afc::float16"}


def render_cpu(program: Program, plan: LaunchPlan, symbol: str) -> str:
    """Text of the unit; its entry functions are `<symbol>_workspace`, `<symbol>_forward`,
    `<symbol>_backward`.
    """
    return render("cpu", "module.cpp.j2", unit=context(program, plan, symbol))


def context(program: Program, plan: LaunchPlan, symbol: str) -> CpuContext:
    """Everything the templates print."""
    s = plan.semantics
    blocks = render_blocks(program, s, CPU)
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
            "Element" if b.name.endswith("_rotated") else "Real",
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
    )


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
