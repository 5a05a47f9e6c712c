# SPDX-License-Identifier: Apache-2.0
"""Rotations that read more than position and pair: compiled C++ and the schedule interpreter against the
formula, equal rows bit by bit, and reads outside a tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import afc
from afc import passes
from afc.expr.evaluate import evaluate
from afc.frontend import check_text
from afc.reference import Call, backward, forward, run_backward, run_forward
from afc.schedule.plan import schedule

D = 16
TURN = "return (x0 * cos(angle) - x1 * sin(angle), x0 * sin(angle) + x1 * cos(angle))"
BLOCKS = f"""
rotate by_head(x0, x1, h, p, c; t[Heads, D // 2]) over adjacent {{
    angle = p * t[h, c] + h
    {TURN}
}}
rotate by_both(x0, x1, b, h, r, c; t[B, Heads, L]) over half {{
    y = x0 * 0.5 + x1
    return (y * t[b, h, r], x1 * t[b, h, r] - y)
}}
rotate by_number(x0, x1, r, c; w: int, up: bool, gain: float) over half {{
    line = if up then r // w + min(r, 3) else L - r
    angle = line * 10.0 ** (-2 * c / D)
    return (gain * (x0 * cos(angle) - x1 * sin(angle)), x0 * sin(angle) + gain * x1 * cos(angle))
}}
rotate looked_up(x0, x1, b, r, c; first[B]: int, pos[T]: int, on[1|B, L]: bool) over half {{
    row   = max(r - first[b], 0)
    angle = if on[b, r] and row < T then pos[row] * 0.25 ** c else 0.0
    {TURN}
}}
"""
PROGRAMS = {
    "heads": ("t[H, Dqk // 2], u[Hk, (Dqk - 8) // 2]", "q = by_head(q; t)", "k[8:] = by_head(k[8:]; t = u)"),
    "both": ("t[B, H, M], u[B, Hk, N]", "q = by_both(q; t)", "k = by_both(k; t = u)"),
    "numbers": (
        "w: int, up: bool, gain: float",
        "q, k = by_number(q, k; w, up, gain)",
        "q[:8], k[:8] = by_number(q[:8], k[:8]; w = 5, up, gain = 0.5)",
    ),
    "mixed": (
        "first[B]: int, pos[T]: int, on[1|B, M]: bool, u[B, Hk, N]",
        "q[:8] = rope(q[:8]; base = 100.0)",
        "q[8:] = looked_up(q[8:]; first, pos, on)",
        "k[2:8] = by_both(k[2:8]; t = u)",
        "k[10:] = rope_interleaved(k[10:])",
    ),
}
NUMBERS: dict[str, Any] = {"w": 7, "up": True, "gain": 1.25}


def text(name: str) -> str:
    parameters, *lines = PROGRAMS[name]
    body = "".join(f"    {line}\n" for line in lines)
    return (
        f"attention {name}(q, k, v; {parameters}) {{\n{body}"
        "    return softmax(scaled_dot_product(q, k)) @ v\n}\n"
    )


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("rotations") / "rotations.attn"
    path.write_text(BLOCKS + "".join(map(text, PROGRAMS)), encoding="utf-8")
    return afc.load(path, D=D, dtype=torch.float64, backend="cpu")


def tensors(name: str, m: int, n: int, g: np.random.Generator) -> dict[str, Any]:
    sizes = {"B": 2, "H": 4, "Hk": 2, "M": m, "N": n, "T": 11, "Dqk": D}
    made: dict[str, Any] = {}
    for tensor in check_text(BLOCKS + text(name)).programs[0].tensors:
        shape = [int(evaluate(e.size, sizes)) for e in tensor.shape]
        shape[0] = 1 if tensor.name == "on" else shape[0]
        made[tensor.name] = {
            "float": g.standard_normal(shape),
            "int": g.integers(0, 9, shape),
            "bool": g.random(shape) < 0.7,
        }[tensor.type.value]
    return made


@pytest.mark.parametrize("name", PROGRAMS)
def test_three_ways(name: str, module: Any) -> None:
    program = passes.run(check_text(BLOCKS + text(name)).programs[0], {"Dqk": D, "Dv": D})
    plan = schedule(program, "cpu", "float64")
    g = np.random.default_rng()
    for m, n, origins in ((37, 70, (33, 0)), (70, 21, (0, 4))):
        q, k, v = (g.standard_normal(s) for s in ((2, 4, m, D), (2, 2, n, D), (2, 2, n, D)))
        given, do = tensors(name, m, n, g), g.standard_normal((2, 4, m, D))
        numbers = {x.name: NUMBERS[x.name] for x in program.scalars}
        call = Call(q, k, v, given, {**numbers, "T": 11}, *origins)
        want, gradients = forward(program, call), backward(program, call, do)
        scheduled = run_forward(plan, call)
        inputs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
        options = {x: torch.from_numpy(t) for x, t in given.items()}
        o = getattr(module, name)(*inputs, **options, **numbers, q_origin=origins[0], k_origin=origins[1])
        found = torch.autograd.grad(o, inputs, torch.from_numpy(do))
        np.testing.assert_allclose(scheduled.o, want.o, rtol=0, atol=1e-12)
        np.testing.assert_allclose(o.detach().numpy(), want.o, rtol=0, atol=1e-11)
        by_schedule = run_backward(plan, call, scheduled, do)
        for x, compiled in zip(("dq", "dk", "dv"), found, strict=True):
            expected = getattr(gradients, x)
            scale = max(1.0, np.abs(expected).max())
            np.testing.assert_allclose(getattr(by_schedule, x), expected, rtol=0, atol=1e-11 * scale)
            np.testing.assert_allclose(compiled.numpy(), expected, rtol=0, atol=1e-11 * scale)


SAME = """
attention places(q, k, v) {
    q, k = rope(q, k)
    return softmax(causal(scaled_dot_product(q, k))) @ v
}
attention positions(q, k, v; qpos[1|B, M]: int, kpos[1|B, N]: int) {
    q = rope_position(q; pos = qpos)
    k = rope_position(k; pos = kpos)
    return softmax(causal(scaled_dot_product(q, k))) @ v
}
attention three(q, k, v; qpos[3, 1|B, M]: int, kpos[3, 1|B, N]: int) {
    q = mrope(q; pos = qpos, temporal = 3, height = 2, base = 10000.0)
    k = mrope(k; pos = kpos, temporal = 3, height = 2, base = 10000.0)
    return softmax(causal(scaled_dot_product(q, k))) @ v
}
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_positions_that_are_places_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """A row has one value, whatever its coefficients were computed from, in forward and backward."""
    path = tmp_path / "same.attn"
    path.write_text(SAME, encoding="utf-8")
    module = afc.load(path, D=D, dtype=dtype, backend="cpu")
    m, n = 50, 77
    q, k, v = (torch.randn(2, h, x, D).to(dtype).requires_grad_() for h, x in ((4, m), (2, n), (2, n)))
    do = torch.randn(2, 4, m, D).to(dtype)
    qpos, kpos = torch.arange(n - m, n)[None], torch.arange(n, dtype=torch.int32).expand(2, -1)
    one = {"qpos": qpos, "kpos": kpos}
    all_three = {name: x.expand(3, *x.shape) for name, x in one.items()}
    results = []
    for name, options in (("places", {}), ("positions", one), ("three", all_three)):
        o = getattr(module, name)(q, k, v, **options, q_origin=n - m)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_read_outside_a_tensor_is_nan(tmp_path: Path) -> None:
    """The row that has no entry, and no other."""
    path = tmp_path / "short.attn"
    path.write_text(
        "rotate scaled(x0, x1, r; t[T]) over half = (x0 * t[r], x1 * t[r])\n"
        "attention short(q, k, v; t[T]) {\n    q = scaled(q; t)\n    return softmax(dot(q, k)) @ v\n}\n",
        encoding="utf-8",
    )
    call = afc.load(path, D=D, dtype=torch.float32, backend="cpu").short
    q, k, v = (torch.randn(1, 2, 20, D) for _ in range(3))
    nan = torch.isnan(call(q, k, v, t=torch.ones(13)))
    assert nan[:, :, 13:].all() and not nan[:, :, :13].any()
