# SPDX-License-Identifier: Apache-2.0
"""The Jinja contexts of `templates/sm80`: one frozen dataclass per template, what it prints already decided.

Lengths are in elements unless a name ends in `_bytes`. `softmax_scale`, `scale_log2` and `gradient_scale` are
C literals of type float. Buffers are indices into `afc_args.buffer`; B, Hq, Hk, M, N as in `afc_args`:

- coefficient table: float32 `[rows][table_stride]`, rows = M for q and N for k; behind one another where
  coefficients depend on the batch entry or the head;
- rotated q and k: storage type, contiguous `[B, Hq, M, d_qk]` and `[B, Hk, N, d_qk]`;
- row terms: float32 `[B, Hq, M, 2]`: log-sum-exp in units of log2 (+inf where a row is empty), and delta;
- dQ sum: float32, `B * Hq * ceil(M / 16) * 16 * d_qk` in the order of accumulator fragments.

Head sizes: `head_qk` and `head_v` are those of the tensors, multiples of 8; `d_qk` and `d_v` are what they
are filled up to with zeros, and `valid_qk`, `valid_v` the last argument of a tile type that says so, or
nothing.

`pointwise`: weights without a sum over the keys, which have no softmax scale, no LSE and no row terms.
Elements of a batch entry that lie beyond its keys are left out as those beyond N.

Every buffer must be 16-byte aligned. `shared_bytes` is dynamic shared memory; beside it kernels declare up to
64 bytes themselves (the rotate kernel: its coefficients), and up to 512 where they walk over several runs. So
the opt-in attribute for the maximum dynamic size must always be set, not only above 48 KB; a limit of L bytes
per CTA leaves L - 512 for `shared_bytes`.

A kernel template prints into a translation unit that begins with the prelude.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from afc.schedule.captured import PLACED, Sum


@dataclass(frozen=True)
class RotationContext:
    """One rotation of q or k: its columns, its matrix, its table.

    `last` is the last rotated column. `table_stride` and `table_offset` are floats; if `coefficients` is 2,
    even. `in_registers` says that an accumulator can be rotated back without shared memory: `first` and the
    number of rotated columns are multiples of 8 and, for half-split pairs, `pairs` is a multiple of 8 and,
    with column_warps > 1, of `16 * column_warps`. `plain`: `function` takes (position, pair, c), else
    (args, b, h, row, position, pair, c). `by_batch`, `by_head`: the operand has a table for each batch entry,
    for each head; where batch entries have origins of their own, it has one for each of them in any case.
    """

    struct: str  # name of the emitted type, such as QRotation0
    function: str  # such as rotate_q_coefficients_0
    first: int
    last: int
    pairs: int
    adjacent: bool
    coefficients: int
    a00: str  # C expressions in c[...]
    a01: str
    a10: str
    a11: str
    table_buffer: int
    table_stride: int
    table_offset: int
    in_registers: bool
    tensor: str  # q or k
    rows: str  # M or N
    heads: str  # Hq or Hk
    plain: bool
    by_batch: bool
    by_head: bool


@dataclass(frozen=True)
class TableRow:
    """A read of a captured tensor by the mask: `axis` along which it has extents, -1 for none; then `chunks`
    of extents behind those of the tables `before` it, as C++ expressions.
    """

    slot: int
    name: str
    type: str
    rank: int
    axis: int
    chunks: str
    before: str


@dataclass(frozen=True)
class ExtentsContext:
    """`extents.cu.j2`. Grid: the chunks of all tables in x. No dynamic shared memory."""

    name: str
    threads: int
    chunk: int  # elements
    buffer: int
    tables: tuple[TableRow, ...]  # those with extents


@dataclass(frozen=True)
class PlanContext:
    """`plan.cu.j2`, for any GPU target. Grid: ceil(tiles of the own axis * heads * batch entries / warps) in
    x, without heads where the mask does not depend on them. No dynamic shared memory.
    """

    name: str
    warps: int
    own: str  # m or n
    other: str
    owns: str  # the same in words
    others: str
    own_tile: int
    other_tile: int
    by_head: bool
    runs_buffer: int
    extents_buffer: int | None  # None: no table has extents
    tables: tuple[TableRow, ...]  # in the order of the mask's reads


@dataclass(frozen=True)
class StoredRow:
    """The stored runs that a kernel walks over, in `args.buffer[buffer]`; `row`: of a work item (for keys: of
    its first query head), a C++ expression in `work`; `pitch`: entries from the row of a head to that of the
    next.
    """

    buffer: int
    row: str
    pitch: str


@dataclass(frozen=True)
class SharedGradient:
    """A captured tensor whose gradient a kernel adds to: name, slot, and the dimensions of it that the batch
    entry, the head and the row alone index in every read (-1: none).
    """

    name: str
    slot: int
    batch: int
    head: int
    row: int


@dataclass(frozen=True)
class SharesContext:
    """How the sums of the kernel `name` are shared out to its blocks: function `<name>_shares` of `text`, the
    same in device and host code. `buffer`: of the copies, None without gradients; `placed`: (slot, C
    condition) of gradients whose places must fit an int.
    """

    name: str
    text: str
    gradients: tuple[SharedGradient, ...]
    buffer: int | None
    placed: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class SumRead:
    """A read of a captured tensor whose gradient a kernel sums.

    `index`: in `gradients[...]` of the unit's functions; `gradient`: in the kernel's targets; `kind`: see
    `score_sum` and `column_sum`; `offset`: C expression of its place; `one_to_one`: C condition that what the
    kind takes for dimensions is not broadcast. `extra`: in the normalizer's extra term, `weight`: in a weight
    block. Of a row or output block, its terms are `width` columns from `start` on.
    """

    index: int
    gradient: int
    kind: Sum
    offset: str
    one_to_one: str
    text: str
    extra: bool = False
    start: int = 0
    width: int = 0
    weight: bool = False

    @property
    def placed(self) -> bool:
        """Whether a walk over scores needs the place of each."""
        return self.kind in PLACED


@dataclass(frozen=True)
class StepContext:
    """A step of q, k or the output: a row or output block (function `name`, and `name`_gradient whose terms
    start at `sums` if it `reads`), or a rotation. `state`: the row that it acts on; a block leaves it and
    writes the next.
    """

    call: str
    name: str
    rotation: RotationContext | None
    state: int
    sums: int = 0
    reads: int = 0


@dataclass(frozen=True)
class PreludeContext:
    """`prelude.cu.j2`: includes, storage type, the author's functions and the rotations of a whole unit."""

    element: str  # Bf16 or F16
    blocks: str  # Item, load_item, score, score_gradient, keep, key_run, query_run, rotate_*_coefficients_*
    rotations: tuple[RotationContext, ...]
    stored: bool  # runs are found by a plan kernel
    has_rows: bool
    groups: tuple[SharesContext, ...]


