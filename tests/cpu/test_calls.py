# SPDX-License-Identifier: Apache-2.0
"""A kernel inside PyTorch programs: checkpointing, copies, autocast, layouts, empty sizes, new lengths."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import afc
from tests.support.checks import EXAMPLES, inputs, poison

Tensor = torch.Tensor


def module(name: str, dtype: str = "float32", **options: Any) -> Any:
    return afc.load(EXAMPLES / f"{name}.attn", D=64, dtype=dtype, backend="cpu", **options)


def leaves(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> list[Tensor]:
    b, h, hk, m, n = shape
    return [x.requires_grad_() for x in inputs(b, h, hk, m, n, 64, 64, dtype, layout=layout)]


class Layer(torch.nn.Module):
    """Holds an attention, the module it comes from, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = module("llama")
        self.attention = self.kernel.llama
        self.weight = torch.nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight(x)
        out: Tensor = self.attention(y, y, x) + self.kernel.llama(x, x, y)
        return out


# ---- checkpointing, copies -------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    layer, (x, *_) = Layer(), leaves(2, 2, 2, 33, 33)
    parameters = [x, *layer.parameters()]
    plain = torch.autograd.grad(layer(x).square().sum(), parameters)
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, plain, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_output_and_lse(reentrant: bool) -> None:
    call = module("llama").llama
    tensors = leaves(1, 4, 2, 20, 30)

    def both(*a: Tensor) -> Any:
        return call(*a, return_lse=True)

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].square().sum() + pair[1].sin().sum()

    plain = torch.autograd.grad(loss(both(*tensors)), tensors)
    loss(checkpoint(both, *tensors, use_reentrant=reentrant)).backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(tensors, plain, strict=True))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_model_that_holds_a_kernel_can_be_copied(how: str) -> None:
    layer, x = Layer(), torch.randn(1, 2, 9, 64)
    if how == "deepcopy":
        again = copy.deepcopy(layer)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert torch.equal(again(x), layer(x))
    assert again.kernel is layer.kernel and again.attention is layer.attention
    assert again.weight.weight is not layer.weight.weight


def test_kernel_is_unpickled_in_another_process(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 9, 64)
    kernel = module("llama")
    (tmp_path / "held").write_bytes(pickle.dumps((kernel, kernel.llama, x, kernel.llama(x, x, x))))
    code = (
        "import pickle, torch\n"
        "kernel, attention, x, o = pickle.load(open('held', 'rb'))\n"
        "assert kernel.llama is attention and torch.equal(attention(x, x, x), o)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


# ---- autocast --------------------------------------------------------------------------------------------


def test_autocast_casts_q_k_and_v() -> None:
    """As in a model whose norm of q and k gives float32 while v stays in bfloat16."""
    call = module("llama", "bfloat16").llama
    q, k, v = leaves(1, 4, 2, 20, 20)
    v = v.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = call(q, k, v, return_lse=True)
    assert o.dtype is torch.bfloat16 and lse.dtype is torch.float32
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, (q, k, v), do)
    assert [g.dtype for g in got] == [torch.float32, torch.float32, torch.bfloat16]
    cast = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    want = call(*cast)
    assert torch.equal(o, want)
    grads = torch.autograd.grad(want, cast, do)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, grads, strict=True))


