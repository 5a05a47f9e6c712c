# SPDX-License-Identifier: Apache-2.0
"""Program: one attention, checked, in the author's terms. Passes map Program to Program.

    O = output(weight(normalizer(score_k(... score_1(rotate(q) . rotate(k))), masks)) @ v)

Names that formulas may read: `s` (score), `b, h, i, j, m, n` (indices; i, j are positions), `p, r, c`
(position, row and pair of a rotation), `x0, x1`, the dimensions `B H Hk M N Dqk Dv D L`, run-time scalars and
captured tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from afc.errors import Span
from afc.expr.nodes import Const, Expr, Formula, Load, Type

INDEX_NAMES = ("b", "h", "i", "j", "m", "n")
DIMENSIONS = ("B", "H", "Hk", "M", "N", "Dqk", "Dv")


@dataclass(frozen=True)
class Extent:
    """Size of one dimension of a captured tensor; `broadcast`: size 1 is also accepted (`1|B`)."""

    size: Expr
    broadcast: bool = False


@dataclass(frozen=True)
class TensorParam:
    """A captured tensor of the signature. `grad`: a gradient is asked for."""

    name: str
    shape: tuple[Extent, ...]
    type: Type
    grad: bool
    span: Span


@dataclass(frozen=True)
class ScalarParam:
    """A run-time scalar of the signature. `positive`: declared `> 0`, checked at every call."""

    name: str
    type: Type
    default: Const | None
    positive: bool
    span: Span


Param = TensorParam | ScalarParam


@dataclass(frozen=True)
class Step:
    """A block as used: its formula with arguments bound.

    `call`: how it reads, e.g. `softcap(cap = 50.0)`; `span`: where it is used; `origin`: where it is
    declared.
    """

    block: str
    formula: Formula
    call: str
    doc: str
    span: Span
    origin: Span


@dataclass(frozen=True)
class RotationRead:
    """A read of a captured tensor marked `grad` in a rotation, and what a pair adds to its gradient: a
    formula of the pair (x0, x1) ahead of the rotation, the gradients d0_value, d1_value of the pair behind
    it, and what the matrix reads.
    """

    load: Load
    term: Formula


@dataclass(frozen=True)
class Rotation(Step):
    """A linear map of column pairs of q or k.

    Columns `first .. first + width - 1`. Pair c joins columns (c, c + width/2) for `half`, (2c, 2c + 1) for
    `adjacent`. `matrix`: (a00, a01, a10, a11) as formulas of p, r, c, b, h (the operand's own head), sizes,
    scalars and captured tensors; `reads`: of captured tensors whose gradient is asked for. Both are set by
    the pass `matrices`.
    """

    first: Expr = field(kw_only=True)
    width: Expr = field(kw_only=True)
    pairing: Literal["half", "adjacent"] = field(kw_only=True)
    matrix: Formula | None = field(default=None, kw_only=True)
    reads: tuple[RotationRead, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Mean:
    """A mean over the columns of a row: a formula of x, the indices of its slot and earlier means."""

    name: str
    formula: Formula


@dataclass(frozen=True)
class RowRead:
    """A read of a captured tensor marked `grad` in a row or output block, and what a column adds to its
    gradient.
    """

    load: Load
    term: Formula


@dataclass(frozen=True)
class RowBackward:
    """Derivative of a row block; d_value is the incoming gradient of a column.

    `means`: last mean first, a name and the term whose mean over the columns is its value; `x`: the gradient
    of a column of the input. Terms read x, c, d_value, the means, and the values before them.
    """

    means: tuple[tuple[str, Formula], ...]
    x: Formula
    reads: tuple[RowRead, ...]


@dataclass(frozen=True)
class RowStep(Step):
    """A formula on each column x of a row of q or k, or of the output, with means over the row.

    Columns `first .. first + width - 1`; an output block has all. It reads `c, b, h` and, of q or k, the row
    `r`; of the output, the row `m` and its position `i`. The pass `rows` sets `means`, `value` (the formula
    in terms of them) and `backward`.
    """

    first: Expr = field(kw_only=True)
    width: Expr = field(kw_only=True)
    means: tuple[Mean, ...] = field(default=(), kw_only=True)
    value: Formula | None = field(default=None, kw_only=True)
    backward: RowBackward | None = field(default=None, kw_only=True)


Transform = Rotation | RowStep


@dataclass(frozen=True)
class WeightStep(Step):
    """A linear map of the weight p of an element, after the normalizer: p times `factor`, a formula of b, h,
    i, j, m, n, sizes, scalars and captured tensors, set by the pass `weights`.
    """

    factor: Formula | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Normalizer:
    """Weights of a row: w(s), or w(s) / (sum(w(s)) + extra).

    `exponential`: w is exp (the online softmax); `factor`: positive constant f such that the score is f
    times what the score steps give, set by the pass `factor`.
    """

    block: str
    weight: Formula
    exponential: bool
    has_sum: bool
    extra: Formula | None
    call: str
    doc: str
    span: Span
    origin: Span
    factor: float = 1.0


@dataclass(frozen=True)
class ScoreGradient:
    """d score / d s as a product: `constant * steps_k(...)`. A step whose derivative is constant is None."""

    steps: tuple[Formula | None, ...]
    constant: float


@dataclass(frozen=True)
class CapturedRead:
    """A read of a captured tensor whose gradient is asked for, in a score step, the extra term or a weight
    block.

    `step`: place in `scores`, None for the normalizer's extra term. The gradient of the element that `load`
    names is the sum over all scores of dX * `coefficient`, where dX is the gradient of the score after all
    steps times the varying derivatives of the steps behind this one; their constant derivatives are part of
    `coefficient`, a formula of the step's own input s. For the extra term dX is the gradient of its
    logarithm. `weight`: `step` is the place in `weight_steps`, dX is P dP', where P is the normalizer's
    weight and P' what meets v, and `coefficient` is the derivative of the factor of all weight blocks.
    """

    load: Load
    step: int | None
    coefficient: Formula
    weight: bool = False

    @property
    def score(self) -> bool:
        """Whether the read is in a score step."""
        return self.step is not None and not self.weight


def learned(reads: Iterable[CapturedRead], steps: Iterable[Transform]) -> tuple[str, ...]:
    """Captured tensors that are read by anything but the mask and whose gradient is asked for."""
    names = [r.load.tensor for r in reads]
    for step in steps:
        if isinstance(step, Rotation):
            names += [r.load.tensor for r in step.reads]
        elif step.backward is not None:
            names += [r.load.tensor for r in step.backward.reads]
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Program:
    """An attention. `constants` are dimensions and parameters fixed at compile time (`-D D=64`)."""

    name: str
    doc: str
    source: str
    span: Span
    params: tuple[Param, ...]
    q_steps: tuple[Transform, ...]
    k_steps: tuple[Transform, ...]
    scores: tuple[Step, ...]
    masks: tuple[Step, ...]
    normalizer: Normalizer
    constants: tuple[tuple[str, int | float | bool], ...] = ()
    score_gradient: ScoreGradient | None = None
    captured_reads: tuple[CapturedRead, ...] = ()
    output_steps: tuple[RowStep, ...] = ()
    weight_steps: tuple[WeightStep, ...] = ()

    @property
    def tensors(self) -> tuple[TensorParam, ...]:
        """Captured tensors in signature order."""
        return tuple(p for p in self.params if isinstance(p, TensorParam))

    @property
    def scalars(self) -> tuple[ScalarParam, ...]:
        """Run-time scalars in signature order."""
        return tuple(p for p in self.params if isinstance(p, ScalarParam))

    @property
    def learned(self) -> tuple[str, ...]:
        """Captured tensors whose gradient is not 0 everywhere; the passes have been run."""
        return learned(self.captured_reads, (*self.q_steps, *self.k_steps, *self.output_steps))

    def constant(self, name: str) -> int | float | bool | None:
        """A compile-time constant, or None."""
        return dict(self.constants).get(name)

    def map_formulas(self, rule: Callable[[Formula], Formula]) -> Program:
        """The program with `rule` applied to the formula of each step (and matrix, factor, weight, extra)."""

        def step(s: Step) -> Step:
            return replace(s, formula=rule(s.formula))

        def row(s: RowStep) -> RowStep:
            return replace(s, formula=rule(s.formula))

        def transform(s: Transform) -> Transform:
            if isinstance(s, RowStep):
                return row(s)
            matrix = None if s.matrix is None else rule(s.matrix)
            return replace(s, formula=rule(s.formula), matrix=matrix)

        def weight(s: WeightStep) -> WeightStep:
            factor = None if s.factor is None else rule(s.factor)
            return replace(s, formula=rule(s.formula), factor=factor)

        extra = self.normalizer.extra
        normalizer = replace(
            self.normalizer, weight=rule(self.normalizer.weight), extra=None if extra is None else rule(extra)
        )
        return replace(
            self,
            normalizer=normalizer,
            q_steps=tuple(map(transform, self.q_steps)),
            k_steps=tuple(map(transform, self.k_steps)),
            scores=tuple(map(step, self.scores)),
            masks=tuple(map(step, self.masks)),
            output_steps=tuple(map(row, self.output_steps)),
            weight_steps=tuple(map(weight, self.weight_steps)),
        )
