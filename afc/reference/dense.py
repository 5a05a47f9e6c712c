# SPDX-License-Identifier: Apache-2.0
"""The formula interpreter: an attention as its author wrote it, dense, in float64. Memory is O(M N); for
tests.

Contracts: a row without a live key (or whose live scores are all -inf) has output 0, LSE -inf and
gradients 0; a masked element influences nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from afc.expr.evaluate import evaluate_formula
from afc.ir.program import Program, Rotation, RowStep, Transform, WeightStep
from afc.reference.captured import add_at, add_extra, add_scores, add_weights, extra_gradient

Array = Any  # np.ndarray of float64


@dataclass(frozen=True)
class Call:
    """Arguments of a call: q [B, H, M, Dqk], k [B, Hk, N, Dqk], v [B, Hk, N, Dv], captured tensors, scalars,
    origins and number of keys; each of the last three an int or an array [B]. `kv_len` None: all keys.
    """

    q: Array
    k: Array
    v: Array
    tensors: Mapping[str, Array] = field(default_factory=dict)
    scalars: Mapping[str, float | int | bool] = field(default_factory=dict)
    q_origin: int | Array = 0
    k_origin: int | Array = 0
    kv_len: int | Array | None = None

    def of_batch(self, b: int) -> Call:
        """The same call with the origins and the number of keys of batch b, as ints."""
        places = (np.broadcast_to(x, self.q.shape[:1]) for x in (self.q_origin, self.k_origin))
        q_origin, k_origin = (int(x[b]) for x in places)
        return replace(self, q_origin=q_origin, k_origin=k_origin, kv_len=self.key_count(b))

    def key_count(self, b: int) -> int:
        """Number of keys of batch b."""
        count = self.k.shape[2] if self.kv_len is None else self.kv_len
        return int(np.broadcast_to(count, self.q.shape[:1])[b])

    def without_unread(self, x: Array) -> Array:
        """x [B, Hk, N, D] in float64 with zeros in the rows that are never read."""
        if self.kv_len is None:
            return np.asarray(x, np.float64)
        live = np.arange(x.shape[2])[:, None] < _by_batch(self.kv_len)
        return np.where(live, np.asarray(x, np.float64), 0.0)

    def sizes(self) -> dict[str, int]:
        """Dimensions and origins by name."""
        b, h, m, d = self.q.shape
        return {
            "B": b,
            "H": h,
            "Hk": self.k.shape[1],
            "M": m,
            "N": self.k.shape[2],
            "Dqk": d,
            "Dv": self.v.shape[3],
            "q_origin": self.q_origin,
            "k_origin": self.k_origin,
        }

    def elements(self, h: Array | None = None) -> dict[str, Any]:
        """Indices that broadcast to [B, H, M, N], with dimensions and scalars."""
        sizes = self.sizes()
        b, heads, m, n = (np.arange(sizes[x]) for x in ("B", "H", "M", "N"))
        heads = heads if h is None else h
        m, n = m[:, None], n[None, :]
        return {
            **sizes,
            **self.scalars,
            "b": b[:, None, None, None],
            "h": heads[None, :, None, None],
            "m": m,
            "n": n,
            "i": m + _by_batch(self.q_origin),
            "j": n + _by_batch(self.k_origin),
        }


def _by_batch(value: int | Array) -> int | Array:
    """A number, or numbers [B] that broadcast to [B, H, rows, columns]."""
    return value if np.ndim(value) == 0 else np.reshape(value, (-1, 1, 1, 1))


@dataclass(frozen=True)
class Result:
    """o [B, H, M, Dv], the natural-log LSE [B, H, M] and, where there are output blocks, o before them."""

    o: Array
    lse: Array
    raw: Array | None = None

    @property
    def before(self) -> Array:
        """o before the output blocks."""
        return self.o if self.raw is None else self.raw


@dataclass(frozen=True)
class Gradients:
    """Gradients of q, k and v, in their shapes, and of captured tensors marked `grad`, by name."""

    dq: Array
    dk: Array
    dv: Array
    captured: Mapping[str, Array] = field(default_factory=dict)


def transform(
    x: Array,
    steps: tuple[Transform, ...],
    call: Call,
    origin: int | Array,
    first: tuple[int, int, int] = (0, 0, 0),
) -> Array:
    """Rows of x [B, H, L, D] after the steps, which the passes have been run on.

    `origin`: position of row 0; `first`: batch, head and row of x[0, 0, 0].
    """
    return _inputs(x, steps, call, origin, first)[-1]


def transform_back(
    d: Array,
    x: Array,
    steps: tuple[Transform, ...],
    call: Call,
    origin: int | Array,
    first: tuple[int, int, int] = (0, 0, 0),
    gradients: dict[str, Array] | None = None,
) -> Array:
    """Gradient of the rows x from that of the transformed rows; what captured tensors get is added to
    `gradients`.
    """
    d, inputs = np.array(d, np.float64), _inputs(x, steps, call, origin, first)
    env = _row_names(d, call, origin, first)
    for step, before in zip(reversed(steps), reversed(inputs[:-1]), strict=True):
        if isinstance(step, Rotation):
            _rotation_reads(d, before, step, env, call, gradients)
            _rotate(d, step, env, call, transpose=True)
        else:
            _row_back(d, before, step, env, call, gradients)
    return d


def _inputs(
    x: Array, steps: tuple[Transform, ...], call: Call, origin: int | Array, first: tuple[int, int, int]
) -> list[Array]:
    """x before each step, and after the last."""
    env = _row_names(x, call, origin, first)
    found = [np.array(x, np.float64)]
    for step in steps:
        row = found[-1].copy()
        if isinstance(step, Rotation):
            _rotate(row, step, env, call, transpose=False)
        else:
            part = _row_columns(step)
            assert step.value is not None
            names = _with_means(step, row[..., part], env, call)
            row[..., part] = evaluate_formula(step.value, names, call.tensors)[0]
        found.append(row)
    return found


def _row_names(x: Array, call: Call, origin: int | Array, first: tuple[int, int, int]) -> dict[str, Any]:
    b, h, r = (np.arange(start, start + size) for start, size in zip(first, x.shape[:3], strict=True))
    env = {**call.sizes(), **call.scalars, "b": b[:, None, None, None], "h": h[:, None, None]}
    rows, positions = r[:, None], r[:, None] + _by_batch(origin)
    return env | {"r": rows, "m": rows, "p": positions, "i": positions}


def _rotate(x: Array, step: Rotation, env: Mapping[str, Any], call: Call, transpose: bool) -> None:
    """In place, times the matrix of each pair or its transpose."""
    assert step.matrix is not None
    lo, hi = columns(step)
    matrix = evaluate_formula(step.matrix, {**env, "c": np.arange(len(lo))}, call.tensors)
    a00, a01, a10, a11 = matrix
    if transpose:
        a01, a10 = a10, a01
    x0, x1 = x[..., lo], x[..., hi]
    x[..., lo], x[..., hi] = x0 * a00 + x1 * a01, x0 * a10 + x1 * a11


def _rotation_reads(
    d: Array,
    x: Array,
    step: Rotation,
    env: Mapping[str, Any],
    call: Call,
    gradients: dict[str, Array] | None,
) -> None:
    """Adds what captured tensors get from the pairs x ahead of a rotation and the gradients d behind it."""
    if gradients is None or not step.reads:
        return
    lo, hi = columns(step)
    pair = {"x0": x[..., lo], "x1": x[..., hi], "d0_value": d[..., lo], "d1_value": d[..., hi]}
    names = {**env, **pair, "c": np.arange(len(lo))}
    live = (pair["d0_value"] != 0) | (pair["d1_value"] != 0)
    for read in step.reads:
        value = evaluate_formula(read.term, names, call.tensors)[0]
        add_at(gradients, read.load, names, call.tensors, np.where(live, value, 0.0))


def _row_columns(step: RowStep) -> slice:
    first, width = int(step.first.value), int(step.width.value)  # type: ignore[union-attr]
    return slice(first, first + width)


def _with_means(step: RowStep, x: Array, env: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """The names of a row block's formulas, means included."""
    names = {**env, "x": x, "c": np.arange(x.shape[-1])}
    for mean in step.means:
        names[mean.name] = _mean(evaluate_formula(mean.formula, names, call.tensors)[0], x)
    return names


