# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels against dense float64 PyTorch: every variant, dtype, head size, layout and awkward
length.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import afc  # noqa: E402
from tests.support.checks import EXAMPLES, compare, failures, inputs, on_the_cpu, run  # noqa: E402
from tests.support.dense import VARIANTS  # noqa: E402
from tests.support.published import PUBLISHED  # noqa: E402

ARCH = os.environ.get("AFC_TEST_ARCH")
DTYPES = ("bfloat16", "float16")


def kernel(name: str, dtype: str, dqk: int, dv: int | None = None, **options: Any) -> Any:
    module = afc.load(
        EXAMPLES / f"{name}.attn", Dqk=dqk, Dv=dv or dqk, dtype=dtype, backend="cuda", arch=ARCH, **options
    )
    return getattr(module, VARIANTS[name].attention)


def check(
    name: str,
    dtype: str,
    d: int,
    b: int,
    h: int,
    hk: int,
    m: int,
    n: int,
    layout: str = "contiguous",
    scale: float = 1.0,
    dv: int | None = None,
    **origins: int,
) -> None:
    variant = VARIANTS[name]
    q, k, v = inputs(b, h, hk, m, n, d, dv or d, getattr(torch, dtype), "cuda", layout, scale)
    extras = {**variant.extras(h, "cuda"), **origins}
    bad = failures(compare(kernel(name, dtype, d, dv), variant, q, k, v, extras))
    assert not bad, f"{name} {dtype} D{d} {layout} B{b} H{h}/{hk} M{m} N{n}: (error, allowed) {bad}"


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, dtype: str, d: int) -> None:
    check(name, dtype, d, 2, 4, 2, 129, 129)
    check(name, dtype, d, 1, 2, 2, 500, 500)


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["packed", "qwen2_vl", "axial_vit", "llama_tables", "speculative"])
def test_rotations_by_captured_tensors(name: str, dtype: str, d: int) -> None:
    variant = PUBLISHED[name]
    shape = replace(variant.shape, d=d)
    path = EXAMPLES / f"{name}.attn"
    call = getattr(afc.load(path, D=d, dtype=dtype, backend="cuda", arch=ARCH), variant.attention)
    q, k, v = inputs(shape.b, shape.h, shape.hk, shape.m, shape.n, d, d, getattr(torch, dtype), "cuda")
    options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in variant.arguments(shape).items()}
    checked = replace(variant, reference=on_the_cpu(variant.reference))
    bad = failures(compare(call, checked, q, k, v, options))
    assert not bad, f"{name} {dtype} {shape}: (error, allowed) {bad}"


@pytest.mark.parametrize(
    "shape", [(1, 1), (17, 17), (127, 127), (300, 300), (5, 200), (200, 5), (64, 129), (1, 300), (1025, 1023)]
)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["llama", "mistral", "alibi", "gemma2"])
def test_lengths(name: str, d: int, shape: tuple[int, int]) -> None:
    check(name, "bfloat16", d, 1, 2, 1, *shape)


@pytest.mark.parametrize("d", [8, 16, 32, 40, 48, 72, 80, 88, 96, 104, 120, 136, 160, 192, 200, 256])
@pytest.mark.parametrize("name", ["causal", "llama"])
def test_head_sizes(name: str, d: int) -> None:
    check(name, "float16", d, 1, 4, 2, 200, 260)


def test_head_sizes_differ() -> None:
    check("causal", "bfloat16", 192, 1, 2, 2, 150, 150, dv=128)
    check("causal", "bfloat16", 64, 1, 2, 2, 150, 150, dv=128)
    check("causal", "bfloat16", 128, 1, 2, 2, 150, 150, dv=32)
    check("llama", "bfloat16", 40, 1, 4, 2, 150, 150, dv=72)
    check("llama", "bfloat16", 136, 1, 4, 2, 150, 150, dv=24)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_strides(name: str, d: int, layout: str) -> None:
    check(name, "bfloat16", d, 3, 6, 3, 130, 70, layout)


