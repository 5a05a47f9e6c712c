# SPDX-License-Identifier: Apache-2.0
"""The CPU target against dense float64 PyTorch: every variant, dtype, layout and awkward length, forward and
backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import afc
from tests.support.checks import EXAMPLES, compare, failures, inputs, run
from tests.support.dense import VARIANTS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def kernel(name: str, dtype: torch.dtype, d: int = 64, **options: Any) -> Any:
    module = afc.load(EXAMPLES / f"{name}.attn", D=d, dtype=dtype, backend="cpu", **options)
    return getattr(module, VARIANTS[name].attention)


def check(
    name: str,
    dtype: torch.dtype,
    b: int,
    h: int,
    hk: int,
    m: int,
    n: int,
    layout: str = "contiguous",
    scale: float = 1.0,
    **origins: int,
) -> None:
    variant = VARIANTS[name]
    q, k, v = inputs(b, h, hk, m, n, 64, 64, dtype, layout=layout, scale=scale)
    extras = {**variant.extras(h, "cpu"), **origins}
    bad = failures(compare(kernel(name, dtype), variant, q, k, v, extras))
    assert not bad, f"{name} {dtype} {layout} B{b} H{h}/{hk} M{m} N{n}: (error, allowed) {bad}"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, 2, 4, 2, 129, 129)


@pytest.mark.parametrize(
    "shape", [(1, 1), (17, 17), (127, 127), (300, 300), (5, 200), (200, 5), (64, 129), (1, 300)]
)
@pytest.mark.parametrize("name", ["llama", "mistral", "alibi"])
def test_lengths(name: str, shape: tuple[int, int]) -> None:
    check(name, torch.float32, 1, 2, 1, *shape)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_strides(layout: str, dtype: torch.dtype) -> None:
    check("llama", dtype, 3, 6, 3, 130, 70, layout)


@pytest.mark.parametrize("heads", [(8, 1), (6, 3), (7, 7)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check("gemma2", torch.float32, 2, *heads, 70, 70)


@pytest.mark.parametrize("origins", [(0, 50), (60, 0), (100, 100), (0, 200)])
@pytest.mark.parametrize("name", ["llama", "mistral", "alibi"])
def test_origins(name: str, origins: tuple[int, int]) -> None:
    check(name, torch.float32, 1, 2, 2, 90, 80, q_origin=origins[0], k_origin=origins[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_large_logits(dtype: torch.dtype) -> None:
    check("causal", dtype, 1, 2, 2, 65, 65, scale=10.0)


def test_gradcheck() -> None:
    for name, variant in VARIANTS.items():
        q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 7, 9, 64, 64, torch.float64))
        extras = variant.extras(2, "cpu")
        call = kernel(name, torch.float64)
        assert torch.autograd.gradcheck(
            lambda *a, c=call, e=extras: c(*a, **e, return_lse=True)[0], (q, k, v), fast_mode=True
        )


def test_empty_rows_are_zero() -> None:
    call = kernel("causal", torch.float32)
    q, k, v = inputs(1, 2, 2, 40, 30, 64, 64, torch.float32)
    do = torch.randn(1, 2, 40, 64)
    found = run(lambda *a, **x: call(*a, **x, return_lse=True), q, k, v, do, None, {"k_origin": 20})
    assert torch.equal(found.o[:, :, :20], torch.zeros(1, 2, 20, 64, dtype=torch.float64))
    assert torch.isneginf(found.lse[:, :, :20]).all()
    assert torch.equal(found.dq[:, :, :20], torch.zeros(1, 2, 20, 64, dtype=torch.float64))
    assert all(torch.isfinite(x).all() for x in (found.o, found.dq, found.dk, found.dv))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_zero_lengths(shape: tuple[int, int]) -> None:
    call = kernel("llama", torch.float32)
    m, n = shape
    q, k, v = inputs(2, 2, 2, m, n, 64, 64, torch.float32)
    found = run(lambda *a, **x: call(*a, **x, return_lse=True), q, k, v, torch.randn(2, 2, m, 64), None, {})
    assert torch.equal(found.o, torch.zeros(2, 2, m, 64, dtype=torch.float64))
    assert torch.isneginf(found.lse).all()
    assert torch.equal(found.dk, torch.zeros(2, 2, n, 64, dtype=torch.float64))


def test_zero_batch() -> None:
    q, k, v = inputs(0, 2, 2, 5, 5, 64, 64, torch.float32)
    assert kernel("llama", torch.float32)(q, k, v).shape == (0, 2, 5, 64)


def test_rows_beyond_the_tensor_are_never_seen() -> None:
    """q, k, v, dO are views into memory whose other rows are NaN."""
    call = kernel("llama", torch.float32)
    big = [torch.full((1, 2, 200, 64), torch.nan) for _ in range(4)]
    views = [x[:, :, :77] for x in big]
    for x in views:
        x.copy_(torch.randn(1, 2, 77, 64))
    q, k, v, do = views
    found = run(lambda *a, **x: call(*a, **x, return_lse=True), q, k, v, do, None, {})
    assert all(torch.isfinite(x).all() for x in (found.o, found.lse, found.dq, found.dk, found.dv))


def test_masked_key_lets_nothing_through() -> None:
    """A key that no query sees may hold anything."""
    call = kernel("mistral", torch.float32)
    q, k, v = inputs(1, 2, 2, 64, 64, 64, 64, torch.float32)
    options = {"w": 5, "q_origin": 100}
    before = call(q, k, v, **options)
    k[:, :, :3], v[:, :, :3] = 1e30, -1e30
    assert torch.equal(call(q, k, v, **options), before)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided"])
def test_gradient_of_the_output_has_any_strides(kind: str) -> None:
    call = kernel("llama", torch.float32)
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 50, 50, 64, 64, torch.float32))
    do = {
        "expanded": torch.ones(()).expand(1, 2, 50, 64),
        "transposed": torch.randn(1, 2, 64, 50).transpose(2, 3),
        "strided": torch.randn(1, 2, 50, 128)[..., ::2],
    }[kind]
    got = torch.autograd.grad(call(q, k, v), (q, k, v), do)
    want = torch.autograd.grad(call(q, k, v), (q, k, v), do.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_same_bits_for_any_number_of_threads() -> None:
    call = kernel("llama", torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in inputs(2, 4, 2, 200, 200, 64, 64, torch.bfloat16))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            o = call(q, k, v, deterministic=True)
            results.append((o, *torch.autograd.grad(o.float().sum(), (q, k, v))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_window_wider_than_the_sequence_is_no_window() -> None:
    q, k, v = inputs(1, 2, 2, 90, 90, 64, 64, torch.float32)
    call = kernel("mistral", torch.float32)
    assert torch.equal(call(q, k, v, w=90), call(q, k, v, w=10_000))
    counted = call(q, k, torch.ones_like(v), w=1)
    assert torch.allclose(counted, torch.ones_like(counted))


def test_causal_and_window_never_see_the_future() -> None:
    call = kernel("mistral", torch.float32)
    q, k, _ = inputs(1, 1, 1, 64, 64, 64, 64, torch.float32)
    one_hot = torch.eye(64)[None, None]
    weights = call(q, k, one_hot.contiguous(), w=9)[0, 0]
    i, j = torch.arange(64)[:, None], torch.arange(64)[None]
    assert torch.equal(weights > 0, (j <= i) & (i - j < 9))


def test_output_takes_the_stride_order_of_q() -> None:
    q, k, v = inputs(2, 4, 4, 33, 33, 64, 64, torch.float32, layout="transposed")
    assert kernel("llama", torch.float32)(q, k, v).transpose(1, 2).is_contiguous()


def test_head_sizes_differ() -> None:
    variant = VARIANTS["causal"]
    for dqk, dv in ((64, 32), (24, 80), (7, 5)):
        module = afc.load(EXAMPLES / "causal.attn", Dqk=dqk, Dv=dv, dtype=torch.float32, backend="cpu")
        q, k, v = inputs(1, 2, 2, 50, 60, dqk, dv, torch.float32)
        assert not failures(compare(module.causal_lm, variant, q, k, v, {}))


def test_no_memory_of_the_size_of_the_score_matrix() -> None:
    """Workspaces grow with the tensors: 64 times the rows take 64 times the bytes, not 4096 times."""
    module = afc.load(EXAMPLES / "llama.attn", D=64, dtype=torch.bfloat16, backend="cpu")
    for backward in (False, True):
        short, long = (
            module._afc_workspace(0, backward, -1, (1, 8, 8, rows, rows), 0, 0, 2, ())
            for rows in (1024, 65536)
        )
        assert long < 64 * short
        assert long < 4 * 65536 * 8 * 64 * 2  # a few tensors of the size of q
