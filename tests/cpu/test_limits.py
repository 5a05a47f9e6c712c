# SPDX-License-Identifier: Apache-2.0
"""The edges of what a call may be: lengths, sizes of logits, and what no query may see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import afc
from tests.support.checks import EXAMPLES, compare, failures, inputs, poison
from tests.support.dense import VARIANTS, softmax_attention


def kernel(name: str, dtype: str = "float32") -> Any:
    module = afc.load(EXAMPLES / f"{name}.attn", D=64, dtype=dtype, backend="cpu")
    return getattr(module, module.__all__[0])


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (1, 1), (127, 129), (129, 127), (1, 8191), (129, 8191)])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_lengths(name: str, m: int, n: int) -> None:
    variant = VARIANTS[name]
    q, k, v = inputs(1, 2, 1, m, n, 64, 64, torch.float32)
    extras = {**variant.extras(2, "cpu"), "q_origin": max(0, n - m)}
    if m and n:
        bad = failures(compare(kernel(name), variant, q, k, v, extras))
        assert not bad, f"M{m} N{n}: (error, allowed) {bad}"
        return
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o, lse = kernel(name)(q, k, v, **extras, return_lse=True)
    assert o.shape == q.shape and not o.any() and torch.isneginf(lse).all()
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(g.shape == x.shape and not g.any() for g, x in zip(gradients, (q, k, v), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("logit", [2.5e5, -2.5e5])
def test_logits_of_any_size(dtype: str, logit: float) -> None:
    """Scores far beyond exp's range: a row's largest stays, and ties share. All values are exact in bf16."""
    size = abs(logit) * 8  # of q . k, before 1 / sqrt(64)
    q, k, v = (torch.zeros(1, 1, 130, 64, dtype=getattr(torch, dtype)) for _ in range(3))
    q[..., 0] = 512.0
    k[..., 0] = float(torch.tensor(size / 512).bfloat16()) * (1 if logit > 0 else -1)
    k[0, 0, 3, 0] *= 0.5  # smaller where logits are positive, the largest where they are negative
    v[0, 0, :, 0] = torch.arange(130) % 2
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    poison()
    o, lse = kernel("full", dtype)(q, k, v, return_lse=True)
    keep = torch.ones(130, 130, dtype=torch.bool)
    want, want_lse = softmax_attention(q.double(), k.double(), v.double(), lambda s: s / 8, keep)
    torch.testing.assert_close(o.double(), want, rtol=0, atol=0 if logit < 0 else 2e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2**-22, atol=0)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(o.sum() + lse.sum(), (q, k, v)))


def test_causal_and_window_never_see_the_future() -> None:
    """Other keys after position i change nothing before it, forward and backward: bit for bit if finite."""
    call = kernel("mistral")
    q, k, v = inputs(1, 2, 2, 150, 150, 64, 64, torch.float32)
    do = torch.randn(1, 2, 150, 64)

    def run(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = q.clone().requires_grad_()
        o = call(leaf, k, v, w=37)
        return o.detach(), torch.autograd.grad(o, leaf, do)[0]

    o, dq = run(k, v)
    for future in (1, 64, 149):
        seen = slice(0, future)
        for key, value in ((7.0, 9.0), (torch.nan, torch.inf)):
            k2, v2 = k.clone(), v.clone()
            k2[:, :, future:], v2[:, :, future:] = key, value
            o2, dq2 = run(k2, v2)
            # A tile that holds infinities is added up in another order.
            near = {"rtol": 0, "atol": 0 if value == 9.0 else 1e-6}
            torch.testing.assert_close(o2[:, :, seen], o[:, :, seen], **near)
            torch.testing.assert_close(dq2[:, :, seen], dq[:, :, seen], **near)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, :50], v2[:, :, :50] = 7.0, 9.0  # and nothing older than the window
    assert torch.equal(o[:, :, 86:], run(k2, v2)[0][:, :, 86:])


@pytest.mark.parametrize("scale", [0.5, -2.0, 0.0])
def test_a_scale_reaches_the_backward(tmp_path: Any, scale: float) -> None:
    file = tmp_path / "scaled.attn"
    file.write_text(
        f"attention scaled(q, k, v) = softmax(scaled_dot_product(q, k; scale = {scale})) @ v\n",
        encoding="utf-8",
    )
    call = afc.load(file, D=64, dtype="float64", backend="cpu").scaled
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 70, 80, 64, 64, torch.float64))
    keep = torch.ones(70, 80, dtype=torch.bool)
    want, _ = softmax_attention(q, k, v, lambda s: s * scale, keep)
    do = torch.randn_like(want)
    found = torch.autograd.grad(call(q, k, v), (q, k, v), do)
    for a, b in zip(found, torch.autograd.grad(want, (q, k, v), do), strict=True):
        torch.testing.assert_close(a, b)
