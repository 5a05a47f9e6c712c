# SPDX-License-Identifier: Apache-2.0
"""LaunchPlan to the texts of one GPU unit: the kernels (CUDA C++), and the host code that launches them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from afc.expr.nodes import Const, Expr, Type, const
from afc.expr.operators import add
from afc.expr.simplify import simplify
from afc.ir.program import Program, Rotation, RowStep, Transform
from afc.ir.rotation import dependence
from afc.ir.tiled import Buffer, Launch, LaunchPlan, Semantics, TiledKernel
from afc.masks.boxes import reads
from afc.render.blocks import CUDA, BlockText, RotationText, render_blocks
from afc.render.boxes import TABLE_TYPES
from afc.render.launch_context import BufferRow, CapturedRow, KernelRow, LaunchContext, LaunchRow, PassRow
from afc.render.shares import row_reads_of, row_texts, score_reads, shares, widths
from afc.render.sm80_context import (
    BackwardContext,
    CapturedContext,
    ClearContext,
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
    RowsBackContext,
    SharedGradient,
    SharesContext,
    StepContext,
    StoredRow,
    SumContext,
    SumRead,
    TableRow,
    TransformContext,
    TransformOperand,
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


@dataclass(frozen=True)
class CudaTexts:
    """A unit as text: launch code, and the kernels, which do not depend on the architecture. `passes` are the
    kernels again, those of each pass for themselves: (name, text), to be compiled side by side.
    """

    host: str
    device: str
    passes: tuple[tuple[str, str], ...]


def render_cuda(program: Program, plan: LaunchPlan, symbol: str) -> CudaTexts:
    """The texts of a unit whose C symbols begin with `symbol`."""
    unit = _Unit(program, plan, symbol)
    head, kernels = unit.device_head(), [(c.name, _print(t, c)) for t, c in unit.kernels()]
    early = {launch.kernel.name for launch in plan.forward}
    parts = [
        (name, "\n".join([head, *(text for kernel, text in kernels if (kernel in early) == first)]))
        for name, first in (("forward", True), ("backward", False))
    ]
    device = "\n".join([head, *(text for _, text in kernels)])
    return CudaTexts(unit.host_text(), device, tuple(parts) if plan.backward else ())


@dataclass(frozen=True)
class _Group:
    """A kernel that sums gradients of captured tensors, or could: those of the blocks of an operand (q, k,
    or o for the output), or of scores (empty).
    """

    operand: str
    gradients: tuple[SharedGradient, ...]
    reads: tuple[SumRead, ...]
    shares: SharesContext


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
        self.groups = self._groups()

    # ---- device -------------------------------------------------------------------------------------------

    def device_head(self) -> str:
        """What comes before the kernels."""
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
        prelude = PreludeContext(
            sm80.ELEMENTS[s.storage],
            self.blocks.text,
            rotations,
            self.stored,
            bool(self.blocks.q_rows or self.blocks.k_rows or self.blocks.outputs),
            tuple(g.shares for g in self.groups.values()),
        )
        return header + _print("prelude", prelude)

    def kernels(self) -> list[tuple[str, Any]]:
        """(template, context) of every kernel, in launch order; the deterministic form's own comes last."""
        forward = {x.kernel.name for x in self.plan.forward}
        planned: list[tuple[str, Any]] = []
        others: list[tuple[str, Any]] = []
        for name, launch in self._launched().items():
            first = launch.kernel.kind in ("table", "plan")
            (planned if first else others).append(
                self._kernel("forward" if name in forward else "backward", launch.kernel)
            )
        return planned + others

    def _launched(self) -> dict[str, Launch]:
        """One launch of every kernel, by name, those of the deterministic form last."""
        launches = (*self.plan.launches, *self.plan.deterministic_backward)
        found: dict[str, Launch] = {}
        for launch in launches:
            found.setdefault(launch.kernel.name, launch)
        return found

    def _kernel(self, which: str, kernel: TiledKernel) -> tuple[str, Any]:
        """(template, context) of one kernel of a pass."""
        group = self.groups.get(kernel.name)
        match kernel.kind:
            case "table":
                return "extents", self._extents(kernel)
            case "plan":
                return "plan", self._plan(kernel)
            case "rotate" if kernel.name.endswith(f"_transform_{which}"):
                return "transform", self._transform(kernel)
            case "rotate":
                return "rotate", self._rotate(which)
            case "forward":
                return "forward", self._forward()
            case "preprocess":
                return "preprocess", self._preprocess()
            case "backward" if kernel.stationary == "queries":
                return "backward_queries", self._query_gradient()
            case "backward":
                return "backward", self._backward()
            case "postprocess" if group is None:
                return "postprocess", self._postprocess()
            case "postprocess" | "output" if group is not None:
                return "rows_back", self._rows_back(kernel, group)
            case "captured" if group is not None:
                return "captured", self._captured(kernel, group)
            case "clear":
                summed = tuple(g.shares for g in self.groups.values() if g.reads)
                return "clear", ClearContext(kernel.name, sm80.CLEAR_THREADS, summed)
            case "sum":
                shares = self.groups[kernel.name.removesuffix("_sum")].shares
                return "sum", SumContext(kernel.name, sm80.SUM_THREADS, shares)
        raise AssertionError(kernel.kind)

    def _groups(self) -> dict[str, _Group]:
        """The kernels whose work is shared out by the gradients that they sum, by name."""
        found: dict[str, _Group] = {}
        next_buffer = len(self.plan.buffers)
        for kernel in (launch.kernel for launch in self.plan.backward if launch.grid is None):
            if kernel.kind == "sum":
                continue
            queries = kernel.stationary == "queries"
            if kernel.kind == "captured":
                operand = ""
                gradients, reads = score_reads(self.program, self.blocks.captured)
            else:
                operand = "o" if kernel.kind == "output" else "q" if queries else "k"
                texts = row_texts(self.blocks, operand)
                length = "args.N" if operand == "k" else "args.M"
                gradients, reads = row_reads_of(self.program, texts, widths(self.semantics, operand), length)
            buffer = next_buffer if reads else None
            next_buffer += bool(reads)
            heads, rows = ("Hq", "M") if queries else ("Hk", "N")
            tile = kernel.tile.queries if queries else kernel.tile.keys
            shared = shares(kernel.name, heads, rows, tile, gradients, reads, buffer)
            found[kernel.name] = _Group(operand, gradients, reads, shared)
        return found

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
        found = self._launched()[f"{self.prefix}_{kernel}"].kernel
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

    def _rotate(self, which: str) -> RotateContext:
        """Forward: q's table (Q is rotated in the prologue) and k's rows. Backward: all. With row blocks only
        tables.
        """
        late = which == "backward"
        rows_q, rows_k = bool(self.blocks.q_rows), bool(self.blocks.k_rows)
        operands = [
            self._operand("q", True, late and not rows_q),
            self._operand("k", late or rows_k, not rows_k),
        ]
        present = tuple(o for o in operands if o is not None)
        return RotateContext(f"{self.prefix}_rotate_{which}", sm80.ROTATE_THREADS, sm80.ROTATE_ROWS, present)

    def _steps(self, operand: str) -> tuple[StepContext, ...]:
        """The steps of q, k or the output."""
        s = self.semantics
        steps: tuple[Transform, ...] = {"q": s.q_steps, "k": s.k_steps, "o": s.output_steps}[operand]
        rotations = iter({"q": self.q_rotations, "k": self.k_rotations, "o": ()}[operand])
        texts = iter(row_texts(self.blocks, operand))
        of_width = iter(widths(s, operand))
        made: list[StepContext] = []
        state = sums = 0
        for step in steps:
            if isinstance(step, RowStep):
                text, width = next(texts), next(of_width)
                made.append(StepContext(step.call, text.name, None, state, sums, len(text.reads)))
                sums += len(text.reads) * width
                state += 1
            else:
                made.append(StepContext(step.call, "", next(rotations), state))
        return tuple(made)

    def _transform(self, kernel: TiledKernel) -> TransformContext:
        operands = [
            TransformOperand(name, rows, heads, self._steps(name), self.buffer[f"{name}_rotated"])
            for name, rows, heads in (("q", "M", "Hq"), ("k", "N", "Hk"))
            if row_texts(self.blocks, name)
        ]
        shared = kernel.binding.shared_bytes
        rows = sm80.TRANSFORM_ROWS
        return TransformContext(kernel.name, rows, self.semantics.head_qk, shared, tuple(operands))

    def _rows_back(self, kernel: TiledKernel, group: _Group) -> RowsBackContext:
        s, operand = self.semantics, group.operand
        steps = self._steps(operand)
        states = sum(step.rotation is None for step in steps)
        sums = {"q": "dq_sum", "k": "dk_sum", "o": "d_raw"}[operand]
        return RowsBackContext(
            kernel.name,
            operand,  # type: ignore[arg-type]
            "N" if operand == "k" else "M",
            "Hk" if operand == "k" else "Hq",
            kernel.tile.keys if operand == "k" else kernel.tile.queries,
            s.head_v if operand == "o" else s.head_qk,
            states,
            sum(r.width for r in group.reads),
            kernel.binding.shared_bytes,
            _f(s.gradient_scale),
            self.buffer[sums],
            sm80.padded(s.head_qk),
            s.has_sum,
            tuple(x for x in steps if x.state + (x.rotation is None) < states),
            tuple(reversed(steps)),
            group.gradients,
            group.shares.buffer,
            group.reads,
            tuple(r for r in group.reads if r.kind == "column"),
        )

    def _captured(self, kernel: TiledKernel, group: _Group) -> CapturedContext:
        s, walks = self.semantics, [r for r in group.reads if not r.extra]
        return CapturedContext(
            name=kernel.name,
            **_head_sizes(s),
            tile_m=kernel.tile.queries,
            tile_n=kernel.tile.keys,
            shared_bytes=kernel.binding.shared_bytes,
            scale_log2=_f(s.softmax_scale * LOG2_E),
            pointwise=not s.has_sum,
            has_score=self.blocks.has_score,
            has_mask=self.blocks.has_mask,
            has_weight=self.blocks.has_weight,
            distance=self.blocks.distance,
            row_terms=self.blocks.row_terms,
            column_terms=self.blocks.column_terms,
            stored=self._stored_row("captured"),
            alternatives=len(s.mask.alternatives),
            q_buffer=self.buffer.get("q_rotated"),
            k_buffer=self.buffer.get("k_rotated"),
            terms_buffer=self.buffer.get("row_terms"),
            gradients=group.gradients,
            buffer=group.shares.buffer,
            all_reads=len(group.reads),
            reads=group.reads,
            values=any(r.kind != "row" for r in walks),
            places=any(r.placed for r in walks),
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
            shared_bytes=t.shared_bytes(s.head_qk, s.head_v, bool(s.output_steps)),
            softmax_scale=_f(s.softmax_scale),
            scale_log2=_f(s.softmax_scale * LOG2_E),
            pointwise=not s.has_sum,
            removed="-tile::INFINITE" if s.has_sum else "0.0f",
            has_score=self.blocks.has_score,
            has_mask=self.blocks.has_mask,
            has_weight=self.blocks.has_weight,
            distance=self.blocks.distance,
            row_terms=self.blocks.row_terms,
            column_terms=self.blocks.column_terms,
            has_extra=self.blocks.has_extra,
            alternatives=len(s.mask.alternatives),
            stored=self._stored_row("forward"),
            scores_finite=s.scores_finite,
            q_rotations=() if self.blocks.q_rows else self.q_rotations,
            q_buffer=self.buffer["q_rotated"] if self.blocks.q_rows else None,
            k_buffer=self.buffer.get("k_rotated"),
            outputs=self._steps("o"),
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
            distance=self.blocks.distance,
            row_terms=self.blocks.row_terms,
            column_terms=self.blocks.column_terms,
            alternatives=len(s.mask.alternatives),
            stored=self._stored_row("backward"),
            scores_finite=s.scores_finite,
            q_buffer=self.buffer.get("q_rotated"),
            k_buffer=self.buffer.get("k_rotated"),
            terms_buffer=self.buffer.get("row_terms"),
            dq_buffer=self.buffer["dq_sum"],
            dk_buffer=self.buffer["dk_sum"] if self.blocks.k_rows else None,
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
            distance=self.blocks.distance,
            row_terms=self.blocks.row_terms,
            column_terms=self.blocks.column_terms,
            alternatives=len(s.mask.alternatives),
            stored=self._stored_row("backward_queries"),
            scores_finite=s.scores_finite,
            q_buffer=self.buffer.get("q_rotated"),
            k_buffer=self.buffer.get("k_rotated"),
            terms_buffer=self.buffer.get("row_terms"),
            q_rotations=self.q_rotations,
            dq_buffer=self.buffer["dq_sum"] if self.blocks.q_rows else None,
            sum_columns=sm80.padded(s.head_qk),
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
        kernels = [self._kernel_row(launch) for launch in self._launched().values()]
        passes = [PassRow("forward", tuple(map(self._launch_row, plan.forward)))]
        if plan.backward:
            other = tuple(map(self._launch_row, plan.deterministic_backward))
            passes.append(PassRow("backward", tuple(map(self._launch_row, plan.backward)), other))
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
            tuple(g.shares for g in self.groups.values()),
            tuple(sorted({g.slot for group in self.groups.values() for g in group.gradients})),
            bool(s.output_steps),
        )
        return render("host", "launch.cpp.j2", unit=context)

    def _buffers(self) -> tuple[BufferRow, ...]:
        needed = {("forward", "backward"): "true", ("backward",): "backward", ("forward",): "!backward"}
        rows = [
            BufferRow(n, b.name, needed[b.passes], BYTES[b.dtype], self._count(b))
            for n, b in enumerate(self.plan.buffers)
        ]
        for name, group in self.groups.items():
            if group.shares.buffer is not None:
                count = f"shares_of({name}_shares, args).floats()"
                rows.append(BufferRow(group.shares.buffer, f"copies of {name}", "backward", 4, count))
        assert len(rows) <= MOST_BUFFERS, "afc_abi.h: AFC_MAX_BUFFERS"
        return tuple(rows)

    def _launch_row(self, launch: Launch) -> LaunchRow:
        name, then = launch.kernel.name, ""
        if launch.grid is not None:
            x, y = map(size_text, launch.grid)
        elif launch.kernel.kind == "sum":
            group = self.groups[name.removesuffix("_sum")]
            warps = sm80.SUM_THREADS // 32
            largest = f"shares_of({group.shares.name}_shares, args).largest()"
            x, y = f"ceil_div({largest}, {warps})", str(len(group.gradients))
        else:
            x, y = f"shares_of({name}_shares, args).blocks()", "1"
            if launch.kernel.kind == "captured":  # nothing but sums
                x = f"shares_of({name}_shares, args).wanted_blocks()"
        if launch.kernel.kind == "output":
            then = "d_raw"
        return LaunchRow(_constant(name), x, y, then)

    def _count(self, buffer: Buffer) -> str:
        """Values of a buffer; with an origin for each batch entry there are more tables than planned."""
        operand, _, kind = buffer.name.partition("_")
        count = size_text(buffer.count)
        if kind != "table" or (self.q_rotations if operand == "q" else self.k_rotations)[0].by_batch:
            return count
        return f"(args.{operand}_origin_per_batch != nullptr ? larger(args.B, 1) : 1) * ({count})"

    def _kernel_row(self, launch: Launch) -> KernelRow:
        name, binding = launch.kernel.name, launch.kernel.binding
        part = 0 if name in {other.kernel.name for other in self.plan.forward} else 1
        return KernelRow(_constant(name), name, binding.shared_bytes, 32 * binding.warps, part)


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
