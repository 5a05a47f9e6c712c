# SPDX-License-Identifier: Apache-2.0
"""Is a system computing the cell at all? Asked once, before it is timed.

Whole heads are compared with dense attention in float64: the first and the last (batch, key head), with every
query head of their group, so that a wrong mask, scale, rotation, head map or tail shows. The bound is twice
the error of the same dense formulas evaluated in the cell's dtype, every operation rounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.cells import Cell
from bench.inputs import Outputs, Tensors, torch_dtype
from bench.peers import rope_tables

CHUNK = 1024  # query rows at a time: bounds the memory to a few CHUNK x N matrices


class WrongOutput(Exception):
    """A system's outputs are not those of the cell; the message has the tensor, its error and the bound."""


def check(outputs: Outputs, tensors: Tensors, cell: Cell) -> dict[str, dict[str, float]]:
    """Per output tensor the largest relative Frobenius error over the checked heads, and its bound.

    Raises WrongOutput for an error above the bound, a shape that is not the cell's, or a value that is not
    finite.
    """
    report: dict[str, dict[str, float]] = {}
    for name, x in outputs.items():
        heads = cell.Hk if name in ("dk", "dv") else cell.Hq
        if tuple(x.shape) != (cell.B, heads, cell.N, cell.D):
            raise WrongOutput(f"{name} has shape {list(x.shape)}")
        if not bool(torch.isfinite(x).all()):
            raise WrongOutput(f"{name} has values that are not finite")
        report[name] = {"error": 0.0, "bound": 0.0}
    for b, head in {(0, 0), (cell.B - 1, cell.Hk - 1)}:
        _check_head(outputs, tensors, cell, b, head, report)
    return report


def _check_head(
    outputs: Outputs, tensors: Tensors, cell: Cell, b: int, head: int, report: dict[str, dict[str, float]]
) -> None:
    group = slice(head * (cell.Hq // cell.Hk), (head + 1) * (cell.Hq // cell.Hk))
    inputs = (tensors.q[b, group], tensors.k[b, head], tensors.v[b, head], tensors.do[b, group])
    exact = dense(*inputs, cell=cell, dtype=torch.float64)
    rounded = dense(*inputs, cell=cell, dtype=torch_dtype(cell))
    for name, x in outputs.items():
        error = _distance(x[b, head] if name in ("dk", "dv") else x[b, group], exact[name])
        # float64 is its own reference: there the bound is how rounding grows in a sum of N terms.
        baseline = (
            _distance(rounded[name], exact[name]) if cell.dtype != "float64" else math.sqrt(cell.N) * 2**-53
        )
        bound = 2.0 * baseline
        if not error <= bound:
            raise WrongOutput(f"{name} of batch {b}, key head {head}: error {error:.3g}, bound {bound:.3g}")
        if error >= report[name]["error"]:
            report[name] = {"error": error, "bound": bound}


def _distance(x: Tensor, exact: Tensor) -> float:
    """‖x - exact‖ / ‖exact‖ over all elements, in float64."""
    return float((x.double() - exact).norm() / exact.norm())


def dense(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, cell: Cell, dtype: torch.dtype) -> Outputs:
    """One key head by the formulas of attention, each operation in ``dtype``.

    q, do: [group, N, D]; k, v: [N, D]. Returns o and dq [group, N, D], dk and dv [N, D], the latter summed
    over the group; the rotation of q and k, if any, is part of the function that is differentiated.
    """
    q, k, v, do = (x.detach().to(dtype) for x in (q, k, v, do))
    q, k = _rotate(q, cell), _rotate(k, cell)
    o, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for h in range(q.shape[0]):
        for start in range(0, cell.N, CHUNK):
            rows = slice(start, min(start + CHUNK, cell.N))
            o[h, rows], dq[h, rows], dk_part, dv_part = _dense_rows(
                q[h, rows], k, v, do[h, rows], start, cell
            )
            dk += dk_part
            dv += dv_part
    return {"o": o, "dq": _rotate(dq, cell, inverse=True), "dk": _rotate(dk, cell, inverse=True), "dv": dv}


def _dense_rows(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, start: int, cell: Cell
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = cell.D**-0.5
    s = q @ k.T * scale
    if cell.mask == "causal":
        m = torch.arange(start, start + q.shape[0], device=q.device)[:, None]
        s = s.masked_fill(torch.arange(cell.N, device=q.device) > m, -math.inf)
    p = s.softmax(-1)
    o = p @ v
    ds = p * (do @ v.T - (do * o).sum(-1, keepdim=True))
    return o, ds @ k * scale, ds.T @ q * scale, p.T @ do


def _rotate(x: Tensor, cell: Cell, inverse: bool = False) -> Tensor:
    """x: [..., N, D] turned by position, or back."""
    if cell.rope_base is None:
        return x
    cos, sin = rope_tables(cell.N, cell.D, cell.rope_base, x.dtype, x.device)
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return x * cos + turned * (-sin if inverse else sin)
