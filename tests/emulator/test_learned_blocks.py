# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors that weight blocks read, and that row blocks read by row, in the emitted CUDA
of the sm_80 family, run by the emulator, against dense PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import emulator  # noqa: E402
from tests.support.checks import compare, failures, inputs, without_lse  # noqa: E402
from tests.support.dense import Variant  # noqa: E402

Tensor = torch.Tensor
# Every way in which the elements of a tile share those of a tensor; u is also read by the score.
WEIGHTS = """\
score lift(s, b, m; u[B, M]: grad) = s + u[b, m] * s
weight gate(p, b, h, m, n; g[H]: grad, u[B, M]: grad, x[B, N]: grad) = p * (g[h] + u[b, m] * x[b, n])
weight relative(p, h, i, j; t[H, 9]: grad) = if i > j then p * t[h, min(i - j, 8)] else p
weight table(p, b, h, m, n; y[1|B, H, M, N]: grad) = p * tanh(y[b, h, m, n])
attention weighted(q, k, v; slope[H]: grad, g[H]: grad, u[B, M]: grad, x[B, N]: grad, t[H, 9]: grad) {
    s = causal(alibi(lift(scaled_dot_product(q, k); u); slope))
    return relative(gate(softmax(s); g, u, x); t) @ v
}
attention tabled(q, k, v; y[1|B, H, M, N]: grad) {
    return table(sigmoid_attention(sliding_window(scaled_dot_product(q, k); w = 30)); y) @ v
}
"""


def loaded(text: str, tmp_path_factory: Any) -> ModuleType:
    path: Path = tmp_path_factory.mktemp("learned") / "learned.attn"
    path.write_text(text, encoding="utf-8")
    return emulator.load(path, D=32)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: Any) -> ModuleType:
    return loaded(WEIGHTS, tmp_path_factory)


def agrees(call: Any, name: str, reference: Any, sizes: tuple[int, int], options: dict[str, Tensor]) -> None:
    q, k, v = inputs(2, 4, 2, *sizes, 32, 32, torch.bfloat16)
    variant = Variant(name, name, reference)
    bad = failures(compare(call, variant, q, k, v, options, learned=list(options)))
    assert not bad, f"{name} {sizes}: (error, allowed) {bad}"


def rows_and_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[2]).unsqueeze(1), torch.arange(k.shape[2]).unsqueeze(0)


def weighted(q: Tensor, k: Tensor, v: Tensor, **options: Tensor) -> tuple[Tensor, Tensor]:
    slope, g, u, x, t = (options[name].to(q.dtype) for name in ("slope", "g", "u", "x", "t"))
    m, n = rows_and_keys(q, k)
    k, v = (y.repeat_interleave(2, 1) for y in (k, v))
    s = q @ k.mT * 32**-0.5 * (1 + u[:, None, :, None]) - slope[:, None, None] * (m - n)
    s = s.masked_fill(n > m, -torch.inf)
    p = s.softmax(-1) * (g[:, None, None] + u[:, None, :, None] * x[:, None, None])
    p = p * torch.where(m > n, t[:, (m - n).clamp(0, 8)], 1.0)
    return p.to(v.dtype) @ v, s.logsumexp(-1)


def tabled(q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    m, n = rows_and_keys(q, k)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    p = torch.sigmoid(q @ k.mT * 32**-0.5) * ((m - n).abs() < 30) * torch.tanh(y.to(q.dtype))
    return p.to(v.dtype) @ v, (q * 0).sum(-1)


@pytest.mark.parametrize("length", [1, 70, 129])
def test_weights(weights: ModuleType, length: int) -> None:
    torch.manual_seed(length)
    shapes = {"slope": (4,), "g": (4,), "u": (2, length), "x": (2, length), "t": (4, 9)}
    options = {name: torch.rand(shape) for name, shape in shapes.items()}
    agrees(weights.weighted, "weighted", weighted, (length, length), options)


@pytest.mark.parametrize("batch", [1, 2])
def test_weights_without_a_sum(weights: ModuleType, batch: int) -> None:
    torch.manual_seed(batch)
    y = torch.randn(batch, 4, 70, 90)
    agrees(without_lse(weights.tabled), "tabled", tabled, (70, 90), {"y": y})


# ---- row blocks --------------------------------------------------------------------------------------------

# By row and column, by row alone, through an index, and a tensor that scores read too.
ROWS = """\
row placed(x, r, c; t[1|L, D]: grad) = x + t[r, c]
row scaled(x, b, h, r; u[1|B, Heads, L]: grad) = x * u[b, h, r] / (1.0 + mean(x * x))
row bucketed(x, r, c; z[5, D]: grad, w[D]: grad) = x * w[c] + z[r // 20, c]
score lift(s, b, h, m; u[1|B, H, M]: grad) = s + u[b, h, m]
attention rows(q, k, v; qt[1|M, Dqk]: grad, kt[1|N, Dqk]: grad, u[1|B, H, M]: grad, z[5, 16]: grad,
               w[16]: grad) {
    q = placed(q; t = qt)
    q = scaled(q; u)
    k = placed(k; t = kt)
    k[16:32] = bucketed(k[16:32]; z, w)
    q, k = rope(q, k)
    return softmax(causal(lift(scaled_dot_product(q, k); u))) @ v
}
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: Any) -> ModuleType:
    return loaded(ROWS, tmp_path_factory)


def rope(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turns = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * turns.cos() - high * turns.sin(), low * turns.sin() + high * turns.cos()), -1)


def rows_reference(q: Tensor, k: Tensor, v: Tensor, **options: Tensor) -> tuple[Tensor, Tensor]:
    qt, kt, u, z, w = (options[name].double() for name in ("qt", "kt", "u", "z", "w"))
    dtype, (m, n) = q.dtype, rows_and_keys(q, k)
    q, k = q.double() + qt, k.double() + kt
    q = q * u[..., None] / (1 + q.square().mean(-1, keepdim=True))
    k = torch.cat((k[..., :16], k[..., 16:] * w + z[torch.arange(k.shape[2]) // 20]), -1)
    q, k = (rope(x).to(dtype).double() for x in (q, k))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    s = (q @ k.mT * 32**-0.5 + u[..., None]).masked_fill(n > m, -torch.inf)
    return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1).to(dtype)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (70, 90), (97, 40)])
@pytest.mark.parametrize("broadcast", [False, True])
def test_rows(rows: ModuleType, m: int, n: int, broadcast: bool) -> None:
    torch.manual_seed(m)
    shapes = {"qt": (1 if broadcast else m, 32), "kt": (1 if broadcast else n, 32)}
    shapes |= {"u": (1 if broadcast else 2, 4, m), "z": (5, 16), "w": (16,)}
    options = {name: torch.rand(shape) for name, shape in shapes.items()}
    agrees(rows.rows, "rows", rows_reference, (m, n), options)
