# SPDX-License-Identifier: Apache-2.0
"""Output blocks on the CPU target: gates and norms of the output, and gradients of what they read."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import afc
from afc.errors import SourceError
from afc.runtime import read_module
from tests.support.checks import inputs, poison

Tensor = torch.Tensor

TEXT = """
attention gated(q, k, v; g[B, H, M, Dv]: grad) {
    return gate(softmax(causal(scaled_dot_product(q, k))) @ v; g)
}
attention by_head(q, k, v; g[1|B, H, M]: grad) {
    o = softmax(causal(scaled_dot_product(q, k))) @ v
    return head_gate(o; g)
}
attention around(q, k, v; w[Dqk]: grad, sink[H]: grad, z[Dv]: grad, g[B, H, M, Dv]: grad) {
    q, k = rms_norm(q, k; w)
    q, k = rope(q, k)
    return gate(output_norm(softmax_sink(causal(scaled_dot_product(q, k)); sink) @ v; w = z); g)
}
output centred(o, c; w[D]: grad) {
    x = o - mean(o)
    return x * rsqrt(sum(x * x) / Dv + 0.1) * w[c]
}
output squashed(o; cap: float) = tanh(o / cap) * cap
attention centre(q, k, v; w[Dv]: grad, top: float) {
    return squashed(centred(softmax(dot(q, k)) @ v; w); cap = top)
}
score tilt(s, i, j; t[Dqk]: grad) = s + t[clamp(i - j, 0, Dqk - 1)]
output tint(o, c; t[Dqk]: grad) = o * t[c] + t[0]
attention shared(q, k, v; t[Dqk]: grad) {
    q = per_dim_scale(q; w = t)
    return tint(softmax(tilt(causal(scaled_dot_product(q, k)); t)) @ v; t)
}
output placed(o, m, i, c; t[T, Dv]: grad, u[T]: grad) = o * t[i, c] + u[m] * sigmoid(t[i, c])
attention positions(q, k, v; t[T, Dv]: grad, u[T]: grad) {
    return placed(softmax(causal(scaled_dot_product(q, k))) @ v; t, u)
}
attention pointwise(q, k, v; g[B, H, M, Dv]: grad) {
    return gate(sigmoid_attention(scaled_dot_product(q, k); bias = -2.0) @ v; g)
}
attention padded(q, k, v; keep[B, N]: bool, t[Dqk]: grad) {
    return tint(softmax(key_padding(scaled_dot_product(q, k); keep)) @ v; t)
}
attention plain(q, k, v) = softmax(causal(scaled_dot_product(q, k))) @ v
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("outputs") / "outputs.attn"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def module(path: Path) -> ModuleType:
    return afc.load(path, D=16, dtype="float64", backend="cpu")


@pytest.fixture(scope="module")
def single(path: Path) -> ModuleType:
    return afc.load(path, D=16, dtype="float32", backend="cpu")


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def rows(m: int = 7, n: int = 9, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs(2, 4, 2, m, n, 16, 16, dtype)]


def check(call: Any, *learned: tuple[int, ...]) -> None:
    """Gradients against differences; `learned`: shapes for a call with 3 query rows and 5 keys."""
    poison()
    assert torch.autograd.gradcheck(call, (*rows(3, 5), *tensors(*learned)))


def test_a_gate_for_each_element(module: ModuleType) -> None:
    check(lambda q, k, v, g: module.gated(q, k, v, g=g, q_origin=2), (2, 4, 3, 16))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_gate_for_each_head_of_one_batch_or_of_all(module: ModuleType, batch: int) -> None:
    check(lambda q, k, v, g: module.by_head(q, k, v, g=g, q_origin=2), (batch, 4, 3))


def test_two_blocks_beside_row_blocks_a_rotation_a_sink_and_the_lse(module: ModuleType) -> None:
    check(
        lambda q, k, v, w, sink, z, g: module.around(q, k, v, w=w, sink=sink, z=z, g=g, return_lse=True),
        (16,),
        (4,),
        (16,),
        (2, 4, 3, 16),
    )


def test_means_sums_and_numbers(module: ModuleType) -> None:
    q, k, v = rows()
    [w] = tensors((16,))
    s = q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    x = s.softmax(-1) @ v.repeat_interleave(2, 1)
    x = x - x.mean(-1, keepdim=True)
    want = torch.tanh(x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * w / 0.7) * 0.7
    torch.testing.assert_close(module.centre(q, k, v, w=w, top=0.7), want)
    check(lambda q, k, v, w: module.centre(q, k, v, w=w, top=0.7), (16,))


def test_a_tensor_that_rows_scores_and_outputs_read(module: ModuleType) -> None:
    check(lambda q, k, v, t: module.shared(q, k, v, t=t), (16,))


