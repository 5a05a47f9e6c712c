# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors on the CPU target: shapes, reads, threads, tracing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import afc
from afc.errors import SourceError
from tests.support.checks import inputs, poison
from tests.support.dense import softmax_attention

TEXT = """
score tilt(s; t[]: grad) = s * t[]
score rows(s, b, m, n; x[B, M]: grad) = s + x[b, m] - x[b, n]
score twice(s, h, i, j; t[H, 9]: grad) =
    s + t[h, clamp(i - j, 0, 8)] * tanh(t[h, clamp(j - i, 0, 8)])

attention scalar(q, k, v; t[]: grad) = softmax(causal(tilt(scaled_dot_product(q, k); t))) @ v
attention bias(q, k, v; bias[1|B, 1|H, M, N]: grad) {
    return softmax(additive_bias(scaled_dot_product(q, k); bias)) @ v
}
attention same(q, k, v; x[B, M]: grad) = softmax(causal(rows(scaled_dot_product(q, k); x))) @ v
attention table(q, k, v; t[H, 9]: grad) {
    return softmax(softcap(twice(causal(scaled_dot_product(q, k)); t); cap = 3.0)) @ v
}
score shifted(s, m, i, n; y[Rows, N]: grad) = s + y[m, n] * y[i, n]
attention moved(q, k, v; y[Rows, N]: grad) = softmax(shifted(scaled_dot_product(q, k); y)) @ v
attention unread(q, k, v; t[H]: grad) = softmax(dot(q, k)) @ v
attention outside(q, k, v; t[H, 5]: grad) {
    s = relative(scaled_dot_product(q, k); t)
    return softmax(causal(s)) @ v
}
score relative(s, h, i, j; t[H, 5]: grad) = if i - j < 5 then s + t[h, i - j] else s
attention sigmoid_bias(q, k, v; slope[H]: grad) {
    return sigmoid_attention(causal(alibi(scaled_dot_product(q, k); slope)); bias = -2.0) @ v
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("captured") / "captured.attn"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def module(path: Path) -> ModuleType:
    return afc.load(path, D=16, dtype="float64", backend="cpu")


@pytest.fixture(scope="module")
def single(path: Path) -> ModuleType:
    return afc.load(path, D=16, dtype="float32", backend="cpu")


def rows(m: int = 7, n: int = 9, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in inputs(2, 4, 2, m, n, 16, 16, dtype)]


def gradcheck(call: Any, *given: torch.Tensor) -> None:
    poison()
    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("h", [1, 4])
def test_broadcast_biases(module: ModuleType, b: int, h: int) -> None:
    bias = torch.randn(b, h, 7, 9, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda q, k, v, x: module.bias(q, k, v, bias=x, return_lse=True), *rows(), bias)


@pytest.mark.parametrize(
    ("name", "argument", "shape"),
    [
        ("scalar", "t", ()),
        ("same", "x", (2, 7)),
        ("table", "t", (4, 9)),
        ("outside", "t", (4, 5)),
        ("sigmoid_bias", "slope", (4,)),
    ],
)
def test_gradcheck(module: ModuleType, name: str, argument: str, shape: tuple[int, ...]) -> None:
    """A number, a tensor read at two places, a product of two reads, reads that a branch guards."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda q, k, v, x: getattr(module, name)(q, k, v, **{argument: x}), *rows(7, 7), x)


def test_strided_and_expanded_tensors(module: ModuleType) -> None:
    whole = torch.randn(9, 2, 14, 4, dtype=torch.float64, requires_grad=True)
    gradcheck(
        lambda q, k, v, x: module.bias(q, k, v, bias=x.permute(1, 3, 2, 0)[:, :, ::2]), *rows(7, 9), whole
    )
    one = torch.randn(4, 1, 1, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda q, k, v, x: module.bias(q, k, v, bias=x.expand(2, 4, 7, 9)), *rows(7, 9), one)


def test_only_the_captured_tensor_needs_a_gradient(module: ModuleType) -> None:
    q, k, v = (x.detach() for x in rows())
    bias = torch.randn(1, 1, 7, 9, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda x: module.bias(q, k, v, bias=x), bias)


