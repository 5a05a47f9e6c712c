# SPDX-License-Identifier: Apache-2.0
"""The hand-written Hopper kernels as one more system of the benchmark, forward and backward.

``python -m bench.spikes.hopper.compare build DIR`` compiles what the cells need, where nvcc is.
``python -m bench.spikes.hopper.compare DIR ARGUMENTS…`` is ``python -m bench ARGUMENTS…`` with the systems
``spike`` (the fastest tile at N 16384) and, forward only, ``spike_persistent`` (192 x 80, the next work item
drawn one step before the end of this one) and ``spike_128`` (128 x 128, persistent).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import __main__ as command_line
from bench.cells import Cell
from bench.peers import PEERS, Peer
from bench.spikes.hopper import run_backward, run_forward
from bench.spikes.hopper.run_forward import GRID_LONGEST_FIRST, PERSISTENT, WATCHED, Candidate

VARIANTS = {
    "spike_persistent": {"schedule": PERSISTENT},
    "spike_128": {"schedule": PERSISTENT, "consumers": 2, "tile_n": 128, "stages": 2},
}


def forward_kernel(head_dim: int, causal: bool) -> Candidate:
    """The fastest tile of the search for a head size."""
    tile = {128: (3, 80, 2), 64: (3, 128, 3)}[head_dim]
    schedule = GRID_LONGEST_FIRST if head_dim == 128 else PERSISTENT
    return Candidate(head_dim, *tile, causal=int(causal), maximum=WATCHED, schedule=schedule)


def backward_kernel(head_dim: int, causal: bool) -> str:
    """The fastest one for a head size, by its name in run_backward."""
    return f"d{head_dim}{'c' if causal else 'f'}_{'w' if head_dim == 128 else 'plain'}0"


def attend(folder: Path, changes: dict[str, int], cell: Cell, device: torch.device) -> Callable[..., Any]:
    """Attention of a cell through the kernels: (B, H, N, D) bf16 contiguous, as an autograd function."""
    if cell.dtype != "bfloat16":
        raise ValueError(f"dtype: the kernels take bfloat16, got {cell.dtype}")
    causal = cell.mask == "causal"
    candidate = replace(forward_kernel(cell.D, causal), **changes)
    forward = run_forward.Kernel(run_forward.Cuda(), folder, candidate)
    backward = run_backward.Module(folder / f"{backward_kernel(cell.D, causal)}.cubin")

    @cache
    def extras(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> run_forward.Extras:
        return run_forward.Extras.of(torch.empty(q_shape), torch.empty(k_shape))

    def bind(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Callable[[], None]:
        q, k, v, o = (t.transpose(1, 2) for t in (q, k, v, o))
        return forward.bind(q, k, v, o, lse, extras=extras(q.shape, k.shape))

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = torch.empty_like(q)
            lse = torch.empty(q.shape[:3], device=q.device)
            bind(q, k, v, o, lse)()
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v, o, lse = ctx.saved_tensors
            problem = run_backward.Problem(q, k, v, o, d_o, lse, causal, 0)
            call = run_backward.Call(backward, problem, poison=False)
            call()
            return call.dq, call.dk, call.dv

    return Attention.apply


def build(folder: Path) -> int:
    """Compile every kernel of the cells. Raises RuntimeError or returns 1 where the gate fails."""
    folder.mkdir(parents=True, exist_ok=True)
    good = True
    for head_dim in (128, 64):
        for causal in (True, False):
            chosen = forward_kernel(head_dim, causal)
            for changes in ({}, *VARIANTS.values()):
                print(run_forward.build_one(replace(chosen, **changes), folder)["name"], flush=True)
            good &= run_backward.build(backward_kernel(head_dim, causal), folder)
    return 0 if good else 1


def main() -> int:
    """Command line; see the module's text."""
    if sys.argv[1:2] == ["build"]:
        return build(Path(sys.argv[2]))
    folder = Path(sys.argv[1])
    PEERS["spike"] = Peer(partial(attend, folder, {}))
    for name, changes in VARIANTS.items():
        PEERS[name] = Peer(partial(attend, folder, changes), forward_only=True)
    return command_line.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
