# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors, row and output blocks on a GPU, at lengths too long for the emulator.

`test_published` has the numbers of every published variant; here are order, memory, sizes and broadcasts.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import afc  # noqa: E402
from tests.gpu.test_published import on_gpu  # noqa: E402
from tests.support.checks import EXAMPLES, compare, failures, inputs  # noqa: E402
from tests.support.published import PUBLISHED, Shape  # noqa: E402

ARCH = os.environ.get("AFC_TEST_ARCH")
LEARNED = [
    "clipped_distance",
    "deberta",
    "forgetting",
    "headwise_norm",
    "kerple",
    "qwen3",
    "qwen3_next",
    "swin",
    "t5_decoder",
]


def attention(name: str, d: int) -> Any:
    module = afc.load(EXAMPLES / f"{name}.attn", D=d, dtype="bfloat16", backend="cuda", arch=ARCH)
    return getattr(module, PUBLISHED[name].attention)


@pytest.mark.parametrize("shape", [(1, 4, 4, 700, 700), (3, 6, 2, 257, 257), (1, 8, 1, 64, 64)])
@pytest.mark.parametrize("name", LEARNED)
def test_lengths(name: str, shape: tuple[int, int, int, int, int]) -> None:
    b, h, hk, m, n = shape
    variant, call = PUBLISHED[name], attention(name, 64)
    q, k, v = inputs(b, h, hk, m, n, 64, 64, torch.bfloat16)
    arguments = variant.arguments(Shape(b, h, hk, m, n, 64))
    learned = [t.name for t in call.info.tensors if t.grad]
    bad = failures(compare(on_gpu(call), variant, q, k, v, arguments, learned=learned))
    assert not bad, f"{name} {shape}: (error, allowed) {bad}"


@pytest.mark.parametrize("d", [32, 128, 192, 256])
@pytest.mark.parametrize("name", ["deberta", "qwen3_next", "t5_decoder"])
def test_head_sizes(name: str, d: int) -> None:
    variant, call = PUBLISHED[name], attention(name, d)
    q, k, v = inputs(1, 4, 2, 130, 130, d, d, torch.bfloat16)
    arguments = variant.arguments(Shape(1, 4, 2, 130, 130, d))
    learned = [t.name for t in call.info.tensors if t.grad]
    bad = failures(compare(on_gpu(call), variant, q, k, v, arguments, learned=learned))
    assert not bad, f"{name} D{d}: (error, allowed) {bad}"


@pytest.mark.parametrize("name", LEARNED)
def test_equal_calls_give_equal_gradients(name: str) -> None:
    """What row blocks of q read is left out: it comes from dQ, which is added in no fixed order."""
    call = attention(name, 64)
    rows = inputs(2, 4, 2, 600, 600, 64, 64, torch.bfloat16, "cuda")
    options = PUBLISHED[name].arguments(Shape(2, 4, 2, 600, 600, 64))
    options = {x: t.cuda() if isinstance(t, torch.Tensor) else t for x, t in options.items()}
    learned = [t.name for t in call.info.tensors if t.grad and t.name != "qw"]
    options |= {x: options[x].requires_grad_() for x in learned}

    def gradients() -> tuple[Any, ...]:
        o = call(*(x.requires_grad_() for x in rows), **options)
        return torch.autograd.grad(o.float().square().sum(), (*rows[1:], *(options[x] for x in learned)))

    first, second = gradients(), gradients()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["kerple", "t5_decoder"])
def test_no_memory_of_the_size_of_the_score_matrix(name: str) -> None:
    n = 16384
    call = attention(name, 64)
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, n, n, 64, 64, torch.bfloat16, "cuda"))
    options = PUBLISHED[name].arguments(Shape(1, 2, 2, n, n, 64))
    options = {x: t.cuda().requires_grad_() if isinstance(t, torch.Tensor) else t for x, t in options.items()}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(q, k, v, **options).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 16 * q.numel() * q.element_size() < n * n, f"{peak} bytes above the inputs"
    assert all(torch.isfinite(x.grad).all() for x in options.values() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("sizes", [(1, 1, 300, 300), (2, 1, 300, 300), (1, 4, 300, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broadcast_biases(sizes: tuple[int, ...], dtype: Any) -> None:
    """The gradient of a broadcast bias is the sum of that of the whole."""
    call = attention("swin", 64)
    q, k, v = inputs(2, 4, 2, 300, 300, 64, 64, torch.bfloat16, "cuda")
    bias = torch.randn(sizes, device="cuda").to(dtype).requires_grad_()
    whole = bias.detach().expand(2, 4, 300, 300).clone().float().requires_grad_()
    [got] = torch.autograd.grad(call(q, k, v, bias=bias).float().square().sum(), bias)
    [want] = torch.autograd.grad(call(q, k, v, bias=whole).float().square().sum(), whole)
    assert got.dtype is dtype and got.shape == bias.shape
    summed = want.double().sum_to_size(sizes)
    scale = want.double().abs().sum_to_size(sizes)  # of the terms, which may cancel
    eps = torch.finfo(dtype).eps
    assert (
        (got.double() - summed).abs() <= eps * summed.abs() + 8 * torch.finfo(torch.float32).eps * scale
    ).all()


def test_a_graph_replays_the_backward() -> None:
    call = attention("kerple", 64)
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 2, 200, 200, 64, 64, torch.bfloat16, "cuda"))
    r1, r2 = (torch.rand(4, device="cuda").add(0.1).requires_grad_() for _ in range(2))
    do = torch.randn(1, 4, 200, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Any, ...]:
        return torch.autograd.grad(call(q, k, v, r1=r1, r2=r2), (r1, r2), do)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
