# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors that row blocks read by row: against dense attention in PyTorch, by finite
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
from afc.schedule.plan import schedule  # noqa: E402

# By row and column, by row alone and through an index, before, between and behind learned rotations and row
# blocks that read by column; w and u are read in several places.
TEXT = """
row placed(x, r, c; t[1|L, D]: grad) = x + t[r, c]
row scaled(x, b, h, r; u[1|B, Heads, L]: grad) = x * tanh(u[b, h, r]) / (1.0 + mean(x * x))
row bucketed(x, r, c; z[5, D]: grad, w[D]: grad) = x * w[c] + z[(r // 3) % 5, c] * mean(x * w[c])
rotate turn(x0, x1, p, c; f[D // 2]: grad) over half {
    return (x0 * cos(p * f[c]) - x1 * sin(p * f[c]), x0 * sin(p * f[c]) + x1 * cos(p * f[c]))
}
score lift(s, b, h, m; u[1|B, H, M]: grad) = s + s * u[b, h, m]
attention positions(q, k, v; qt[1|M, Dqk]: grad, kt[1|N, Dqk]: grad) {
    q = placed(q; t = qt)
    k = placed(k; t = kt)
    return softmax(causal(scaled_dot_product(q, k))) @ v
}
attention several(q, k, v; qt[1|M, Dqk]: grad, u[1|B, H, M]: grad, z[5, 8]: grad, w[Dqk]: grad,
                  f[Dqk // 2]: grad, w8[8]: grad) {
    q, k = rms_norm(q, k; w)
    q = placed(q; t = qt)
    q, k = turn(q, k; f)
    q = scaled(q; u)
    k[4:12] = bucketed(k[4:12]; z, w = w8)
    q, k = rope(q, k)
    q = per_dim_scale(q; w)
    return softmax(causal(lift(scaled_dot_product(q, k); u))) @ v
}
"""
NAMES = ("qt", "u", "z", "w", "f", "w8")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("learned") / "learned.attn"
    path.write_text(TEXT, encoding="utf-8")
    return afc.load(path, D=16, dtype="float64", backend="cpu")


def drawn(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def rows(m: int, n: int) -> list[Any]:
    return [drawn(2, 4, m, 16), drawn(2, 2, n, 16), drawn(2, 2, n, 16)]


def tables(m: int, n: int) -> dict[str, Any]:
    return {
        "qt": drawn(m, 16),
        "u": drawn(1, 4, m),
        "z": drawn(5, 8),
        "w": drawn(16),
        "f": drawn(8),
        "w8": drawn(8),
    }


def dense(q: Any, k: Any, v: Any, qt: Any, kt: Any) -> Any:
    """Learned absolute positions, causal."""
    m, n = q.shape[2], k.shape[2]
    s = (q + qt) @ (k + kt).repeat_interleave(2, 1).mT * 16**-0.5
    hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
    return s.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (131, 140), (300, 310)])
@pytest.mark.parametrize("broadcast", [False, True])
def test_positions_against_dense_attention(module: Any, m: int, n: int, broadcast: bool) -> None:
    leaves = [*rows(m, n), drawn(1 if broadcast else m, 16), drawn(1 if broadcast else n, 16)]
    d_o = torch.randn(2, 4, m, 16).double()
    found = module.positions(*leaves[:3], qt=leaves[3], kt=leaves[4], q_origin=n - m)
    want = dense(*leaves)
    torch.testing.assert_close(found, want)
    for x, y in zip(*(torch.autograd.grad(o, leaves, d_o) for o in (found, want)), strict=True):
        torch.testing.assert_close(x, y)


