# SPDX-License-Identifier: Apache-2.0
"""LaunchPlan to the texts of one GPU unit: the kernels (CUDA C++), and the host code that launches them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from afc.expr.nodes import Const
from afc.ir.program import Program, Rotation
from afc.ir.rotation import Dependence, dependence
from afc.ir.tiled import Launch, LaunchPlan
from afc.render.blocks import CUDA, BlockText, RotationText, render_blocks
from afc.render.launch_context import BufferRow, KernelRow, LaunchContext, LaunchRow, PassRow
from afc.render.sm80_context import (
    BackwardContext,
    ForwardContext,
    PostprocessContext,
    PreludeContext,
    PreprocessContext,
    RotateContext,
    RotateOperand,
    RotationContext,
)
from afc.render.tables import table_index
from afc.render.text import LOG2_E, provenance, real_literal, render, scalar_checks, size_text
from afc.schedule.common import table_part, table_width
from afc.schedule.sm80 import float_rows, in_registers
from afc.schedule.targets import sm80

BYTES = {"float": 4, "bfloat16": 2, "float16": 2}


def render_cuda(program: Program, plan: LaunchPlan, symbol: str) -> tuple[str, str]:
    """(host text, device text). The device text does not depend on the architecture."""
    unit = _Unit(program, plan, symbol)
    return unit.host_text(), unit.device_text()


class _Unit:
    def __init__(self, program: Program, plan: LaunchPlan, symbol: str) -> None:
        self.program, self.plan, self.symbol = program, plan, symbol
        self.semantics = plan.semantics
        self.blocks: BlockText = render_blocks(program, plan.semantics, CUDA)
        self.buffer = {b.name: n for n, b in enumerate(plan.buffers)}
        head = max(self.semantics.head_qk, self.semantics.head_v)
        self.front = sm80.forward_tile(head, bool(self.semantics.weight_steps))
        self.back = sm80.backward_tile(head, bool(self.semantics.weight_steps))
        self.q_rotations = self._rotations("q", self.semantics.q_rotations, self.blocks.q_rotations)
        self.k_rotations = self._rotations("k", self.semantics.k_rotations, self.blocks.k_rotations)
        self.prefix = program.name

    # ---- device -------------------------------------------------------------------------------------------

    def device_text(self) -> str:
        """Prelude and kernels in launch order."""
        rotations = (*self.q_rotations, *self.k_rotations)
        s = self.semantics
        schedule = (
            f"forward {self.front.queries} x {self.front.keys}, {self.front.warps} warps; "
            f"backward {self.back.queries} x {self.back.keys}, {self.back.warps} warps (queries x keys)"
        )
        banner = "// " + "=" * 76
        header = "\n".join(
            [banner, *(f"// {line}" for line in provenance(self.program, self.plan, schedule)), banner, ""]
        )
        parts = [
            header + _print("prelude", PreludeContext(sm80.ELEMENTS[s.storage], self.blocks.text, rotations))
        ]
        parts += [_print(template, context) for template, context in self.kernels()]
        return "\n".join(parts)

    def kernels(self) -> list[tuple[str, Any]]:
        """(template, context) of every kernel, in launch order."""
        found: list[tuple[str, Any]] = []
        if rotate := self._rotate("forward"):
            found.append(("rotate", rotate))
        found.append(("forward", self._forward()))
        if self.plan.backward:
            if rotate := self._rotate("backward"):
                found.append(("rotate", rotate))
            found += [
                ("preprocess", self._preprocess()),
                ("backward", self._backward()),
                ("postprocess", self._postprocess()),
            ]
        return found

    def _rotations(
        self, operand: str, rotations: tuple[Rotation, ...], texts: tuple[RotationText, ...]
    ) -> tuple[RotationContext, ...]:
        made, offset = [], 0
        tables = table_index(rotations, "Hq" if operand == "q" else "Hk", "heads")
        for index, (rotation, text) in enumerate(zip(rotations, texts, strict=True)):
            assert isinstance(rotation.first, Const) and isinstance(rotation.width, Const)
            first, width = int(rotation.first.value), int(rotation.width.value)
            made.append(
                RotationContext(
                    struct=f"{operand.upper()}Rotation{index}",
                    function=f"rotate_{operand}_coefficients_{index}",
                    first=first,
                    last=first + width - 1,
                    pairs=width // 2,
                    adjacent=rotation.pairing == "adjacent",
                    coefficients=text.coefficients,
                    a00=text.a00,
                    a01=text.a01,
                    a10=text.a10,
                    a11=text.a11,
                    table_buffer=self.buffer[f"{operand}_table"],
                    table_stride=table_width(rotations),
                    table_offset=offset,
                    in_registers=in_registers(rotation, self.back.column_warps),
                    rows="M" if operand == "q" else "N",
                    plain=text.plain,
                    index=tables,
                )
            )
            offset += table_part(rotation)
        return tuple(made)

    def _operand(self, name: str, table: bool, rows: bool) -> RotateOperand | None:
        rotations = self.q_rotations if name == "q" else self.k_rotations
        if not rotations or not (table or rows):
            return None
        length, heads = ("M", "Hq") if name == "q" else ("N", "Hk")
        steps = self.semantics.q_rotations if name == "q" else self.semantics.k_rotations
        return RotateOperand(
            name,
            length,
            heads,
            self.semantics.head_qk,
            rotations,
            table,
            self.buffer[f"{name}_rotated"] if rows else None,
            _untouched(rotations, self.semantics.head_qk),
            rotations[0].index,
            _members(dependence(steps)),
        )

    def _rotate(self, which: str) -> RotateContext | None:
        """Forward: q's table (Q is rotated in the prologue) and k's rows. Backward: all."""
        late = which == "backward"
        operands = [self._operand("q", True, late), self._operand("k", late, True)]
        present = tuple(o for o in operands if o is not None)
        return (
            RotateContext(f"{self.prefix}_rotate_{which}", sm80.ROTATE_THREADS, sm80.ROTATE_ROWS, present)
            if present
            else None
        )

    def _section(self) -> int:
        return sm80.section_heads(self.semantics.head_qk, self.semantics.head_v)

    def _descending(self) -> bool:
        """Whether later queries see more keys: start with them."""
        return any(b.side == "upper" and b.slope == 1 for b in self.semantics.mask.bounds)

    def _forward(self) -> ForwardContext:
        s, t = self.semantics, self.front
        return ForwardContext(
            name=f"{self.prefix}_forward",
            d_qk=s.head_qk,
            d_v=s.head_v,
            tile_m=t.queries,
            tile_n=t.keys,
            warps=t.warps,
            min_blocks=t.min_blocks,
            q_in_registers=t.q_in_registers,
            section=self._section(),
            descending=self._descending(),
            shared_bytes=t.shared_bytes(s.head_qk, s.head_v),
            softmax_scale=_f(s.softmax_scale),
            scale_log2=_f(s.softmax_scale * LOG2_E),
            has_score=self.blocks.has_score,
            has_mask=self.blocks.has_mask,
            has_weight=self.blocks.has_weight,
            alternatives=len(s.mask.alternatives),
            scores_finite=s.scores_finite,
            q_rotations=self.q_rotations,
            k_buffer=self.buffer.get("k_rotated"),
        )

    def _preprocess(self) -> PreprocessContext:
        s = self.semantics
        return PreprocessContext(
            f"{self.prefix}_preprocess",
            s.head_qk,
            s.head_v,
            sm80.PREPROCESS_ROWS,
            self.buffer["row_terms"],
            self.buffer["dq_sum"],
        )

    def _backward(self) -> BackwardContext:
        s, t = self.semantics, self.back
        return BackwardContext(
            name=f"{self.prefix}_backward",
            d_qk=s.head_qk,
            d_v=s.head_v,
            tile_m=t.queries,
            tile_n=t.keys,
            key_warps=t.key_warps,
            query_warps=t.query_warps,
            column_warps=t.column_warps,
            dq_row_warps=t.dq_row_warps,
            q_stages=t.q_stages,
            do_stages=t.do_stages,
            min_blocks=t.min_blocks,
            section=self._section(),
            descending=not self._descending(),
            shared_bytes=t.shared_bytes(s.head_qk, s.head_v, float_rows(s, t)),
            scale_log2=_f(s.softmax_scale * LOG2_E),
            gradient_scale=_f(s.gradient_scale),
            has_score=self.blocks.has_score,
            has_score_gradient=self.blocks.has_score_gradient,
            has_mask=self.blocks.has_mask,
            has_weight=self.blocks.has_weight,
            alternatives=len(s.mask.alternatives),
            scores_finite=s.scores_finite,
            q_buffer=self.buffer.get("q_rotated"),
            k_buffer=self.buffer.get("k_rotated"),
            terms_buffer=self.buffer["row_terms"],
            dq_buffer=self.buffer["dq_sum"],
            needs_float_rows=float_rows(s, t),
            k_rotations=self.k_rotations,
        )

    def _postprocess(self) -> PostprocessContext:
        s, rows = self.semantics, sm80.POSTPROCESS_ROWS
        return PostprocessContext(
            f"{self.prefix}_postprocess",
            s.head_qk,
            rows,
            sm80.POSTPROCESS_THREADS,
            4 * rows * (s.head_qk + 4),
            _f(s.gradient_scale),
            self.buffer["dq_sum"],
            self.q_rotations,
        )

    # ---- host ---------------------------------------------------------------------------------------------

    def host_text(self) -> str:
        """Launch code of both passes."""
        s = self.semantics
        kernels = [self._kernel_row(launch) for launch in self.plan.launches]
        passes = []
        for name, launches in (("forward", self.plan.forward), ("backward", self.plan.backward)):
            if launches:
                passes.append(PassRow(name, tuple(map(_launch_row, launches))))
        context = LaunchContext(
            provenance(self.program, self.plan, "host code: launches the kernels in order"),
            self.symbol,
            s.head_qk,
            s.head_v,
            len(self.program.tensors),
            bool(self.plan.backward),
            tuple(kernels),
            self._buffers(),
            scalar_checks(self.program),
            tuple(passes),
        )
        return render("host", "launch.cpp.j2", unit=context)

    def _buffers(self) -> tuple[BufferRow, ...]:
        needed = {("forward", "backward"): "true", ("backward",): "backward", ("forward",): "!backward"}
        return tuple(
            BufferRow(n, b.name, needed[b.passes], BYTES[b.dtype], size_text(b.count))
            for n, b in enumerate(self.plan.buffers)
        )

    def _kernel_row(self, launch: Launch) -> KernelRow:
        binding = launch.kernel.binding
        return KernelRow(
            _constant(launch.kernel.name), launch.kernel.name, binding.shared_bytes, 32 * binding.warps
        )


def _launch_row(launch: Launch) -> LaunchRow:
    assert launch.grid is not None
    x, y = launch.grid
    return LaunchRow(_constant(launch.kernel.name), size_text(x), size_text(y))


def _print(template: str, context: Any) -> str:
    return render("sm80", f"{template}.cu.j2", **{f.name: getattr(context, f.name) for f in fields(context)})


def _constant(kernel: str) -> str:
    return kernel.upper()


def _f(value: float) -> str:
    return real_literal(value, "float")


def _members(reads: Dependence) -> tuple[str, str, str]:
    """(first, end, step) of the indices b * heads + h that the table of a batch entry or head serves."""
    match reads.batch, reads.head:
        case True, True:
            return "table + part", "table + 1", "parts"
        case True, False:
            return "table * heads + part", "table * heads + heads", "parts"
        case False, True:
            return "table + part * heads", "batch_heads", "parts * heads"
        case _:
            return "part", "batch_heads", "parts"


def _untouched(rotations: tuple[RotationContext, ...], columns: int) -> tuple[tuple[int, int], ...]:
    """(first, count) of the column ranges that no rotation touches."""
    ranges, at = [], 0
    for rotation in sorted(rotations, key=lambda r: r.first):
        if rotation.first > at:
            ranges.append((at, rotation.first - at))
        at = rotation.last + 1
    if at < columns:
        ranges.append((at, columns - at))
    return tuple(ranges)
