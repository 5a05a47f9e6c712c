# SPDX-License-Identifier: Apache-2.0
"""Masks whose tiles only a test finds, and reads of captured tensors by rows and by columns, with their dense
references in PyTorch: over several tiles of any target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.dense import Variant, softmax_attention

Tensor = torch.Tensor

PROGRAM = """
mask near_head(h, i, j) = i - j < 40 * (h + 1)
mask loud(b, n; level[B, N]) = level[b, n] * 3.0 > 0.5
mask thirds(n) = n % 3 != 1
score by_row(s, b, m; t[B, M]) = s * t[b, m]
score by_column(s, h, n; bias[H, N]) = s + bias[h, n]
attention packed(q, k, v; qdoc[B, M]: int, kdoc[B, N]: int) {
    return softmax(causal(document(scaled_dot_product(q, k); qdoc, kdoc))) @ v
}
attention by_head(q, k, v) = softmax(causal(near_head(scaled_dot_product(q, k)))) @ v
attention by_level(q, k, v; level[B, N]) = softmax(loud(scaled_dot_product(q, k); level)) @ v
attention thirds_of(q, k, v) = softmax(thirds(scaled_dot_product(q, k))) @ v
attention biased(q, k, v; t[B, M], bias[H, N], qdoc[B, M]: int, kdoc[B, N]: int) {
    return softmax(document(by_column(by_row(scaled_dot_product(q, k); t); bias); qdoc, kdoc)) @ v
}
attention bent(q, k, v; t[B, M], bias[H, N]) {
    return softmax(causal(softcap(by_column(by_row(scaled_dot_product(q, k); t); bias); cap = 5.0))) @ v
}
"""


def documents(b: int, length: int, seed: int) -> Tensor:
    """[b, length] numbers of packed documents of random lengths, then padding (-1)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((b, length), -1)
    for row in ids:
        lengths = torch.randint(1, 150, (length,), generator=generator)
        count = max(length - 30, 1)
        row[:count] = torch.repeat_interleave(torch.arange(length), lengths)[:count]
    return ids


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(max(q.shape[2], k.shape[2]), device=q.device)
    return at[: q.shape[2], None], at[None, : k.shape[2]]


def _scaled(q: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda s: s * float(q.shape[-1]) ** -0.5


def _same(qdoc: Tensor, kdoc: Tensor) -> Tensor:
    return ((qdoc[:, :, None] == kdoc[:, None]) & (kdoc >= 0)[:, None])[:, None]


def _packed(q: Tensor, k: Tensor, v: Tensor, qdoc: Tensor, kdoc: Tensor) -> tuple[Tensor, Tensor]:
    i, j = _positions(q, k)
    return softmax_attention(q, k, v, _scaled(q), _same(qdoc, kdoc) & (j <= i))


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    i, j = _positions(q, k)
    h = torch.arange(q.shape[1], device=q.device)[:, None, None]
    return softmax_attention(q, k, v, _scaled(q), (j <= i) & (i - j < 40 * (h + 1)))


def _by_level(q: Tensor, k: Tensor, v: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    kept = (level.float() * 3 > 0.5)[:, None, None]
    return softmax_attention(q, k, v, _scaled(q), kept)


def _thirds(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return softmax_attention(q, k, v, _scaled(q), _positions(q, k)[1] % 3 != 1)


def _biased(
    q: Tensor, k: Tensor, v: Tensor, t: Tensor, bias: Tensor, qdoc: Tensor, kdoc: Tensor
) -> tuple[Tensor, Tensor]:
    def score(s: Tensor) -> Tensor:
        return _scaled(q)(s) * t[:, None, :, None].to(s.dtype) + bias[:, None].to(s.dtype)

    return softmax_attention(q, k, v, score, _same(qdoc, kdoc))


def _bent(q: Tensor, k: Tensor, v: Tensor, t: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    i, j = _positions(q, k)

    def score(s: Tensor) -> Tensor:
        x = _scaled(q)(s) * t[:, None, :, None].to(s.dtype) + bias[:, None].to(s.dtype)
        return 5.0 * torch.tanh(x / 5.0)

    return softmax_attention(q, k, v, score, j <= i)


Extras = Callable[[int, int, int, int], dict[str, Any]]


def _ids(b: int, h: int, m: int, n: int) -> dict[str, Any]:
    return {"qdoc": documents(b, m, 1), "kdoc": documents(b, n, 1).int()}


def _level(b: int, h: int, m: int, n: int) -> dict[str, Any]:
    level = torch.linspace(-1, 1, n).repeat(b, 1).roll(n // 8, 1)
    level[:, 40::97] = torch.nan
    return {"level": level}


def _terms(b: int, h: int, m: int, n: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    t = 1 + 0.2 * torch.randn(b, m, generator=generator)
    return {"t": t.bfloat16(), "bias": torch.randn(h, n, generator=generator)}


def _none(b: int, h: int, m: int, n: int) -> dict[str, Any]:
    return {}


MASKED: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Extras]] = {
    "packed": (_packed, _ids),
    "by_head": (_by_head, _none),
    "by_level": (_by_level, _level),
    "thirds_of": (_thirds, _none),
    "biased": (_biased, lambda *shape: {**_terms(*shape), **_ids(*shape)}),
    "bent": (_bent, _terms),
}


def variant(name: str) -> Variant:
    """The reference of an attention of PROGRAM."""
    return Variant(name, name, MASKED[name][0])
