# SPDX-License-Identifier: Apache-2.0
"""Random tensors of a cell, and the callable that a benchmark times over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.cells import Cell

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Outputs = dict[str, Tensor]

LAYOUTS = ("bhnd", "bnhd")


@dataclass(frozen=True)
class Tensors:
    """q, do: [B, Hq, N, D]; k, v: [B, Hk, N, D]; contiguous, random normal, without gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


@dataclass(frozen=True)
class System:
    """``call`` is what the clock times; ``outputs`` computes what it computes once more, for the check.

    ``outputs`` works on the first input set and returns ``o``, or ``dq, dk, dv``, each [B, H, N, D].
    """

    name: str
    call: Callable[[], object]
    outputs: Callable[[], Outputs]


def input_sets(cell: Cell, l2_bytes: int) -> int:
    """How many sets to rotate so that no call finds its data in an L2 cache of this size (0: unknown)."""
    itemsize = torch.empty((), dtype=torch_dtype(cell)).element_size()
    forward = cell.B * cell.N * cell.D * (2 * cell.Hq + 2 * cell.Hk) * itemsize
    working_set = forward * (2 if cell.pass_ == "bwd" else 1)
    if working_set >= l2_bytes:
        return 1
    # A set's turn comes after all others, which together fill the cache once over.
    return 1 + -(-l2_bytes // working_set)


def torch_dtype(cell: Cell) -> torch.dtype:
    """The cell's dtype as PyTorch names it."""
    return {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[cell.dtype]


def draw(cell: Cell, device: torch.device, sets: int, seed: int) -> list[Tensors]:
    """Fresh random normal tensors."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch_dtype(cell)

    def normal(heads: int) -> Tensor:
        shape = (cell.B, heads, cell.N, cell.D)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    return [Tensors(normal(cell.Hq), normal(cell.Hk), normal(cell.Hk), normal(cell.Hq)) for _ in range(sets)]


def assemble(name: str, cell: Cell, sets: list[Tensors], attend: Attend, layout: str = "bhnd") -> System:
    """A system that calls ``attend(q, k, v)`` or its backward on copies of the sets of its own, in turn.

    ``layout`` is the memory order that ``attend`` takes and returns: each system gets its native one.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    make = _forward if cell.pass_ == "fwd" else _backward
    calls = [make(attend, _native(tensors, layout)) for tensors in sets]
    return System(
        name, calls[0] if len(calls) == 1 else _Rotation(calls), partial(_outputs, calls[0], layout)
    )


def _native(tensors: Tensors, layout: str) -> Tensors:
    def copy(x: Tensor) -> Tensor:
        return x.clone() if layout == "bhnd" else x.transpose(1, 2).contiguous()

    return Tensors(copy(tensors.q), copy(tensors.k), copy(tensors.v), copy(tensors.do))


def _forward(attend: Attend, tensors: Tensors) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(tensors.q, tensors.k, tensors.v),)

    return call


def _backward(attend: Attend, tensors: Tensors) -> Callable[[], tuple[Tensor, ...]]:
    leaves = tuple(x.requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    o = attend(*leaves)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, tensors.do, retain_graph=True)

    return call


class _Rotation:
    """Calls the members in turn, one each time."""

    def __init__(self, calls: list[Callable[[], tuple[Tensor, ...]]]) -> None:
        self._calls = calls
        self._next = 0

    def __call__(self) -> object:
        call = self._calls[self._next]
        self._next = (self._next + 1) % len(self._calls)
        return call()


def _outputs(call: Callable[[], tuple[Tensor, ...]], layout: str) -> Outputs:
    results = call()
    names = ("o",) if len(results) == 1 else ("dq", "dk", "dv")
    swap = layout == "bnhd"
    return {name: (x.transpose(1, 2) if swap else x).detach() for name, x in zip(names, results, strict=True)}
