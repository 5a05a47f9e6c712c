# SPDX-License-Identifier: Apache-2.0
"""TiledKernel: one kernel as a target-free schedule of tile operations, plus its binding to a target.
LaunchPlan: the kernels of a pass in order, and the workspace they share.

`afc/reference/tiled.py` executes the schedule half on NumPy tiles, roundings included; the templates print
the same steps for a target. Names in capitals are tiles: rows = queries, columns = keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Union

from afc.expr.nodes import Expr, Formula
from afc.ir.masks import MaskPlan
from afc.ir.program import CapturedRead, Rotation, RowRead, RowStep, Step, Transform, WeightStep, learned
from afc.ir.protocol import Protocol

Kind = Literal[
    "table",
    "rotate",
    "forward",
    "output",
    "preprocess",
    "backward",
    "clear",
    "captured",
    "sum",
    "postprocess",
    "combine",
    "plan",
]
Axis = Literal["queries", "keys"]
Pass = Literal["forward", "backward"]
# y, dy: the output after its blocks, where it has some; o is then the output before them.
Operand = Literal[
    "q", "k", "v", "o", "do", "y", "dy", "lse", "dlse", "delta", "dq", "dk", "dv", "dq_sum", "dk_sum"
]


# ---- tile operations -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A tile of a tensor, rows beyond its length as zeros.

    q and k arrive rotated and rounded to the storage type.
    """

    out: str
    source: Operand


@dataclass(frozen=True)
class Matmul:
    """out (+)= a b with float32 (float64) accumulation; `transpose_*` as written."""

    out: str
    a: str
    b: str
    transpose_a: bool = False
    transpose_b: bool = False
    accumulate: bool = False


@dataclass(frozen=True)
class Scores:
    """X = score steps of S, element by element; S itself is kept for the gradient."""

    out: str
    s: str


@dataclass(frozen=True)
class Mask:
    """X = `removed` where the mask, or the end of a sequence, removes the element. Only on partial tiles."""

    x: str
    removed: float = -math.inf


@dataclass(frozen=True)
class OnlineSoftmax:
    """m' = max(m, rowmax X), P = exp(f (X - m')), l = l exp(f (m - m')) + rowsum P; O is rescaled alike.

    `form` says what a full tile after the first may do instead; partial tiles and the first are always
    exact. `stale`: P refers to m, the maximum before this tile; where a row grew by more than 2^8, P, l
    and O are then brought to the new maximum. `watched`: no maximum at all; where a row's sum of P exceeds
    2^13, P, l and O are brought to a reference taken from the largest P. Both leave O and LSE unchanged,
    up to rounding.
    """

    out: str
    x: str
    maximum: str
    total: str
    rescale: tuple[str, ...]
    form: Literal["exact", "stale", "watched"] = "exact"


@dataclass(frozen=True)
class Weights:
    """P = exp(f X - LSE), zero where X or LSE is -inf."""

    out: str
    x: str
    lse: str


@dataclass(frozen=True)
class Reweigh:
    """X times the factor of the weight blocks; 0 stays 0, whatever the factor is."""

    x: str


@dataclass(frozen=True)
class ScoreGradient:
    """dS = P (dP - delta), times the derivative of the score steps at S.

    Without a sum over the keys `delta` is None: dS = dP times that derivative, of which the weight is part.
    """

    out: str
    p: str
    dp: str
    delta: str | None
    s: str


@dataclass(frozen=True)
class AddCaptured:
    """Adds P (dP - delta), times the derivative of the score by each read of a captured tensor, to the
    element of its gradient that was read. Without a sum over the keys `delta` is None: dP, masked, instead.
    """

    p: str
    dp: str
    delta: str | None
    s: str


@dataclass(frozen=True)
class AddCapturedExtra:
    """The same for reads in the normalizer's extra term, row by row: -exp(log extra - LSE) delta."""

    lse: str
    delta: str


@dataclass(frozen=True)
class AddCapturedWeights:
    """The same for reads in weight blocks, of P and of dP ahead of them: P dP times the derivative of their
    factor.
    """

    p: str
    dp: str