@pytest.mark.parametrize("heads", [(8, 1), (6, 3), (7, 7), (32, 8)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check("llama", "bfloat16", 128, 3, *heads, 140, 140)
    check("gemma2", "float16", 64, 2, *heads, 70, 70)


@pytest.mark.parametrize("origins", [(0, 50), (60, 0), (100, 100), (0, 200), (1_000_000, 999_990)])
@pytest.mark.parametrize("name", ["llama", "mistral", "alibi"])
def test_origins(name: str, origins: tuple[int, int]) -> None:
    check(name, "bfloat16", 64, 1, 2, 2, 90, 80, q_origin=origins[0], k_origin=origins[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [3.0, 10.0])
def test_large_logits(dtype: str, scale: float) -> None:
    check("causal", dtype, 128, 1, 2, 2, 257, 257, scale=scale)


def test_empty_rows_are_zero() -> None:
    for d in (64, 128):
        call = kernel("causal", "bfloat16", d)
        q, k, v = inputs(1, 2, 2, 300, 200, d, d, torch.bfloat16, "cuda")
        found = run(
            lambda *a, c=call, **x: c(*a, **x, return_lse=True),
            q,
            k,
            v,
            torch.randn_like(q),
            None,
            {"k_origin": 150},
        )
        assert not found.o[:, :, :150].any() and torch.isneginf(found.lse[:, :, :150]).all()
        assert not found.dq[:, :, :150].any()
        assert all(torch.isfinite(x).all() for x in (found.o, found.dq, found.dk, found.dv))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_zero_lengths(shape: tuple[int, int]) -> None:
    m, n = shape
    q, k, v = inputs(2, 2, 2, m, n, 64, 64, torch.bfloat16, "cuda")
    call = kernel("llama", "bfloat16", 64)
    found = run(lambda *a, **x: call(*a, **x, return_lse=True), q, k, v, torch.randn_like(q), None, {})
    assert not found.o.any() and torch.isneginf(found.lse).all() and not found.dq.any() and not found.dk.any()


def test_rows_beyond_the_tensor_are_never_seen() -> None:
    call = kernel("llama", "bfloat16", 128)
    big = [torch.full((1, 2, 400, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    views = [x[:, :, 100:277] for x in big]
    for x in views:
        x.copy_(torch.randn(1, 2, 177, 128))
    q, k, v, do = views
    found = run(lambda *a, **x: call(*a, **x, return_lse=True), q, k, v, do, None, {})
    assert all(torch.isfinite(x).all() for x in (found.o, found.lse, found.dq, found.dk, found.dv))


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided"])
def test_gradient_of_the_output_has_any_strides(kind: str) -> None:
    call = kernel("llama", "bfloat16", 64)
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 150, 150, 64, 64, torch.bfloat16, "cuda"))
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    do = {
        "expanded": torch.ones((), **make).expand(1, 2, 150, 64),
        "transposed": torch.randn(1, 2, 64, 150, **make).transpose(2, 3),
        "strided": torch.randn(1, 2, 150, 128, **make)[..., ::2],
    }[kind]
    got = torch.autograd.grad(call(q, k, v), (q, k, v), do)
    want = torch.autograd.grad(call(q, k, v), (q, k, v), do.contiguous())
    for a, b in zip(got[1:], want[1:], strict=True):  # dQ is added in no fixed order
        assert torch.equal(a, b)
    torch.testing.assert_close(got[0], want[0], rtol=2**-7, atol=2**-10)


def test_forward_is_deterministic() -> None:
    call = kernel("llama", "bfloat16", 64)
    q, k, v = inputs(1, 2, 2, 1500, 1500, 64, 64, torch.bfloat16, "cuda")
    outputs = [call(q, k, v, return_lse=True) for _ in range(5)]
    assert all(torch.equal(o, outputs[0][0]) and torch.equal(s, outputs[0][1]) for o, s in outputs)


def test_no_memory_of_the_size_of_the_score_matrix() -> None:
    n = 16384
    call = kernel("llama", "bfloat16", 64)
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, n, n, 64, 64, torch.bfloat16, "cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(q, k, v).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    tensor = q.numel() * q.element_size()
    assert peak < 14 * tensor < n * n, f"{peak} bytes above the inputs, a tensor has {tensor}"
