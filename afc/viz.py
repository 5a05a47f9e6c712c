# SPDX-License-Identifier: Apache-2.0
"""Pictures of a mask (`afc viz`): which elements it keeps, and which tiles the forward kernel visits.

Two forms: SVG, and text for a terminal. Both show a square of `length` queries (down) and keys (across),
origins 0, batch 0 and head 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from afc import api
from afc.explain import (
    Piece,
    Visited,
    assumed,
    bounded,
    captured,
    check_length,
    conjuncts,
    forward_kernel,
    pieces,
    select,
    sizes_of,
    visited,
)
from afc.expr.evaluate import evaluate
from afc.expr.nodes import Expr, variables
from afc.expr.printer import attn, number
from afc.frontend import check_file
from afc.options import Constant, Options

LARGEST = 8192  # positions: each element is evaluated
CELLS = 512  # of the element map, across; more positions share a cell
COLUMNS, ROWS = 64, 32  # of the maps in a terminal
NONE, SOME, ALL = 0, 1, 2  # how much of a cell is kept; of a tile: not visited, partial, full
SIDE, GAP, TOP, FOOT = 480, 56, 64, 72  # of a panel, in pixels
COLOURS = {NONE: "#eef1f4", SOME: "#f2a65a", ALL: "#2f6690"}
INK, GRID = "#22303c", "#ffffff"
ELEMENTS = {NONE: "masked", SOME: "in part, or open", ALL: "kept"}
TILES = {NONE: "not visited", SOME: "partial", ALL: "full"}


@dataclass(frozen=True)
class Map:
    """A mask of one attention. `cells` [C, C]: how much of a square of `step` elements is kept.

    `open`: parts of the mask that read captured tensors and are left out: `cells` then has no ALL, as a
    call may remove any element. `values`: run-time scalars that were assumed. `bounded`: "at most " where a
    call may visit fewer tiles.
    """

    name: str
    mask: str
    length: int
    step: int
    cells: Any
    steps: tuple[Piece, ...]
    visited: Visited
    tile: tuple[int, int]
    target: str
    open: tuple[str, ...]
    by_head: bool
    values: Mapping[str, Constant]
    bounded: str

    @property
    def caption(self) -> list[str]:
        """What the picture assumes, and shares."""
        tiles = f"{self.bounded}{self.visited.steps} tiles of {self.tile[0]} x {self.tile[1]}"
        lines = [f"{self.target}: {tiles} visited, {self.visited}"]
        if self.values:
            lines.append("assumed: " + ", ".join(f"{n} = {number(v)}" for n, v in self.values.items()))
        lines += [f"open, as only a call has the tensor: {part}" for part in self.open]
        return [*lines, "batch 0, head 0"] if self.by_head else lines


def maps(path: str | Path, options: Options, length: int, attention: str | None = None) -> tuple[Map, ...]:
    """Maps of a file's attentions, or of one. Raises SourceError, UsageError."""
    check_length(length, LARGEST)
    units = api.units(select(check_file(path), attention), options)
    found = []
    for unit in units:
        plan, values = unit.plan, assumed(unit.program, length)
        parts = conjuncts(plan.semantics.mask.predicate)
        known = [p for p in parts if not captured(p)]
        open_ = tuple(attn(p) for p in parts if captured(p))
        step = -(-length // CELLS)
        cells = _cells(known, length, step, values)
        tile = forward_kernel(plan).tile
        found.append(
            Map(
                unit.program.name,
                ", ".join(s.call for s in unit.program.masks) or "no mask",
                length,
                step,
                np.minimum(cells, SOME) if open_ else cells,
                tuple(pieces(plan, length, values)),
                visited(plan, length, values),
                (tile.queries, tile.keys),
                plan.target,
                open_,
                any(variables(p) & {"b", "h"} for p in known),
                values,
                bounded(plan),
            )
        )
    return tuple(found)


def _cells(known: list[Expr], length: int, step: int, values: Mapping[str, Constant]) -> Any:
    """How much of each square of `step` elements is kept, by rows of squares."""
    columns = np.arange(length)[None, :]
    sizes = {**sizes_of(length, values), "Dqk": 0, "Dv": 0, "b": 0, "h": 0, "n": columns, "j": columns}
    rows = []
    for first in range(0, length, step):
        m = np.arange(first, min(first + step, length))[:, None]
        kept = np.ones((len(m), length), bool)
        for part in known:
            kept &= evaluate(part, {**sizes, "m": m, "i": m})
        rows.append(_amount(kept, step))
    return np.stack(rows)


def _amount(kept: Any, step: int) -> Any:
    """NONE, SOME or ALL for each group of `step` columns of a few rows."""
    starts = np.arange(0, kept.shape[1], step)
    some = np.logical_or.reduceat(kept.any(axis=0), starts)
    every = np.logical_and.reduceat(kept.all(axis=0), starts)
    return np.where(every, ALL, np.where(some, SOME, NONE))


# ---- text ------------------------------------------------------------------------------------------------


def text(pictures: Iterable[Map]) -> str:
    """The maps as characters: `.` nothing, `+` in part, `#` everything."""
    return "\n".join(_text(m) for m in pictures)


def _text(picture: Map) -> str:
    lines = [f"{picture.name}: {picture.mask}, {picture.length} positions"]
    lines += ["", "elements (. masked, + in part or open, # kept)", *_characters(picture.cells)]
    lines += ["", "tiles (. not visited, + partial, # full)", *_characters(_tile_cells(picture))]
    return "\n".join([*lines, "", *picture.caption]) + "\n"


def _tile_cells(picture: Map) -> Any:
    """The tile map on the grid of the element map; a cell on a border is as the tile of its first element."""
    count = len(picture.cells)
    cells = np.zeros((count, count), int)
    for piece in picture.steps:
        first, last = (-(-e // picture.step) for e in (piece.queries.start, piece.queries.stop))
        left, right = (-(-e // picture.step) for e in (piece.keys.start, piece.keys.stop))
        cells[first:last, left:right] = ALL if piece.full else SOME
    return cells


def _characters(cells: Any) -> list[str]:
    """Lines of at most COLUMNS characters; a character stands for several cells where there are more."""
    down, across = -(-len(cells) // ROWS), -(-len(cells) // COLUMNS)
    lines = []
    for first in range(0, len(cells), down):
        block = cells[first : first + down]
        starts = np.arange(0, block.shape[1], across)
        lowest = np.minimum.reduceat(block.min(axis=0), starts)
        highest = np.maximum.reduceat(block.max(axis=0), starts)
        amount = np.where(lowest == highest, lowest, SOME)
        lines.append("".join(".+#"[a] for a in amount))
    return lines


# ---- SVG -------------------------------------------------------------------------------------------------


def svg(pictures: Iterable[Map]) -> str:
    """The maps as one SVG document, an attention below the other."""
    shown = tuple(pictures)
    width, row = 2 * SIDE + 3 * GAP, TOP + SIDE + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{row * len(shown)}" '
        f'viewBox="0 0 {width} {row * len(shown)}" font-family="sans-serif" fill="{INK}">',
        f'<rect width="100%" height="100%" fill="{GRID}"/>',
    ]
    for number_, picture in enumerate(shown):
        parts += [f'<g transform="translate(0 {row * number_})">', *_picture(picture), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _picture(picture: Map) -> list[str]:
    title = f"{picture.name}: {picture.mask}"
    parts = [_label(GAP, 26, title, 16)]
    panels = (
        (GAP, "elements", ELEMENTS, _element_paths(picture)),
        (2 * GAP + SIDE, "tiles of the forward kernel", TILES, _tile_paths(picture)),
    )
    for left, heading, names, paths in panels:
        parts += [_label(left, TOP - 10, heading, 12), f'<g transform="translate({left} {TOP})">']
        parts += [f'<rect width="{SIDE}" height="{SIDE}" fill="{COLOURS[NONE]}"/>', *paths]
        parts += [*_axes(picture.length), "</g>", *_legend(left + SIDE, TOP - 10, names)]
    bottom = TOP + SIDE + 36
    return parts + [_label(GAP, bottom + 15 * n, line, 12) for n, line in enumerate(picture.caption)]


def _label(x: float, y: float, words: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def _axes(length: int) -> list[str]:
    """Positions at the corners; queries go down, keys across."""
    return [
        _label(0, SIDE + 14, "key 0", 11),
        _label(SIDE, SIDE + 14, str(length - 1), 11, "end"),
        _label(-4, 10, "query 0", 11, "end"),
        _label(-4, SIDE, str(length - 1), 11, "end"),
    ]


def _legend(right: float, y: float, names: Mapping[int, str]) -> list[str]:
    parts = []
    for amount, name in reversed(list(names.items())):
        right -= 7 * len(name) + 20
        parts.append(f'<rect x="{right:g}" y="{y - 9:g}" width="10" height="10" fill="{COLOURS[amount]}"/>')
        parts.append(_label(right + 14, y, name, 11))
    return parts


def _element_paths(picture: Map) -> list[str]:
    """Horizontal runs of equal cells, one path for each colour."""
    size = picture.step
    boxes: dict[int, list[tuple[int, int, int, int]]] = {SOME: [], ALL: []}
    for row, cells in enumerate(picture.cells):
        edges = [0, *(np.flatnonzero(np.diff(cells)) + 1).tolist(), len(cells)]
        for first, last in pairwise(edges):
            if cells[first] != NONE:
                boxes[int(cells[first])].append((first * size, row * size, (last - first) * size, size))
    return _paths(picture.length, boxes, "")


def _tile_paths(picture: Map) -> list[str]:
    boxes: dict[int, list[tuple[int, int, int, int]]] = {SOME: [], ALL: []}
    for p in picture.steps:
        box = (p.keys.start, p.queries.start, len(p.keys), len(p.queries))
        boxes[ALL if p.full else SOME].append(box)
    width = min(1.0, 0.1 * SIDE * picture.tile[1] / picture.length)
    return _paths(picture.length, boxes, f' stroke="{GRID}" stroke-width="{width:.2f}"')


def _paths(length: int, boxes: Mapping[int, list[tuple[int, int, int, int]]], style: str) -> list[str]:
    """Boxes (left, top, width, height) in positions, cut at the end of the sequence."""
    scale = SIDE / length
    parts = []
    for amount, found in boxes.items():
        if not found:
            continue
        path = "".join(
            f"M{x * scale:.2f} {y * scale:.2f}h{(min(x + w, length) - x) * scale:.2f}"
            f"v{(min(y + h, length) - y) * scale:.2f}h-{(min(x + w, length) - x) * scale:.2f}z"
            for x, y, w, h in found
        )
        parts.append(f'<path d="{path}" fill="{COLOURS[amount]}"{style}/>')
    return parts