def test_no_gradient_where_none_is_asked_for(module: ModuleType) -> None:
    q, k, v = rows()
    o = module.bias(q, k, v, bias=torch.randn(1, 1, 7, 9, dtype=torch.float64))
    assert all(x is not None for x in torch.autograd.grad(o.sum(), (q, k, v)))


def test_a_tensor_that_no_score_reads_has_gradient_zero(module: ModuleType) -> None:
    t = torch.randn(4, dtype=torch.float64, requires_grad=True)
    o = module.unread(*rows(), t=t)
    assert torch.equal(torch.autograd.grad(o.sum(), t)[0], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_gradient_has_the_dtype_of_its_tensor(single: ModuleType, dtype: torch.dtype) -> None:
    bias = torch.randn(1, 4, 7, 9).to(dtype).requires_grad_()
    o = single.bias(*rows(dtype=torch.float32), bias=bias)
    [gradient] = torch.autograd.grad(o.square().sum(), bias)
    assert gradient.dtype is dtype and gradient.shape == bias.shape and gradient.abs().sum() > 0


def test_bitwise_equal_with_any_number_of_threads(single: ModuleType) -> None:
    """What a task adds, and in which order, depends on the shapes alone."""
    q, k, v = rows(250, 250, torch.float32)
    table = torch.randn(4, 9, requires_grad=True)
    bias = torch.randn(1, 1, 250, 250, requires_grad=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            poison()
            for call, x in ((single.table(q, k, v, t=table), table), (single.bias(q, k, v, bias=bias), bias)):
                found.append(torch.autograd.grad(call.square().sum(), x)[0])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found, found[2:], strict=False):
        assert torch.equal(one, other)


def test_many_terms_are_summed_accurately(single: ModuleType) -> None:
    """Four million terms of a scalar's gradient: the sum is kept in double precision."""
    torch.manual_seed(3)
    q, k, v = (x.detach() for x in inputs(1, 4, 2, 1024, 1024, 16, 16, torch.float32))
    do = torch.randn(1, 4, 1024, 16)
    t = torch.ones((), requires_grad=True)
    [found] = torch.autograd.grad((single.scalar(q, k, v, t=t) * do).sum(), t)
    exact = torch.ones((), dtype=torch.float64, requires_grad=True)
    keep = torch.ones(1024, 1024, dtype=torch.bool).tril()
    o, _ = softmax_attention(q.double(), k.double(), v.double(), lambda s: s / 4 * exact, keep)
    [want] = torch.autograd.grad((o * do.double()).sum(), exact)
    assert abs(float(found) - float(want)) < 1e-5 * max(1.0, abs(float(want)))


def test_large_tables_are_added_to_directly(single: ModuleType) -> None:
    """A bias for all heads is too large for copies: its rows are split among tasks."""
    torch.manual_seed(5)
    q, k, v = (x.detach() for x in inputs(2, 4, 4, 1100, 1000, 16, 16, torch.float32))
    bias = torch.randn(1, 1, 1100, 1000, requires_grad=True)
    [found] = torch.autograd.grad(single.bias(q, k, v, bias=bias).square().sum(), bias)
    exact = bias.detach().double().requires_grad_()
    keep = torch.ones(1100, 1000, dtype=torch.bool)
    o, _ = softmax_attention(q.double(), k.double(), v.double(), lambda s: s / 4 + exact, keep)
    [want] = torch.autograd.grad(o.square().sum(), exact)
    assert float((found - want).norm() / want.norm()) < 1e-5


def test_two_rows_of_one_tensor_are_not_added_to_at_once(single: ModuleType) -> None:
    """Row m of one query tile is row i of another where q has an origin."""
    torch.manual_seed(7)
    q, k, v = (x.detach() for x in inputs(1, 1, 1, 1500, 3000, 16, 16, torch.float32))
    y = torch.rand(1600, 3000, requires_grad=True)  # too large for copies
    origin = 96
    [found] = torch.autograd.grad(single.moved(q, k, v, y=y, q_origin=origin).square().sum(), y)
    exact = y.detach().double().requires_grad_()
    bias = exact[:1500] * exact[origin : 1500 + origin]
    keep = torch.ones(1500, 3000, dtype=torch.bool)
    o, _ = softmax_attention(q.double(), k.double(), v.double(), lambda s: s / 4 + bias, keep)
    [want] = torch.autograd.grad(o.square().sum(), exact)
    assert float((found - want).norm() / want.norm()) < 1e-5


def test_torch_compile_and_opcheck(module: ModuleType) -> None:
    q, k, v = rows()
    bias = torch.randn(1, 4, 7, 9, dtype=torch.float64, requires_grad=True)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        return module.bias(*x[:3], bias=x[3]).square().sum()

    want = torch.autograd.grad(loss(q, k, v, bias), (q, k, v, bias))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(q, k, v, bias), (q, k, v, bias))
    for a, b in zip(want, found, strict=True):
        assert torch.equal(a, b)
    module.bias.prepare()
    o, lse = module.bias.glue.forward_op(q, k, v, [bias], [], [0, 0, -1], [], [])
    arguments = (torch.ones_like(o), None, q, k, v, o, lse, [bias], [], [0, 0, -1], [], [], False, [True])
    detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
    torch.library.opcheck(module.bias.glue.backward_op, detached)


