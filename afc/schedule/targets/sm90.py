# SPDX-License-Identifier: Apache-2.0
"""Hopper with its own instructions (sm_90a): wgmma, TMA, warp specialisation.

Tiles as measured: docs/notes/hopper.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NAME = "sm90"
STORAGES = ("bfloat16", "float16")
HEAD_MULTIPLE = 16
HEAD_MAX = 256
SHARED_BYTES = 227 * 1024
L2_SECTION_BYTES = 40 * 2**20  # what the heads of a section share
REGISTERS_OF_CONSUMERS = {2: 240, 3: 160}


@dataclass(frozen=True)
class ForwardTile:
    """64 query rows per consumer warpgroup, `keys` per step. For heads up to `head_max`."""

    head_max: int
    consumers: int
    keys: int
    stages: int = 2
    softmax: Literal["exact", "stale", "watched"] = "watched"

    @property
    def queries(self) -> int:
        """Rows of the query tile."""
        return 64 * self.consumers

    def accumulators(self, head_v: int) -> int:
        """Registers of a thread that hold S, O and P: N/2 + Dv/2 + N/4."""
        return self.keys // 2 + head_v // 2 + self.keys // 4

    def fits(self, head_v: int) -> bool:
        """The register rule: what a consumer keeps, and 28 registers to work with, stay within its share.

        Beyond it ptxas spills and then serialises the products; it predicted every build that was tried.
        """
        return self.accumulators(head_v) + 28 <= REGISTERS_OF_CONSUMERS[self.consumers]


@dataclass(frozen=True)
class BackwardTile:
    """64 key rows per consumer warpgroup (two of them), `queries` per step."""

    head_max: int
    queries: int
    stages: int = 2
    ds_stages: int = 2


FORWARD = (
    ForwardTile(64, 3, 128),
    ForwardTile(128, 3, 80),
    ForwardTile(192, 2, 112),
    ForwardTile(256, 2, 80),
)

BACKWARD = (BackwardTile(64, 128), BackwardTile(128, 80), BackwardTile(256, 64, 1, 1))
