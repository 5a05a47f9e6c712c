# SPDX-License-Identifier: Apache-2.0
"""The sm_80 family (80, 86, 89, 120, and 90 without its own instructions): mma.sync, ldmatrix, cp.async."""

from __future__ import annotations

from dataclasses import dataclass

STORAGES = ("bfloat16", "float16")
ELEMENTS = {"bfloat16": "Bf16", "float16": "F16"}
HEAD_MULTIPLE = 8
HEAD_MAX = 256
L2_BYTES = 32 * 2**20  # K and V of the heads worked on at a time should fit; A100 has 40 MB, H200 60 MB


def padded(head: int) -> int:
    """Columns of a tile: whole blocks of the tensor cores."""
    return -(-head // 16) * 16


@dataclass(frozen=True)
class ForwardTile:
    """`queries` x `keys` for heads up to `head_max`; `min_blocks` per SM bounds the registers of a thread."""

    head_max: int
    queries: int
    keys: int
    warps: int
    min_blocks: int
    q_in_registers: bool

    def shared_bytes(self, head_qk: int, head_v: int, float_rows: bool = False) -> int:
        """Q, two stages of K and V; at the end O over all of it, in float32 if `float_rows`."""
        head_qk, head_v = padded(head_qk), padded(head_v)
        inputs = 2 * (self.queries * head_qk + 2 * self.keys * (head_qk + head_v))
        output = 4 * self.queries * (head_v + 4) if float_rows else 2 * self.queries * head_v
        return max(inputs, output)


@dataclass(frozen=True)
class BackwardTile:
    """Warps of a block: `key_warps` x `query_warps` for scores, `sum_key_warps` x `column_warps` for dK and
    dV, `dq_row_warps` x the rest for dQ.

    `k_in_registers`, `v_in_registers`: a warp keeps its rows of K or V as operands.
    """

    head_max: int
    queries: int
    keys: int
    key_warps: int
    query_warps: int
    sum_key_warps: int
    dq_row_warps: int
    stages: int
    min_blocks: int
    k_in_registers: bool
    v_in_registers: bool

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.key_warps * self.query_warps

    @property
    def column_warps(self) -> int:
        """Warps along the columns of dK and dV."""
        return self.warps // self.sum_key_warps

    def keeps_v(self, head_qk: int, head_v: int) -> bool:
        """Whether V is in registers: it passes through the second stage and the place of P and dS."""
        head_qk, head_v = padded(head_qk), padded(head_v)
        later = 2 * (self.stages - 1) * self.queries * (head_qk + head_v) + 4 * self.queries * self.keys
        return self.v_in_registers and 2 * self.keys * head_v <= later

    def shared_bytes(self, head_qk: int, head_v: int, float_rows: bool, row_terms: bool) -> int:
        """K, V, stages of Q and dO, P, dS, row terms; at the end dK and dV over all of it."""
        kept = self.keeps_v(head_qk, head_v)
        head_qk, head_v = padded(head_qk), padded(head_v)
        k, v = 2 * self.keys * head_qk, 2 * self.keys * head_v
        stages = 2 * self.stages * self.queries * (head_qk + head_v)
        inputs = k + (0 if kept else v) + stages + 4 * self.queries * self.keys
        rows = 4 * self.keys * (head_qk + 4) if float_rows else 0
        return max(inputs + (16 * self.queries if row_terms else 0), rows, k + v)


@dataclass(frozen=True)
class QueryGradientTile:
    """`queries` x `keys` of the kernel that computes dQ in a fixed order, for heads up to `head_max`."""

    head_max: int
    queries: int
    keys: int
    warps: int
    min_blocks: int

    def shared_bytes(self, head_qk: int, head_v: int) -> int:
        """Q and dO, two stages of K and V; at the end float rows of dQ over all of it."""
        head_qk, head_v = padded(head_qk), padded(head_v)
        inputs = 2 * (self.queries + 2 * self.keys) * (head_qk + head_v)
        return max(inputs, 4 * self.queries * (head_qk + 4))


@dataclass(frozen=True)
class CapturedTile:
    """`queries` x `keys` of the kernel of captured gradients, for heads up to `head_max`; a warp to 16
    queries.
    """

    head_max: int
    queries: int
    keys: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.queries // 16

    def shared_bytes(self, head_qk: int, head_v: int, walks: bool, values: bool, places: bool) -> int:
        """Q, dO, K, V (if it walks over keys) and row terms; a value and a place for each score."""
        tiles = 2 * (self.queries + self.keys) * (padded(head_qk) + padded(head_v)) if walks else 0
        return tiles + 8 * self.queries + 4 * self.queries * (self.keys + 8) * (values + places)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a class of GPUs: the first that fits the heads is taken, what follows holds less."""

    shared_bytes: int  # dynamic, of a block; kernels declare up to 512 bytes beside it
    forward: tuple[ForwardTile, ...]
    backward: tuple[BackwardTile, ...]


# Registers and times of each: docs/notes/sm80.md.
_WIDE_FORWARD = (ForwardTile(192, 64, 32, 4, 1, False), ForwardTile(256, 64, 32, 4, 1, False))
_WIDE_BACKWARD = (
    BackwardTile(192, 32, 64, 4, 2, 2, 2, 1, 1, False, False),
    BackwardTile(256, 32, 32, 2, 2, 2, 2, 1, 1, False, False),
)
# Where scores or masks leave few registers: nothing is kept as operands, and blocks of a warp are small.
_FRUGAL_BACKWARD = (
    BackwardTile(64, 64, 64, 2, 2, 2, 2, 2, 2, False, False),
    BackwardTile(128, 64, 64, 4, 2, 2, 2, 1, 1, False, False),
)
# Compute capability 8.6, 8.9 and 12.0: 100 KB an SM, so one block of eight warps or two small ones.
_SMALL = Tiles(
    99 * 1024 - 512,
    (
        ForwardTile(64, 128, 32, 4, 2, True),
        ForwardTile(96, 128, 64, 8, 1, False),
        ForwardTile(128, 128, 64, 8, 1, True),
        ForwardTile(128, 64, 64, 4, 2, True),
        *_WIDE_FORWARD,
    ),
    (
        BackwardTile(64, 64, 128, 4, 2, 4, 2, 2, 1, True, True),
        _FRUGAL_BACKWARD[0],
        BackwardTile(128, 32, 128, 8, 1, 4, 2, 2, 1, True, True),
        _FRUGAL_BACKWARD[1],
        *_WIDE_BACKWARD,
    ),
)
# 8.0, 9.0 and the others with at least 163 KB for a block.
_LARGE = Tiles(
    163 * 1024 - 512,
    (
        ForwardTile(64, 128, 64, 4, 2, False),
        ForwardTile(96, 64, 64, 4, 2, False),
        ForwardTile(128, 64, 64, 4, 2, True),
        *_WIDE_FORWARD,
    ),
    (
        BackwardTile(64, 128, 128, 4, 2, 4, 4, 2, 1, False, False),
        _FRUGAL_BACKWARD[0],
        BackwardTile(128, 64, 128, 4, 2, 4, 2, 2, 1, False, False),
        _FRUGAL_BACKWARD[1],
        *_WIDE_BACKWARD,
    ),
)
# With weight blocks, whose factors need registers beside the accumulators.
_WEIGHTED = Tiles(
    _SMALL.shared_bytes,
    (ForwardTile(96, 64, 64, 4, 2, False), ForwardTile(128, 64, 64, 4, 2, True), *_WIDE_FORWARD),
    (*_FRUGAL_BACKWARD, *_WIDE_BACKWARD),
)
NAMES = {"sm80": _LARGE, "sm86": _SMALL}  # targets by their tiles, those that ask for most of a GPU first
SMALLEST = "sm86"  # runs on all of the family
_SMALL_CAPABILITIES = (86, 89, 120, 121)


def name_for(capability: int | None) -> str:
    """The target for machine code that uses a compute capability (times ten); None: for PTX, which the driver
    compiles for whatever GPU it meets.
    """
    return SMALLEST if capability is None or capability in _SMALL_CAPABILITIES else "sm80"


def class_text(target: str) -> str:
    """In words, the GPUs that a target's tiles are for."""
    return f"GPUs with at least {-(-NAMES[target].shared_bytes // 1024)} KB of shared memory a block"


def tiles_of(
    target: str, head_qk: int, head_v: int, steps: tuple[int, int] = (0, 0), weighted: bool = False
) -> tuple[ForwardTile | None, BackwardTile | None]:
    """The tiles of both kernels, `steps` further down than the first that fit the heads; None past the end.

    A further tile holds less: it is what is tried where a kernel does not fit in registers. `weighted`: the
    program has weight blocks.
    """
    head = max(head_qk, head_v)
    tiles = _WEIGHTED if weighted else NAMES[target]
    front = [t for t in tiles.forward if head <= t.head_max]
    back = [t for t in tiles.backward if head <= t.head_max]
    first, second = steps
    return (
        front[first] if first < len(front) else None,
        back[second] if second < len(back) else None,
    )


CAPTURED = (CapturedTile(64, 64, 64), CapturedTile(192, 64, 32), CapturedTile(256, 32, 32))
QUERY_GRADIENT = (
    QueryGradientTile(64, 64, 64, 4, 2),
    QueryGradientTile(192, 64, 32, 4, 1),
    QueryGradientTile(256, 64, 16, 4, 1),
)

ROTATE_THREADS, ROTATE_ROWS = 256, 16
TRANSFORM_ROWS = 32  # eight lanes to a row
ROW_TILES = (32, 16, 8, 4)  # rows of a kernel that differentiates row or output blocks, eight lanes to a row
ROW_SHARED_BYTES = 48 * 1024  # so that two blocks fit an SM
CLEAR_BLOCKS, CLEAR_THREADS, SUM_THREADS = 256, 256, 256
BATCH_HEADS_PER_SHARE = 16  # (batch, head)s that share one computation of the coefficients
PREPROCESS_ROWS = 32
POSTPROCESS_ROWS, POSTPROCESS_THREADS = 32, 256


TYPICAL_ROWS = 8192  # the length for which heads are grouped to share the L2 cache


def section_heads(head_qk: int, head_v: int) -> int:
    """Heads worked on at a time, for a typical sequence, so that their K and V stay in the L2 cache."""
    return max(1, L2_BYTES // (TYPICAL_ROWS * (head_qk + head_v) * 2))


def row_tile(columns: int, blocks: int, terms: int) -> int:
    """Rows of a block of the kernel that differentiates `blocks` row blocks, with `terms` terms of a row for
    gradients of captured tensors."""
    return next((r for r in ROW_TILES if row_bytes(r, columns, blocks, terms) <= ROW_SHARED_BYTES), 4)


def row_bytes(rows: int, columns: int, blocks: int, terms: int) -> int:
    """The row ahead of each row block, its gradient, and its terms; the sums of terms over the rows."""
    return 4 * (rows * (blocks + 1) * (columns + 4) + (rows + 1) * terms)
