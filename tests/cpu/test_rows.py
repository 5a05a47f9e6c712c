# SPDX-License-Identifier: Apache-2.0
"""Row blocks on the CPU target: norms of q and k ahead of the product, and gradients of their weights."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

import afc
from afc.errors import SourceError
from tests.support.checks import inputs, poison

TEXT = """
attention shared(q, k, v; w[Dqk]: grad) {
    q, k = rms_norm(q, k; w)
    q, k = rope(q, k)
    q, k = l2_norm(q, k; eps = 0.01)
    return softmax(causal(scaled_dot_product(q, k))) @ v
}
attention slices(q, k, v; qw[8]: grad, kw[8]: grad) {
    q[:8] = layer_norm(q[:8]; w = qw)
    q, k = rope_interleaved(q, k)
    k[8:16] = layer_norm(k[8:16]; w = kw)
    return softmax(scaled_dot_product(q, k)) @ v
}
row per_head(x, c, h; w[2, D]: grad) = tanh(x) * w[h % 2, c]
row steep(x, c, b, h, r; w[1|B, L, D]) = x * w[b, r, c] + mean(x) * h
attention heads(q, k, v; qw[2, Dqk]: grad, kw[2, Dqk]: grad, each[1|B, M, Dqk]) {
    q = per_head(q; w = qw)
    q = steep(q; w = each)
    k = per_head(k; w = kw)
    return softmax(causal(scaled_dot_product(q, k))) @ v
}
attention both(q, k, v; t[Dqk]: grad) {
    q = rms_norm(q; w = t)
    return softmax(tilt(causal(scaled_dot_product(q, k)); t)) @ v
}
score tilt(s, i, j; t[Dqk]: grad) = s + t[clamp(i - j, 0, Dqk - 1)]
attention frozen(q, k, v; w[Dqk]) {
    k = rms_norm(k; w)
    return softmax(causal(scaled_dot_product(q, k))) @ v
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.attn"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def module(path: Path) -> ModuleType:
    return afc.load(path, D=16, dtype="float64", backend="cpu")


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def rows(m: int = 7, n: int = 9) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in inputs(2, 4, 2, m, n, 16, 16, torch.float64)]


def test_one_weight_for_q_and_k_around_a_rotation(module: ModuleType) -> None:
    poison()
    assert torch.autograd.gradcheck(
        lambda q, k, v, w: module.shared(q, k, v, w=w, q_origin=2, return_lse=True),
        (*rows(), *tensors((16,))),
    )


def test_slices_before_and_after_a_rotation(module: ModuleType) -> None:
    poison()
    call = lambda q, k, v, a, b: module.slices(q, k, v, qw=a, kw=b)  # noqa: E731
    assert torch.autograd.gradcheck(call, (*rows(), *tensors((8,), (8,))))


def test_weights_by_head_and_values_by_row(module: ModuleType) -> None:
    poison()
    each = torch.randn(1, 7, 16, dtype=torch.float64)
    call = lambda q, k, v, a, b: module.heads(q, k, v, qw=a, kw=b, each=each)  # noqa: E731
    assert torch.autograd.gradcheck(call, (*rows(), *tensors((2, 16), (2, 16))))


def test_a_tensor_that_rows_and_scores_read(module: ModuleType) -> None:
    poison()
    assert torch.autograd.gradcheck(lambda q, k, v, t: module.both(q, k, v, t=t), (*rows(), *tensors((16,))))


def test_places_of_each_batch(module: ModuleType) -> None:
    """Rows of k beyond kv_len hold NaN: nothing of theirs reaches a weight."""
    q, k, v = rows()
    with torch.no_grad():
        k[0, :, 5:], v[0, :, 5:] = torch.nan, torch.nan
    [w] = tensors((16,))
    lengths = torch.tensor([5, 9])
    o = module.shared(q, k, v, w=w, kv_len=lengths, q_origin=2)
    found = torch.autograd.grad(o.square().sum(), (q, k, v, w))
    parts = [
        module.shared(q[b : b + 1], k[b : b + 1, :, :n].contiguous(), v[b : b + 1, :, :n], w=w, q_origin=2)
        for b, n in enumerate(lengths.tolist())
    ]
    want = torch.autograd.grad(sum(p.square().sum() for p in parts), (q, k, v, w))
    torch.testing.assert_close(o, torch.cat(parts))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_weight_without_grad(module: ModuleType) -> None:
    q, k, v = rows()
    w = torch.rand(16, dtype=torch.float64)
    o = module.frozen(q, k, v, w=w)
    k_normed = torch.nn.functional.rms_norm(k, (16,), w, 1e-6)
    s = (q @ k_normed.repeat_interleave(2, 1).transpose(-1, -2)) / 4
    s = s.masked_fill(~torch.ones(7, 9, dtype=torch.bool).tril(), -torch.inf)
    want = s.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(o, want)
    with pytest.raises(ValueError, match="w: expected a tensor without requires_grad"):
        module.frozen(q, k, v, w=w.requires_grad_())


def test_bitwise_equal_with_any_number_of_threads(path: Path) -> None:
    single = afc.load(path, D=16, dtype="float32", backend="cpu")
    q, k, v = inputs(2, 4, 2, 250, 250, 16, 16, torch.float32)
    w, before, found = torch.rand(16, requires_grad=True), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            poison()
            found.append(torch.autograd.grad(single.shared(q, k, v, w=w).square().sum(), w)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, found[0]) for x in found)


def test_rows_of_zeros_have_finite_gradients(module: ModuleType) -> None:
    q, k, v = (torch.zeros_like(x).requires_grad_() for x in rows())
    [w] = tensors((16,))
    o = module.shared(q, k, v, w=w)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(o.sum(), (q, k, v, w)))


# ---- refusals ---------------------------------------------------------------------------------------------


def refusal(text: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "a.attn"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SourceError, match=code):
        afc.load(file, D=16, dtype="float32", backend="cpu")


def test_what_a_row_block_cannot_do(tmp_path: Path) -> None:
    end = "return softmax(dot(q, k)) @ v }\n"
    refusal(f"row f(x, i) = x * i\nattention a(q, k, v) {{ q = f(q) {end}", "E0115", tmp_path)
    refusal(f"attention a(q, k, v) {{ v = l2_norm(v) {end}", "E0139", tmp_path)
    refusal(f"attention a(q, k, v) {{ q[:4] = l2_norm(q[4:8]) {end}", "E0138", tmp_path)
    refusal(f"row f(x) = x * mean(x, x)\nattention a(q, k, v) {{ q = f(q) {end}", "E0106", tmp_path)
    refusal(f"attention a(q, k, v) {{ q[4:4] = l2_norm(q[4:4]) {end}", "E0308", tmp_path)
    refusal("score f(s) = s - mean(s)\nattention a(q, k, v) = softmax(f(dot(q, k))) @ v\n", "E0105", tmp_path)
