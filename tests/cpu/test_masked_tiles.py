# SPDX-License-Identifier: Apache-2.0
"""Masks that are several runs, over many tiles: forward and backward against dense attention of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import afc

B, H, HK, M, N, D = 2, 4, 2, 500, 700, 16
Tensor = torch.Tensor

PROGRAM = """
mask near_head(h, i, j) = i - j < 40 * (h + 1)
mask loud(b, n; level[B, N]) = level[b, n] * 3.0 > 0.5
attention packed(q, k, v; qdoc[B, M]: int, kdoc[B, N]: int) {
    return softmax(causal(document(dot(q, k); qdoc, kdoc))) @ v
}
attention sink(q, k, v; w: int > 0) = softmax(streaming(dot(q, k); w)) @ v
attention chunks(q, k, v; size: int > 0) = softmax(chunked(dot(q, k); size)) @ v
score tilted(s, h; t[H]: grad) = s * t[h]
attention packed_tilted(q, k, v; t[H]: grad, qdoc[B, M]: int, kdoc[B, N]: int) {
    return softmax(causal(document(tilted(dot(q, k); t); qdoc, kdoc))) @ v
}
attention sink_tilted(q, k, v; t[H]: grad, w: int > 0) = softmax(streaming(tilted(dot(q, k); t); w)) @ v
attention by_head(q, k, v) = softmax(causal(near_head(dot(q, k)))) @ v
attention by_level(q, k, v; level[B, N]) = softmax(loud(dot(q, k); level)) @ v
"""


def documents(length: int, seed: int) -> Tensor:
    """Packed documents of random lengths, then padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 150, (B, 20), generator=generator)
    rows = [torch.repeat_interleave(torch.arange(20), row) for row in lengths]
    ids = torch.full((B, length), -1)
    for row, found in zip(ids, rows, strict=True):
        count = min(length - 60, len(found))
        row[:count] = found[:count]
    return ids


ROW, COLUMN = torch.arange(M)[:, None], torch.arange(N)[None]
QDOC, KDOC = documents(M, 1), documents(N, 1)
LEVEL = torch.linspace(-1, 1, N).repeat(B, 1).roll(90, 1)
LEVEL[:, 40::97] = torch.nan
CASES: dict[str, tuple[Callable[[], Tensor], dict[str, Any]]] = {
    "packed": (
        lambda: ((QDOC[:, :, None] == KDOC[:, None]) & (KDOC >= 0)[:, None] & (COLUMN <= ROW))[:, None],
        {"qdoc": QDOC, "kdoc": KDOC},
    ),
    "sink": (lambda: (COLUMN <= ROW) & ((COLUMN < 4) | ((ROW - COLUMN).abs() < 130)), {"w": 130}),
    "chunks": (lambda: ROW // 90 == COLUMN // 90, {"size": 90}),
    "by_head": (lambda: (COLUMN <= ROW) & (40 * (torch.arange(H)[:, None, None] + 1) > ROW - COLUMN), {}),
    "by_level": (lambda: (LEVEL * 3 > 0.5)[:, None, None], {"level": LEVEL}),
}


@pytest.fixture(scope="module")
def module(tmp_path_factory: Any) -> ModuleType:
    path: Path = tmp_path_factory.mktemp("masked") / "masked_tiles.attn"
    path.write_text(PROGRAM)
    return afc.load(path, D=D, dtype=torch.float64, backend="cpu")


@pytest.mark.parametrize("name", CASES)
def test_against_dense(name: str, module: ModuleType) -> None:
    mask, arguments = CASES[name]
    generator = torch.Generator().manual_seed(3)

    def draw(heads: int, rows: int) -> Tensor:
        shape = (B, heads, rows, D)
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v = draw(H, M), draw(HK, N), draw(HK, N)
    grouped = [x.repeat_interleave(H // HK, 1) for x in (k, v)]
    kept = mask().expand(B, H, M, N)
    scores = torch.where(kept, q @ grouped[0].transpose(-1, -2), -1e300)
    want = torch.where(kept, scores.softmax(-1), 0.0) @ grouped[1]
    got = getattr(module, name)(q, k, v, **arguments)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    upstream = torch.randn(want.shape, dtype=torch.float64, generator=generator)
    mine = torch.autograd.grad(got, (q, k, v), upstream)
    for a, b in zip(mine, torch.autograd.grad(want, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["packed_tilted", "sink_tilted"])
def test_places_of_each_batch_and_captured_gradients(name: str, module: ModuleType) -> None:
    """Runs end at the keys of each batch, and the gradient of a captured tensor walks over the same runs."""
    counts, origins = torch.tensor([650, 123]), torch.tensor([30, 200])
    i, j = (ROW + origins[:, None, None])[:, None], COLUMN
    kept = (j <= i) & (j < counts[:, None, None, None])
    if name == "packed_tilted":
        arguments: dict[str, Any] = {"qdoc": QDOC, "kdoc": KDOC}
        kept = kept & ((QDOC[:, :, None] == KDOC[:, None]) & (KDOC >= 0)[:, None])[:, None]
    else:
        arguments = {"w": 130}
        kept = kept & ((j < 4) | ((i - j).abs() < 130))
    generator = torch.Generator().manual_seed(4)
    shapes = ((B, H, M, D), (B, HK, N, D), (B, HK, N, D), (H,), (B, H, M, D))
    q, k, v, t, upstream = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v, t)]
    grouped = [x.repeat_interleave(H // HK, 1) for x in (k, v)]
    scores = torch.where(kept, q @ grouped[0].transpose(-1, -2) * t[:, None, None], -1e300)
    want = torch.where(kept, scores.softmax(-1), 0.0) @ grouped[1]
    got = getattr(module, name)(q, k, v, t=t, **arguments, kv_len=counts, q_origin=origins)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    mine, dense = (torch.autograd.grad(o, inputs, upstream) for o in (got, want))
    for a, b in zip(mine, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_rows_that_no_tile_keeps(module: ModuleType) -> None:
    """Queries of a document without keys: output and gradients 0, LSE -inf, whatever v holds."""
    q, k, v = (torch.randn(B, h, n, D, dtype=torch.float64) for h, n in ((H, M), (HK, N), (HK, N)))
    v[:] = torch.nan
    ids = {"qdoc": torch.zeros(B, M, dtype=torch.int64), "kdoc": torch.ones(B, N, dtype=torch.int64)}
    out, lse = module.packed(q, k, v, **ids, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