def test_rows_that_are_not_seen_give_nothing(module: Any) -> None:
    """Keys beyond kv_len and behind every query, and a query without a key, hold NaN."""
    m, n, seen = 9, 12, 6
    leaves = [*(x.detach() for x in rows(m, n)), drawn(m, 16).detach(), drawn(n, 16).detach()]
    q, k, v, qt, kt = leaves
    k[:, :, seen:], v[:, :, seen:], q[:, :, :3] = torch.nan, torch.nan, torch.nan
    qt.requires_grad_()
    kt.requires_grad_()
    o = module.positions(q, k, v, qt=qt, kt=kt, q_origin=-3, kv_len=8)
    found = torch.autograd.grad(o.sum(), (qt, kt))
    part = dense(q[:, :, 3:], k[:, :, :seen], v[:, :, :seen], qt[3:], kt[:seen])
    want = torch.autograd.grad(part.sum(), (qt, kt))
    torch.testing.assert_close(o[:, :, 3:], part)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y)


def test_large_tables_are_shared_out_by_rows(module: Any) -> None:
    """More elements than copies may have: tasks add to the rows of their own tiles."""
    m = 280000  # keys, of which the last query alone sees all
    q, k, v = (
        torch.randn(1, 1, 1, 16).double(),
        torch.randn(1, 1, m, 16).double(),
        torch.randn(1, 1, m, 16).double(),
    )
    qt, kt = drawn(1, 16), drawn(m, 16)
    o = module.positions(q, k, v, qt=qt, kt=kt, q_origin=m - 1)
    found = torch.autograd.grad(o.sum(), (qt, kt))
    s = (q + qt) @ (k + kt).mT * 16**-0.5
    want = torch.autograd.grad((s.softmax(-1) @ v).sum(), (qt, kt))
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y)


def test_all_kinds_by_finite_differences(module: Any) -> None:
    m, n = 3, 5
    options = tables(m, n)

    def call(*leaves: Any) -> Any:
        learned = dict(zip(NAMES, leaves[3:], strict=True))
        return module.several(*leaves[:3], **learned, q_origin=2, return_lse=True)

    assert torch.autograd.gradcheck(call, (*rows(m, n), *(options[x] for x in NAMES)))


def test_formula_schedule_and_code_agree(module: Any) -> None:
    m, n = 131, 140
    leaves, options = rows(m, n), tables(m, n)
    q, k, v = (x.detach().numpy() for x in leaves)
    tensors = {name: x.detach().numpy() for name, x in options.items()}
    d_o = np.random.default_rng().standard_normal((2, 4, m, 16))
    (program,) = [p for p in check_text(TEXT, "learned.attn").programs if p.name == "several"]
    lowered = passes.run(program, {"Dqk": 16, "Dv": 16})
    call, plan = Call(q, k, v, tensors, {}, 5, 1), schedule(lowered, "cpu", "float64")
    want = backward(lowered, call, d_o)
    scheduled = run_backward(plan, call, run_forward(plan, call), d_o)
    o = module.several(*leaves, **options, q_origin=5, k_origin=1)
    found = torch.autograd.grad(o, [options[x] for x in NAMES], torch.from_numpy(d_o))
    for name, got in zip(NAMES, found, strict=True):
        size = np.abs(want.captured[name]).max()
        np.testing.assert_allclose(got.numpy(), want.captured[name], rtol=0, atol=1e-11 * size)
        np.testing.assert_allclose(scheduled.captured[name], want.captured[name], rtol=0, atol=1e-11 * size)


def test_the_order_of_sums_does_not_depend_on_threads(module: Any) -> None:
    leaves, options = rows(131, 140), tables(131, 140)
    d_o, threads, results = torch.randn(2, 4, 131, 16).double(), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            o = module.several(*leaves, **options, q_origin=9)
            results.append((o, *torch.autograd.grad(o, [*leaves, *options.values()], d_o)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_only_some_gradients_are_asked_for(module: Any) -> None:
    leaves, options = rows(7, 9), tables(7, 9)
    o = module.several(*leaves, **options, q_origin=2)
    want = torch.autograd.grad(o.square().sum(), [options["qt"], options["z"]])
    for name, expected in zip(("qt", "z"), want, strict=True):
        own = {x: t.detach().requires_grad_(x == name) for x, t in options.items()}
        o = module.several(*(x.detach() for x in leaves), **own, q_origin=2)
        (found,) = torch.autograd.grad(o.square().sum(), [own[name]])
        assert torch.equal(found, expected)
