# SPDX-License-Identifier: Apache-2.0
"""In words: what an error code means, and what a program becomes (`afc explain`).

The text is stable: the same program and options give the same lines on every machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from afc import api, passes, paths
from afc.errors import UsageError
from afc.expr.evaluate import evaluate
from afc.expr.nodes import Const, Expr, Formula, Load, Op, Type, const, variables, walk
from afc.expr.printer import attn, number
from afc.frontend import Checked, check_file
from afc.frontend.report import did_you_mean
from afc.ir.masks import Bound, MaskPlan, Run
from afc.ir.printer import print_program, print_sides
from afc.ir.program import Normalizer, Program, Rotation, RowStep, ScalarParam
from afc.ir.rotation import dependence
from afc.ir.tiled import Buffer, Launch, LaunchPlan, TiledKernel
from afc.masks import BoxTest, derive, key_runs, stored_runs
from afc.masks.stored import MOST_RUNS
from afc.options import Constant, Options

BATCH, HEADS = 1, 8  # what sizes are given for
ASSUMED = {Type.INT: 256, Type.FLOAT: 1.0, Type.BOOL: True}
BYTES = {"double": 8, "float64": 8, "int64": 8, "float": 4, "float32": 4, "int32": 4, "uint32": 4}
BYTES |= {"bfloat16": 2, "float16": 2, "extent": 24, "run": 16}
CODE = re.compile(r"[Ee]\d{4}")


# ---- error codes -----------------------------------------------------------------------------------------


def explain_code(code: str) -> str:
    """The section of a code in `docs/errors.md`. Raises UsageError E0623 for a code without one."""
    pages = (paths.docs() / "errors.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (E\d{4}) (.*?)(?=^## |\Z)", pages, re.M | re.S))
    code = code.upper()
    if code not in sections:
        raise UsageError.of(
            "E0623",
            f"there is no error code {code}",
            hint=did_you_mean(code, sections) or "see docs/errors.md",
        )
    title, _, body = sections[code].partition("\n\n")
    return f"{code}: {title}\n\n{body.strip()}\n"


# ---- what a mask visits ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """What a kernel does in one step: a range of queries and a range of keys, `full` if nothing is masked."""

    queries: range
    keys: range
    full: bool

    @property
    def area(self) -> int:
        """Elements."""
        return len(self.queries) * len(self.keys)


def forward_kernel(plan: LaunchPlan) -> TiledKernel:
    """The kernel that computes the output."""
    return next(x.kernel for x in plan.forward if x.kernel.kind == "forward")


def sizes_of(length: int, values: Mapping[str, Constant]) -> dict[str, Constant]:
    """Dimensions of a call with as many keys as queries, origins 0, and the run-time scalars."""
    return {
        "B": BATCH,
        "H": HEADS,
        "Hk": HEADS,
        "M": length,
        "N": length,
        "q_origin": 0,
        "k_origin": 0,
        **values,
    }


def assumed(program: Program, length: int) -> dict[str, Constant]:
    """Run-time scalars that are not fixed: the default of the signature, or a value that gives a picture."""

    def choose(param: ScalarParam) -> Constant:
        if param.default is not None:
            return param.default.value
        value = ASSUMED[param.type]
        return max(1, min(int(value), length // 4)) if param.type is Type.INT else value

    return {p.name: choose(p) for p in program.scalars}


def runs_of_tiles(
    plan: LaunchPlan, length: int, values: Mapping[str, Constant]
) -> Iterator[tuple[range, tuple[Run, ...]]]:
    """Tiles of queries of the forward kernel, with the keys of each, on a square of `length` positions.

    Of batch 0 and head 0. A captured tensor may hold anything: a call visits at most this.
    """
    sizes, mask = sizes_of(length, values), plan.semantics.mask
    kernel = forward_kernel(plan)
    tile = kernel.tile
    ranges = [range(first, min(first + tile.queries, length)) for first in range(0, length, tile.queries)]
    if _stored(plan) and mask.predicate is not None and _tests_decide(mask.predicate):
        test = BoxTest(mask.predicate, sizes)
        found = stored_runs(test, (length, length), (tile.queries, tile.keys))
        if _aligned(plan):  # a plan kernel has room for so many
            found = found.at_most(MOST_RUNS)
        yield from ((queries, found.of(number)) for number, queries in enumerate(ranges))
        return
    grid = tile.keys if _aligned(plan) else 1
    whole = {n: int(v) for n, v in sizes.items()}
    for queries in ranges:
        yield queries, key_runs(mask, queries[0], queries[-1], whole, grid)


def _tests_decide(predicate: Expr) -> bool:
    """Whether a test of tiles can say more than the bounds without the captured tensors."""
    return any(not captured(p) and derive([Formula((p,))]).residual for p in conjuncts(predicate))


def pieces(plan: LaunchPlan, length: int, values: Mapping[str, Constant]) -> Iterator[Piece]:
    """Steps of the forward kernel, by tiles of queries."""
    tile = forward_kernel(plan).tile.keys
    for queries, runs in runs_of_tiles(plan, length, values):
        for run in runs:
            for keys, full in (run.tiles if _aligned(plan) else run.pieces)(tile):
                yield Piece(queries, range(keys.start, min(keys.stop, length)), full)


def bounded(plan: LaunchPlan) -> str:
    """ "at most " where a call may visit fewer tiles, as the test of tiles then has the captured tensors."""
    predicate = plan.semantics.mask.predicate
    return "at most " if _stored(plan) and predicate is not None and captured(predicate) else ""


def _stored(plan: LaunchPlan) -> bool:
    walk = forward_kernel(plan).walk
    return walk is not None and walk.stored


def _aligned(plan: LaunchPlan) -> bool:
    walk = forward_kernel(plan).walk
    return walk is None or walk.aligned


@dataclass(frozen=True)
class Visited:
    """Number of steps of the forward kernel, and how many elements its partial and its full steps cover."""

    steps: int
    partial: int
    full: int
    length: int

    def __str__(self) -> str:
        areas = (self.partial + self.full, self.partial, self.full)
        percent = [f"{100 * area / self.length**2:.1f}%" for area in areas]
        return f"{percent[0]} of the score matrix ({percent[1]} partial, {percent[2]} full)"


def visited(plan: LaunchPlan, length: int, values: Mapping[str, Constant]) -> Visited:
    """What all `pieces` together are, counted without listing them: a million positions have 10^8."""
    size = forward_kernel(plan).tile.keys
    count = _count_aligned if _aligned(plan) else _count_pieces
    steps = partial = full = 0
    for queries, runs in runs_of_tiles(plan, length, values):
        for run in runs:
            found, some, every = count(run, size, length)
            steps += found
            partial += some * len(queries)
            full += every * len(queries)
    return Visited(steps, partial, full, length)


def _count_aligned(run: Run, size: int, length: int) -> tuple[int, int, int]:
    """Steps, keys of partial steps and keys of full steps, of `Run.tiles`."""
    if run.end <= run.begin:
        return 0, 0, 0
    first, last = run.begin // size, -(-run.end // size)
    full = size * max(0, run.full_end // size - -(-run.full_begin // size))
    return last - first, min(last * size, length) - first * size - full, full


def _count_pieces(run: Run, size: int, length: int) -> tuple[int, int, int]:
    """The same of `Run.pieces`."""
    full = run.full_end - run.full_begin
    parts = (run.full_begin - run.begin, run.end - run.full_end)
    return sum(-(-keys // size) for keys in (*parts, full)), sum(parts), full


def conjuncts(predicate: Expr | None) -> tuple[Expr, ...]:
    """The parts of a mask that must all hold."""
    match predicate:
        case None:
            return ()
        case Op(name="and", args=(a, b)):
            return (*conjuncts(a), *conjuncts(b))
        case _:
            return (predicate,)


def captured(expr: Expr) -> tuple[str, ...]:
    """Captured tensors that an expression reads, in order of first use."""
    return tuple(dict.fromkeys(e.tensor for e in walk(expr) if isinstance(e, Load)))


def undecided(plan: MaskPlan) -> tuple[tuple[Expr, str], ...]:
    """Parts of a mask that only elements can decide, each with the reason."""
    if not plan.residual:
        return ()
    parts = [p for p in conjuncts(plan.predicate) if derive([Formula((p,))]).residual]
    if not parts:  # each is a few ranges, all of them together are many
        parts = [p for p in conjuncts(plan.predicate) if derive([Formula((p,))]).alternatives]
    return tuple((part, _reason(part)) for part in parts)


def _reason(expr: Expr) -> str:
    if tensors := captured(expr):
        return f"it reads {', '.join(tensors)}, which only a call has"
    if variables(expr) & {"b", "h"}:
        return "it depends on batch or head, and bounds are shared by all"
    if isinstance(expr, Op) and expr.name in ("or", "not", "select", "ne"):
        return "it is not a few ranges of keys"
    if any(isinstance(e, Op) and e.name in ("floordiv", "mod") for e in walk(expr)):
        return "it goes in steps (// or %)"
    return "it is not of the form j <= a*i + c or j >= a*i + c with a in -1, 0, 1"


# ---- a program -------------------------------------------------------------------------------------------


def explain_file(path: str | Path, options: Options, length: int, *, kernels: bool = False) -> str:
    """What a file's attentions become; with `kernels` GPU code is compiled and its figures shown.

    Raises SourceError, UsageError; with `kernels` also ToolchainError.
    """
    check_length(length)
    checked = check_file(path)
    originals = {p.name: p for p in checked.programs}
    parts = []
    for unit in api.units(checked, options):
        parts.append(
            "\n".join(
                [
                    *_program(originals[unit.program.name], unit.program),
                    *_plan(unit, length, assumed(unit.program, length)),
                ]
            )
        )
    if kernels:
        parts.append("\n".join(["kernels:", *api.kernel_figures(checked, options)]))
    return "\n\n".join(parts) + "\n"


def check_length(length: int, largest: int | None = None) -> None:
    """Raises UsageError E0624 for a length that is not positive, or above `largest`."""
    if length < 1 or (largest is not None and length > largest):
        wanted = "a positive int" if largest is None else f"1 to {largest}"
        raise UsageError.of("E0624", f"--seq {length}: expected {wanted}")


def select(checked: Checked, name: str | None) -> Checked:
    """The file with one attention only. Raises UsageError E0625 for an unknown name."""
    if name is None:
        return checked
    found = tuple(p for p in checked.programs if p.name == name)
    if not found:
        names = [p.name for p in checked.programs]
        raise UsageError.of(
            "E0625",
            f"{checked.path} has no attention `{name}`",
            hint=did_you_mean(name, names) or f"its attentions: {', '.join(names) or 'none'}",
        )
    return Checked(checked.path, checked.text, found, checked.outcomes, checked.notes, checked.texts)


def _program(original: Program, program: Program) -> list[str]:
    fixed = ", ".join(f"{n} = {number(v)}" for n, v in program.constants)
    lines = [f"{program.name}  [{program.source}:{program.span.line}]"]
    if program.doc:
        lines.append(f"  {program.doc.splitlines()[0]}")
    lines.append(f"  known when compiled: {fixed}")
    lines.append(f"  passes that changed it: {', '.join(_changes(original, dict(program.constants)))}")
    for operand, steps in (("q", program.q_steps), ("k", program.k_steps)):
        for step in steps:
            if isinstance(step, RowStep):
                lines.append(f"  {operand}: {_row(step)}")
            else:
                lines.append(f"  {operand} is rotated: {_rotation(step)}")
    lines += _scores(original, program)
    lines += [f"  mask: {step.call} keeps {_formula(step.formula)}" for step in program.masks]
    for weight in program.weight_steps:
        assert weight.factor is not None
        lines.append(f"  weight: {weight.call} multiplies p by {_formula(weight.factor)}")
    lines += [f"  output: {_row(step)}" for step in program.output_steps]
    return lines


def _changes(original: Program, constants: Mapping[str, Constant]) -> list[str]:
    changed, before = [], original
    for name, after in passes.stages(original, constants):
        if print_program(after) != print_program(before):
            changed.append(name)
        before = after
    return changed


def _row(step: RowStep) -> str:
    assert isinstance(step.first, Const) and isinstance(step.width, Const) and step.value is not None
    first, width = int(step.first.value), int(step.width.value)
    means = "".join(f"{m.name} = mean of {_formula(m.formula)}; " for m in step.means)
    return f"{step.call}, columns {first} to {first + width - 1}: {means}{_formula(step.value)}"


def _rotation(step: Rotation) -> str:
    assert isinstance(step.first, Const) and isinstance(step.width, Const)
    first, width = int(step.first.value), int(step.width.value)
    pair = f"c with c + {width // 2}" if step.pairing == "half" else "2c with 2c + 1"
    reads = dependence((step,))
    of = ["batch entry"] * reads.batch + ["head"] * reads.head
    tables = f"; coefficients for each {' and '.join(of)}" if of else ""
    return f"{step.call}, columns {first} to {first + width - 1}, pairing {pair}{tables}"


def _scores(original: Program, program: Program) -> list[str]:
    lines = [f"  score: {step.call}" for step in original.scores] or ["  score: dot(q, k)"]
    lines += [f"  computed for each score, after merging: {_formula(s.formula)}" for s in program.scores]
    lines += _normalizer(program.normalizer)
    gradient = program.score_gradient
    if gradient is not None:
        lines.append(f"  gradient: the factor {gradient.constant!r} multiplies dQ and dK once")
        formulas = [_formula(f) for f in gradient.steps if f is not None]
        lines += [f"  gradient of each score: {text}" for text in formulas]
    return lines


def _normalizer(normalizer: Normalizer) -> list[str]:
    weight = _formula(normalizer.weight)
    extra = "" if normalizer.extra is None else f" + {_formula(normalizer.extra)}"
    total = f" / (sum({weight}){extra})" if extra else f" / sum({weight})"
    lines = [f"  weights: {normalizer.call}, {weight}{total if normalizer.has_sum else ''}"]
    if normalizer.exponential:
        factor = "no factor" if normalizer.factor == 1 else f"the factor {normalizer.factor!r}"
        lines.append(f"  folded into the exponential: {factor}, and log2 e for exp2")
    return lines


def _formula(formula: Formula) -> str:
    lets = "; ".join(f"{let.name} = {attn(let.value)}" for let in formula.lets)
    results = ", ".join(attn(r) for r in formula.results)
    return f"{results} where {lets}" if lets else results


# ---- a plan ----------------------------------------------------------------------------------------------


def _plan(unit: api.Unit, length: int, values: Mapping[str, Constant]) -> list[str]:
    plan = unit.plan
    s = plan.semantics
    lines = [
        f"  on {unit.gpus}, {s.storage}, computed in {s.compute}, B = {BATCH}, H = {HEADS}, M = N = {length}:"
    ]
    sizes = sizes_of(length, values)
    for title, launches in (("forward", plan.forward), ("backward", plan.backward)):
        buffers = [b for b in plan.buffers if title in b.passes]
        if launches:
            lines.append(f"    {title}, workspace {_total(buffers, sizes)} bytes:")
        lines += [f"      {n}. {_launch(x, length, sizes)}" for n, x in enumerate(launches, 1)]
    if plan.backward:
        how = "the same bits each time" if plan.ordered else "dQ is added in no fixed order"
        if plan.deterministic_backward:
            how += "; with `deterministic`, in one: " + ", ".join(
                x.kernel.name for x in plan.deterministic_backward if x.kernel.kind == "backward"
            )
        lines.append(f"    gradients: {how}")
    return lines + _runs(plan, length, values)


def _total(buffers: list[Buffer], sizes: Mapping[str, Constant]) -> int:
    total = 0
    for buffer in buffers:
        total = -(-total // buffer.alignment) * buffer.alignment
        total += int(evaluate(buffer.count, sizes)) * BYTES[buffer.dtype]
    return total


def _launch(launch: Launch, length: int, sizes: Mapping[str, Constant]) -> str:
    kernel = launch.kernel
    tile = kernel.tile.queries if kernel.stationary == "queries" else kernel.tile.keys
    size = f"{kernel.tile.queries} queries x {kernel.tile.keys} keys" if kernel.walk else f"{tile} rows"
    if launch.grid is not None:
        blocks = math.prod(int(evaluate(axis, sizes)) for axis in launch.grid)
        size += f", {blocks} blocks"
    elif kernel.walk is not None:
        size += f", {-(-length // tile) * BATCH * HEADS} work items"
    after = f", after {', '.join(launch.after)}" if launch.after else ""
    return f"{kernel.name} ({kernel.kind}): tiles of {size}{after}"


def _runs(plan: LaunchPlan, length: int, values: Mapping[str, Constant]) -> list[str]:
    mask = plan.semantics.mask
    done = visited(plan, length, values)
    lines = []
    if values:
        shown = ", ".join(f"{n} = {number(v)}" for n, v in values.items())
        lines.append(f"    assumed for a call: {shown} (choose with -D)")
    lines.append(f"    the forward kernel visits {bounded(plan)}{done.steps} tiles a head, {done}")
    lines += [f"    tiles are skipped by: {_bound(bound)}" for bound in mask.bounds]
    if mask.alternatives:
        ranges = "; or ".join(" and ".join(map(_bound, bounds)) for bounds in mask.alternatives)
        lines.append(f"    tiles are skipped outside: {ranges}")
    how = "tested tile by tile" if _stored(plan) else "decided element by element"
    for part, reason in undecided(mask):
        lines.append(f"    {how}: {attn(part)}; {reason}")
    return lines


def _bound(bound: Bound) -> str:
    left, right = print_sides(bound)
    offset = "" if right and bound.offset == const(0) else attn(bound.offset)
    side = "<=" if bound.side == "upper" else ">="
    return f"{left} {side} {' + '.join(part for part in (right, offset) if part)}"
