# SPDX-License-Identifier: Apache-2.0
"""Random programs in float64, three ways: the formula interpreter, the schedule interpreter, compiled C++."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import afc
from afc import passes
from afc.frontend import check_text
from afc.reference import Call, backward, forward, run_backward, run_forward
from afc.schedule.plan import schedule

COUNT, HEAD = 4, 16
NORMALIZERS = (
    "softmax({})",
    "softmax({})",
    "softmax1({})",
    "softmax_sink({}; sink = t)",
    "sigmoid_attention({}; bias = -log(N))",
    "relu_attention({})",
)


class Author:
    """Writes random programs from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def number(self) -> str:
        return f"{self.random.uniform(0.2, 2.0):.3f}"

    def formula(self, depth: int) -> str:
        """Of s and indices: differentiable almost everywhere, of moderate size for moderate s."""
        if depth == 0:
            return self.pick("s", "s", "s", self.number(), "(j - i) * 0.05", "t[h]", "u[b, m]", "0.1 * h")
        a, b = self.formula(depth - 1), self.formula(depth - 1)
        return self.pick(
            f"({a} + {b})",
            f"({a} - {b})",
            f"({a} * {self.number()})",
            f"tanh({a})",
            f"sigmoid({a}) * {b}",
            f"max({a}, {b})",
            f"min({a}, {self.number()})",
            f"({a} / (1.0 + abs({b})))",
            f"(if {self.condition(0, captured=False)} then {a} else {b})",
            f"sin({a})",
            f"clamp({a}, -2.0, 2.0)",
            f"log(1.0 + exp(min({a}, 4.0)))",
        )

    def condition(self, depth: int, captured: bool = True) -> str:
        c = self.random.randrange(1, 30)
        if depth == 0:
            return self.pick(
                f"j <= i + {c}",
                f"i - j < {c}",
                f"j - i < {c}",
                f"(i + j) % {c} != 0",
                f"j // {c} == i // {c}",
                f"j < {c}",
                f"i + j > {c}",
                f"(h % 2 == 0 or j <= i + {c})",
                f"flags[b, n % {c}]" if captured else "true",
            )
        a, b = self.condition(depth - 1), self.condition(depth - 1)
        return self.pick(f"({a} and {b})", f"({a} or {b})", f"not ({a})")

    def angle(self, depth: int) -> str:
        """Of position, row, pair, batch, head and captured tensors."""
        if depth == 0:
            return self.pick(
                "p", "0.3 * r", "t[h]", "turns[b, r]", "c / D", "b + 0.5 * h", "L - r", "turns[b, r + c]"
            )
        a, b = self.angle(depth - 1), self.angle(depth - 1)
        c = self.random.randrange(1, 9)
        return self.pick(
            f"({a} + {b})",
            f"({a} * {self.number()} - {b})",
            f"sin({a})",
            f"(if r % {c} == 0 or h > 1 then {a} else {b})",
            f"{a} * {self.number()} ** (-c)",
        )

    def row(self, depth: int) -> str:
        """Of a column x, its row and captured tensors."""
        if depth == 0:
            c = self.random.randrange(1, 9)
            return self.pick(
                "x",
                "w[h, c]",
                "turns[b, r]",
                "turns[b, r + c]",
                f"turns[b, r // {c}]",
                "0.1 * x * c",
                "mean(x * x)",
                "mean(x * turns[b, r + c])",
            )
        a, b = self.row(depth - 1), self.row(depth - 1)
        return self.pick(
            f"({a} + {b})",
            f"tanh({a}) * {b}",
            f"({a} - mean({b}))" if "mean" not in b else f"({a} - {b})",
            f"({a} / (1.0 + abs({b})))",
            f"(if r % 3 == 0 then {a} else {b})",
        )

    def weight(self) -> str:
        """Linear in p."""
        c = self.random.randrange(1, 9)
        return self.pick(
            f"p * ({self.number()} + spin[h])",
            f"p * sigmoid(spin[h] * u[b, m]) + p * turns[b, n + {c}] / {c}",
            f"if i - j < {c} then p * u[b, m] else p * turns[b, n] * turns[b, n // {c}]",
            f"p * (1.0 + {self.number()} * tanh(turns[b, (m + n) % {c}]))",
            f"if {self.condition(1)} then p / {self.number()} else -p",
            f"p * exp(-abs(i - j) * 0.1) + (if flags[b, n] then p else 0.0) * {self.number()}",
            f"if random({c}, b, h, m // {c}, n) < 0.5 then p else 0.0",
            f"-(p * (i - j)) / {c}",
        )

    def rotations(self, index: int) -> list[str]:
        """Rotations and row blocks in any order, some of them declared by `program`."""
        known = self.pick("", "q, k = rope(q, k)", "q[:8], k[:8] = rope(q[:8], k[:8]; base = 100.0)")
        own = self.pick(
            "",
            f"q[8:] = turn_{index}(q[8:]; t = spin, turns = qturns)",
            f"q = turn_{index}(q; t = spin, turns = qturns)",
        )
        other = self.pick(
            "",
            f"k = turn_{index}(k; t = spin, turns = kturns)",
            f"k[2:12] = turn_{index}(k[2:12]; t = spin, turns = kturns)",
        )
        norm = self.pick("", "q, k = l2_norm(q, k; eps = 0.1)", "k[4:12] = l2_norm(k[4:12]; eps = 0.1)")
        row = self.pick("", f"q = row_{index}(q; w = weights)", f"q, k = row_{index}(q, k; w = weights)")
        of_q = self.pick("", f"q = placed_{index}(q; w = weights, turns = qturns)")
        of_k = self.pick("", f"k[2:12] = placed_{index}(k[2:12]; w = narrow, turns = kturns)")
        lines = [line for line in (known, own, other, norm, row, of_q, of_k) if line]
        self.random.shuffle(lines)
        return lines

    def program(self, index: int) -> str:
        scores = f"mask_{index}(score_{index}(dot(q, k); t, u); flags)"
        formula, condition = (
            self.formula(self.random.randrange(1, 4)),
            self.condition(self.random.randrange(3)),
        )
        weights = self.pick(*NORMALIZERS).format(scores)
        weights = self.pick(weights, f"dropout({weights}; rate = 0.3, seed = {self.random.randrange(99)})")
        weighed = f"weight_{index}({weights}; flags, spin, u, turns = kturns)"
        weights = self.pick(weights, weighed, weighed)
        spin, qturns, kturns = (self.pick("", ": grad") for _ in range(3))
        parts = [
            f"score score_{index}(s, b, h, i, j, m; t[H]: grad, u[B, M]: grad) = {formula}",
            f"mask mask_{index}(b, h, i, j, n; flags[B, N]: bool) = {condition}",
            f"rotate turn_{index}(x0, x1, b, h, r, p, c; t[Heads], turns[1|B, 2*L]) "
            f"over {self.pick('half', 'adjacent')} {{",
            f"    angle = {self.angle(self.random.randrange(3))}",
            f"    y = sin(angle) * {self.number()}",
            "    return (x0 * cos(angle) - x1 * y, x0 * sin(angle) + x1 * cos(angle))",
            "}",
            f"row row_{index}(x, c, h; w[Heads, D]: grad) {{",
            f"    far = x - mean(x) * {self.number()}",
            f"    return tanh(far) * w[h, c] + x / ({self.number()} + 3.0 + mean(far * far))",
            "}",
            f"row placed_{index}(x, b, c, h, r; w[Heads, D], turns[1|B, 2*L]) = {self.row(2)}",
            f"weight weight_{index}(p, b, h, i, j, m, n; flags[B, N]: bool, spin[H], u[B, M], "
            f"turns[1|B, 2*N]) = {self.weight()}",
            f"attention random_{index}(q, k, v; t[H]: grad, u[B, M]: grad, flags[B, N]: bool, "
            f"spin[H]{spin}, qturns[1|B, 2*M]{qturns}, kturns[1|B, 2*N]{kturns}, "
            "weights[H, Dqk]: grad, narrow[H, 10]: grad) {",
            *(f"    {line}" for line in self.rotations(index)),
            f"    return {weights} @ v",
            "}",
        ]
        return "\n".join(parts) + "\n"


