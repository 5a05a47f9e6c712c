# SPDX-License-Identifier: Apache-2.0
"""The schedule interpreter: executes a LaunchPlan on NumPy tiles exactly as scheduled.

It walks the work items, runs and tile operations of every kernel, with the explicit roundings to the
storage type; sums are in float64, so the difference to a real kernel is the accumulation error alone. The
difference to `dense` shows a fault of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from afc.expr.evaluate import evaluate, evaluate_formula
from afc.ir.masks import Run
from afc.ir.tiled import (
    AddCaptured,
    AddCapturedExtra,
    AddCapturedWeights,
    AddOutputs,
    Launch,
    LaunchPlan,
    Load,
    Mask,
    Matmul,
    Normalize,
    OnlineSoftmax,
    Outputs,
    OutputsBack,
    Reweigh,
    RotateBack,
    Round,
    RowDot,
    Scale,
    ScoreGradient,
    Scores,
    Semantics,
    Store,
    Tile,
    TiledKernel,
    TileOp,
    Walk,
    Weights,
)
from afc.masks import BoxTest, StoredRuns, key_runs, query_runs, stored_runs
from afc.masks.stored import MOST_RUNS
from afc.reference.captured import add_extra, add_scores, add_weights, extra_gradient
from afc.reference.dense import Call, Gradients, Result, output_back, transform, transform_back, weight_factor
from afc.reference.rounding import to_storage

Array = Any


@dataclass
class _Memory:
    """Global tensors, [B, heads, rows, width] (row vectors have width 1), float64 holding storage values."""

    call: Call
    semantics: Semantics
    tensors: dict[str, Array] = field(default_factory=dict)
    captured: dict[str, Array] = field(default_factory=dict)  # gradients, in the tensors' shapes
    group: int = 1
    stored: dict[tuple[str, int, int], StoredRuns] = field(default_factory=dict)
    planned: dict[tuple[str, Tile, int, int], StoredRuns] = field(default_factory=dict)


@dataclass
class _Work:
    """Where a work item stands: batch, query head, key head, and the index ranges of the current tile."""

    b: int
    h: int
    hk: int
    rows: slice
    keys: slice
    partial: bool = True
    tiles: dict[str, Array] = field(default_factory=dict)


def run_forward(plan: LaunchPlan, call: Call) -> Result:
    """Output and LSE, by the plan's forward kernels."""
    memory = _memory(plan, call)
    b, h, m, _ = call.q.shape
    memory.tensors |= {name: np.full((b, h, m, call.v.shape[3]), np.nan) for name in ("o", "y")}
    memory.tensors["lse"] = np.full((b, h, m, 1), np.nan if plan.semantics.has_sum else 0.0)
    _run(plan.forward, memory)
    o, lse = memory.tensors["o"], memory.tensors["lse"][..., 0]
    return Result(memory.tensors["y"], lse, o) if plan.semantics.output_steps else Result(o, lse)


def run_backward(
    plan: LaunchPlan,
    call: Call,
    result: Result,
    do: Array,
    dlse: Array | None = None,
    deterministic: bool = False,
) -> Gradients:
    """Gradients, by the plan's backward kernels, or by those of its deterministic form. `result` is the
    forward's.
    """
    memory = _memory(plan, call)
    storage = plan.semantics.storage
    b, h, m, d = call.q.shape
    d_o = to_storage(do, storage)
    memory.tensors |= {
        "o": result.before,
        "lse": result.lse[..., None],
        "do": np.full(d_o.shape, np.nan) if plan.semantics.output_steps else d_o,
        "dy": d_o,
        "dlse": np.zeros((b, h, m, 1)) if dlse is None else np.asarray(dlse, np.float64)[..., None],
        "delta": np.full((b, h, m, 1), np.nan),
        "dq_sum": np.zeros((b, h, m, d)),
        "dk_sum": np.zeros(call.k.shape),
        "dq": np.full(call.q.shape, np.nan),
        "dk": call.without_unread(np.full(call.k.shape, np.nan)),
        "dv": call.without_unread(np.full(call.v.shape, np.nan)),
    }
    memory.captured = {name: np.zeros(np.shape(call.tensors[name])) for name in plan.semantics.learned}
    _run(plan.deterministic_backward if deterministic else plan.backward, memory)
    return Gradients(memory.tensors["dq"], memory.tensors["dk"], memory.tensors["dv"], memory.captured)


