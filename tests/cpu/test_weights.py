# SPDX-License-Identifier: Apache-2.0
"""Weight blocks: dropout and other linear maps of the weights, by formula, by schedule and compiled."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import afc
from afc import passes
from afc.errors import SourceError
from afc.frontend import check_text
from afc.ir.tiled import Reweigh
from afc.reference import Call, backward, forward, run_backward, run_forward
from afc.reference.rounding import to_storage
from afc.schedule.plan import schedule
from tests.support.checks import inputs, poison
from tests.support.counter import uniform_scores

Tensor = torch.Tensor
HEAD, KEYS = 16, 61

FEW = """
attention dropped(q, k, v; rate: float, seed: int) {
    return dropout(softmax(scaled_dot_product(q, k)); rate, seed) @ v
}
normalizer bare(s) = s
score drawn(s, b, h, m, n; seed: int) = 0.0 * s + random(seed, b, h, m, n)
attention numbers(q, k, v; seed: int) = bare(drawn(dot(q, k); seed)) @ v
"""
TEXT = """
attention learned(q, k, v; slope[H]: grad, sink[H]: grad, rate: float, seed: int) {
    s = causal(alibi(scaled_dot_product(q, k); slope))
    return dropout(softmax_sink(s; sink); rate, seed) @ v
}
weight fade(p, i, j; near: float) = p * exp(-abs(i - j) / near)
weight table(p, b, n; t[B, N]) {
    part = p * t[b, n]
    return part + p
}
attention composed(q, k, v; t[B, N], near: float, rate: float, seed: int) {
    q, k = rope(q, k)
    p = fade(softmax(softcap(scaled_dot_product(q, k); cap = 5.0)); near)
    return gated(table(dropout(p; rate, seed); t) @ v)
}
output gated(o) = o * sigmoid(o)
attention pointwise(q, k, v; slope[H]: grad, rate: float, seed: int) {
    s = sigmoid_attention(causal(alibi(scaled_dot_product(q, k); slope)); bias = -1.0)
    return dropout(s; rate, seed) @ v
}
attention linear(q, k, v; rate: float, seed: int) = dropout(bare(dot(q, k)); rate, seed) @ v
weight first(p, b, n; t[B, T]) = p * t[b, n]
attention beyond(q, k, v; keep[B, N]: bool, t[B, T]) {
    return first(softmax(key_padding(scaled_dot_product(q, k); keep)); t) @ v
}
"""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "weights.attn"
    file.write_text(FEW + TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def module(path: Path) -> ModuleType:
    return afc.load(path, D=HEAD, dtype="float64", backend="cpu")


def rows(m: int = 7, n: int = 9) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs(2, 4, 2, m, n, HEAD, HEAD, torch.float64)]


def check(call: Any, *learned: tuple[int, ...]) -> None:
    """Gradients against differences, for 3 query rows and 5 keys."""
    poison()
    extra = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in learned]
    assert torch.autograd.gradcheck(call, (*rows(3, 5), *extra))


# ---- gradients ---------------------------------------------------------------------------------------------


def test_dropout_and_the_gradient_of_the_lse(module: ModuleType) -> None:
    check(lambda q, k, v: module.dropped(q, k, v, rate=0.3, seed=3, return_lse=True))


def test_captured_tensors_of_scores_and_of_the_extra_term(module: ModuleType) -> None:
    check(
        lambda q, k, v, slope, sink: module.learned(
            q, k, v, slope=slope, sink=sink, rate=0.3, seed=3, q_origin=2, return_lse=True
        ),
        (4,),
        (4,),
    )


def test_several_weight_blocks_between_a_rotation_and_an_output_block(module: ModuleType) -> None:
    t = torch.randn(2, 5, dtype=torch.float64)
    check(lambda q, k, v: module.composed(q, k, v, t=t, near=2.0, rate=0.3, seed=3, return_lse=True))


def test_weights_without_a_sum(module: ModuleType) -> None:
    check(lambda q, k, v, slope: module.pointwise(q, k, v, slope=slope, rate=0.3, seed=3, q_origin=2), (4,))
    check(lambda q, k, v: module.linear(q, k, v, rate=0.3, seed=3))


def test_a_weight_of_zero_has_a_gradient_without_a_sum(module: ModuleType) -> None:
    """The weight is the score itself: 0, and its derivative 1."""
    q, k, v = rows()
    with torch.no_grad():
        q.zero_()
    o = module.linear(q, k, v, rate=0.3, seed=3)
    [dq] = torch.autograd.grad(o.sum(), [q])
    factor = (uniform_scores(3, 2, 4, 7, 9) >= 0.3) / 0.7
    ds = factor * v.repeat_interleave(2, 1).sum(-1)[:, :, None]
    torch.testing.assert_close(dq, (ds @ k.repeat_interleave(2, 1)).detach())


# ---- numbers -----------------------------------------------------------------------------------------------


def weights_of(call: Any, dtype: torch.dtype, m: int, **options: Any) -> Tensor:
    """The weights [2, 4, m, KEYS] that meet v, by rows of unit matrices as v, HEAD keys at a time."""
    q, k, _ = inputs(2, 4, 2, m, KEYS, HEAD, HEAD, dtype)
    parts = []
    for first in range(0, KEYS, HEAD):
        v = torch.zeros(2, 2, KEYS, HEAD, dtype=dtype)
        for c in range(min(HEAD, KEYS - first)):
            v[:, :, first + c, c] = 1
        parts.append(call(q, k, v, **options))
    return torch.cat(parts, -1)[..., :KEYS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_drops_the_same_elements(tmp_path: Path, dtype: torch.dtype) -> None:
    file = tmp_path / "few.attn"
    file.write_text(FEW, encoding="utf-8")
    own = afc.load(file, D=HEAD, dtype=dtype, backend="cpu")
    for seed in (0, -5, 2**30 - 1):
        drawn = uniform_scores(seed, 2, 4, 130, KEYS)
        dropped = weights_of(own.dropped, dtype, 130, rate=0.4, seed=seed) == 0
        assert torch.equal(dropped, drawn < 0.4)
        values = weights_of(own.numbers, dtype, 130, seed=seed)
        assert torch.equal(values, drawn.to(dtype))


def test_results_do_not_depend_on_threads(module: ModuleType) -> None:
    torch.manual_seed(0)
    q, k, v = [x.requires_grad_() for x in inputs(2, 4, 2, 211, 190, HEAD, HEAD, torch.float64)]
    slope = torch.rand(4, dtype=torch.float64, requires_grad=True)
    sink = torch.rand(4, dtype=torch.float64, requires_grad=True)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            o = module.learned(q, k, v, slope=slope, sink=sink, rate=0.1, seed=9)
            found.append((o, *torch.autograd.grad(o.square().sum(), [q, k, v, slope, sink])))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_nothing_and_everything_dropped(module: ModuleType) -> None:
    q, k, v = rows()
    plain, lse = module.dropped(q, k, v, rate=0.0, seed=1, return_lse=True)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(plain, want)
    nothing, same = module.dropped(q, k, v, rate=1.0, seed=1, return_lse=True)
    assert not nothing.any() and torch.equal(lse, same)
    for gradient in torch.autograd.grad(nothing.sum(), [q, k, v]):
        assert not gradient.any()


def test_what_is_masked_influences_nothing(module: ModuleType) -> None:
    """The factor of masked elements is NaN (outside the table) or infinite."""
    q, k, v = rows(7, 12)
    keep = (torch.arange(12) < 8).expand(2, 12)
    t = torch.randn(2, 9, dtype=torch.float64)
    t[:, 8] = torch.inf
    o = module.beyond(q, k, v, keep=keep, t=t)
    part = [q, *(x[:, :, :8].detach().requires_grad_() for x in (k, v))]
    s = q @ part[1].repeat_interleave(2, 1).mT * HEAD**-0.5
    want = (s.softmax(-1) * t[:, None, None, :8]) @ part[2].repeat_interleave(2, 1)
    torch.testing.assert_close(o, want)
    do = torch.randn_like(o)
    found, wanted = torch.autograd.grad(o, [q, k, v], do), torch.autograd.grad(want, part, do)
    torch.testing.assert_close(found[0], wanted[0])
    for x, y in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(x[:, :, :8], y)
        assert not x[:, :, 8:].any()


# ---- schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "sm80", "sm90"])
def test_the_schedule_has_the_step_and_computes_the_formula(target: str) -> None:
    text = Path(afc.__file__).parent.parent.joinpath("examples/bert.attn").read_text(encoding="utf-8")
    lowered = passes.run(check_text(text).programs[0], {"Dqk": 64, "Dv": 64})
    plan = schedule(lowered, target, "float64" if target == "cpu" else "bfloat16")
    bodies = [x.kernel.body for x in plan.launches if x.kernel.body]
    assert bodies and all(Reweigh("P") in body for body in bodies)
    assert all(Reweigh("dP") in x.kernel.body for x in plan.backward if x.kernel.body)
    g = np.random.default_rng(1)
    q, k, v, do = (to_storage(g.standard_normal((1, 2, 75, 64)), "bfloat16") for _ in range(4))
    call = Call(q, k, v, {"keep": g.random((1, 75)) < 0.8}, {"rate": 0.2, "seed": 11})
    want, gradients = forward(lowered, call), backward(lowered, call, do)
    found = run_forward(plan, call)
    again = run_backward(plan, call, found, do)
    allowed = 1e-12 if target == "cpu" else 2**-7  # of P, dS and the results, rounded to bfloat16
    for x, y in (
        (found.o, want.o),
        *((getattr(again, n), getattr(gradients, n)) for n in ("dq", "dk", "dv")),
    ):
        assert np.linalg.norm(x - y) <= allowed * np.linalg.norm(y)
    np.testing.assert_allclose(found.lse, want.lse, rtol=1e-12)


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("weight f(p) = p * p\nattention a(q, k, v) = f(softmax(dot(q, k))) @ v", "E0316"),
        ("weight f(p) = p + 0.1\nattention a(q, k, v) = f(softmax(dot(q, k))) @ v", "E0316"),
        ("weight f(p) = max(p, 0.0)\nattention a(q, k, v) = f(softmax(dot(q, k))) @ v", "E0316"),
        (
            "weight f(p) = if p > 0.1 then p else 0.0\nattention a(q, k, v) = f(softmax(dot(q, k))) @ v",
            "E0316",
        ),
        ("weight f(p, s) = p * s\nattention a(q, k, v) = f(softmax(dot(q, k))) @ v", "E0115"),
        ("weight f(p) = p > 0.0\nattention a(q, k, v) = f(softmax(dot(q, k))) @ v", "E0103"),
        ("weight f(p) = p * 2.0\nattention a(q, k, v) = f(softmax(dot(q, k)), v) @ v", "E0106"),
        ("weight f(p) = p * 2.0\nattention a(q, k, v) = softmax(f(dot(q, k))) @ v", "E0146"),
        ("weight f(p) = p * 2.0\nattention a(q, k, v) = f(softmax(dot(q, k)) @ v)", "E0146"),
        ("weight f(p) = p * 2.0\nattention a(q, k, v) = softmax(causal(f(softmax(dot(q, k))))) @ v", "E0146"),
    ],
)
def test_what_a_weight_block_cannot_do(text: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "a.attn"
    file.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(SourceError, match=code):
        afc.load(file, D=16, dtype="float32", backend="cpu")