@dataclass(frozen=True)
class RowDot:
    """out = rowsum(a * b) - minus: delta of the backward pass, where `minus` is the gradient of the LSE."""

    out: str
    a: str
    b: str
    minus: str


@dataclass(frozen=True)
class Round:
    """Round to the storage type: an explicit rounding point."""

    x: str


@dataclass(frozen=True)
class Scale:
    """X *= by."""

    x: str
    by: float


@dataclass(frozen=True)
class RotateBack:
    """Gradient of the raw rows of an operand from that of the rotated ones: the transposed derivative of its
    steps, last step first; what captured tensors of row blocks get is added to their gradients.
    """

    x: str
    operand: Literal["q", "k"]


@dataclass(frozen=True)
class Normalize:
    """O exp(f m) / Z and LSE = log Z, where Z = l exp(f m) + extra: the sum of the weights and what the
    normalizer adds to it. A row without a key has O = 0 and LSE = log extra, -inf without an extra.
    """

    o: str
    maximum: str
    total: str
    lse: str


@dataclass(frozen=True)
class Outputs:
    """out = output blocks of O, row by row."""

    out: str
    o: str


@dataclass(frozen=True)
class OutputsBack:
    """Gradient of O before the output blocks from that after them, 0 where LSE is -inf. Without a sum over
    the keys `lse` is None.
    """

    out: str
    dy: str
    o: str
    lse: str | None


@dataclass(frozen=True)
class AddOutputs:
    """Adds what the output blocks of O give to the gradients of the captured tensors that they read."""

    dy: str
    o: str


@dataclass(frozen=True)
class Store:
    """Write a tile (rows within the tensor), or add it to an accumulator."""

    x: str
    target: Operand
    add: bool = False


TileOp = Union[  # noqa: UP007
    Load,
    Matmul,
    Scores,
    Mask,
    OnlineSoftmax,
    Weights,
    Reweigh,
    ScoreGradient,
    AddCaptured,
    AddCapturedExtra,
    AddCapturedWeights,
    RowDot,
    Round,
    Scale,
    RotateBack,
    Normalize,
    Outputs,
    OutputsBack,
    AddOutputs,
    Store,
]


# ---- kernels ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile."""

    queries: int
    keys: int


@dataclass(frozen=True)
class Walk:
    """The inner loop of a kernel: for a tile of one axis, the runs of the other, partial tiles before full
    ones.

    `over_group`: the loop also visits every query head of the tile's key head. `aligned`: tiles lie on a grid
    (`Run.tiles`), so a ragged last tile is partial; otherwise they start where the run starts (`Run.pieces`).
    `stored`: the runs are found by a test of tiles at each call, as bounds alone do not decide the mask.
    """

    axis: Axis
    over_group: bool = False
    aligned: bool = True
    stored: bool = False


@dataclass(frozen=True)
class Binding:
    """How a target runs a kernel.

    `homes`: tile -> registers, shared or global memory; `stages`: of streamed tiles; `issue`: the products
    of a steady step in the order in which they are handed to the tensor cores, where `S next` belongs to
    the next tile (the only work that may be in flight at the end of a step); `schedule`: a block per work
    item, or persistent blocks; `section`: heads worked on at a time, so that what they share stays in the
    L2 cache; `extra_columns`: columns added to the product Q K' that carry additive terms of low rank;
    `protocol`: roles, barriers and buffers of a warp-specialised kernel, from which producer and consumer
    loops are both printed.
    """

    target: str
    homes: tuple[tuple[str, str], ...] = ()
    warps: int = 0
    stages: int = 1
    min_blocks: int = 1
    shared_bytes: int = 0
    issue: tuple[str, ...] = ()
    schedule: Literal["block per item", "persistent"] = "block per item"
    section: int = 0
    extra_columns: int = 0
    protocol: Protocol | None = None