def test_values_by_row_and_by_position(module: ModuleType) -> None:
    """What a row reads outside a tensor would be NaN: all positions lie inside."""
    origins = torch.tensor([0, 5])
    check(lambda q, k, v, t, u: module.positions(q, k, v, t=t, u=u, q_origin=origins), (9, 16), (9,))


def test_without_a_sum_over_the_keys(module: ModuleType) -> None:
    check(lambda q, k, v, g: module.pointwise(q, k, v, g=g), (2, 4, 3, 16))


def test_the_lse_is_that_of_the_attention(module: ModuleType) -> None:
    q, k, v = rows()
    [g] = tensors((2, 4, 7, 16))
    o, lse = module.plain(q, k, v, return_lse=True)
    gated, same = module.gated(q, k, v, g=g, return_lse=True)
    torch.testing.assert_close(gated, o * torch.sigmoid(g))
    assert torch.equal(lse, same)


def test_keys_that_are_not_there(module: ModuleType) -> None:
    """Rows of k and v beyond kv_len hold NaN: nothing of theirs reaches the output or a gradient."""
    q, k, v = rows()
    with torch.no_grad():
        k[0, :, 5:], v[0, :, 5:] = torch.nan, torch.nan
    [g] = tensors((2, 4, 7, 16))
    lengths = torch.tensor([5, 9])
    o = module.gated(q, k, v, g=g, kv_len=lengths, q_origin=2)
    found = torch.autograd.grad(o.square().sum(), (q, k, v, g))
    parts = [
        module.plain(q[b : b + 1], k[b : b + 1, :, :n].contiguous(), v[b : b + 1, :, :n], q_origin=2)
        for b, n in enumerate(lengths.tolist())
    ]
    whole = torch.cat(parts) * torch.sigmoid(g)
    torch.testing.assert_close(o, whole)
    want = torch.autograd.grad(whole.square().sum(), (q, k, v, g))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_without_a_key_are_zero_ahead_of_the_blocks(module: ModuleType) -> None:
    q, k, v = rows()
    [t] = tensors((16,))
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1] = False
    o, lse = module.padded(q, k, v, keep=keep, t=t, return_lse=True)
    assert torch.equal(o[1], t[0].expand(o[1].shape)) and bool(torch.isneginf(lse[1]).all())
    dq, dk, dv, dt = torch.autograd.grad(o.sum(), (q, k, v, t))
    assert all(torch.equal(x[1], torch.zeros_like(x[1])) for x in (dq, dk, dv))
    s = q[0] @ k[0].repeat_interleave(2, 0).transpose(-1, -2) / 4
    full = s.softmax(-1) @ v[0].repeat_interleave(2, 0)
    want = full.sum((0, 1))
    want[0] += o.numel()
    torch.testing.assert_close(dt, want)


@pytest.mark.parametrize("name", ["gated", "by_head"])
def test_incoming_gradients_of_any_strides(module: ModuleType, name: str) -> None:
    q, k, v = rows()
    [g] = tensors((2, 4, 7, 16) if name == "gated" else (2, 4, 7))
    o = getattr(module, name)(q, k, v, g=g)
    for d in (
        torch.ones((), dtype=o.dtype).expand(o.shape),
        torch.randn(2, 4, 16, 7, dtype=o.dtype).transpose(-1, -2),
    ):
        found = torch.autograd.grad(o, (q, k, v, g), d, retain_graph=True)
        want = torch.autograd.grad(o, (q, k, v, g), d.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_no_rows_and_no_keys(module: ModuleType) -> None:
    for m, n in ((0, 9), (7, 0)):
        q, k, v = rows(m, n)
        [g] = tensors((2, 4, m, 16))
        o = module.gated(q, k, v, g=g)
        assert o.shape == (2, 4, m, 16) and not o.any()
        assert not any(x.any() for x in torch.autograd.grad(o.sum(), (q, k, v, g)))


# M = 9000 makes the gates too large to be summed in copies: each task writes those of its own heads.
@pytest.mark.parametrize(("name", "m"), [("around", 250), ("by_head", 250), ("gated", 9000)])
def test_bitwise_equal_with_any_number_of_threads(single: ModuleType, name: str, m: int) -> None:
    q, k, v = rows(m, min(m, 250), torch.float32)
    shapes = {
        "around": {"w": (16,), "sink": (4,), "z": (16,), "g": (2, 4, m, 16)},
        "by_head": {"g": (1, 4, m)},
        "gated": {"g": (2, 4, m, 16)},
    }[name]
    options = {n: torch.randn(s, requires_grad=True) for n, s in shapes.items()}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            poison()
            loss = getattr(single, name)(q, k, v, **options).square().sum()
            found.append(torch.autograd.grad(loss, (q, k, v, *options.values())))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for x in found for a, b in zip(x, found[0], strict=True))


