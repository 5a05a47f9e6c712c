# SPDX-License-Identifier: Apache-2.0
"""Least and largest values of captured tensors over boxes of indices.

A box of at most EXACT elements is read; a longer range along one axis is answered from a table: the bounds of
blocks of BLOCK elements, and of runs of 2, 4, 8, ... blocks (any range is two of those and its two ends).
Built once per call in O(elements). `runtime/cpu/bounds.hpp` has the same for the emitted code;
`runtime/tile/mask_tables.cuh` finds the same bounds by a tree of ranges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from afc.expr.nodes import Type

BLOCK, EXACT = 32, 64
LARGEST_EXACT = 2.0**53  # integers up to here are exact in float64


class Bounds(NamedTuple):
    """Values in [lo, hi], float64 arrays; `nan`: some may be NaN (floats only). An int without known bounds
    is [-inf, inf]."""

    lo: Any
    hi: Any
    nan: Any


def everything(kind: Type) -> Bounds:
    """No knowledge of a value."""
    return Bounds(np.float64(-np.inf), np.float64(np.inf), np.bool_(kind is Type.FLOAT))


def enclose(lo: Any, hi: Any, kind: Type) -> tuple[Any, Any]:
    """float64 bounds of stored values, for every compute type: an int beyond 2**53 loses its last bits, a
    float is rounded where it is read as float32 (rounding is monotone, so the ends are enough)."""
    low, high = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    if kind is Type.FLOAT:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.minimum(low, np.float32(low)), np.maximum(high, np.float32(high))
    low = np.where(np.abs(low) >= LARGEST_EXACT, np.nextafter(low, -np.inf), low)
    return low, np.where(np.abs(high) >= LARGEST_EXACT, np.nextafter(high, np.inf), high)


class Table:
    """Bounds of ranges along one axis of a tensor."""

    def __init__(self, tensor: Any, axis: int, kind: Type) -> None:
        self.axis, self.size = axis, tensor.shape[axis]
        low, high, nan = _extremes(np.moveaxis(tensor, axis, -1), kind)
        self.levels = [(*enclose(low, high, kind), nan)]
        while (count := self.levels[-1][0].shape[-1]) > 2 ** (len(self.levels) - 1):
            a, b, n = self.levels[-1]
            step = 2 ** (len(self.levels) - 1)
            first, second = slice(0, count - step), slice(step, count)
            self.levels.append(
                (
                    np.minimum(a[..., first], a[..., second]),
                    np.maximum(b[..., first], b[..., second]),
                    n[..., first] | n[..., second],
                )
            )

    def blocks(self, others: tuple[Any, ...], first: Any, last: Any) -> Bounds:
        """Bounds over the blocks first..last - 1 (first < last), at the given indices of the other axes."""
        low, high, nan = (np.empty(np.shape(first), t.dtype) for t in self.levels[0])
        level = np.frexp((last - first).astype(np.float64))[1] - 1  # 2**level <= last - first
        for k in np.unique(level):
            chosen = level == k
            at = tuple(o[chosen] for o in others)
            a, b = first[chosen], last[chosen] - 2**k
            lo, hi, n = self.levels[k]
            low[chosen] = np.minimum(lo[(*at, a)], lo[(*at, b)])
            high[chosen] = np.maximum(hi[(*at, a)], hi[(*at, b)])
            nan[chosen] = n[(*at, a)] | n[(*at, b)]
        return Bounds(low, high, nan)


def _extremes(tensor: Any, kind: Type) -> tuple[Any, Any, Any]:
    """(least, largest, any NaN) of blocks along the last axis; NaN counts for neither end."""
    starts = np.arange(0, tensor.shape[-1], BLOCK)
    if kind is not Type.FLOAT:
        low, high = (f.reduceat(tensor, starts, axis=-1) for f in (np.minimum, np.maximum))
        return low, high, np.zeros(low.shape, bool)
    missing = np.isnan(tensor)
    if not missing.any():
        low, high = (f.reduceat(tensor, starts, axis=-1) for f in (np.minimum, np.maximum))
        return low, high, np.zeros(low.shape, bool)
    low = np.minimum.reduceat(np.where(missing, np.inf, tensor), starts, axis=-1)
    high = np.maximum.reduceat(np.where(missing, -np.inf, tensor), starts, axis=-1)
    return low, high, np.logical_or.reduceat(missing, starts, axis=-1)


class Captured:
    """A captured tensor: bounds of its values over boxes of indices. Tables are built when first needed."""

    def __init__(self, tensor: Any, kind: Type) -> None:
        self.tensor, self.kind = np.asarray(tensor), kind
        if kind is Type.FLOAT and self.tensor.dtype not in (np.float32, np.float64):
            self.tensor = self.tensor.astype(np.float64)
        self.tables: dict[int, Table] = {}

    def bounds(self, first: list[Any], last: list[Any], axis: int | None) -> Bounds:
        """Bounds over the boxes first..last (one array an axis, both ends included, any int or infinite).

        Indices outside the tensor read as NaN, 0 or false; an axis of size 1 takes any index. `axis`: along
        which a table may answer.
        """
        shape = np.broadcast_shapes(*(np.shape(x) for x in (*first, *last)))
        inside, partly = np.ones(shape, bool), np.ones(shape, bool)
        low, high = [], []
        for a, b, size in zip(first, last, self.tensor.shape, strict=True):
            if size == 1:
                a, b = np.zeros(shape), np.zeros(shape)
            inside &= (a >= 0) & (b < size)
            partly &= (b >= 0) & (a < size)
            low.append(np.broadcast_to(np.clip(a, 0, max(size - 1, 0)), shape).astype(np.int64))
            high.append(np.broadcast_to(np.clip(b, 0, max(size - 1, 0)), shape).astype(np.int64))
        if self.tensor.size == 0:
            inside, partly = np.zeros(shape, bool), np.zeros(shape, bool)
            found = everything(self.kind)
        else:
            found = self._inside(low, high, axis, shape)
        lo, hi, nan = found
        if self.kind is Type.FLOAT:
            unknown = (lo > hi) | ~partly  # nothing but NaN
            return Bounds(np.where(unknown, -np.inf, lo), np.where(unknown, np.inf, hi), nan | ~inside)
        lo = np.where(inside, lo, np.where(partly, np.minimum(lo, 0), 0))
        return Bounds(lo, np.where(inside, hi, np.where(partly, np.maximum(hi, 0), 0)), nan)

    def _inside(self, low: list[Any], high: list[Any], axis: int | None, shape: tuple[int, ...]) -> Bounds:
        flat_low = [x.reshape(-1) for x in low]
        flat_high = [x.reshape(-1) for x in high]
        count = np.ones(int(np.prod(shape)), np.float64)
        for a, b in zip(flat_low, flat_high, strict=True):
            count *= b - a + 1
        lo, hi = np.full(count.shape, -np.inf), np.full(count.shape, np.inf)
        nan = np.full(count.shape, self.kind is Type.FLOAT)
        small = count <= EXACT
        if small.any():
            at = [x[small] for x in flat_low], [x[small] for x in flat_high]
            lo[small], hi[small], nan[small] = self._read(*at)
        if axis is not None:
            others = [k for k in range(len(flat_low)) if k != axis]
            long = ~small
            for k in others:
                long &= flat_low[k] == flat_high[k]
            if long.any():
                at = [x[long] for x in flat_low], [x[long] for x in flat_high]
                lo[long], hi[long], nan[long] = self._range(*at, axis)
        return Bounds(lo.reshape(shape), hi.reshape(shape), nan.reshape(shape))

    def _range(self, low: list[Any], high: list[Any], axis: int) -> Bounds:
        """Of more than EXACT elements along one axis."""
        if axis not in self.tables:
            self.tables[axis] = Table(self.tensor, axis, self.kind)
        table = self.tables[axis]
        others = tuple(x for k, x in enumerate(low) if k != axis)
        a, b = low[axis], high[axis] + 1
        first = -(-a // BLOCK)
        last = np.where(b == table.size, -(-b // BLOCK), b // BLOCK)
        lo, hi, nan = table.blocks(others, first, last)
        for begin, end in ((a, first * BLOCK), (last * BLOCK, b)):
            ragged = begin < end
            if not ragged.any():
                continue
            at = [x[ragged] for x in low], [x[ragged] for x in high]
            at[0][axis], at[1][axis] = begin[ragged], end[ragged] - 1
            found = self._read(*at)
            lo[ragged] = np.minimum(lo[ragged], found.lo)
            hi[ragged] = np.maximum(hi[ragged], found.hi)
            nan[ragged] |= found.nan
        return Bounds(lo, hi, nan)

    def _read(self, low: list[Any], high: list[Any]) -> Bounds:
        """Of at most EXACT elements, each read."""
        boxes = len(low[0]) if low else 1
        index: list[Any] = []
        step = np.ones(boxes, np.int64)
        sizes = [b - a + 1 for a, b in zip(low, high, strict=True)]
        total = np.prod(sizes, axis=0) if sizes else step
        number = np.arange(int(total.max(initial=1)))[None]
        for a, size in zip(low, sizes, strict=True):
            # Numbers beyond the box repeat elements of it.
            index.append(a[:, None] + number // step[:, None] % size[:, None])
            step = step * size
        values = np.broadcast_to(self.tensor[tuple(index)], (boxes, number.shape[1]))
        if self.kind is not Type.FLOAT:
            low_high = enclose(values.min(1), values.max(1), self.kind)
            return Bounds(*low_high, np.zeros(boxes, bool))
        missing = np.isnan(values)
        low_high = enclose(
            np.where(missing, np.inf, values).min(1), np.where(missing, -np.inf, values).max(1), self.kind
        )
        return Bounds(*low_high, missing.any(1))
