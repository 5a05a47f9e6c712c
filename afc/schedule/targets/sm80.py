# SPDX-License-Identifier: Apache-2.0
"""The sm_80 family (80, 86, 89, 120, and 90 without its own instructions): mma.sync, ldmatrix, cp.async."""

from __future__ import annotations

from dataclasses import dataclass

NAME = "sm80"
STORAGES = ("bfloat16", "float16")
ELEMENTS = {"bfloat16": "Bf16", "float16": "F16"}
HEAD_MULTIPLE = 16
HEAD_MAX = 256
# Dynamic shared memory of a block on compute capability 8.6, 8.9 and 12.0, the least in the family;
# kernels declare up to 512 bytes beside it.
SHARED_BYTES = 99 * 1024 - 512
L2_BYTES = 32 * 2**20  # K and V of the heads worked on at a time should fit; A100 has 40 MB, H200 60 MB


@dataclass(frozen=True)
class ForwardTile:
    """`queries` x `keys` for heads up to `head_max`; `min_blocks` per SM bounds the registers of a thread."""

    head_max: int
    queries: int
    keys: int
    warps: int
    min_blocks: int
    q_in_registers: bool

    def shared_bytes(self, head_qk: int, head_v: int) -> int:
        """Q, two stages of K and V; at the end O over all of it."""
        inputs = 2 * (self.queries * head_qk + 2 * self.keys * (head_qk + head_v))
        return max(inputs, 2 * self.queries * head_v)


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

    def shared_bytes(self, head_qk: int, head_v: int, float_rows: bool) -> int:
        """K, V, stages of Q and dO, dS, row terms; at the end float rows of dK and dV over all of it."""
        rows = 0
        if float_rows:
            rows = 4 * self.keys * max(head_qk + 4, head_v)
        elif self.query_warps > 1:
            rows = 4 * self.keys * max(head_qk, head_v)
        q_and_do = self.queries * (self.q_stages * head_qk + self.do_stages * head_v)
        inputs = (
            2 * (self.keys * (head_qk + head_v) + q_and_do + self.queries * self.keys) + 16 * self.queries
        )
        return max(rows, inputs)


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

# With weight blocks, whose factors need registers beside the accumulators.
FORWARD_WEIGHTED = FORWARD[1:]
BACKWARD_WEIGHTED = (
    BackwardTile(64, 64, 64, 4, 1, 1, 2, 2, 2, 2),
    BackwardTile(128, 16, 64, 4, 1, 1, 1, 2, 2, 1),
)
HEAD_MAX_WEIGHTED = 128  # wider heads leave no registers for the factors

ROTATE_THREADS, ROTATE_ROWS = 256, 16
BATCH_HEADS_PER_SHARE = 6  # (batch, head)s that share one computation of the coefficients
PREPROCESS_ROWS = 32
POSTPROCESS_ROWS, POSTPROCESS_THREADS = 32, 256


def forward_tile(head: int, has_weight: bool) -> ForwardTile:
    """The tile of the forward kernel for heads of this size."""
    return next(t for t in (FORWARD_WEIGHTED if has_weight else FORWARD) if head <= t.head_max)


def backward_tile(head: int, has_weight: bool) -> BackwardTile:
    """The tile of the backward kernel for heads of this size."""
    return next(t for t in (BACKWARD_WEIGHTED if has_weight else BACKWARD) if head <= t.head_max)


TYPICAL_ROWS = 8192  # the length for which heads are grouped to share the L2 cache


def section_heads(head_qk: int, head_v: int) -> int:
    """Heads worked on at a time, for a typical sequence, so that their K and V stay in the L2 cache."""
    return max(1, L2_BYTES // (TYPICAL_ROWS * (head_qk + head_v) * 2))