def test_masked_and_dead_elements_get_nothing(module: ModuleType) -> None:
    """NaN where no key is seen reaches no gradient; a row without keys gives its bias gradient 0."""
    q, k, v = (x.detach() for x in rows(7, 7))
    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    o = module.same(q, k, v, x=x, q_origin=-3)
    [gradient] = torch.autograd.grad(o.square().sum(), x)
    assert torch.isfinite(gradient).all()
    bias = torch.full((1, 1, 7, 7), -torch.inf, dtype=torch.float64)
    bias[:, :, 3:] = 0.0
    bias.requires_grad_()
    [gradient] = torch.autograd.grad(module.bias(q, k, v, bias=bias).square().sum(), bias)
    assert torch.equal(gradient[:, :, :3], torch.zeros(1, 1, 3, 7, dtype=torch.float64))


# ---- refusals ---------------------------------------------------------------------------------------------


def test_a_gradient_that_was_not_declared(tmp_path: Path) -> None:
    file = tmp_path / "a.attn"
    file.write_text(
        "attention a(q, k, v; slope[H]) = softmax(alibi(dot(q, k); slope)) @ v\n", encoding="utf-8"
    )
    kernel = afc.load(file, D=16, dtype="float32", backend="cpu").a
    q, k, v = rows(dtype=torch.float32)
    with pytest.raises(ValueError, match="slope: expected a tensor without requires_grad"):
        kernel(q, k, v, slope=torch.ones(4, requires_grad=True))


@pytest.mark.parametrize("option", ["keep[B, N]: bool grad", "pick[B]: int grad"])
def test_only_float_tensors_have_gradients(tmp_path: Path, option: str) -> None:
    file = tmp_path / "a.attn"
    file.write_text(f"attention a(q, k, v; {option}) = softmax(dot(q, k)) @ v\n", encoding="utf-8")
    with pytest.raises(SourceError, match="E0402"):
        afc.load(file, D=16, dtype="float32", backend="cpu")


def test_the_call_interface_checks_gradients(single: ModuleType) -> None:
    """A gradient of another type or layout than the module writes would be overwritten beyond its end."""
    f = np.zeros(4, np.float32)
    data = np.zeros((1, 4, 2, 16), np.float32)
    view = (data.ctypes.data, 128, 32, 16, 1)
    rows_view = (f.ctypes.data, 8, 2, 1, 1)
    tensors = (*[view] * 4, rows_view, view, None, *[view] * 3)
    index = next(e.index for e in single.sigmoid_bias.info.entries)
    work = np.zeros(1 << 20, np.uint8)
    pointer = (work.ctypes.data + 255) // 256 * 256

    def call(*gradients: Any) -> None:
        single._afc_run(
            index, True, 0, -1, (1, 4, 4, 2, 2), tensors, ((f.ctypes.data, 5, (4,), (1,)),), gradients, (),
            0, 0, pointer, (1 << 20) - 256, 0, 1,
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"grad_captured\[0\]: expected dtype 5"):
        call((f.ctypes.data, 6, (4,), (1,)))
    with pytest.raises(ValueError, match=r"grad_captured\[0\]: expected a contiguous gradient"):
        call((f.ctypes.data, 5, (4,), (2,)))
    with pytest.raises(NotImplementedError, match=r"grad_captured\[1\]"):
        call((f.ctypes.data, 5, (4,), (1,)), (f.ctypes.data, 5, (4,), (1,)))
