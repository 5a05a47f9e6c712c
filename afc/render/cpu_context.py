# SPDX-License-Identifier: Apache-2.0
"""What the CPU templates see: pure data, decided before rendering.

`templates/cpu/module.cpp.j2` is rendered with `CpuContext` as the variable `unit`, under `StrictUndefined`,
`trim_blocks` and `lstrip_blocks`. The text is one C++17 unit for one (attention, Dqk, Dv, dtype). It includes
`abi/...`, `host/...` and `cpu/...` relative to the folder `runtime`. It defines, with C linkage and hidden
visibility:

    int64_t <name>_workspace(const afc_args *args, int backward);  // bytes; depends on args->threads
    int <name>_forward(const afc_args *args);
    int <name>_backward(const afc_args *args);                     // only with `backward`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from afc.render.launch_context import ScalarCheck


@dataclass(frozen=True)
class CpuRotationRead:
    """A read of a captured tensor marked `grad` in a rotation: the place of its tensor in `learned` of the
    operand, and the functions that give what a pair adds (`value`) and where (`offset`).
    """

    gradient: int
    value: str
    offset: str


@dataclass(frozen=True)
class CpuRotation:
    """One rotation of a row: `pairs` pairs of columns, from column `first` on.

    `index` is the r of the generated function `rotate_<operand>_coefficients_<r>`, which fills
    `coefficients` values: `plain` from (position, pair, Real *c), else from (args, b, h, row, position,
    pair, Real *c). `half` pairs column first + c with first + pairs + c, `adjacent` pairs column first + 2c
    with first + 2c + 1. `a00, a01, a10, a11` are the entries of the 2x2 matrix as C expressions in c[...],
    such as "c[0]" and "-c[1]". `table_offset` is the first column of this rotation in the operand's
    coefficient table: the sum of `coefficients * pairs`, rounded up to even, over the rotations before it.
    `call` is the source text, for a comment.
    """

    index: int
    first: int
    pairs: int
    pairing: Literal["half", "adjacent"]
    coefficients: int
    a00: str
    a01: str
    a10: str
    a11: str
    table_offset: int
    call: str
    plain: bool
    reads: tuple[CpuRotationRead, ...]


@dataclass(frozen=True)
class CpuOutputRead:
    """A read of a captured tensor marked `grad` in an output or row block: the place of its tensor in
    `output_gradients` (in `learned`), the first of the row sums that are its own (one per column), and the
    call that gives the place of column c in the gradient.
    """

    gradient: int
    start: int
    offset: str


@dataclass(frozen=True)
class CpuRow:
    """A row or output block: its functions are `name` and `name`_gradient; `call` is the source text.

    `sums`: the first of the operand's (the output's) row sums that are its own. `reads`: of captured tensors
    whose gradient is asked for, where they are summed row by row (`by_row` of the operand), with their place
    in `learned`; `width`: its columns.
    """

    name: str
    call: str
    sums: int
    reads: tuple[CpuOutputRead, ...] = ()
    width: int = 0


@dataclass(frozen=True)
class CpuRotated:
    """An operand with steps: `name` is "q" or "k". `steps`: rotations and row blocks in the order in which
    they act, at least one; `rotations`, `row_blocks`: those of either kind; `row_sums`: sums over rows that
    the row blocks need for gradients of captured tensors.

    `heads, rows, origin` are the fields of afc_args: ("Hq", "M", "q_origin") or ("Hk", "N", "k_origin").
    `table_width` is that sum over all of them. The buffers `<name>_rotated` and `<name>_table` must exist.
    `by_batch`, `by_head`: what the coefficients depend on beside the position, or also (not `plain`) through
    captured tensors; with an origin per batch there is a table per batch in any case. `by_row`: some
    row block reads a learned tensor by row, so that sums over rows do not do. `learned`: captured tensors
    whose gradient is asked for and that rotations read or, `by_row`, row blocks.
    """

    name: Literal["q", "k"]
    heads: str
    rows: str
    origin: str
    rotations: tuple[CpuRotation, ...]
    table_width: int
    by_batch: bool
    by_head: bool
    plain: bool
    steps: tuple[CpuRotation | CpuRow, ...]
    row_blocks: tuple[CpuRow, ...]
    row_sums: int
    by_row: bool = False
    learned: tuple[CpuCapturedGradient, ...] = ()

    @property
    def task_sums(self) -> bool:
        """Whether row blocks are summed over the rows of a task."""
        return self.row_sums > 0 and not self.by_row


@dataclass(frozen=True)
class CpuBuffer:
    """A part of the workspace: `count` values of C++ type `c_type`.

    `count` is an int64_t expression in `args` and the constants of the unit. The templates use these names:

    | name                  | type    | count                                                  |
    |-----------------------|---------|--------------------------------------------------------|
    | q_rotated, k_rotated  | Element | args.B * args.Hq * args.M * HEAD_QK  (k: Hk, N)        |
    | q_table, k_table      | Real    | q_tables(args).count() * args.M * Q_TABLE_WIDTH        |
    | delta (backward only) | Real    | args.B * args.Hq * args.M                              |
    | extents_<tensor>_<axis> | afc::Extent | of a captured tensor that the mask reads             |
    | d_raw (backward only) | Element | args.B * args.Hq * args.M * HEAD_V; with output blocks |

    Per-thread scratch is placed behind them by the template.
    """

    name: str
    c_type: Literal["Element", "Real", "afc::Extent"]
    count: str
    backward_only: bool


@dataclass(frozen=True)
class CpuTable:
    """A captured tensor that the test of tiles reads: its slot and name, the C++ type of its values, the axis
    along which ranges are looked up (-1: none), the buffer of their extents ("": none, small boxes are read)
    and its count."""

    slot: int
    name: str
    type: str
    axis: int
    buffer: str
    count: str


@dataclass(frozen=True)
class CpuRowRead:
    """A read in a row block of an operand with `heads`, `rows` (fields of afc_args) and `tile` rows to a
    task: the first of the row sums that are its own, how many they are (one per column), and the call that
    gives the place of column c in the gradient.
    """

    operand: str
    heads: str
    rows: str
    tile: str
    start: int
    width: int
    offset: str


@dataclass(frozen=True)
class CpuRowGradient:
    """A captured tensor that row blocks read: its place in the signature; `also`: scores or output blocks
    read it too.
    """

    name: str
    slot: int
    also: bool
    reads: tuple[CpuRowRead, ...]


@dataclass(frozen=True)
class CpuCapturedGradient:
    """A captured tensor whose gradient is asked for: its place in the signature, and the dimension that the
    batch, the query head, the query row alone index in every read (-1: none). `also`, of one that output
    blocks read: scores read it too.
    """

    name: str
    slot: int
    axes: tuple[int, int, int]
    also: bool = False


@dataclass(frozen=True)
class CpuCapturedRead:
    """A read of such a tensor: its place in `gradients[...]` and that of its tensor in `captured_gradients`;
    the rest as in render.blocks.CapturedText.
    """

    index: int
    gradient: int
    offset: str
    by_row: bool
    reads_position: bool
    extra: bool
    weight: bool


@dataclass(frozen=True)
class CpuContext:
    """One unit.

    Text:
      name        prefix of the entry functions, a C identifier
      provenance  lines of the header comment, without "// "
      blocks      generated functions, C++ text (struct Item, load_item, score, keep, runs, coefficients)
    Types:
      element     storage type: "double", "float", "afc::bfloat16" or "afc::float16"
      real        compute type, also of LSE and its gradient in memory: "double" for double, else "float"
    Sizes:
      head_qk, head_v               width of a q or k row, of a v or o row; at least 1
      query_tile, key_tile          forward and dQ: queries in vector lanes, keys streamed
      stream_query_tile, lane_key_tile  dK and dV: queries streamed, keys in vector lanes
      A lane tile is a multiple of 96 / sizeof(real) (24 float, 12 double; twice that for AVX-512), a streamed
      tile of 4.
    Numbers, as C++ literals of type Real:
      scale_log2, softmax_scale (positive), gradient_scale
    Features:
      has_score, has_score_gradient, has_mask, has_extra, has_weight
                  which of score, score_gradient, keep, log_extra, weight_factor exist in `blocks`
      pointwise   the score is the weight: no sum over the keys, LSE or delta; never with `has_extra`
      rotated     rotated operands, q before k; may be empty
      buffers     parts of the workspace
      captured    number of captured tensors
      captured_gradients, captured_reads
                  captured tensors whose gradient is asked for and is not 0 everywhere, and their reads
      outputs     output blocks in the order in which they act; may be empty
      output_gradients, output_reads
                  captured tensors whose gradient is asked for and that output blocks read, and their reads
      row_gradients   captured tensors whose gradient is asked for and that row blocks read, but not by row
      gradient_slots  bit n: captured tensor n may take a gradient
      scalar_checks  conditions on run-time scalars, checked at each call
      backward    whether the unit has a backward
    Tiles:
      run_type    "Run" or "Runs<n>": what key_run and query_run find from bounds
      stored      key_run and query_run test tiles instead, and write runs to memory
      tables      captured tensors that the test reads, in the order of `tables[...]` in `blocks`
    """

    name: str
    provenance: tuple[str, ...]
    blocks: str
    element: Literal["double", "float", "afc::bfloat16", "afc::float16"]
    real: Literal["double", "float"]
    head_qk: int
    head_v: int
    query_tile: int
    key_tile: int
    stream_query_tile: int
    lane_key_tile: int
    scale_log2: str
    softmax_scale: str
    gradient_scale: str
    has_score: bool
    has_score_gradient: bool
    has_mask: bool
    has_extra: bool
    has_weight: bool
    pointwise: bool
    rotated: tuple[CpuRotated, ...]
    buffers: tuple[CpuBuffer, ...]
    captured: int
    captured_gradients: tuple[CpuCapturedGradient, ...]
    captured_reads: tuple[CpuCapturedRead, ...]
    outputs: tuple[CpuRow, ...]
    output_gradients: tuple[CpuCapturedGradient, ...]
    output_reads: tuple[CpuOutputRead, ...]
    row_gradients: tuple[CpuRowGradient, ...]
    gradient_slots: int
    scalar_checks: tuple[ScalarCheck, ...]
    backward: bool
    run_type: str
    stored: bool
    tables: tuple[CpuTable, ...]
