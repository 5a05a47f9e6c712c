# SPDX-License-Identifier: Apache-2.0
"""The other implementations, each in its native layout, plain or behind RoPE in PyTorch.

``fa2, cudnn, efficient, math`` are the backends of PyTorch's scaled_dot_product_attention (fa2:
FLASH_ATTENTION), ``sdpa`` is whatever it picks; ``flex`` is FlexAttention's Triton kernel, ``flex_a100``
the same with an A100's tiles, ``flex_flash`` its FLASH backend; ``fa3`` and ``fa4`` are the packages
``fa3-fwd`` (no backward) and ``flash-attn-4``. Mask
structures are built outside the timing.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cells import Cell
from bench.inputs import Attend, System, Tensors, assemble, torch_dtype

ROPE_STYLES = ("compiled", "eager")
# Both block sizes that the FLASH backend takes on some card; it refuses the other one.
FLASH_BLOCKS = ((128, 128), (256, 128))


class Unavailable(Exception):
    """A peer that cannot run here or cannot do this cell; the message says why and goes into the file."""


@dataclass(frozen=True)
class Peer:
    """``make(cell, device)`` returns the callable for a cell; ``layout`` is the memory order it takes."""

    make: Callable[[Cell, torch.device], Attend]
    layout: str = "bhnd"
    cuda_only: bool = True
    forward_only: bool = False


def build(name: str, cell: Cell, sets: list[Tensors]) -> System:
    """System ``peer`` or ``peer+rope_<style>``. Raises Unavailable, ValueError, or the peer's own.

    A cell with a rotation needs a style, one without takes none: a peer never computes something else than
    the cell.
    """
    base, _, style = name.partition("+rope_")
    if base not in PEERS:
        raise ValueError(f"systems: expected ours or some of {', '.join(PEERS)}, got {base!r}")
    if (cell.rope_base is None) != (style == ""):
        raise ValueError(
            f"systems: {name!r} does not compute the cell {cell.name!r} (rotation {cell.rope_base})"
        )
    peer = PEERS[base]
    device = sets[0].q.device
    if peer.cuda_only and device.type != "cuda":
        raise Unavailable(f"needs a CUDA device, and this run is on {device.type}")
    if peer.forward_only and cell.pass_ == "bwd":
        raise Unavailable("has no backward")
    attend = peer.make(cell, device)
    if cell.rope_base is not None:
        attend = _behind_rope(attend, cell, peer.layout, device, style)
    return assemble(name, cell, sets, attend, peer.layout)


def expand(name: str, cell: Cell, styles: list[str]) -> list[str]:
    """What a name on the command line stands for in this cell: ``flex`` → ``flex+rope_compiled``, …"""
    if name == "ours" or cell.rope_base is None or "+" in name:
        return [name]
    return [f"{name}+rope_{style}" for style in styles]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package built for another PyTorch fails in any way it likes
        raise Unavailable(f"import {name}: {type(error).__name__}: {error}") from error


# ---- scaled_dot_product_attention ----------------------------------------------------------------


def _sdpa(backend: SDPBackend | None) -> Callable[[Cell, torch.device], Attend]:
    def make(cell: Cell, device: torch.device) -> Attend:
        causal, grouped = cell.mask == "causal", cell.Hq != cell.Hk

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        return attend

    return make


# ---- FlexAttention -------------------------------------------------------------------------------


def _causal(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return m >= n


@lru_cache(maxsize=8)
def _block_mask(N: int, block: int | tuple[int, int], device: torch.device) -> Any:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return flex.create_block_mask(_causal, None, None, N, N, device=str(device), BLOCK_SIZE=block)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    allow_many_shapes()
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    compiled: Callable[..., Any] = torch.compile(flex.flex_attention, dynamic=False)
    return compiled


def allow_many_shapes() -> None:
    """Let one process compile every cell's shape: past its limit, dynamo would run eagerly."""
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = 500
    config.accumulated_recompile_limit = 5000
    # Timing repeats a backward over one graph, which buffer donation forbids.
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False


def _flex(cell: Cell, device: torch.device) -> Attend:
    mask = _block_mask(cell.N, 128, device) if cell.mask == "causal" else None
    return partial(_compiled_flex(), block_mask=mask, enable_gqa=cell.Hq != cell.Hk)