@dataclass(frozen=True)
class ForwardContext:
    """`forward.cu.j2`. Grid: `ceil(M / tile_m) * Hq * B` in x; threads: `32 * warps`; no launch if that is 0.

    `shared_bytes` = max(2 * (tile_m * d_qk + 2 * tile_n * (d_qk + d_v)), 2 * tile_m * d_v); with output
    blocks the last is 4 * tile_m * (d_v + 4). `tile_m` is a multiple of `16 * warps`, `tile_n` of 16.
    `removed`: the score, or weight, of what the mask removes.
    """

    name: str
    d_qk: int
    d_v: int
    head_qk: int
    head_v: int
    valid_qk: str
    valid_v: str
    tile_m: int
    tile_n: int
    warps: int
    min_blocks: int
    q_in_registers: bool
    section: int  # heads that share the L2 cache
    descending: bool  # last query tiles first: they are the longest under a causal mask
    shared_bytes: int
    softmax_scale: str
    scale_log2: str
    pointwise: bool
    removed: str
    has_score: bool
    has_mask: bool
    has_weight: bool
    distance: bool  # score and score_gradient take i - j as a float
    row_terms: bool  # score, score_gradient and keep take a `row`
    column_terms: bool  # and a `column`
    has_extra: bool
    alternatives: int  # runs that key_run merges; 0: it gives one run
    stored: StoredRow | None  # runs of a plan kernel instead
    scores_finite: bool
    q_rotations: tuple[RotationContext, ...]  # applied to Q in shared memory, in this order
    q_buffer: int | None  # queries after row blocks, or None: args.q
    k_buffer: int | None  # rotated keys, or None: args.k
    outputs: tuple[StepContext, ...]


@dataclass(frozen=True)
class RotateOperand:
    """What the rotate kernel does for q or k. The rotations of one operand must have disjoint columns."""

    tensor: str  # q or k
    rows: str  # M or N
    columns: int  # head_qk
    rotations: tuple[RotationContext, ...]
    write_table: bool
    rows_buffer: int | None  # where rotated rows go, or None: the table only
    copied_columns: tuple[
        tuple[int, int], ...
    ]  # (first, count) of the column ranges that no rotation touches


