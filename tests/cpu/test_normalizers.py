# SPDX-License-Identifier: Apache-2.0
"""Normalizers other than softmax, against PyTorch written from their papers: an extra term in the sum
(softmax1, sinks), and weights without a sum over the keys (sigmoid, ReLU).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import afc
from afc import passes
from afc.errors import UsageError
from afc.frontend import check_text
from afc.reference import Call, backward, forward, run_backward, run_forward
from afc.schedule.plan import schedule
from tests.support.checks import compare, failures, inputs, without_lse
from tests.support.dense import Tensor, Variant, softmax_attention
from tests.support.published import (
    averaged_relu,
    causal_scores,
    lower,
    of_its_head,
    pointwise,
    shifted_sigmoid,
    with_a_sink,
)

SCORES = "causal(scaled_dot_product(q, k))"
TEXTS = {
    "softmax1": f"attention a(q, k, v) = softmax1({SCORES}) @ v",
    "softmax_sink": f"attention a(q, k, v; sink[H]) = softmax_sink({SCORES}; sink) @ v",
    "sigmoid": f"attention a(q, k, v) = sigmoid_attention({SCORES}; bias = -log(N)) @ v",
    "relu": f"attention a(q, k, v) = relu_attention({SCORES}) @ v",
    "identity": f"normalizer linear(s) = s\nattention a(q, k, v) = linear({SCORES}) @ v",
    "sink_per_row": "normalizer moving(s, i, h; t[H]) = exp(s) / (sum(exp(s)) + exp(t[h] * i))\n"
    f"attention a(q, k, v; sink[H]) = moving(softcap({SCORES}; cap = 5.0); t = sink) @ v",
}
POINTWISE = ("sigmoid", "relu", "identity")


def capped_scores(q: Tensor, k: Tensor, q_origin: int, k_origin: int) -> tuple[Tensor, Tensor]:
    s, keep = causal_scores(q, k, q_origin, k_origin)
    return 5.0 * torch.tanh(s / 5.0), keep


def sinks(heads: int, device: Any) -> dict[str, Any]:
    return {"sink": torch.randn(heads) * 2}


per_head = with_a_sink(of_its_head, causal_scores)
VARIANTS = {
    "softmax1": Variant("softmax1", "a", per_head),
    "softmax_sink": Variant("softmax_sink", "a", per_head, sinks),
    "sigmoid": Variant("sigmoid", "a", pointwise(shifted_sigmoid, causal_scores)),
    "relu": Variant("relu", "a", pointwise(averaged_relu, causal_scores)),
    "identity": Variant("identity", "a", pointwise(lambda s: s, causal_scores)),
    "sink_per_row": Variant(
        "sink_per_row",
        "a",
        with_a_sink(lambda t, i: t * i, capped_scores),
        lambda heads, device: {"sink": torch.rand(heads) * 0.1},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("normalizers")
    for name, text in TEXTS.items():
        (folder / f"{name}.attn").write_text(text + "\n", encoding="utf-8")
    return folder


def kernel(folder: Path, name: str, dtype: torch.dtype) -> Any:
    return afc.load(folder / f"{name}.attn", D=64, dtype=dtype, backend="cpu").a


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("name", TEXTS)
def test_against_pytorch(folder: Path, name: str, dtype: torch.dtype) -> None:
    call = kernel(folder, name, dtype)
    call = without_lse(call) if name in POINTWISE else call
    variant = VARIANTS[name]
    for m, n, origins in ((129, 129, {}), (17, 90, {"q_origin": 60}), (60, 50, {"k_origin": 20})):
        q, k, v = inputs(2, 4, 2, m, n, 64, 64, dtype)
        bad = failures(compare(call, variant, q, k, v, {**variant.extras(4, "cpu"), **origins}))
        assert not bad, f"{name} {dtype} M{m} N{n}: (error, allowed) {bad}"


@pytest.mark.parametrize("name", TEXTS)
def test_schedule_equals_formula(name: str) -> None:
    program = passes.run(check_text(TEXTS[name] + "\n", "a.attn").programs[0], {"Dqk": 24, "Dv": 8})
    plan = schedule(program, "cpu", "float64")
    g = np.random.default_rng()
    for origins in ((0, 0), (40, 3), (0, 9)):
        shapes = ((2, 4, 61, 24), (2, 2, 73, 24), (2, 2, 73, 8))
        q, k, v = (g.standard_normal(s) for s in shapes)
        call = Call(q, k, v, {"sink": g.standard_normal(4)} if program.tensors else {}, {}, *origins)
        want, got = forward(program, call), run_forward(plan, call)
        np.testing.assert_allclose(got.o, want.o, rtol=0, atol=1e-11)
        np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=1e-11)
        do, dlse = g.standard_normal(want.o.shape), g.standard_normal(want.lse.shape)
        a, b = backward(program, call, do, dlse), run_backward(plan, call, got, do, dlse)
        for x, y in ((a.dq, b.dq), (a.dk, b.dk), (a.dv, b.dv)):
            np.testing.assert_allclose(y, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sink", [-200.0, 200.0, -torch.inf])
def test_a_sink_of_any_size(folder: Path, sink: float) -> None:
    """exp(sink) is beyond float32 either way; its logarithm is what the kernel computes with."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 70, 70, 64, 64, torch.float32))
    o, lse = kernel(folder, "softmax_sink", torch.float32)(
        q, k, v, sink=torch.full((2,), sink), return_lse=True
    )
    keep = lower(q, k)
    want, want_lse = softmax_attention(q.double(), k.double(), v.double(), lambda s: s / 8, keep)
    if sink > 0:
        assert torch.equal(o, torch.zeros_like(o)) and torch.equal(lse, torch.full_like(lse, sink))
    else:
        assert torch.allclose(o.double(), want, atol=1e-5) and torch.allclose(
            lse.double(), want_lse, atol=1e-5
        )
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(o.sum() + lse.sum(), (q, k, v)))


def test_a_row_without_keys_has_the_extra_alone(folder: Path) -> None:
    q, k, v = inputs(1, 2, 2, 40, 30, 64, 64, torch.float32)
    o, lse = kernel(folder, "softmax1", torch.float32)(q, k, v, k_origin=20, return_lse=True)
    assert torch.equal(o[:, :, :20], torch.zeros(1, 2, 20, 64))
    assert torch.equal(lse[:, :, :20], torch.zeros(1, 2, 20))  # log 1


def test_large_negative_scores_have_finite_gradients(folder: Path) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 65, 65, 64, 64, torch.float32, scale=30.0))
    for name in ("sigmoid", "relu"):
        o = kernel(folder, name, torch.float32)(q, k, v)
        assert all(torch.isfinite(g).all() for g in (o, *torch.autograd.grad(o.sum(), (q, k, v))))


def test_no_lse_without_a_sum(folder: Path) -> None:
    q, k, v = inputs(1, 2, 2, 8, 8, 64, 64, torch.float32)
    with pytest.raises(ValueError, match=r"a: return_lse: its normalizer has no sum over the keys"):
        kernel(folder, "sigmoid", torch.float32)(q, k, v, return_lse=True)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("name", TEXTS)
def test_gpu_targets_refuse_by_name(name: str, target: str) -> None:
    program = passes.run(check_text(TEXTS[name] + "\n", "a.attn").programs[0], {"Dqk": 64, "Dv": 64})
    with pytest.raises(UsageError) as caught:
        schedule(program, target, "bfloat16")
    assert caught.value.diagnostics[0].code == "E0411"