def test_autocast_leaves_captured_tensors_and_float64_alone() -> None:
    call = module("alibi", "bfloat16").alibi_lm
    q, k, v = inputs(1, 4, 4, 9, 400, 64, 64, torch.float32)
    slope = torch.rand(4) + 0.001
    with torch.autocast("cpu", torch.bfloat16):
        o = call(q, k, v, slope=slope)
    assert torch.equal(o, call(q.bfloat16(), k.bfloat16(), v.bfloat16(), slope=slope))
    double = [x.double() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert module("causal", "float64").causal_lm(*double).dtype is torch.float64
        with pytest.raises(TypeError, match=r"k: expected q's dtype torch.bfloat16, got torch.float64"):
            call(q, double[1], v, slope=slope)


def test_autocast_to_a_dtype_that_was_not_built_says_so() -> None:
    q, k, v = inputs(1, 2, 2, 5, 5, 64, 64, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="no kernel for cpu bfloat16"):
        module("llama").llama(q, k, v)


# ---- layouts, empty sizes --------------------------------------------------------------------------------


def test_broadcast_inputs_and_every_kind_of_gradient() -> None:
    """k and v shared by batch and heads through stride 0, q transposed; dO expanded, transposed, strided."""
    call = module("llama").llama
    q = torch.randn(3, 50, 4, 64).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(1, 1, 60, 64, requires_grad=True) for _ in range(2))
    wide = [x.expand(3, 2, 60, 64) for x in (k, v)]
    dense = [x.detach().contiguous().requires_grad_() for x in (q, *wide)]
    for do in (
        torch.ones(()).expand(3, 4, 50, 64),
        torch.randn(3, 1, 1, 64).expand(3, 4, 50, 64),
        torch.randn(3, 4, 64, 50).transpose(2, 3),
        torch.randn(3, 4, 50, 128)[..., ::2],
    ):
        poison()
        got = torch.autograd.grad(call(q, *wide), (q, k, v), do)
        want = torch.autograd.grad(call(*dense), dense, do.contiguous())
        assert torch.equal(got[0], want[0])
        for a, b in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(a, b.sum((0, 1), keepdim=True), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [(0, 2, 2, 5, 5), (2, 2, 2, 0, 5), (2, 2, 2, 5, 0), (2, 2, 2, 0, 0), (2, 0, 0, 5, 5), (0, 0, 0, 0, 0)],
)
@pytest.mark.parametrize("name", ["llama", "softmax1", "sigmoid"])
def test_empty_sizes(name: str, shape: tuple[int, ...]) -> None:
    """Shapes survive, rows without keys are 0, gradients too."""
    kernel = module(name)
    call = getattr(kernel, kernel.__all__[0])
    b, h, _, m, n = shape
    tensors = leaves(*shape)
    poison(megabytes=1)
    o = call(*tensors)
    assert o.shape == (b, h, m, 64) and (n > 0 or torch.equal(o, torch.zeros_like(o)))
    for x, g in zip(tensors, torch.autograd.grad(o.sum(), tensors), strict=True):
        assert g.shape == x.shape
        assert (m > 0 and n > 0) or torch.equal(g, torch.zeros_like(g))
    if name != "sigmoid":
        lse = call(*tensors, return_lse=True)[1]
        empty = {"llama": -torch.inf, "softmax1": 0.0}[name]
        assert lse.shape == (b, h, m) and (n > 0 or torch.equal(lse, torch.full_like(lse, empty)))


# ---- lengths that change ---------------------------------------------------------------------------------


def test_lengths_change_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither afc nor torch.compile compiles again for another batch, head count or length."""
    kernel = module("mistral")
    compilers: list[Any] = []
    monkeypatch.setattr(subprocess, "run", lambda *a, **x: compilers.append(a))
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **x: compilers.append(a))
    graphs: list[Any] = []

    def backend(graph: Any, arguments: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    torch._dynamo.reset()
    step = torch.compile(
        lambda q, k, v, w: kernel.mistral(q, k, v, w=w), fullgraph=True, dynamic=True, backend=backend
    )
    for b, m, n, w in ((3, 33, 40, 9), (5, 50, 17, 11), (3, 63, 90, 30), (6, 7, 300, 12)):  # no two are equal
        q, k, v = inputs(b, 4, 2, m, n, 64, 64, torch.float32)
        assert torch.equal(step(q, k, v, w), kernel.mistral(q, k, v, w=w))
    assert len(graphs) == 1 and compilers == []


# ---- LSE -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "softmax1", "learned_sink"])
def test_output_and_lse_are_differentiable_together(name: str) -> None:
    kernel = module(name, "float64")
    call = getattr(kernel, kernel.__all__[0])
    options = {"sink": torch.randn(4, dtype=torch.float64)} if name == "learned_sink" else {}
    tensors = leaves(2, 4, 2, 9, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *a: call(*a, k_origin=-2, return_lse=True, **options), tensors, fast_mode=True
    )


def test_lse_of_weights_without_a_sum_is_refused() -> None:
    tensors = inputs(1, 2, 2, 5, 5, 64, 64, torch.float32)
    with pytest.raises(ValueError, match="return_lse: its normalizer has no sum over the keys"):
        module("sigmoid").sigmoid_lm(*tensors, return_lse=True)
