# SPDX-License-Identifier: Apache-2.0
"""LaunchPlan to the texts of one GPU unit: the kernels (CUDA C++), and the host code that launches them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from afc.expr.nodes import Const, Expr, Type, const
from afc.expr.operators import add
from afc.expr.simplify import simplify
from afc.ir.program import Program, Rotation
from afc.ir.rotation import dependence
from afc.ir.tiled import Buffer, Launch, LaunchPlan, Semantics, TiledKernel
from afc.masks.boxes import reads
from afc.render.blocks import CUDA, BlockText, RotationText, render_blocks
from afc.render.boxes import TABLE_TYPES
from afc.render.launch_context import BufferRow, CapturedRow, KernelRow, LaunchContext, LaunchRow, PassRow
from afc.render.sm80_context import (
    BackwardContext,
    ExtentsContext,
    ForwardContext,
    PlanContext,
    PostprocessContext,
    PreludeContext,
    PreprocessContext,
    QueryGradientContext,
    RotateContext,
    RotateOperand,
    RotationContext,
    StoredRow,
    TableRow,
)
from afc.render.text import LOG2_E, provenance, real_literal, render, scalar_checks, size_text
from afc.schedule.common import table_part, table_width
from afc.schedule.sm80 import float_rows, in_registers
from afc.schedule.stored import depends_on_head, runs_name, tabled
from afc.schedule.targets import sm80

MOST_BUFFERS = 16  # AFC_MAX_BUFFERS
BYTES = {"float": 4, "bfloat16": 2, "float16": 2, "extent": 24, "run": 16}

CAPTURED_TYPES = {  # condition on `dtype`, and in words
    Type.FLOAT: ("dtype >= AFC_FLOAT16 && dtype <= AFC_FLOAT64", "float16, bfloat16, float32 or float64"),
    Type.INT: ("dtype == AFC_INT32 || dtype == AFC_INT64", "int32 or int64"),
    Type.BOOL: ("dtype == AFC_BOOL", "bool"),
}


def render_cuda(program: Program, plan: LaunchPlan, symbol: str) -> tuple[str, str]:
    """(host text, device text). The device text does not depend on the architecture."""
    unit = _Unit(program, plan, symbol)
    return unit.host_text(), unit.device_text()


class _Unit:
    def __init__(self, program: Program, plan: LaunchPlan, symbol: str) -> None:
        self.program, self.plan, self.symbol = program, plan, symbol
        self.semantics = plan.semantics
        self.stored = plan.semantics.mask.residual
        self.blocks: BlockText = render_blocks(program, plan.semantics, CUDA, self.stored)
        self.buffer = {b.name: n for n, b in enumerate(plan.buffers)}
        assert len(self.buffer) <= MOST_BUFFERS, "afc_abi.h: AFC_MAX_BUFFERS"
        meaning = self.semantics
        front, back = sm80.tiles_of(
            plan.target, meaning.head_qk, meaning.head_v, plan.tile_steps, bool(meaning.weight_steps)
        )
        assert front is not None and back is not None
        self.front, self.back = front, back
        head = max(self.semantics.head_qk, self.semantics.head_v)
        self.ordered = next(t for t in sm80.QUERY_GRADIENT if head <= t.head_max)
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
        prelude = PreludeContext(sm80.ELEMENTS[s.storage], self.blocks.text, rotations, self.stored)
        parts = [header + _print("prelude", prelude)]
        parts += [_print(template, context) for template, context in self.kernels()]
        return "\n".join(parts)

    def kernels(self) -> list[tuple[str, Any]]:
        """(template, context) of every kernel, in launch order; the deterministic form's own comes last."""
        found: list[tuple[str, Any]] = self._plan_kernels()
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
                ("backward_queries", self._query_gradient()),
            ]
        return found

    def _plan_kernels(self) -> list[tuple[str, Any]]:
        """The kernels that find the runs of both passes."""
        kernels = {x.kernel.name: x.kernel for x in self._launches if x.kernel.kind in ("table", "plan")}
        return [
            ("extents", self._extents(k)) if k.kind == "table" else ("plan", self._plan(k))
            for k in kernels.values()
        ]

    @property
    def _launches(self) -> tuple[Launch, ...]:
        """All kernels, those of the deterministic form last."""
        return (*self.plan.launches, *self.plan.deterministic_backward)

    def _tables(self) -> tuple[TableRow, ...]:
        """What the mask reads, in order of first use."""
        predicate = self.semantics.mask.predicate
        assert predicate is not None
        slots = {t.name: (n, len(t.shape)) for n, t in enumerate(self.program.tensors)}
        chunks = {t.read: t.chunks for t in tabled(self.program, self.semantics)}
        rows: list[TableRow] = []
        before: Expr = const(0)
        for read in reads(predicate):
            slot, rank = slots[read.tensor]
            kind, own = TABLE_TYPES[read.type], chunks.get(read)
            if own is None or read.axis is None:
                rows.append(TableRow(slot, read.tensor, kind, rank, -1, "", ""))
                continue
            texts = size_text(own), size_text(before)
            rows.append(TableRow(slot, read.tensor, kind, rank, read.axis, *texts))
            before = simplify(add(before, own))
        return tuple(rows)

    def _extents(self, kernel: TiledKernel) -> ExtentsContext:
        tables = tuple(t for t in self._tables() if t.axis >= 0)
        threads = 32 * kernel.binding.warps
        return ExtentsContext(kernel.name, threads, kernel.tile.queries, self.buffer["extents"], tables)

    def _plan(self, kernel: TiledKernel) -> PlanContext:
        words = {"m": "queries", "n": "keys"}
        own, other = ("m", "n") if kernel.stationary == "queries" else ("n", "m")
        sizes = {"m": kernel.tile.queries, "n": kernel.tile.keys}
        return PlanContext(
            kernel.name,
            kernel.binding.warps,
            own,
            other,
            words[own],
            words[other],
            sizes[own],
            sizes[other],
            depends_on_head(self.semantics),
            self.buffer[runs_name(kernel)],
            self.buffer.get("extents"),
            self._tables(),
        )

    def _stored_row(self, kernel: str) -> StoredRow | None:
        """Where a kernel finds its runs, if a plan kernel has stored them."""
        found = next(x.kernel for x in self._launches if x.kernel.name == f"{self.prefix}_{kernel}")
        if found.walk is None or not found.walk.stored:
            return None
        queries = found.stationary == "queries"
        head = "work.head" if queries else "work.head * group"
        first = "static_cast<int64_t>(work.batch) * tiles + work.tile"
        by_head = depends_on_head(self.semantics)
        if by_head:
            first = f"(static_cast<int64_t>(work.batch) * heads + {head}) * tiles + work.tile"
        pitch = "static_cast<int64_t>(tiles) * tile::RUN_ROW" if by_head and not queries else "0"
        return StoredRow(self.buffer[runs_name(found)], first, pitch)

    def _rotations(
        self, operand: str, rotations: tuple[Rotation, ...], texts: tuple[RotationText, ...]
    ) -> tuple[RotationContext, ...]:
        made, offset = [], 0
        reads = dependence(rotations)
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
                    tensor=operand,
                    rows="M" if operand == "q" else "N",
                    heads="Hq" if operand == "q" else "Hk",
                    plain=text.plain,
                    by_batch=reads.batch,
                    by_head=reads.head,
                )
            )
            offset += table_part(rotation)
        return tuple(made)

    def _operand(self, name: str, table: bool, rows: bool) -> RotateOperand | None:
        rotations = self.q_rotations if name == "q" else self.k_rotations
        if not rotations or not (table or rows):
            return None
        return RotateOperand(
            name,
            rotations[0].rows,
            self.semantics.head_qk,
            rotations,
            table,
            self.buffer[f"{name}_rotated"] if rows else None,
            _untouched(rotations, self.semantics.head_qk),
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
            **_head_sizes(s),
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
            pointwise=not s.has_sum,
            removed="-tile::INFINITE" if s.has_sum else "0.0f",
            has_score=self.blocks.has_score,
            has_mask=self.blocks.has_mask,
            has_weight=self.blocks.has_weight,
            row_terms=self.blocks.row_terms,
            column_terms=self.blocks.column_terms,
            has_extra=self.blocks.has_extra,
            alternatives=len(s.mask.alternatives),
            stored=self._stored_row("forward"),
            scores_finite=s.scores_finite,
            q_rotations=self.q_rotations,
            k_buffer=self.buffer.get("k_rotated"),
        )

    def _preprocess(self) -> PreprocessContext:
        s = self.semantics
        return PreprocessContext(
            f"{self.prefix}_preprocess",
            sm80.padded(s.head_qk),
            s.head_v,
            sm80.PREPROCESS_ROWS,
            not s.has_sum,
            self.buffer.get("row_terms"),
            self.buffer["dq_sum"],
        )

    def _backward(self) -> BackwardContext:
        s, t = self.semantics, self.back
        return BackwardContext(
            name=f"{self.prefix}_backward",
            **_head_sizes(s),
            tile_m=t.queries,
            tile_n=t.keys,
            key_warps=t.key_warps,
            query_warps=t.query_warps,
            sum_key_warps=t.sum_key_warps,
            column_warps=t.column_warps,
            dq_row_warps=t.dq_row_warps,
            dq_column_warps=t.warps // t.dq_row_warps,
            stages=t.stages,
            min_blocks=t.min_blocks,
            k_in_registers=t.k_in_registers,
            v_in_registers=t.keeps_v(s.head_qk, s.head_v),
            section=self._section(),
            descending=not self._descending(),
            shared_bytes=t.shared_bytes(s.head_qk, s.head_v, float_rows(s, t), s.has_sum),
            scale_log2=_f(s.softmax_scale * LOG2_E),
            gradient_scale=_f(s.gradient_scale),
            pointwise=not s.has_sum,
            has_score=self.blocks.has_score,
            has_score_gradient=self.blocks.has_score_gradient,
            has_mask=self.blocks.has_mask,
            has_weight=self.blocks.has_weight,
            row_terms=self.blocks.row_terms,
            column_terms=self.blocks.column_terms,
            alternatives=len(s.mask.alternatives),
            stored=self._stored_row("backward"),
            scores_finite=s.scores_finite,
            q_buffer=self.buffer.get("q_rotated"),
            k_buffer=self.buffer.get("k_rotated"),
            terms_buffer=self.buffer.get("row_terms"),
            dq_buffer=self.buffer["dq_sum"],
            needs_float_rows=float_rows(s, t),
            k_rotations=self.k_rotations,
        )

    def _query_gradient(self) -> QueryGradientContext:
        s, t = self.semantics, self.ordered
        return QueryGradientContext(
            name=f"{self.prefix}_backward_queries",
            **_head_sizes(s),
            tile_m=t.queries,
            tile_n=t.keys,
            warps=t.warps,
            min_blocks=t.min_blocks,
            section=self._section(),
            descending=self._descending(),
            shared_bytes=t.shared_bytes(s.head_qk, s.head_v),
            scale_log2=_f(s.softmax_scale * LOG2_E),
            gradient_scale=_f(s.gradient_scale),
            pointwise=not s.has_sum,
            has_score=self.blocks.has_score,
            has_score_gradient=self.blocks.has_score_gradient,
            has_mask=self.blocks.has_mask,
            has_weight=self.blocks.has_weight,
            row_terms=self.blocks.row_terms,
            column_terms=self.blocks.column_terms,
            alternatives=len(s.mask.alternatives),
            stored=self._stored_row("backward_queries"),
            scores_finite=s.scores_finite,
            q_buffer=self.buffer.get("q_rotated"),
            k_buffer=self.buffer.get("k_rotated"),
            terms_buffer=self.buffer.get("row_terms"),
            q_rotations=self.q_rotations,
        )

    def _postprocess(self) -> PostprocessContext:
        s, rows = self.semantics, sm80.POSTPROCESS_ROWS
        columns = sm80.padded(s.head_qk)
        return PostprocessContext(
            f"{self.prefix}_postprocess",
            columns,
            s.head_qk,
            rows,
            sm80.POSTPROCESS_THREADS,
            4 * rows * (columns + 4),
            _f(s.gradient_scale),
            self.buffer["dq_sum"],
            self.q_rotations,
        )

    # ---- host ---------------------------------------------------------------------------------------------

    def host_text(self) -> str:
        """Launch code of both passes."""
        s = self.semantics
        plan = self.plan
        launched = {x.kernel.name: x for x in self._launches}
        kernels = [self._kernel_row(launch) for launch in launched.values()]
        passes = [PassRow("forward", tuple(map(_launch_row, plan.forward)))]
        if plan.backward:
            other = tuple(map(_launch_row, plan.deterministic_backward))
            passes.append(PassRow("backward", tuple(map(_launch_row, plan.backward)), other))
        context = LaunchContext(
            provenance(self.program, self.plan, "host code: launches the kernels in order"),
            self.symbol,
            s.head_qk,
            s.head_v,
            tuple(CapturedRow(t.name, *CAPTURED_TYPES[t.type]) for t in self.program.tensors),
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
            BufferRow(self.buffer[b.name], b.name, needed[b.passes], BYTES[b.dtype], self._count(b))
            for b in self.plan.buffers
        )

    def _count(self, buffer: Buffer) -> str:
        """Values of a buffer; with an origin for each batch entry there are more tables than planned."""
        operand, _, kind = buffer.name.partition("_")
        count = size_text(buffer.count)
        if kind != "table" or (self.q_rotations if operand == "q" else self.k_rotations)[0].by_batch:
            return count
        return f"(args.{operand}_origin_per_batch != nullptr ? larger(args.B, 1) : 1) * ({count})"

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


def _head_sizes(meaning: Semantics) -> dict[str, Any]:
    """Head sizes of a context, and what they are filled up to."""
    d_qk, d_v = (sm80.padded(head) for head in (meaning.head_qk, meaning.head_v))
    return {
        "d_qk": d_qk,
        "d_v": d_v,
        "head_qk": meaning.head_qk,
        "head_v": meaning.head_v,
        "valid_qk": "" if d_qk == meaning.head_qk else f", {meaning.head_qk}",
        "valid_v": "" if d_v == meaning.head_v else f", {meaning.head_v}",
    }


def _constant(kernel: str) -> str:
    return kernel.upper()


def _f(value: float) -> str:
    return real_literal(value, "float")


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