def _memory(plan: LaunchPlan, call: Call) -> _Memory:
    s = plan.semantics
    q, k, v = (to_storage(x, s.storage) for x in (call.q, *map(call.without_unread, (call.k, call.v))))
    memory = _Memory(call, s, group=call.q.shape[1] // max(call.k.shape[1], 1))
    memory.tensors = {
        "q": to_storage(transform(q, s.q_steps, call, call.q_origin), s.storage),
        "k": to_storage(transform(k, s.k_steps, call, call.k_origin), s.storage),
        "v": v,
    }
    return memory


def _run(launches: tuple[Launch, ...], memory: _Memory) -> None:
    for launch in launches:
        if launch.kernel.kind == "plan":
            _find_runs(launch.kernel, memory)
        # The results of a rotation are in `memory` already; sums are added without copies.
        elif launch.kernel.kind not in ("rotate", "table", "clear", "sum"):
            _kernel(launch.kernel, memory)


def _find_runs(kernel: TiledKernel, memory: _Memory) -> None:
    """The runs of every tile of an axis, as a plan kernel stores them."""
    sizes = memory.call.sizes()
    for b in range(sizes["B"]):
        for h in range(sizes["H"]):
            found = _tested(kernel, memory, b, h).at_most(MOST_RUNS)
            memory.planned[(kernel.stationary, kernel.tile, b, h)] = found


def _tested(kernel: TiledKernel, memory: _Memory, b: int, h: int) -> StoredRuns:
    call, predicate, tile = memory.call.of_batch(b), memory.semantics.mask.predicate, kernel.tile
    assert predicate is not None
    sizes: dict[str, Any] = {**call.sizes(), **call.scalars}
    test = BoxTest(predicate, sizes, call.tensors)
    by_keys = kernel.stationary == "keys"
    return stored_runs(test, (sizes["M"], sizes["N"]), (tile.queries, tile.keys), by_keys, b, h)


def _kernel(kernel: TiledKernel, memory: _Memory) -> None:
    sizes = memory.call.sizes()
    queries = kernel.stationary == "queries"
    tile = kernel.tile.queries if queries else kernel.tile.keys
    heads = sizes["H"] if queries else sizes["Hk"]
    for b in range(sizes["B"]):
        length = sizes["M"] if queries else memory.call.key_count(b)
        for head in range(heads):
            for first in range(0, length, tile):
                section = slice(first, min(first + tile, length))
                _item(kernel, memory, b, head, section)


def _item(kernel: TiledKernel, memory: _Memory, b: int, head: int, section: slice) -> None:
    queries = kernel.stationary == "queries"
    work = _Work(
        b,
        head if queries else head * memory.group,
        head // memory.group if queries else head,
        section if queries else slice(0, 0),
        slice(0, 0) if queries else section,
    )
    _ops(kernel.prologue, work, memory)
    if kernel.walk is not None:
        size = kernel.tile.keys if queries else kernel.tile.queries
        for member in range(memory.group if kernel.walk.over_group else 1):
            work.h = work.h if queries else head * memory.group + member
            runs = _runs(kernel, kernel.walk, work, memory, section)
            for other, full in _pieces(runs, size, kernel.walk.aligned):
                work.partial = not full
                work.rows, work.keys = (work.rows, other) if queries else (other, work.keys)
                _ops(kernel.body, work, memory)
    _ops(kernel.epilogue, work, memory)


def _pieces(runs: tuple[Run, ...], size: int, aligned: bool) -> list[tuple[slice, bool]]:
    """(range, full) of every tile, in order: on a grid the partial tiles of all runs come first."""
    if aligned:
        return sorted((piece for run in runs for piece in run.tiles(size)), key=lambda piece: piece[1])
    return [piece for run in runs for piece in run.pieces(size)]


def _runs(kernel: TiledKernel, walk: Walk, work: _Work, memory: _Memory, section: slice) -> tuple[Run, ...]:
    """What a work item visits for one query head."""
    call = memory.call.of_batch(work.b)
    runs = _all_runs(kernel, walk, call, work, memory, section)
    if kernel.stationary == "keys":
        return runs
    return tuple(run for run in (r.below(call.key_count(work.b)) for r in runs) if run.begin < run.end)


def _all_runs(
    kernel: TiledKernel, walk: Walk, call: Call, work: _Work, memory: _Memory, section: slice
) -> tuple[Run, ...]:
    """The same up to the last key, present or not."""
    sizes: dict[str, Any] = {**call.sizes(), **call.scalars}
    plan, tile, queries = memory.semantics.mask, kernel.tile, kernel.stationary == "queries"
    if not walk.stored:
        size = tile.keys if queries else tile.queries
        grid = size if walk.aligned else 1
        return (key_runs if queries else query_runs)(plan, section.start, section.stop - 1, sizes, grid)
    number = section.start // (tile.queries if queries else tile.keys)
    if walk.aligned:  # a plan kernel has stored them
        return memory.planned[(kernel.stationary, tile, work.b, work.h)].of(number)
    key = kernel.name, work.b, work.h
    if key not in memory.stored:
        memory.stored[key] = _tested(kernel, memory, work.b, work.h)
    return memory.stored[key].of(number)


def _ops(ops: tuple[TileOp, ...], work: _Work, memory: _Memory) -> None:
    for op in ops:
        _op(op, work, memory)


def _op(op: TileOp, work: _Work, memory: _Memory) -> None:
    tiles, semantics = work.tiles, memory.semantics
    match op:
        case Load(out=out, source=source):
            tiles[out] = _load(memory, work, source)
        case Matmul():
            _matmul(op, work, memory)
        case Scores(out=out, s=s):
            tiles[out] = _scores(tiles[s], work, memory)
        case Mask(x=x, removed=removed):
            if work.partial:
                tiles[x] = np.where(_keep(work, memory), tiles[x], removed)
        case OnlineSoftmax():
            _online_softmax(op, work, semantics)
        case Weights(out=out, x=x, lse=lse):
            exponent = semantics.softmax_scale * tiles[x] - np.where(
                np.isneginf(tiles[lse]), np.inf, tiles[lse]
            )
            tiles[out] = np.exp(np.where(np.isnan(exponent), -np.inf, exponent))
        case Reweigh(x=x):
            factor = weight_factor(semantics.weight_steps, _env(work, memory), memory.call.tensors)
            tiles[x] = np.where(tiles[x] == 0, 0.0, tiles[x] * factor)
        case ScoreGradient(out=out, p=p, dp=dp, delta=delta, s=s):
            derivative = _score_gradient(tiles[s], work, memory)
            if delta is None:
                tiles[out] = tiles[dp] * derivative
            else:
                ds = tiles[p] * (tiles[dp] - tiles[delta]) * derivative
                tiles[out] = np.where(tiles[p] == 0, 0.0, ds)
        case AddCaptured(p=p, dp=dp, delta=delta, s=s):
            dx = tiles[dp] if delta is None else tiles[p] * (tiles[dp] - tiles[delta])
            add_scores(
                memory.captured,
                semantics.captured,
                semantics.scores,
                semantics.score_gradients,
                _env(work, memory),
                memory.call.tensors,
                tiles[s],
                dx if delta is None else np.where(tiles[p] == 0, 0.0, dx),
            )
        case AddCapturedExtra(lse=lse, delta=delta):
            extra = _log_extra(work, memory, tiles[lse].shape[0])
            dextra = extra_gradient(extra, tiles[lse], tiles[delta])
            add_extra(memory.captured, semantics.captured, _env(work, memory), memory.call.tensors, dextra)
        case AddCapturedWeights(p=p, dp=dp):
            env, captured_tensors = _env(work, memory), memory.call.tensors
            add_weights(memory.captured, semantics.captured, env, captured_tensors, tiles[p], tiles[dp])
        case RowDot(out=out, a=a, b=b, minus=minus):
            tiles[out] = (tiles[a] * tiles[b]).sum(-1, keepdims=True) - tiles[minus]
        case Round(x=x):
            if x in tiles:
                tiles[x] = to_storage(tiles[x], semantics.storage)
        case Scale(x=x, by=by):
            if x in tiles:
                tiles[x] = tiles[x] * by
        case RotateBack(x=x, operand=operand):
            _rotate_back(x, operand, work, memory)
        case Normalize():
            _normalize(op, work, memory)
        case Outputs(out=out, o=o):
            row = tiles.get(o, np.zeros((work.rows.stop - work.rows.start, semantics.head_v)))
            call, first = _output_rows(work, memory)
            steps, origin = semantics.output_steps, call.q_origin
            tiles[out] = transform(row[None, None], steps, call, origin, first)[0, 0]
        case OutputsBack(out=out, lse=lse):
            live = np.zeros((work.rows.stop - work.rows.start, 1)) if lse is None else tiles[lse]
            tiles[out] = _outputs_back(op, live, work, memory, None)
        case AddOutputs():
            live = np.zeros((work.rows.stop - work.rows.start, 1))
            _outputs_back(op, live, work, memory, memory.captured)
        case Store():
            _store(op, work, memory)


def _section(source: str, work: _Work) -> tuple[int, slice]:
    """Head and row range of a tensor's tile."""
    return (work.hk, work.keys) if source in ("k", "v", "dk", "dv", "dk_sum") else (work.h, work.rows)


def _load(memory: _Memory, work: _Work, source: str) -> Array:
    """A tile; rows beyond the tensor are zeros."""
    head, rows = _section(source, work)
    tile = memory.tensors[source][work.b, head, rows]
    missing = (rows.stop - rows.start) - tile.shape[0]
    return np.pad(tile, ((0, missing), (0, 0)))


def _matmul(op: Matmul, work: _Work, memory: _Memory) -> None:
    a, b = work.tiles[op.a], work.tiles[op.b]
    product = (a.T if op.transpose_a else a) @ (b.T if op.transpose_b else b)
    if op.accumulate and op.out in work.tiles:
        product = product + work.tiles[op.out]
    work.tiles[op.out] = product


def _env(work: _Work, memory: _Memory) -> dict[str, Any]:
    call = memory.call.of_batch(work.b)
    m, n = (
        np.arange(work.rows.start, work.rows.stop)[:, None],
        np.arange(work.keys.start, work.keys.stop)[None, :],
    )
    return {
        **call.sizes(),
        **call.scalars,
        "b": work.b,
        "h": work.h,
        "m": m,
        "n": n,
        "i": m + call.q_origin,
        "j": n + call.k_origin,
        "kv_len": call.kv_len,
    }


def _scores(s: Array, work: _Work, memory: _Memory) -> Array:
    x = s
    for step in memory.semantics.scores:
        x = evaluate_formula(step.formula, {**_env(work, memory), "s": x}, memory.call.tensors)[0]
    return np.broadcast_to(x, s.shape)


def _score_gradient(s: Array, work: _Work, memory: _Memory) -> Array:
    env, x, product = _env(work, memory), s, np.ones(s.shape)
    for step, derivative in zip(memory.semantics.scores, memory.semantics.score_gradients, strict=True):
        if derivative is not None:
            product = product * evaluate_formula(derivative, {**env, "s": x}, memory.call.tensors)[0]
        x = evaluate_formula(step.formula, {**env, "s": x}, memory.call.tensors)[0]
    return product


def _keep(work: _Work, memory: _Memory) -> Array:
    env = _env(work, memory)
    keep = (env["m"] < env["M"]) & (env["n"] < env["kv_len"])
    predicate = memory.semantics.mask.predicate
    return keep if predicate is None else keep & evaluate(predicate, env, memory.call.tensors)


def _online_softmax(op: OnlineSoftmax, work: _Work, semantics: Semantics) -> None:
    tiles, f = work.tiles, semantics.softmax_scale
    x = tiles[op.x]
    rows = x.shape[0]
    old = tiles.get(op.maximum, np.full((rows, 1), -np.inf))
    if op.form != "exact" and not work.partial and np.isfinite(old).all():
        _free_softmax(op, tiles, f)
        return
    new = np.maximum(old, x.max(-1, keepdims=True))
    safe = np.where(np.isneginf(new), 0.0, new)
    correction = np.exp(f * (old - safe))
    tiles[op.out] = np.exp(f * (x - safe))
    tiles[op.total] = tiles.get(op.total, np.zeros((rows, 1))) * correction + tiles[op.out].sum(
        -1, keepdims=True
    )
    tiles[op.maximum] = new
    for name in op.rescale:
        if name in tiles:
            tiles[name] = tiles[name] * correction


GROWTH, WATCHED_SUM = 2.0**8, 2.0**13


def _free_softmax(op: OnlineSoftmax, tiles: dict[str, Array], f: float) -> None:
    """A full tile without the maximum on its path: weights refer to what is known, and are rebased
    afterwards.
    """
    x, reference = tiles[op.x], tiles[op.maximum]
    with np.errstate(over="ignore"):
        p = np.exp(f * (x - reference))
    if op.form == "stale":
        grown = np.exp(np.minimum(f * (x.max(-1, keepdims=True) - reference), 700)) > GROWTH
    else:
        grown = ~(p.sum(-1, keepdims=True) <= WATCHED_SUM)
    # A weight beyond the range of the compute type has lost its score: its row is computed again from S.
    reference_after = np.where(grown, np.maximum(reference, x.max(-1, keepdims=True)), reference)
    correction = np.exp(f * (reference - reference_after))
    tiles[op.out] = np.where(grown, np.exp(f * (x - reference_after)), p)
    tiles[op.total] = tiles[op.total] * correction + tiles[op.out].sum(-1, keepdims=True)
    tiles[op.maximum] = reference_after
    for name in op.rescale:
        if name in tiles:
            tiles[name] = tiles[name] * correction


def _normalize(op: Normalize, work: _Work, memory: _Memory) -> None:
    tiles = work.tiles
    rows = work.rows.stop - work.rows.start
    total = tiles.get(op.total, np.zeros((rows, 1)))
    o = tiles.get(op.o, np.zeros((rows, memory.semantics.head_v)))
    scaled = memory.semantics.softmax_scale * tiles.get(op.maximum, np.full((rows, 1), -np.inf))
    extra = _log_extra(work, memory, rows)
    live = total > 0
    with np.errstate(divide="ignore", over="ignore"):
        total = np.where(live, total + np.exp(extra - np.where(live, scaled, 0.0)), 1.0)
        tiles[op.o] = np.where(live, o / total, 0.0)
        tiles[op.lse] = np.where(
            live, np.logaddexp(scaled + np.log(tiles.get(op.total, total)), extra), extra
        )


def _log_extra(work: _Work, memory: _Memory, rows: int) -> Array:
    """Logarithm of what the normalizer adds to the sum of each row; -inf where it adds nothing."""
    formula = memory.semantics.log_extra
    if formula is None:
        return np.full((rows, 1), -np.inf)
    value = evaluate_formula(formula, _env(work, memory), memory.call.tensors)[0]
    return np.broadcast_to(value, (rows, 1))


def _rotate_back(x: str, operand: str, work: _Work, memory: _Memory) -> None:
    if x not in work.tiles:
        return
    semantics, call = memory.semantics, memory.call.of_batch(work.b)
    if operand == "q":
        steps, origin, head, rows, raw = semantics.q_steps, call.q_origin, work.h, work.rows, call.q
    else:
        steps, origin, head, rows, raw = semantics.k_steps, call.k_origin, work.hk, work.keys, call.k
    tile = work.tiles[x][None, None]
    first = (work.b, head, rows.start)
    before = to_storage(call.without_unread(raw) if operand == "k" else raw, semantics.storage)
    before = before[work.b, head, rows][None, None]
    work.tiles[x] = transform_back(
        tile[:, :, : before.shape[2]], before, steps, call, origin, first, memory.captured
    )[0, 0]


def _output_rows(work: _Work, memory: _Memory) -> tuple[Call, tuple[int, int, int]]:
    """The call of the work item's batch, and batch, head and row where its tile of the output starts."""
    return memory.call.of_batch(work.b), (work.b, work.h, work.rows.start)


def _outputs_back(
    op: OutputsBack | AddOutputs,
    lse: Array,
    work: _Work,
    memory: _Memory,
    gradients: dict[str, Array] | None,
) -> Array:
    call, first = _output_rows(work, memory)
    dy, o = work.tiles[op.dy][None, None], work.tiles[op.o][None, None]
    steps = memory.semantics.output_steps
    return output_back(dy, o, lse[None, None, :, 0], steps, call, first, gradients)[0, 0]


def _store(op: Store, work: _Work, memory: _Memory) -> None:
    head, rows = _section(op.target, work)
    target = memory.tensors[op.target][work.b, head, rows]
    tile = work.tiles.get(op.x)
    if tile is None:  # nothing was accumulated: the work item had no tile
        tile = np.zeros(target.shape)
    tile = tile[: target.shape[0]]
    target[...] = target + tile if op.add else tile
