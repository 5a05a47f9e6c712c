# SPDX-License-Identifier: Apache-2.0
"""Readable, stable text of Program and LaunchPlan: for people, for `--emit`, and for golden files."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from afc.expr.nodes import Formula
from afc.expr.printer import attn, number
from afc.ir.masks import Bound, MaskPlan
from afc.ir.program import Program, Rotation, RowStep, Step, TensorParam
from afc.ir.tiled import Buffer, Launch, LaunchPlan, TileOp


def print_program(program: Program) -> str:
    """A Program, one line per fact."""
    lines = [f"program {program.name}  [{program.source}:{program.span.line}]"]
    lines += [f"  constant {name} = {number(value)}" for name, value in program.constants]
    for param in program.params:
        if isinstance(param, TensorParam):
            extents = ", ".join(("1|" if e.broadcast else "") + attn(e.size) for e in param.shape)
            lines.append(
                f"  tensor {param.name}[{extents}]: {param.type.value}{' grad' if param.grad else ''}"
            )
        else:
            default = "" if param.default is None else f" = {number(param.default.value)}"
            lines.append(
                f"  scalar {param.name}: {param.type.value}{' > 0' if param.positive else ''}{default}"
            )
    for operand, steps in (("q", program.q_steps), ("k", program.k_steps)):
        for transform in steps:
            if isinstance(transform, RowStep):
                lines += _row(f"row {operand}", transform)
            else:
                lines += _rotation(operand, transform)
    for step in program.scores:
        lines += _step("score", step)
    for step in program.masks:
        lines += _step("mask", step)
    normalizer = program.normalizer
    lines.append(f"  normalizer {normalizer.call}: factor {normalizer.factor!r}")
    if not normalizer.has_sum:
        lines.append("    no sum over the keys: the last score is the weight")
    if normalizer.extra is not None:
        lines += ["    adds to the sum", *_formula(normalizer.extra, 6)]
    for weight in program.weight_steps:
        if weight.factor is None:
            lines += _step("weight", weight)
        else:
            lines += [f"  weight {weight.call}: p times", *_formula(weight.factor, 4)]
    gradient = program.score_gradient
    if gradient is not None:
        lines.append(f"  score gradient: constant {gradient.constant!r}")
        lines += [line for f in gradient.steps for line in (_formula(f, 4) if f is not None else ["    1"])]
    for read in program.captured_reads:
        kind = "weight" if read.weight else "score"
        place = "the extra term" if read.step is None else f"{kind} step {read.step + 1}"
        lines.append(f"  gradient of {attn(read.load)}, read in {place}")
        lines += _formula(read.coefficient, 4)
    for row in program.output_steps:
        lines += _row("output o", row)
    return "\n".join(lines) + "\n"


def _step(kind: str, step: Step) -> list[str]:
    return [f"  {kind} {step.call}", *_formula(step.formula, 4)]


def _rotation(operand: str, step: Rotation) -> list[str]:
    lines = [f"  rotate {operand}[{attn(step.first)} + {attn(step.width)}] {step.call} over {step.pairing}"]
    lines += _formula(step.matrix if step.matrix is not None else step.formula, 4)
    for read in step.reads:
        lines += [f"    gradient of {attn(read.load)}: sum of", *_formula(read.term, 6)]
    return lines


def _row(title: str, step: RowStep) -> list[str]:
    lines = [f"  {title}[{attn(step.first)} + {attn(step.width)}] {step.call}"]
    if step.value is None or step.backward is None:
        return lines + _formula(step.formula, 4)
    for mean in step.means:
        lines += [f"    {mean.name} = mean of", *_formula(mean.formula, 6)]
    lines += _formula(step.value, 4)
    for name, term in step.backward.means:
        lines += [f"    {name} = mean of", *_formula(term, 6)]
    lines += ["    gradient of x", *_formula(step.backward.x, 6)]
    for read in step.backward.reads:
        lines += [f"    gradient of {attn(read.load)}: sum of", *_formula(read.term, 6)]
    return lines


def _formula(formula: Formula, indent: int) -> list[str]:
    space = " " * indent
    lets = [f"{space}{let.name} = {attn(let.value)}" for let in formula.lets]
    return [*lets, f"{space}{', '.join(attn(r) for r in formula.results)}"]


def print_plan(plan: LaunchPlan, stage: str = "plan") -> str:
    """A LaunchPlan: kernels, buffers, mask; with stage `tiled` also the tile operations of every kernel."""
    s = plan.semantics
    lines = [
        f"plan {plan.name}: target {plan.target}, storage {s.storage}, compute {s.compute}, "
        f"Dqk {s.head_qk}, Dv {s.head_v}"
    ]
    lines.append(
        f"  softmax scale {s.softmax_scale!r}, gradient scale {s.gradient_scale!r}, "
        f"scores {'finite' if s.scores_finite else 'may be infinite'}"
    )
    lines += _mask(s.mask)
    lines += [_buffer(b) for b in plan.buffers]
    passes = [("forward", plan.forward), ("backward", plan.backward)]
    if plan.deterministic_backward:
        passes.append(("backward, deterministic", plan.deterministic_backward))
    for name, launches in passes:
        lines.append(f"  {name}:")
        for launch in launches:
            lines += _launch(launch, stage == "tiled")
    lines.append(
        f"  saved: {', '.join(plan.saved)}; "
        f"{'deterministic' if plan.ordered else 'dQ is added in no fixed order'}"
    )
    return "\n".join(lines) + "\n"


def _mask(plan: MaskPlan) -> list[str]:
    if plan.predicate is None:
        return ["  mask: none"]
    lines = [f"  mask: {attn(plan.predicate)}"]
    lines += [f"    {_bound(bound)}" for bound in plan.bounds]
    for bounds in plan.alternatives:
        lines.append(f"    one of: {', '.join(map(_bound, bounds))}")
    if plan.residual:
        lines.append("    the rest is decided tile by tile or element by element")
    return lines


def _bound(bound: Bound) -> str:
    left, right = print_sides(bound)
    offset = attn(bound.offset)
    return f"{left} {'<=' if bound.side == 'upper' else '>='} {f'{right} + {offset}' if right else offset}"


def print_sides(bound: Bound) -> tuple[str, str]:
    """The position that a bound limits, and the one that it is compared with (empty: none)."""
    step = f" // {attn(bound.step)}" if bound.stepped else ""
    return f"{bound.of}{step}", {0: "", 1: f"i{step}", -1: f"-(i{step})" if step else "-i"}[bound.slope]


def _buffer(buffer: Buffer) -> str:
    zeroed = ", zeroed" if buffer.zeroed else ""
    return (
        f"  buffer {buffer.name}: {buffer.dtype}[{attn(buffer.count)}] ({', '.join(buffer.passes)}{zeroed})"
    )


def _launch(launch: Launch, with_ops: bool) -> list[str]:
    kernel = launch.kernel
    walk = (
        ""
        if kernel.walk is None
        else f", walks {kernel.walk.axis}{' of each head of the group' if kernel.walk.over_group else ''}"
    )
    if kernel.walk is not None and kernel.walk.stored:
        walk += ", runs by a test of tiles"
    after = f" after {', '.join(launch.after)}" if launch.after else ""
    lines = [
        f"    {kernel.name}: {kernel.kind}, "
        f"tiles of {kernel.tile.queries} queries x {kernel.tile.keys} keys, "
        f"one work item per tile of {kernel.stationary}, {kernel.order}{walk}{after}"
    ]
    if with_ops:
        for title, ops in (
            ("prologue", kernel.prologue),
            ("body", kernel.body),
            ("epilogue", kernel.epilogue),
        ):
            lines += [f"      {title}: {_op(op)}" for op in ops]
    return lines


def _op(op: TileOp) -> str:
    parts = [
        f"{f.name}={_value(getattr(op, f.name))}" for f in fields(op) if getattr(op, f.name) != f.default
    ]
    return f"{type(op).__name__}({', '.join(parts)})"


def _value(value: Any) -> str:
    return "(" + ", ".join(map(str, value)) + ")" if isinstance(value, tuple) else str(value)
