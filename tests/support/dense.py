# SPDX-License-Identifier: Apache-2.0
"""Attention variants in plain PyTorch, written from their papers and not from our formulas.

The same functions serve as the reference (float64) and as the yardstick (the input dtype): a kernel passes
if its error is at most twice that of the yardstick. Contract for an empty row: output 0, LSE -inf,
gradients 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = torch.Tensor


def rotary(
    x: Tensor, base: float, origin: int = 0, width: int | None = None, interleaved: bool = False
) -> Tensor:
    """RoFormer's rotation of the first `width` columns of x [B, H, L, D]; angles in float64."""
    width = x.shape[-1] if width is None else width
    part, rest = x[..., :width], x[..., width:]
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    angle = (torch.arange(x.shape[2], dtype=torch.float64, device=x.device) + origin)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if interleaved:
        even, odd = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    else:
        low, high = part.chunk(2, -1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return torch.cat((turned, rest), -1)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, score: Callable[[Tensor], Tensor], keep: Tensor
) -> tuple[Tensor, Tensor]:
    """Dense attention with grouped heads. `keep` broadcasts to [B, H, M, N]. Returns (o, natural-log LSE)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = score(q @ k.transpose(-1, -2))
    keep = keep.expand(s.shape)
    s = torch.where(keep, s, torch.full_like(s, -torch.inf))
    live = (s > -torch.inf).any(-1, keepdim=True)
    safe = torch.where(live, s, torch.zeros_like(s))  # rows without a key: a softmax that nothing reads
    lse = torch.where(live, safe.logsumexp(-1, keepdim=True), torch.full_like(safe[..., :1], -torch.inf))
    p = torch.where(live, safe.softmax(-1), torch.zeros_like(safe))
    return p @ v, lse.squeeze(-1)


@dataclass(frozen=True)
class Variant:
    """A variant: file and attention under examples/, the reference, and random extra arguments."""

    name: str
    attention: str
    reference: Callable[..., tuple[Tensor, Tensor]]
    extras: Callable[[int, Any], dict[str, Any]] = field(default=lambda heads, device: {})


def _positions(q: Tensor, k: Tensor, q_origin: int, k_origin: int) -> tuple[Tensor, Tensor]:
    i = torch.arange(q.shape[2], device=q.device)[:, None] + q_origin
    j = torch.arange(k.shape[2], device=q.device)[None, :] + k_origin
    return i, j


def _scale(q: Tensor) -> float:
    return float(q.shape[-1]) ** -0.5


def full(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0, k_origin: int = 0) -> tuple[Tensor, Tensor]:
    i, j = _positions(q, k, q_origin, k_origin)
    return softmax_attention(q, k, v, lambda s: s * _scale(q), (i * 0 + j * 0) == 0)


def causal(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0, k_origin: int = 0) -> tuple[Tensor, Tensor]:
    i, j = _positions(q, k, q_origin, k_origin)
    return softmax_attention(q, k, v, lambda s: s * _scale(q), j <= i)


def llama(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0, k_origin: int = 0) -> tuple[Tensor, Tensor]:
    return causal(rotary(q, 500000.0, q_origin), rotary(k, 500000.0, k_origin), v, q_origin, k_origin)


def gptj(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0, k_origin: int = 0) -> tuple[Tensor, Tensor]:
    q, k = rotary(q, 1e4, q_origin, 32, True), rotary(k, 1e4, k_origin, 32, True)
    return causal(q, k, v, q_origin, k_origin)


def alibi(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, q_origin: int = 0, k_origin: int = 0
) -> tuple[Tensor, Tensor]:
    i, j = _positions(q, k, q_origin, k_origin)
    bias = slope.to(q.dtype)[:, None, None] * (j - i).to(q.dtype)
    return softmax_attention(q, k, v, lambda s: s * _scale(q) + bias, j <= i)


def mistral(
    q: Tensor, k: Tensor, v: Tensor, w: int, q_origin: int = 0, k_origin: int = 0
) -> tuple[Tensor, Tensor]:
    i, j = _positions(q, k, q_origin, k_origin)
    keep = (j <= i) & (i - j < w)
    q, k = rotary(q, 1e4, q_origin), rotary(k, 1e4, k_origin)
    return softmax_attention(q, k, v, lambda s: s * _scale(q), keep)


def gemma2(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0, k_origin: int = 0) -> tuple[Tensor, Tensor]:
    i, j = _positions(q, k, q_origin, k_origin)
    q, k = rotary(q, 1e4, q_origin), rotary(k, 1e4, k_origin)
    return softmax_attention(q, k, v, lambda s: 50.0 * torch.tanh(s * _scale(q) / 50.0), j <= i)


VARIANTS = {
    v.name: v
    for v in (
        Variant("full", "full_attention", full),
        Variant("causal", "causal_lm", causal),
        Variant("llama", "llama", llama),
        Variant("gptj", "gptj", gptj),
        Variant(
            "alibi",
            "alibi_lm",
            alibi,
            lambda heads, device: {"slope": torch.rand(heads, device=device, dtype=torch.float32)},
        ),
        Variant("mistral", "mistral", mistral, lambda heads, device: {"w": 37}),
        Variant("gemma2", "gemma2", gemma2),
    )
}


def by_batch(name: str) -> Variant:
    """A reference that takes each batch alone, cuts k and v, and lets q end where the keys end."""

    def reference(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_origin: Any = None,
        k_origin: Any = 0,
        kv_len: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        results = []
        for b in range(q.shape[0]):
            origin, first, count = (
                int(x.flatten()[b % x.numel()]) if isinstance(x, Tensor) else x
                for x in (q_origin, k_origin, kv_len)
            )
            if origin is None:
                origin = 0 if count is None else first + count - q.shape[2]
            if count == 0:
                empty = q[b : b + 1].sum(-1) * 0 - torch.inf
                results.append((q[b : b + 1] * 0 + v[b : b + 1, :1, :1] * 0, empty))
                continue
            parts = (x[b : b + 1, :, : k.shape[2] if count is None else count] for x in (k, v))
            results.append(
                VARIANTS[name].reference(q[b : b + 1], *parts, q_origin=origin, k_origin=first, **options)
            )
        o, lse = zip(*results, strict=True)
        return torch.cat(o), torch.cat(lse)

    return Variant(name, VARIANTS[name].attention, reference)