def _mean(value: Array, x: Array) -> Array:
    return np.broadcast_to(value, x.shape).mean(-1, keepdims=True)


def _row_back(
    d: Array,
    x: Array,
    step: RowStep,
    env: Mapping[str, Any],
    call: Call,
    gradients: dict[str, Array] | None,
) -> None:
    part, backward = _row_columns(step), step.backward
    assert backward is not None
    names = _with_means(step, x[..., part], env, call) | {"d_value": d[..., part]}
    for name, term in backward.means:
        names[name] = _mean(evaluate_formula(term, names, call.tensors)[0], names["x"])
    live = (names["d_value"] != 0).any(-1, keepdims=True)
    for read in backward.reads if gradients is not None else ():
        value = np.broadcast_to(evaluate_formula(read.term, names, call.tensors)[0], names["x"].shape)
        value = np.where(live, value, 0.0)
        add_at(gradients, read.load, names, call.tensors, value)  # type: ignore[arg-type]
    d[..., part] = evaluate_formula(backward.x, names, call.tensors)[0]


def columns(step: Rotation) -> tuple[Array, Array]:
    """Columns of the first and second member of each pair."""
    first, width = int(step.first.value), int(step.width.value)  # type: ignore[union-attr]
    pairs = np.arange(width // 2)
    if step.pairing == "half":
        return first + pairs, first + width // 2 + pairs
    return first + 2 * pairs, first + 2 * pairs + 1


def weight_factor(
    steps: Iterable[WeightStep], env: Mapping[str, Any], tensors: Mapping[str, Array]
) -> Array | float:
    """What the weight blocks multiply the weights of elements by; the passes have been run."""
    product: Array | float = 1.0
    for step in steps:
        assert step.factor is not None
        product = product * evaluate_formula(step.factor, env, tensors)[0]
    return product


@dataclass(frozen=True)
class _Trace:
    """`p`: the normalizer's weights; `factor`: of the weight blocks; `weights`: both, as they meet v."""

    q: Array
    k: Array
    s: Array
    x: Array
    keep: Array
    p: Array
    factor: Array | float
    weights: Array
    result: Result


def forward(program: Program, call: Call) -> Result:
    """Output and LSE of a program that the passes have been run on."""
    return _trace(program, call).result


def _trace(program: Program, call: Call) -> _Trace:
    group = call.q.shape[1] // max(call.k.shape[1], 1)
    q = transform(call.q, program.q_steps, call, call.q_origin)
    k = transform(call.without_unread(call.k), program.k_steps, call, call.k_origin)
    k = np.repeat(k, group, axis=1)
    v = np.repeat(call.without_unread(call.v), group, axis=1)
    env = call.elements()
    s = q @ k.swapaxes(-1, -2)
    x = s
    for step in program.scores:
        x = np.broadcast_to(evaluate_formula(step.formula, {**env, "s": x}, call.tensors)[0], s.shape)
    keep = np.ones(s.shape, bool)
    if call.kv_len is not None:
        keep &= env["n"] < _by_batch(call.kv_len)
    for step in program.masks:
        keep &= evaluate_formula(step.formula, env, call.tensors)[0]
    x = program.normalizer.factor * x
    factor = weight_factor(program.weight_steps, env, call.tensors)
    if not program.normalizer.has_sum:
        p = np.where(keep, x, 0.0)
        weights = np.where(p == 0, 0.0, p * factor)
        result = _result(program, call, _gated(weights, v), np.zeros(s.shape[:-1]))
        return _Trace(q, k, s, x, keep, p, factor, weights, result)
    masked, extra = np.where(keep, x, -np.inf), _log_extra(program, call)
    maximum = np.maximum(np.max(masked, axis=-1, keepdims=True, initial=-np.inf), extra)
    safe = np.where(np.isneginf(maximum), 0.0, maximum)
    p = np.exp(masked - safe)
    total = p.sum(-1, keepdims=True) + np.exp(extra - safe)
    live = total > 0
    p = p / np.where(live, total, 1.0)
    weights = np.where(p == 0, 0.0, p * factor)
    with np.errstate(divide="ignore"):
        lse = np.where(live, safe + np.log(total), -np.inf)[..., 0]
    result = _result(program, call, _gated(weights, v), lse)
    return _Trace(q, k, s, x, keep, p, factor, weights, result)


def _result(program: Program, call: Call, o: Array, lse: Array) -> Result:
    """The output blocks applied to o."""
    if not program.output_steps:
        return Result(o, lse)
    return Result(transform(o, program.output_steps, call, call.q_origin), lse, o)


def _log_extra(program: Program, call: Call) -> Array:
    """Logarithm of what the normalizer adds to the sum, broadcastable to [B, H, M, 1]; -inf for nothing."""
    extra = program.normalizer.extra
    if extra is None:
        return np.array(-np.inf)
    with np.errstate(divide="ignore"):
        return np.log(evaluate_formula(extra, call.elements(), call.tensors)[0])


def _gated(weights: Array, values: Array) -> Array:
    """weights @ values where a weight of exactly 0 lets nothing through, not even NaN."""
    if np.isfinite(values).all():
        return weights @ values
    terms = np.where(weights[..., None] == 0, 0.0, weights[..., None] * values[..., None, :, :])
    return np.asarray(terms.sum(-2))


def backward(program: Program, call: Call, do: Array, dlse: Array | None = None) -> Gradients:
    """Gradients of sum(do * o) + sum(dlse * lse).

    Source: dS = P (f dP - delta + dLSE), delta = rowsum(dO * O), f of the weight blocks.
    """
    t = _trace(program, call)
    group = call.q.shape[1] // max(call.k.shape[1], 1)
    do = np.asarray(do, np.float64)
    v = np.repeat(call.without_unread(call.v), group, axis=1)
    captured = {p.name: np.zeros(np.shape(call.tensors[p.name])) for p in program.tensors if p.grad}
    do = output_back(do, t.result.before, t.result.lse, program.output_steps, call, gradients=captured)
    delta = (do * t.result.before).sum(-1, keepdims=True)
    if dlse is not None:
        delta = delta - np.asarray(dlse, np.float64)[..., None]
    of_weights = do @ v.swapaxes(-1, -2)
    add_weights(captured, program.captured_reads, call.elements(), call.tensors, t.p, of_weights)
    dp, derivative = of_weights * t.factor, _score_derivative(program, call, t.s)
    if program.normalizer.has_sum:
        dx = np.where(t.keep & (t.p != 0), t.p * (dp - delta), 0.0)
    else:
        dx = np.where(t.keep, dp, 0.0)
    ds = np.where(dx == 0, 0.0, dx * derivative)
    _captured(program, call, t, dx, delta, captured)
    dq = transform_back(ds @ t.k, call.q, program.q_steps, call, call.q_origin, gradients=captured)
    dk = _sum_group(ds.swapaxes(-1, -2) @ t.q, group)
    k = call.without_unread(call.k)
    dk = transform_back(dk, k, program.k_steps, call, call.k_origin, gradients=captured)
    return Gradients(dq, dk, _sum_group(t.weights.swapaxes(-1, -2) @ do, group), captured)


def output_back(
    d: Array,
    before: Array,
    lse: Array,
    steps: tuple[RowStep, ...],
    call: Call,
    first: tuple[int, int, int] = (0, 0, 0),
    gradients: dict[str, Array] | None = None,
) -> Array:
    """Gradient of o [B, H, M, Dv] before the output blocks, whose value is `before`, from that after them.

    It is 0 in rows without a key (`lse` [B, H, M] -inf): their o is 0 whatever q, k and v are.
    """
    if not steps:
        return d
    d = transform_back(d, before, steps, call, call.q_origin, first, gradients)
    return np.where(np.isneginf(lse[..., None]), 0.0, d)


def _captured(
    program: Program, call: Call, t: _Trace, dx: Array, delta: Array, gradients: dict[str, Array]
) -> None:
    """Adds to the gradients of captured tensors marked `grad`, in their shapes, what scores give."""
    steps, reads, env = program.score_gradient, program.captured_reads, call.elements()
    assert steps is not None
    add_scores(gradients, reads, program.scores, steps.steps, env, call.tensors, t.s, dx)
    if program.normalizer.extra is not None:
        lse = t.result.lse[..., None]
        dextra = extra_gradient(np.broadcast_to(_log_extra(program, call), lse.shape), lse, delta)
        add_extra(gradients, reads, env, call.tensors, dextra)


def _sum_group(x: Array, group: int) -> Array:
    b, h, n, d = x.shape
    return x.reshape(b, h // max(group, 1), max(group, 1), n, d).sum(2)


def _score_derivative(program: Program, call: Call, s: Array) -> Array:
    """d score / d s, factor included, from the derivatives of the steps."""
    gradient = program.score_gradient
    assert gradient is not None
    env = call.elements()
    x, product = s, np.full(s.shape, gradient.constant)
    for step, derivative in zip(program.scores, gradient.steps, strict=True):
        if derivative is not None:
            product = product * evaluate_formula(derivative, {**env, "s": x}, call.tensors)[0]
        x = np.broadcast_to(evaluate_formula(step.formula, {**env, "s": x}, call.tensors)[0], s.shape)
    return product
