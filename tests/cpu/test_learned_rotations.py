# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors that rotations read: by finite differences, and the formula, the schedule and
the compiled code against one another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import afc  # noqa: E402
from afc import passes  # noqa: E402
from afc.errors import UsageError  # noqa: E402
from afc.frontend import check_text  # noqa: E402
from afc.reference import Call, backward, run_backward, run_forward  # noqa: E402
from afc.schedule.plan import schedule  # noqa: E402

# Scalars, tensors by pair, head, batch entry and row; some are also read by what is around the rotations.
TEXT = """
rotate turn(x0, x1, p, c; f[D // 2]: grad) over half {
    return (x0 * cos(p * f[c]) - x1 * sin(p * f[c]), x0 * sin(p * f[c]) + x1 * cos(p * f[c]))
}
rotate mixed(x0, x1, b, h, r, p, c; t[Hh]: grad, u[1|B, L]: grad, g[]: grad) over adjacent {
    a = p * 0.3 * t[h] + u[b, r] * (c + 1)
    return (g * (x0 * cos(a) - x1 * sin(a)), x0 * sin(a) + x1 * cos(a) * t[h])
}
score lift(s, h; t[H]: grad) = s * t[h]
attention learned(q, k, v; f[Dqk // 2]: grad) {
    q, k = turn(q, k; f)
    return softmax(causal(scaled_dot_product(q, k))) @ v
}
attention two(q, k, v; t[H]: grad, tk[Hk]: grad, uq[1|B, M]: grad, uk[B, N]: grad, g[]: grad, w[Dqk]: grad) {
    q, k = rms_norm(q, k; w)
    q = mixed(q; t, u = uq, g)
    k[4:12] = mixed(k[4:12]; t = tk, u = uk, g)
    q = per_dim_scale(q; w)
    q, k = rope(q, k)
    return softmax(causal(lift(scaled_dot_product(q, k); t))) @ v
}
"""
NAMES = ("t", "tk", "uq", "uk", "g", "w")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("learned") / "learned.attn"
    path.write_text(TEXT, encoding="utf-8")
    return afc.load(path, D=16, dtype="float64", backend="cpu")


def drawn(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_frequencies_by_finite_differences(module: Any) -> None:
    q, k, v = drawn(2, 4, 3, 16), drawn(2, 2, 5, 16), drawn(2, 2, 5, 16)

    def call(q: Any, k: Any, v: Any, f: Any) -> Any:
        return module.learned(q, k, v, f=f, q_origin=2, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, drawn(8)))


def test_all_kinds_by_finite_differences(module: Any) -> None:
    q, k, v = drawn(2, 4, 3, 16), drawn(2, 2, 4, 16), drawn(2, 2, 4, 16)
    learned = (drawn(4), drawn(2), drawn(1, 3), drawn(2, 4), drawn(), drawn(16))

    def call(*rows: Any) -> Any:
        return module.two(*rows[:3], **dict(zip(NAMES, rows[3:], strict=True)), q_origin=1)

    assert torch.autograd.gradcheck(call, (q, k, v, *learned))


def test_formula_schedule_and_code_agree(module: Any) -> None:
    m, n = 131, 140
    random = np.random.default_rng()
    draw = random.standard_normal
    tensors = {"t": draw(4), "tk": draw(2), "uq": draw((1, m)), "uk": draw((2, n)), "g": np.array(0.7)}
    tensors["w"] = draw(16)
    q, k, v, d_o = draw((2, 4, m, 16)), draw((2, 2, n, 16)), draw((2, 2, n, 16)), draw((2, 4, m, 16))
    (program,) = [p for p in check_text(TEXT, "learned.attn").programs if p.name == "two"]
    lowered = passes.run(program, {"Dqk": 16, "Dv": 16})
    call, plan = Call(q, k, v, tensors, {}, 5, 1), schedule(lowered, "cpu", "float64")
    want = backward(lowered, call, d_o)
    scheduled = run_backward(plan, call, run_forward(plan, call), d_o)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, *(tensors[x] for x in NAMES))]
    options = dict(zip(NAMES, leaves[3:], strict=True))
    o = module.two(*leaves[:3], **options, q_origin=5, k_origin=1)
    found = torch.autograd.grad(o, leaves, torch.from_numpy(d_o))
    for name, got in zip(NAMES, found[3:], strict=True):
        size = np.abs(want.captured[name]).max()
        np.testing.assert_allclose(got.numpy(), want.captured[name], rtol=0, atol=1e-11 * size)
        np.testing.assert_allclose(scheduled.captured[name], want.captured[name], rtol=0, atol=1e-11 * size)


@pytest.mark.parametrize("lengths", [(131, 140), (7, 9)])
def test_results_do_not_depend_on_threads(module: Any, lengths: tuple[int, int]) -> None:
    """Bit by bit: one thread and several run the same code, not two copies that may round differently."""
    m, n = lengths
    rows = [drawn(2, 4, m, 16), drawn(2, 2, n, 16), drawn(2, 2, n, 16)]
    options = dict(
        zip(NAMES, (drawn(4), drawn(2), drawn(1, m), drawn(2, n), drawn(), drawn(16)), strict=True)
    )
    f, d_o, threads, results = drawn(8), torch.randn(2, 4, m, 16).double(), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            o, other = module.learned(*rows, f=f, q_origin=5), module.two(*rows, **options, q_origin=5)
            found = torch.autograd.grad(o, [*rows, f], d_o)
            found += torch.autograd.grad(other, [*rows, *options.values()], d_o)
            results.append((o, other, *found))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_gpus_refuse_them_by_name() -> None:
    (program,) = [p for p in check_text(TEXT, "learned.attn").programs if p.name == "learned"]
    lowered = passes.run(program, {"Dqk": 64, "Dv": 64})
    with pytest.raises(UsageError, match=r"E0411.*`f`"):
        schedule(lowered, "sm80", "bfloat16")