# ---- in PyTorch and NumPy -----------------------------------------------------------------------------


def test_numpy_calls_give_the_same_output(single: ModuleType) -> None:
    q, k, v = (x.detach() for x in rows(dtype=torch.float32))
    g = torch.randn(2, 4, 7, 16)
    got = single.gated(*(x.numpy() for x in (q, k, v)), g=g.numpy())
    np.testing.assert_array_equal(got, single.gated(q, k, v, g=g).numpy())


def test_traced_checked_and_computed_again(single: ModuleType) -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = rows(dtype=torch.float32)
    [g] = tensors((2, 4, 7, 16), dtype=torch.float32)
    call = lambda q, k, v, g: single.gated(q, k, v, g=g)  # noqa: E731
    want = torch.autograd.grad(call(q, k, v, g).square().sum(), (q, k, v, g))
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    again = lambda *x: checkpoint(call, *x, use_reentrant=False)  # noqa: E731
    for other in (compiled, again):
        found = torch.autograd.grad(other(q, k, v, g).square().sum(), (q, k, v, g))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    glue = single.gated.glue
    q, k, v, g = (x.detach() for x in (q, k, v, g))
    numbers: tuple[Any, ...] = ([], [0, 0, -1], [], [])
    torch.library.opcheck(glue.forward_op, (q, k, v, [g], *numbers))
    o, lse, raw = glue.forward_op(q, k, v, [g], *numbers)
    arguments = (torch.randn_like(o), None, q, k, v, raw, lse, [g], *numbers, False, [True])
    torch.library.opcheck(glue.backward_op, arguments)


def test_autocast(path: Path) -> None:
    half = afc.load(path, D=16, dtype="bfloat16", backend="cpu")
    q, k, v = rows(dtype=torch.float32)
    [g] = tensors((2, 4, 7, 16), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = half.gated(q, k, v, g=g)
    assert o.dtype is torch.bfloat16
    found = torch.autograd.grad(o.float().sum(), (q, k, v, g))
    assert all(x.dtype is torch.float32 for x in found)


def test_the_call_interface_names_the_field(single: ModuleType) -> None:
    """o_raw belongs to attentions with output blocks; their backward needs it."""
    attentions = read_module(single).attentions
    x, lse = torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 4)
    view, line = (x.data_ptr(), 64, 64, 16, 1), (lse.data_ptr(), 4, 4, 1, 1)
    size = 1 << 22
    room = torch.empty(size + 256, dtype=torch.uint8)
    start = (room.data_ptr() + 255) // 256 * 256

    def run(name: str, backward: bool, *raw: Any) -> None:
        tensors = (view, view, view, view, line, view, None, view, view, view, *raw)
        gates = ((x.data_ptr(), 5, (1, 1, 4, 16), (64, 64, 16, 1)),) if name == "gated" else ()
        sizes = (1, 1, 1, 4, 4)
        single._afc_run(
            attentions[name].entries[0].index,
            backward,
            0,
            -1,
            sizes,
            tensors,
            gates,
            (),
            (),
            0,
            0,
            start,
            size,
            0,
            1,
        )

    run("gated", False)
    with pytest.raises(NotImplementedError, match="o_raw: this attention has no output block"):
        run("plain", False, view)
    with pytest.raises(ValueError, match="o_raw: expected data, got a null pointer"):
        run("gated", True)
    with pytest.raises(ValueError, match="o_raw: expected stride 1 in the last dimension, got 2"):
        run("gated", False, (x.data_ptr(), 64, 64, 16, 2))


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("output f(o, n) = o * n\nattention a(q, k, v) = f(softmax(dot(q, k)) @ v)", "E0115"),
        ("output f(o) = o > 0.0\nattention a(q, k, v) = f(softmax(dot(q, k)) @ v)", "E0103"),
        ("output f(o) = o + floor(o)\nattention a(q, k, v) = f(f(softmax(dot(q, k)) @ v), v)", "E0106"),
        ("output f(o) = o * 2.0\nattention a(q, k, v) = f(softmax(dot(q, k))) @ v", "E0146"),
        ("output f(o) = o * 2.0\nattention a(q, k, v) = softmax(f(dot(q, k))) @ v", "E0146"),
        ("output f(o) = o * 2.0\nattention a(q, k, v) = causal(f(softmax(dot(q, k)) @ v))", "E0146"),
        ("attention a(q, k, v; w[Dqk]) = output_norm(softmax(dot(q, k)) @ v; w)", "E0201"),
        ("attention a(q, k, v; o: float) = softmax(scale(dot(q, k); scale = o)) @ v", "E0132"),
    ],
)
def test_what_an_output_block_cannot_do(text: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "a.attn"
    file.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(SourceError, match=code):
        afc.load(file, D=16, dtype="float32", backend="cpu")