def _flex_a100(cell: Cell, device: torch.device) -> Attend:
    """FlexAttention with the tiles that PyTorch takes on an A100, for a run with ``TRITON_OVERRIDE_ARCH``."""
    if not os.environ.get("TRITON_OVERRIDE_ARCH"):
        raise Unavailable("needs TRITON_OVERRIDE_ARCH, such as sm80: else it is no A100's code")
    mask = _block_mask(cell.N, 128, device) if cell.mask == "causal" else None
    wide = cell.D > 64
    options = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 3, "fwd_num_warps": 8 if wide else 4}
    options |= {f"bwd_BLOCK_{side}": 64 for side in ("M1", "N1", "M2", "N2")}
    options |= {"bwd_num_stages": 2, "bwd_num_warps": 4}
    grouped = cell.Hq != cell.Hk
    return partial(_compiled_flex(), block_mask=mask, enable_gqa=grouped, kernel_options=options)


def _flex_flash(cell: Cell, device: torch.device) -> Attend:
    _module("flash_attn.cute")
    failures = []
    for block in FLASH_BLOCKS:
        mask = _block_mask(cell.N, block, device) if cell.mask == "causal" else None
        options = {"BACKEND": "FLASH"}
        attend = partial(
            _compiled_flex(), block_mask=mask, enable_gqa=cell.Hq != cell.Hk, kernel_options=options
        )
        try:
            _try_once(attend, cell, device)
        except Exception as error:  # whatever inductor raises for a block size that it cannot lower
            failures.append(f"{block}: {type(error).__name__}: {error}")
        else:
            return attend
    raise Unavailable("no block size works: " + "; ".join(failures))


def _try_once(attend: Attend, cell: Cell, device: torch.device) -> None:
    shape = {"device": device, "dtype": torch_dtype(cell), "requires_grad": cell.pass_ == "bwd"}
    q = torch.randn(cell.B, cell.Hq, cell.N, cell.D, **shape)  # type: ignore[call-overload]
    k = torch.randn(cell.B, cell.Hk, cell.N, cell.D, **shape)  # type: ignore[call-overload]
    attend(q, k, k)
    torch.cuda.synchronize()


# ---- FlashAttention 3 and 4 ----------------------------------------------------------------------


def _flash(module: str) -> Callable[[Cell, torch.device], Attend]:
    def make(cell: Cell, device: torch.device) -> Attend:
        function = _module(module).flash_attn_func
        causal = cell.mask == "causal"

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = function(q, k, v, causal=causal)
            return cast(Tensor, result[0] if isinstance(result, tuple) else result)

        return attend

    return make


# ---- RoPE outside --------------------------------------------------------------------------------


def rotate_half_split(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE as modelling code usually writes it: pairs (c, c + D/2); if eager, one pass per operation."""
    return q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin


def _half_turn(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def rope_tables(
    N: int, D: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [N, D], of position times base^(-2c/D), computed in float64 and rounded once."""
    frequency = base ** (-torch.arange(0, D, 2, device=device, dtype=torch.float64) / D)
    angle = torch.outer(torch.arange(N, device=device, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@lru_cache(maxsize=1)
def _compiled_rope() -> Callable[..., tuple[Tensor, Tensor]]:
    allow_many_shapes()
    return cast(Callable[..., tuple[Tensor, Tensor]], torch.compile(rotate_half_split, dynamic=False))


def _behind_rope(attend: Attend, cell: Cell, layout: str, device: torch.device, style: str) -> Attend:
    if style not in ROPE_STYLES:
        raise ValueError(f"rope: expected one of {', '.join(ROPE_STYLES)}, got {style!r}")
    assert cell.rope_base is not None
    tables = rope_tables(cell.N, cell.D, cell.rope_base, torch_dtype(cell), device)
    cos, sin = (t[None, None] if layout == "bhnd" else t[None, :, None] for t in tables)
    rotate = _compiled_rope() if style == "compiled" else rotate_half_split

    def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(*rotate(q, k, cos, sin), v)

    return rotated


PEERS: dict[str, Peer] = {
    "fa2": Peer(_sdpa(SDPBackend.FLASH_ATTENTION)),
    "cudnn": Peer(_sdpa(SDPBackend.CUDNN_ATTENTION)),
    "efficient": Peer(_sdpa(SDPBackend.EFFICIENT_ATTENTION)),
    "math": Peer(_sdpa(SDPBackend.MATH), cuda_only=False),
    "sdpa": Peer(_sdpa(None), cuda_only=False),
    "flex": Peer(_flex),
    "flex_a100": Peer(_flex_a100),
    "flex_flash": Peer(_flex_flash),
    "fa3": Peer(_flash("fa3_fwd_interface"), layout="bnhd", forward_only=True),
    "fa4": Peer(_flash("flash_attn.cute"), layout="bnhd"),
}