@dataclass(frozen=True)
class RotateContext:
    """`rotate.cu.j2`. Grid: x = the sum over operands of `ceil(rows / tile_rows)`, y = shares of heads.

    y is between 1 and the largest B * heads of an operand whose rows are written (1 if there is none). About
    4 to 8 (batch, head)s to a share keep the cost of the coefficients small. No dynamic shared memory.
    """

    name: str
    threads: int
    tile_rows: int
    operands: tuple[RotateOperand, ...]  # one or two


@dataclass(frozen=True)
class PreprocessContext:
    """`preprocess.cu.j2`. Grid: `ceil(M / tile_rows) * Hq * B` in x; threads: `8 * tile_rows`.

    Reads o, lse, dlse (data may be null: zero) and d_o with any strides, also of its columns. `tile_rows` is
    16 or 32. No shared memory.
    """

    name: str
    d_qk: int
    head_v: int
    tile_rows: int
    pointwise: bool
    terms_buffer: int | None  # None where it is pointwise
    dq_buffer: int


@dataclass(frozen=True)
class BackwardContext:
    """`backward.cu.j2`. Grid: `ceil(N / tile_n) * Hk * B` in x; threads: `32 * key_warps * query_warps`.

    d_o must have a unit column stride and 16-byte aligned rows. The three pairs of warp counts have one
    product. `tile_n` is a multiple of 16 times each of the key warps, `tile_m` of `16 * query_warps` and of
    `16 * dq_row_warps`; all warp counts and what is a warp's along the queries are powers of two.
    `v_in_registers`: V passes through the last 2 * tile_n * d_v bytes before the row terms, which stage 0
    must leave free. `needs_float_rows`: some rotation of k is not `in_registers`.
    `shared_bytes` = max(2 * (tile_n * (d_qk + d_v if V stays) + stages * tile_m * (d_qk + d_v))
    + 4 * tile_m * tile_n + 16 * tile_m, 2 * tile_n * (d_qk + d_v), rows), the term 16 * tile_m only if not
    `pointwise`, where rows = 4 * tile_n * (d_qk + 4) if `needs_float_rows`, else 0.
    """

    name: str
    d_qk: int
    d_v: int
    head_qk: int
    head_v: int
    valid_qk: str
    valid_v: str
    tile_m: int  # queries
    tile_n: int  # keys
    key_warps: int
    query_warps: int
    sum_key_warps: int
    column_warps: int
    dq_row_warps: int
    dq_column_warps: int
    stages: int  # 1 or 2, of Q and dO
    min_blocks: int
    k_in_registers: bool
    v_in_registers: bool
    section: int
    descending: bool  # False under a causal mask: the first keys are seen by the most queries
    shared_bytes: int
    scale_log2: str
    gradient_scale: str
    pointwise: bool
    has_score: bool
    has_score_gradient: bool
    has_mask: bool
    has_weight: bool
    distance: bool  # score and score_gradient take i - j as a float
    row_terms: bool  # score, score_gradient and keep take a `row`
    column_terms: bool  # and a `column`
    alternatives: int
    stored: StoredRow | None
    scores_finite: bool
    q_buffer: int | None  # rotated queries, or None: args.q
    k_buffer: int | None  # rotated keys, or None: args.k
    terms_buffer: int | None  # None where it is pointwise
    dq_buffer: int
    dk_buffer: int | None  # float32 rows of dK for a kernel behind this one, or None: args.dk
    needs_float_rows: bool
    k_rotations: tuple[RotationContext, ...]  # undone on dK, in reverse order


@dataclass(frozen=True)
class QueryGradientContext:
    """`backward_queries.cu.j2`. Grid: `ceil(M / tile_m) * Hq * B` in x; threads: `32 * warps`.

    d_o as in BackwardContext. `shared_bytes` = max(2 * (tile_m + 2 * tile_n) * (d_qk + d_v),
    4 * tile_m * (d_qk + 4)). `tile_m` is a multiple of `16 * warps`, `tile_n` of 16.
    """

    name: str
    d_qk: int
    d_v: int
    head_qk: int
    head_v: int
    valid_qk: str
    valid_v: str
    tile_m: int  # queries
    tile_n: int  # keys
    warps: int
    min_blocks: int
    section: int
    descending: bool
    shared_bytes: int
    scale_log2: str
    gradient_scale: str
    pointwise: bool
    has_score: bool
    has_score_gradient: bool
    has_mask: bool
    has_weight: bool
    distance: bool
    row_terms: bool
    column_terms: bool
    alternatives: int
    stored: StoredRow | None
    scores_finite: bool
    q_buffer: int | None  # rotated queries, or None: args.q
    k_buffer: int | None  # rotated keys, or None: args.k
    terms_buffer: int | None  # None where it is pointwise
    q_rotations: tuple[RotationContext, ...]  # undone on dQ, in reverse order
    dq_buffer: int | None  # the dQ sum, for a kernel behind this one, or None: args.dq
    sum_columns: int  # of a row of it


