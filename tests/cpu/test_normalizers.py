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
from tests.support.dense import softmax_attention
from tests.support.normalizers import POINTWISE, TEXTS, VARIANTS
from tests.support.published import lower


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


@pytest.mark.parametrize("name", TEXTS)
def test_hopper_refuses_by_name(name: str) -> None:
    program = passes.run(check_text(TEXTS[name] + "\n", "a.attn").programs[0], {"Dqk": 64, "Dv": 64})
    with pytest.raises(UsageError) as caught:
        schedule(program, "sm90", "bfloat16")
    assert caught.value.diagnostics[0].code == "E0411"
