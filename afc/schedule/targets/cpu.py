# SPDX-License-Identifier: Apache-2.0
"""The CPU target: C++17 tiles, vectors of whole panels, OpenMP over work items."""

from __future__ import annotations

from dataclasses import dataclass

from afc.ir.tiled import Tile

NAME = "cpu"
STORAGES = ("float64", "float32", "bfloat16", "float16")
COMPUTE = {"float64": "double", "float32": "float", "bfloat16": "float", "float16": "float"}
HEAD_MULTIPLE = 1
HEAD_MAX = 1024
ISA = "x86-64-v3"
EXTENT_BLOCK, EXTENT_LEVELS = 32, 12  # of the tables in runtime/cpu/bounds.hpp


@dataclass(frozen=True)
class Tiles:
    """`rows`: queries in vector lanes, keys streamed (forward, dQ); `keys`: the other way round (dK, dV).

    A lane side is a multiple of a panel (24 floats, 12 doubles), a streamed side of 4.
    """

    rows: Tile
    keys: Tile


# A lane tile and a streamed tile of a head of 64..128 columns stay within a 512 KB second-level cache.
TILES = {
    "float": Tiles(Tile(queries=96, keys=64), Tile(queries=64, keys=96)),
    "double": Tiles(Tile(queries=96, keys=32), Tile(queries=32, keys=96)),
}
