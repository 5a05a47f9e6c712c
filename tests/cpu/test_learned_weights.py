# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors that weight blocks read: against dense attention in PyTorch, by finite
differences, and the formula, the schedule and the compiled code against one another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import afc  # noqa: E402
from afc import passes  # noqa: E402
from afc.frontend import check_text  # noqa: E402
from afc.reference import Call, backward, run_backward, run_forward  # noqa: E402
from afc.reference.rounding import to_storage  # noqa: E402
from afc.schedule.plan import schedule  # noqa: E402
from tests.support.checks import compare, failures, inputs  # noqa: E402
from tests.support.dense import Variant  # noqa: E402

# By head, query, key, distance and element, through an index, one tensor in several places.
TEXT = """
weight gate(p, h; g[H]: grad) = p * g[h]
weight relative(p, b, h, i, j, m; t[H, 2*R + 1]: grad, u[B, M]: grad, R: int) {
    near = t[h, clamp(i - j, -R, R) + R]
    return if i - j > 2 then p * sigmoid(near) * u[b, m] else p * near - p / (2.0 + near * near)
}
weight table(p, b, h, m, n; w[1|B, 1|H, M, N]: grad) = p * w[b, h, m, n]
weight chosen(p, b, n; at[B, N]: int, c[C]: grad) = p * exp(c[at[b, n]])
weight share(p, h; temperature[H]: grad) = p * temperature[h]
score heat(s, h; temperature[H]: grad) = s * temperature[h]
attention gated(q, k, v; g[H]: grad) {
    return gate(softmax(causal(scaled_dot_product(q, k))); g) @ v
}
attention several(q, k, v; temperature[H]: grad, sink[H]: grad, t[H, 2*R + 1]: grad, u[B, M]: grad,
                  c[C]: grad, at[B, N]: int, R: int, rate: float, seed: int) {
    s = causal(heat(scaled_dot_product(q, k); temperature))
    p = relative(softmax_sink(s; sink); t, u, R)
    p = dropout(chosen(p; at, c); rate, seed)
    return share(p; temperature) @ v
}
attention pointwise(q, k, v; w[1|B, 1|H, M, N]: grad, temperature[H]: grad, g[H]: grad) {
    s = sliding_window(heat(scaled_dot_product(q, k); temperature); w = 4)
    return gate(table(sigmoid_attention(s; bias = -1.0); w); g) @ v
}
normalizer bare(s) = s
attention linear(q, k, v; g[H]: grad) = gate(bare(dot(q, k)); g) @ v
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("learned") / "learned.attn"
    path.write_text(TEXT, encoding="utf-8")
    return afc.load(path, D=16, dtype="float64", backend="cpu")


def drawn(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def rows(m: int, n: int) -> list[Any]:
    return [drawn(2, 4, m, 16), drawn(2, 2, n, 16), drawn(2, 2, n, 16)]


def lowered(name: str) -> Any:
    (program,) = [p for p in check_text(TEXT, "learned.attn").programs if p.name == name]
    return passes.run(program, {"Dqk": 16, "Dv": 16})


def scores(q: Any, k: Any) -> Any:
    return q @ k.repeat_interleave(2, 1).mT * 16**-0.5


# ---- against PyTorch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(1, 1), (131, 140)])
def test_gates_against_dense_attention(module: Any, m: int, n: int) -> None:
    """With one key dP - delta is 0: the gate still has its gradient."""
    leaves = [*rows(m, n), drawn(4)]
    q, k, v, g = leaves
    found, d_o = module.gated(q, k, v, g=g, q_origin=n - m), torch.randn(2, 4, m, 16).double()
    hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
    p = scores(q, k).masked_fill(hidden, -torch.inf).softmax(-1)
    want = (p * g[:, None, None]) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(found, want)
    for x, y in zip(
        torch.autograd.grad(found, leaves, d_o), torch.autograd.grad(want, leaves, d_o), strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("broadcast", [False, True])
def test_tables_without_a_sum_against_dense_attention(module: Any, broadcast: bool) -> None:
    m, n = 70, 61
    leaves = [*rows(m, n), drawn(1, 1, m, n) if broadcast else drawn(2, 4, m, n), drawn(4), drawn(4)]
    q, k, v, w, temperature, g = leaves
    found, d_o = (
        module.pointwise(q, k, v, w=w, temperature=temperature, g=g),
        torch.randn(2, 4, m, 16).double(),
    )
    i, j = torch.arange(m)[:, None], torch.arange(n)
    p = torch.sigmoid(scores(q, k) * temperature[:, None, None] - 1.0) * ((i - j).abs() < 4)
    want = (p * w * g[:, None, None]) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(found, want)
    for x, y in zip(
        torch.autograd.grad(found, leaves, d_o), torch.autograd.grad(want, leaves, d_o), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_hidden_values_reach_no_gradient(module: Any) -> None:
    """NaN in values and gates that no query sees; a row that sees no key at all."""
    q, k, v, g = (x.detach() for x in (*rows(7, 7), drawn(4)))
    v[:, :, 4:] = torch.nan
    o = module.gated(q, k, v, g=g.requires_grad_(), q_origin=-3, kv_len=5)
    (found,) = torch.autograd.grad(o.sum(), [g])
    p = scores(q, k[:, :, :4]).masked_fill(torch.ones(7, 4, dtype=torch.bool).triu(-2), -torch.inf)
    p = p.softmax(-1).nan_to_num(0.0)
    want = (p @ v[:, :, :4].repeat_interleave(2, 1)).sum((0, 2, 3))
    torch.testing.assert_close(found, want.detach())


# ---- by finite differences ---------------------------------------------------------------------------------


def test_all_kinds_by_finite_differences(module: Any) -> None:
    at = torch.randint(3, (2, 5))

    def call(q: Any, k: Any, v: Any, *learned: Any) -> Any:
        names = ("temperature", "sink", "t", "u", "c")
        options = dict(zip(names, learned, strict=True))
        return module.several(q, k, v, **options, at=at, R=2, rate=0.3, seed=5, q_origin=3, return_lse=True)

    learned = (drawn(4), drawn(4), drawn(4, 5), drawn(2, 3), drawn(3))
    assert torch.autograd.gradcheck(call, (*rows(3, 5), *learned))


def test_without_a_sum_by_finite_differences(module: Any) -> None:
    def call(q: Any, k: Any, v: Any, w: Any, temperature: Any, g: Any) -> Any:
        return module.pointwise(q, k, v, w=w, temperature=temperature, g=g)

    assert torch.autograd.gradcheck(call, (*rows(3, 5), drawn(2, 1, 3, 5), drawn(4), drawn(4)))
    assert torch.autograd.gradcheck(lambda q, k, v, g: module.linear(q, k, v, g=g), (*rows(3, 5), drawn(4)))


# ---- three ways --------------------------------------------------------------------------------------------


def test_formula_schedule_and_code_agree(module: Any) -> None:
    m, n = 131, 140
    random = np.random.default_rng()
    draw = random.standard_normal
    learned = {"temperature": draw(4), "sink": draw(4), "t": draw((4, 11)), "u": draw((2, m)), "c": draw(6)}
    at = random.integers(6, size=(2, n))
    q, k, v, d_o = draw((2, 4, m, 16)), draw((2, 2, n, 16)), draw((2, 2, n, 16)), draw((2, 4, m, 16))
    program = lowered("several")
    call = Call(q, k, v, {**learned, "at": at}, {"R": 5, "rate": 0.25, "seed": 3}, 5, 1)
    plan = schedule(program, "cpu", "float64")
    want = backward(program, call, d_o)
    scheduled = run_backward(plan, call, run_forward(plan, call), d_o)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, *learned.values())]
    options = dict(zip(learned, leaves[3:], strict=True))
    others = {"at": torch.from_numpy(at), "R": 5, "rate": 0.25, "seed": 3, "q_origin": 5, "k_origin": 1}
    o = module.several(*leaves[:3], **options, **others)
    found = torch.autograd.grad(o, leaves, torch.from_numpy(d_o))
    for name, got in zip(learned, found[3:], strict=True):
        size = np.abs(want.captured[name]).max()
        np.testing.assert_allclose(got.numpy(), want.captured[name], rtol=0, atol=1e-11 * size)
        np.testing.assert_allclose(scheduled.captured[name], want.captured[name], rtol=0, atol=1e-11 * size)


def test_the_order_of_sums_does_not_depend_on_threads(module: Any) -> None:
    leaves = [*rows(131, 140), drawn(4)]
    d_o, threads, results = torch.randn(2, 4, 131, 16).double(), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            o = module.gated(*leaves[:3], g=leaves[3], q_origin=9)
            results.append((o, *torch.autograd.grad(o, leaves, d_o)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_plan_for_gpus_computes_the_same() -> None:
    """Both of its backward passes; P and dP are not rounded ahead of these sums, the inputs are."""
    m, n = 70, 90
    draw = np.random.default_rng(2).standard_normal
    (program,) = [p for p in check_text(TEXT, "learned.attn").programs if p.name == "several"]
    program = passes.run(program, {"Dqk": 64, "Dv": 64})
    learned = {"temperature": draw(4), "sink": draw(4), "t": draw((4, 11)), "u": draw((2, m)), "c": draw(6)}
    tensors = {**learned, "at": np.arange(2 * n).reshape(2, n) % 6}
    shapes = ((2, 4, m, 64), (2, 2, n, 64), (2, 2, n, 64), (2, 4, m, 64))
    q, k, v, d_o = (to_storage(draw(shape), "bfloat16") for shape in shapes)
    call = Call(q, k, v, tensors, {"R": 5, "rate": 0.25, "seed": 3}, 5, 1)
    plan, want = schedule(program, "sm80", "bfloat16"), backward(program, call, d_o)
    result = run_forward(plan, call)
    for deterministic in (False, True):
        found = run_backward(plan, call, result, d_o, deterministic=deterministic)
        for name in learned:
            error = np.linalg.norm(found.captured[name] - want.captured[name])
            assert error <= 2**-7 * np.linalg.norm(want.captured[name]), name


# ---- storage types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storage_types(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "gated.attn"
    path.write_text(
        "weight gate(p, h; g[H]: grad) = p * g[h]\n"
        "row placed(x, r, c; t[L, D]: grad) = x + t[r, c]\n"
        "attention gated(q, k, v; g[H]: grad, t[N, Dqk]: grad) {\n"
        "    k = placed(k; t)\n"
        "    return gate(softmax(scaled_dot_product(q, k)); g) @ v\n"
        "}\n",
        encoding="utf-8",
    )

    def reference(q: Any, k: Any, v: Any, g: Any, t: Any) -> tuple[Any, Any]:
        k = (k.double() + t.double()).to(k.dtype)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        s = q @ k.mT * 32**-0.5
        return (s.softmax(-1) * g.to(q.dtype)[:, None, None]) @ v, s.logsumexp(-1)

    call = afc.load(path, D=32, dtype=dtype, backend="cpu").gated
    torch.manual_seed(3)
    rows_of = inputs(2, 4, 2, 70, 90, 32, 32, dtype)
    options = {"g": torch.randn(4), "t": torch.randn(90, 32)}
    bad = failures(compare(call, Variant("gated", "gated", reference), *rows_of, options, learned=("g", "t")))
    assert not bad, f"(error, allowed) {bad}"
