# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors, for both interpreters: sums over the reads of every element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from afc.expr.evaluate import evaluate, evaluate_formula
from afc.expr.nodes import Formula, Load
from afc.ir.program import CapturedRead, Step

Array = Any


def add_scores(
    gradients: dict[str, Array],
    reads: Sequence[CapturedRead],
    scores: Sequence[Step],
    derivatives: Sequence[Formula | None],
    env: Mapping[str, Any],
    tensors: Mapping[str, Array],
    s: Array,
    dx: Array,
) -> None:
    """Add what scores with raw values `s` and gradients `dx` (of the score after all steps) give, in place.

    `gradients`: by tensor, in the tensors' shapes; a dimension of size 1 is summed over.
    """
    inputs = [s]
    for step in scores:
        value = evaluate_formula(step.formula, {**env, "s": inputs[-1]}, tensors)[0]
        inputs.append(np.broadcast_to(value, np.shape(s)))
    for k in reversed(range(len(scores))):
        at = {**env, "s": inputs[k]}
        for read in reads:
            if read.score and read.step == k:
                _scatter(gradients, read, at, tensors, dx)
        derivative = derivatives[k]
        if derivative is not None:
            dx = np.where(dx == 0, 0.0, dx * evaluate_formula(derivative, at, tensors)[0])


def add_extra(
    gradients: dict[str, Array],
    reads: Sequence[CapturedRead],
    env: Mapping[str, Any],
    tensors: Mapping[str, Array],
    dextra: Array,
) -> None:
    """Add what rows give through the normalizer's extra term, whose logarithm has gradients `dextra`."""
    for read in reads:
        if read.step is None:
            _scatter(gradients, read, env, tensors, dextra)


def add_weights(
    gradients: dict[str, Array],
    reads: Sequence[CapturedRead],
    env: Mapping[str, Any],
    tensors: Mapping[str, Array],
    p: Array,
    dp: Array,
) -> None:
    """Add what elements give through the weight blocks: `p` is the normalizer's weight, `dp` the gradient of
    the weight that meets v. A weight of 0 gives nothing, whatever the gradient and the factor are.
    """
    with np.errstate(invalid="ignore"):
        d = np.where(p == 0, 0.0, p * dp)
    for read in reads:
        if read.weight:
            _scatter(gradients, read, env, tensors, d)


def extra_gradient(extra: Array, lse: Array, delta: Array) -> Array:
    """Gradient of the logarithm of the extra term of rows: a key of value 0; 0 where nothing is added."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(extra), 0.0, -np.exp(extra - lse) * delta)


def _scatter(
    gradients: dict[str, Array],
    read: CapturedRead,
    env: Mapping[str, Any],
    tensors: Mapping[str, Array],
    d: Array,
) -> None:
    coefficient = evaluate_formula(read.coefficient, env, tensors)[0]
    add_at(gradients, read.load, env, tensors, np.where(d == 0, 0.0, d * coefficient))


def add_at(
    gradients: dict[str, Array],
    load: Load,
    env: Mapping[str, Any],
    tensors: Mapping[str, Array],
    value: Array,
) -> None:
    """Add values to the elements of a gradient that a read refers to; nothing outside the tensor."""
    target = gradients[load.tensor]
    position, inside = _positions(load, env, tensors, target.shape, np.shape(value))
    live = inside & (value != 0)
    if target.ndim == 0:
        target += value[live].sum()
    else:
        np.add.at(target, tuple(p[live] for p in position), value[live])


def _positions(
    load: Load, env: Mapping[str, Any], tensors: Mapping[str, Array], sizes: tuple[int, ...], shape: Any
) -> tuple[list[Array], Array]:
    inside = np.ones(shape, bool)
    positions = []
    for index, size in zip(load.indices, sizes, strict=True):
        position = np.broadcast_to(evaluate(index, env, tensors), shape)
        position = np.zeros_like(position) if size == 1 else position
        inside &= (position >= 0) & (position < size)
        positions.append(position)
    return positions, inside