def close(found: Any, want: Any, what: str) -> None:
    scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0.0)))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-9 * scale, err_msg=what)


def test_three_ways(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    text = "\n".join(Author(seed + n).program(n) for n in range(COUNT))
    path = tmp_path / "random.attn"
    path.write_text(text, encoding="utf-8")
    module = afc.load(path, D=HEAD, dtype=torch.float64, backend="cpu")
    g = np.random.default_rng(seed)
    for n, program in enumerate(check_text(text, str(path)).programs):
        lowered = passes.run(program, {"Dqk": HEAD, "Dv": HEAD})
        plan = schedule(lowered, "cpu", "float64")
        for m, keys, origins in ((45, 61, (0, 0)), (61, 45, (20, 3))):
            what = f"seed {seed}\n{Author(seed + n).program(n)}"
            tensors = {
                "t": g.uniform(-1, 1, 4),
                "u": g.uniform(-1, 1, (2, m)),
                "flags": g.random((2, keys)) < 0.7,
                "spin": g.uniform(-1, 1, 4),
                "qturns": g.uniform(-3, 3, (2, 2 * m)),
                "kturns": g.uniform(-3, 3, (1, 2 * keys)),
                "weights": g.uniform(-1, 1, (4, HEAD)),
                "narrow": g.uniform(-1, 1, (4, 10)),
            }
            shapes = ((2, 4, m, HEAD), (2, 2, keys, HEAD), (2, 2, keys, HEAD))
            q, k, v = (g.standard_normal(s) for s in shapes)
            used = {x.name: tensors[x.name] for x in lowered.tensors}
            call = Call(q, k, v, used, {}, *origins)
            do = g.standard_normal((2, 4, m, HEAD))
            want, scheduled = forward(lowered, call), run_forward(plan, call)
            gradients = backward(lowered, call, do)
            close(scheduled.o, want.o, what)
            again = run_backward(plan, call, scheduled, do)
            for name in ("dq", "dk", "dv"):
                close(getattr(again, name), getattr(gradients, name), f"{name} of {what}")
            for name, found in again.captured.items():
                close(found, gradients.captured[name], f"gradient of {name} of {what}")
            inputs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
            options = {name: torch.from_numpy(x) for name, x in tensors.items()}
            names = [x.name for x in lowered.tensors if x.grad]
            learned = [options[name].requires_grad_() for name in names]
            kernel = getattr(module, f"random_{n}")
            o = kernel(*inputs, **options, q_origin=origins[0], k_origin=origins[1])
            close(o.detach().numpy(), want.o, what)
            found = torch.autograd.grad(o, [*inputs, *learned], torch.from_numpy(do))
            for name, x in zip(names, found[3:], strict=True):
                want_gradient = gradients.captured.get(name, np.zeros(x.shape))
                close(x.numpy(), want_gradient, f"gradient of {name} of {what}")
            for name, x in zip(("dq", "dk", "dv"), found[:3], strict=True):
                close(x.numpy(), getattr(gradients, name), f"{name} of {what}")