@dataclass(frozen=True)
class PostprocessContext:
    """`postprocess.cu.j2`. Grid: `ceil(M / tile_rows) * Hq * B` in x.

    `shared_bytes` = 4 * tile_rows * (d_qk + 4); `tile_rows` is a multiple of 16.
    """

    name: str
    d_qk: int
    head_qk: int
    tile_rows: int
    threads: int
    shared_bytes: int
    gradient_scale: str
    dq_buffer: int
    q_rotations: tuple[RotationContext, ...]  # undone on dQ, in reverse order


@dataclass(frozen=True)
class TransformOperand:
    """q or k with row blocks among its steps; `buffer`: where its rows go."""

    tensor: str  # q or k
    rows: str  # M or N
    heads: str  # Hq or Hk
    steps: tuple[StepContext, ...]
    buffer: int


@dataclass(frozen=True)
class TransformContext:
    """`transform.cu.j2`. Grid: the sum over operands of `ceil(rows / tile_rows) * heads * B` in x; threads:
    `8 * tile_rows`. `shared_bytes` = 4 * tile_rows * (columns + 4).
    """

    name: str
    tile_rows: int
    columns: int
    shared_bytes: int
    operands: tuple[TransformOperand, ...]  # one or two


@dataclass(frozen=True)
class RowsBackContext:
    """`rows_back.cu.j2`: the derivative of the steps of q, k or the output. Grid: `<name>_shares` blocks in
    x; threads: `8 * tile_rows`.

    `states`: row blocks; `sums`: terms of a row. `shared_bytes` = 4 * (tile_rows * ((states + 1) *
    (columns + 4) + sums) + sums). `forward`: the steps whose result a derivative reads.
    """

    name: str
    tensor: Literal["q", "k", "o"]
    rows: str
    heads: str
    tile_rows: int
    columns: int
    states: int
    sums: int
    shared_bytes: int
    gradient_scale: str
    sum_buffer: int  # float32 dQ or dK; of the output: where the gradient goes
    sum_columns: int  # of a row of float32 dQ or dK
    has_lse: bool
    forward: tuple[StepContext, ...]
    backward: tuple[StepContext, ...]
    gradients: tuple[SharedGradient, ...]
    buffer: int | None
    reads: tuple[SumRead, ...]
    by_column: tuple[SumRead, ...]


@dataclass(frozen=True)
class CapturedContext:
    """`captured.cu.j2`. Grid: `<name>_shares` blocks in x; threads: `2 * tile_m`.

    `all_reads`: of the unit's functions; `values`, `places`: shared memory for a value, a place of each
    score.
    With tiles = 2 * (tile_m + tile_n) * (d_qk + d_v) if a read is in a score, else 0: `shared_bytes` =
    tiles + 8 * tile_m + 4 * tile_m * (tile_n + 8) * (values + places).
    """

    name: str
    d_qk: int
    d_v: int
    head_qk: int
    head_v: int
    valid_qk: str
    valid_v: str
    tile_m: int
    tile_n: int
    shared_bytes: int
    scale_log2: str
    pointwise: bool
    has_score: bool
    has_mask: bool
    has_weight: bool
    distance: bool
    row_terms: bool
    column_terms: bool
    stored: StoredRow | None
    alternatives: int
    q_buffer: int | None
    k_buffer: int | None
    terms_buffer: int | None
    gradients: tuple[SharedGradient, ...]
    buffer: int | None
    all_reads: int
    reads: tuple[SumRead, ...]
    values: bool
    places: bool


@dataclass(frozen=True)
class ClearContext:
    """`clear.cu.j2`. Any grid in x."""

    name: str
    threads: int
    groups: tuple[SharesContext, ...]


@dataclass(frozen=True)
class SumContext:
    """`sum.cu.j2`. Grid: a warp for each element of the largest copied gradient in x, gradients in y."""

    name: str
    threads: int
    group: SharesContext
