# SPDX-License-Identifier: Apache-2.0
"""The sm_80 family (80, 86, 89, 120, and 90 without its own instructions): mma.sync, ldmatrix, cp.async."""

from __future__ import annotations

from dataclasses import dataclass

NAME = "sm80"
STORAGES = ("bfloat16", "float16")
ELEMENTS = {"bfloat16": "Bf16", "float16": "F16"}
HEAD_MULTIPLE = 8
HEAD_MAX = 256
# Dynamic shared memory of a block on compute capability 8.6, 8.9 and 12.0, the least in the family;
# kernels declare up to 512 bytes beside it.
SHARED_BYTES = 99 * 1024 - 512
L2_BYTES = 32 * 2**20  # K and V of the heads worked on at a time should fit; A100 has 40 MB, H200 60 MB


def padded(head: int, warps: int = 1) -> int:
    """Columns of a tile: whole blocks of the tensor cores for each of the warps along them."""
    return -(-head // (16 * warps)) * 16 * warps


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
    """Warps of a block: `key_warps` x `query_warps` x `column_warps`."""

    head_max: int
    queries: int
    keys: int
    key_warps: int
    query_warps: int
    column_warps: int
    dq_row_warps: int
    q_stages: int
    do_stages: int
    min_blocks: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.key_warps * self.query_warps * self.column_warps

    def shared_bytes(self, head_qk: int, head_v: int, float_rows: bool, row_terms: bool) -> int:
        """K, V, stages of Q and dO, dS, row terms; at the end float rows of dK and dV over all of it."""
        head_qk, head_v = padded(head_qk, self.column_warps), padded(head_v, self.column_warps)
        rows = 0
        if float_rows:
            rows = 4 * self.keys * max(head_qk + 4, head_v)
        elif self.query_warps > 1:
            rows = 4 * self.keys * max(head_qk, head_v)
        q_and_do = self.queries * (self.q_stages * head_qk + self.do_stages * head_v)
        inputs = 2 * (self.keys * (head_qk + head_v) + q_and_do + self.queries * self.keys)
        return max(rows, inputs + (16 * self.queries if row_terms else 0))


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


# First fit by head size. Registers and times of each: docs/notes/sm80.md.
FORWARD = (
    ForwardTile(64, 128, 64, 4, 2, False),
    ForwardTile(96, 64, 64, 4, 2, False),
    ForwardTile(128, 64, 64, 4, 2, True),
    ForwardTile(192, 64, 32, 4, 1, False),
    ForwardTile(256, 64, 32, 4, 1, False),
)

BACKWARD = (
    BackwardTile(64, 64, 64, 4, 1, 1, 2, 2, 2, 2),
    BackwardTile(128, 32, 64, 4, 1, 1, 2, 2, 2, 1),
    BackwardTile(192, 32, 64, 4, 1, 2, 2, 1, 1, 1),
    BackwardTile(256, 32, 32, 2, 2, 2, 2, 1, 1, 1),
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
BATCH_HEADS_PER_SHARE = 6  # (batch, head)s that share one computation of the coefficients
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