@dataclass(frozen=True)
class TiledKernel:
    """One kernel.

    `stationary`: the axis whose tiles are the parallel work items (with batch and head); `order`: of the
    work items;
    `epilogue_kind`: `final`, or `partial` (unnormalised O and LSE of a range of keys, for split-KV).
    """

    name: str
    kind: Kind
    stationary: Axis
    tile: Tile
    order: Literal["any", "longest first"]
    prologue: tuple[TileOp, ...]
    walk: Walk | None
    body: tuple[TileOp, ...]
    epilogue: tuple[TileOp, ...]
    epilogue_kind: Literal["final", "partial"] = "final"
    binding: Binding = field(default_factory=lambda: Binding("reference"))


@dataclass(frozen=True)
class Semantics:
    """What tile operations mean for one attention: the scalar parts, shared by all its kernels."""

    storage: str
    compute: str
    head_qk: int
    head_v: int
    q_steps: tuple[Transform, ...]
    k_steps: tuple[Transform, ...]
    scores: tuple[Step, ...]
    score_gradients: tuple[Formula | None, ...]
    scores_finite: bool
    softmax_scale: float
    gradient_scale: float
    mask: MaskPlan
    has_sum: bool = True
    log_extra: Formula | None = None  # logarithm of what the normalizer adds to the sum
    captured: tuple[CapturedRead, ...] = ()
    output_steps: tuple[RowStep, ...] = ()
    weight_steps: tuple[WeightStep, ...] = ()

    @property
    def learned(self) -> tuple[str, ...]:
        """Captured tensors whose gradient is not 0 everywhere."""
        return learned(self.captured, (*self.q_steps, *self.k_steps, *self.output_steps))

    @property
    def output_reads(self) -> tuple[RowRead, ...]:
        """Reads of captured tensors marked `grad` in output blocks."""
        return tuple(r for s in self.output_steps if s.backward is not None for r in s.backward.reads)

    @property
    def q_rotations(self) -> tuple[Rotation, ...]:
        """The rotations among the steps of q."""
        return tuple(s for s in self.q_steps if isinstance(s, Rotation))

    @property
    def k_rotations(self) -> tuple[Rotation, ...]:
        """The rotations among the steps of k."""
        return tuple(s for s in self.k_steps if isinstance(s, Rotation))


@dataclass(frozen=True)
class Buffer:
    """A part of the workspace. `count`: values, an int expression of B, Hq, Hk, M, N; alignment in bytes."""

    name: str
    dtype: str
    count: Expr
    passes: tuple[Pass, ...]
    zeroed: bool = False
    alignment: int = 256


@dataclass(frozen=True)
class Launch:
    """A kernel in a plan.

    `after`: kernels whose results it reads; `grid`: blocks in x and y as expressions of B, H, Hk, M, N
    (None: the target has no grid, or it depends on the gradients that a call asks for); `dependent`: it may
    start before the kernel ahead of it has ended, and waits for it itself.
    """

    kernel: TiledKernel
    after: tuple[str, ...] = ()
    grid: tuple[Expr, Expr] | None = None
    dependent: bool = False


@dataclass(frozen=True)
class LaunchPlan:
    """Everything one attention needs at one (Dqk, Dv, dtype, target).

    `tile_steps`: how far down its target's lists of tiles the forward and the backward kernel are.
    `deterministic_backward`: what runs instead of `backward` where gradients must have the same bits each
    time, and `backward` does not see to it. A kernel of the same name is the same code.
    """

    name: str
    target: str
    semantics: Semantics
    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]
    saved: tuple[Operand, ...] = ("q", "k", "v", "o", "lse")
    tile_steps: tuple[int, int] = (0, 0)
    deterministic_backward: tuple[Launch, ...] = ()

    @property
    def ordered(self) -> bool:
        """Whether no kernel adds results of several work items in memory."""
        ops = [op for x in self.launches for op in (*x.kernel.prologue, *x.kernel.body, *x.kernel.epilogue)]
        return not any(isinstance(op, Store) and op.add for op in ops)

    @property
    def deterministic(self) -> bool:
        """Whether gradients can be had with the same bits each time."""
        return self.ordered or bool(self.deterministic_backward)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """All kernels of the usual passes, forward first."""
        return (*self.forward, *self.backward)
