# SPDX-License-Identifier: Apache-2.0
"""The three-valued test of boxes: never unsound on random masks, exact on the common ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from afc.expr.evaluate import evaluate
from afc.expr.nodes import Const, Expr, Load, Op, Type, Var, const
from afc.expr.operators import OPERATORS, call, to_float
from afc.expr.printer import attn
from afc.masks.boxes import BoxTest
from afc.masks.tables import BLOCK, EXACT, Captured

LENGTH, MASKS, BOXES = 150, 1100, 100
TENSORS = {  # name: (shape, type); sizes of 1 take any index
    "ids": ((LENGTH,), Type.INT),
    "hashes": ((LENGTH,), Type.INT),
    "sorted": ((2, LENGTH), Type.INT),
    "blocks": ((1, 10, 12), Type.BOOL),
    "keep": ((2, LENGTH), Type.BOOL),
    "level": ((LENGTH - 20,), Type.FLOAT),
    "table": ((7,), Type.FLOAT),
    "fine": ((LENGTH,), Type.FLOAT),
}


class Author:
    """Writes random masks, and the tensors that they read."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)

    def tensors(self) -> dict[str, Any]:
        g = self.numbers
        level = np.round(g.standard_normal(TENSORS["level"][0]), 1)  # tenths: float32 and float64 disagree
        level[g.random(level.shape) < self.random.choice([0.0, 0.02, 0.9])] = np.nan
        level[g.random(level.shape) < self.random.choice([0.0, 0.02])] = np.inf
        if self.random.random() < 0.5:
            level = level.astype(np.float32)
        return {
            "ids": g.integers(-2, 6, LENGTH),
            "hashes": (1 << 60) + g.integers(0, 2, LENGTH),
            "sorted": np.sort(g.integers(0, 9, (2, LENGTH)), axis=1),
            "blocks": g.random((1, 10, 12)) < self.random.choice([0.1, 0.5, 1.0]),
            "keep": g.random((2, LENGTH)) < self.random.choice([0.02, 0.5, 0.98, 1.0]),
            "level": level,
            "fine": 0.5 + 1e-10 * g.integers(0, 2, LENGTH),
            "table": np.round(g.standard_normal(7), 1).astype(self.random.choice([np.float32, np.float64])),
        }

    def integer(self, depth: int) -> Expr:
        pick = self.random.choice
        if depth == 0:
            name = pick(["i", "j", "m", "n", "i", "j", "h", "b", "N", "w", "tensor", "number"])
            if name == "number":
                return const(self.random.randint(-20, LENGTH))
            return self.load(Type.INT) if name == "tensor" else Var(name, Type.INT)
        name = pick(
            ["add", "sub", "sub", "mul", "floordiv", "mod", "max", "min", "abs", "neg", "select", "ipow"]
        )
        if name in ("floordiv", "mod"):
            divisor = pick([const(self.random.randint(1, 30)), Var("w", Type.INT)])
            return call(name, self.integer(depth - 1), divisor)
        if name == "ipow":
            return call(name, self.integer(0), const(self.random.randint(0, 3)))
        return self.operation(name, self.integer, depth)

    def float(self, depth: int) -> Expr:
        if depth == 0:
            return self.random.choice(
                [
                    lambda: self.load(Type.FLOAT),
                    lambda: const(round(self.random.uniform(-2, 2), 1)),
                    lambda: Var("rate", Type.FLOAT),
                    lambda: call("mul", const(0.1), to_float(self.integer(1))),
                ]
            )()
        names = "add sub mul div max min abs neg floor ceil select exp sqrt"
        return self.operation(self.random.choice(names.split()), self.float, depth)

    def operation(self, name: str, part: Any, depth: int) -> Expr:
        if name == "select":
            return call(name, self.condition(depth - 1), part(depth - 1), part(depth - 1))
        return call(name, *(part(depth - 1) for _ in range(OPERATORS[name].arity)))

    def load(self, kind: Type) -> Expr:
        pick = self.random.choice
        name = pick([n for n, (_, k) in TENSORS.items() if k is kind])
        rank = len(TENSORS[name][0])
        last = [
            Var("m", Type.INT),
            Var("n", Type.INT),
            call("add", Var("n", Type.INT), const(self.random.randint(-30, 30))),
            call("sub", Var("N", Type.INT), Var("m", Type.INT)),
            call("floordiv", Var("n", Type.INT), const(self.random.randint(1, 20))),
            call("abs", call("sub", Var("i", Type.INT), Var("j", Type.INT))),
        ]
        first = [Var("b", Type.INT), call("floordiv", Var("m", Type.INT), const(16))]
        return Load(name, tuple(pick(first if k < rank - 1 else last) for k in range(rank)), kind)

    def tie(self, comparison: str) -> Expr:
        """Numbers that float64 tells apart and float32 does not: a long product, and a stored value."""
        side = 4097 + 2 * self.random.randrange(100)
        product = call("mul", to_float(const(side)), to_float(call("add", const(side), self.zero())))
        rounded = const(float(np.float32(side * side)))
        fine = Load("fine", (Var(self.random.choice("mn"), Type.INT),), Type.FLOAT)
        return call(comparison, *self.random.choice([(product, rounded), (fine, const(0.5))]))

    def zero(self) -> Expr:
        return call("mul", Var(self.random.choice("hmn"), Type.INT), const(0))

    def condition(self, depth: int) -> Expr:
        if depth == 0 or self.random.random() < 0.3:
            if self.random.random() < 0.15:
                return self.load(Type.BOOL)
            name = self.random.choice(["lt", "le", "gt", "ge", "eq", "ne"])
            if self.random.random() < 0.2:
                return self.tie(name)
            part = self.random.choice([self.integer, self.integer, self.float])
            return call(name, part(self.random.randint(0, 2)), part(self.random.randint(0, 1)))
        name = self.random.choice(["and", "and", "or", "or", "not", "select", "eq"])
        return self.operation(name, self.condition, depth)


def in_float32(expr: Expr, env: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """As emitted code computes: every float is a float32."""
    match expr:
        case Op(name=name, args=args, type=kind):
            value = OPERATORS[name].numpy(*(in_float32(a, env, tensors) for a in args))
        case Load(tensor=name, indices=indices, type=kind):
            index = {f"index{k}": in_float32(x, env, tensors) for k, x in enumerate(indices)}
            value = evaluate(
                Load(name, tuple(Var(x, Type.INT) for x in index), kind), {**env, **index}, tensors
            )
        case Const(type=kind) | Var(type=kind):
            value = evaluate(expr, env)
    return np.float32(value) if kind is Type.FLOAT else value


def unsound(mask: Expr, author: Author, boxes: int) -> list[str]:
    """Boxes whose class is wrong: empty with a kept element, or full with a removed one."""
    g, tensors = author.numbers, author.tensors()
    rows, columns = (int(x) for x in g.integers(1, LENGTH, 2))
    values = {
        "M": rows,
        "N": columns,
        "q_origin": int(g.integers(-40, 40)),
        "k_origin": int(g.integers(-40, 40)),
        "w": int(g.integers(1, 60)),
        "rate": round(float(g.uniform(-2, 2)), 1),
    }
    b, h = (int(x) for x in g.integers(0, 2, 2))
    m, n = np.arange(rows)[:, None], np.arange(columns)[None]
    env = {**values, "m": m, "n": n, "i": m + values["q_origin"], "j": n + values["k_origin"], "b": b, "h": h}
    with np.errstate(all="ignore"):
        kept = [
            np.broadcast_to(found, (rows, columns))
            for found in (evaluate(mask, env, tensors), in_float32(mask, env, tensors))
        ]
    ends = []
    for size in (rows, columns):
        first = g.integers(0, size, boxes)
        ends.append((first, np.minimum(first + g.choice([1, 4, 16, 40, 80, LENGTH], boxes), size) - 1))
    may, must = BoxTest(mask, values, tensors)(*ends, b, h)
    wrong = []
    for k in range(boxes):
        box = tuple(slice(first[k], last[k] + 1) for first, last in ends)
        for elements in kept:
            if (not may[k] and elements[box].any()) or (must[k] and not elements[box].all()):
                found = f"may {may[k]}, must {must[k]}"
                wrong.append(f"{attn(mask)} on {box} with {values}, b {b}, h {h}: {found}")
    return wrong


def test_random_masks_have_no_unsound_box() -> None:
    """110,000 boxes of random masks: integers, floats with NaN and infinities, captured tensors."""
    seed = random.randrange(2**32)
    author = Author(seed)
    for _ in range(MASKS):
        mask = author.condition(3)
        found = unsound(mask, author, BOXES)
        assert not found, f"seed {seed}: {found[0]}"


# ---- captured tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(Type))
@pytest.mark.parametrize("size", [1, BLOCK, 3 * BLOCK + 5, 1000])
def test_ranges_of_a_tensor(kind: Type, size: int) -> None:
    """Bounds of a range are those of its elements, at any place and of any length; outside is no value."""
    g = np.random.default_rng(size)
    values = g.standard_normal((2, size)) * 50
    tensor = {Type.FLOAT: values, Type.INT: values.astype(int), Type.BOOL: values > 60}[kind]
    if kind is Type.FLOAT:
        tensor[0, size // 2 :] = np.nan
    first = g.integers(-5, size + 5, 400)
    last = first + g.integers(0, size + 5, 400)
    row = g.integers(0, 2, 400)
    found = Captured(tensor, kind).bounds([row, first], [row, last], 1)
    for k in range(400):
        every = np.arange(first[k], last[k] + 1)
        if size == 1:
            every = every * 0
        read = evaluate(
            Load("t", (const(int(row[k])), Var("x", Type.INT)), kind), {"x": every}, {"t": tensor}
        ).astype(float)
        number = read[~np.isnan(read)]
        assert found.nan[k] == np.isnan(read).any()
        if len(number):
            assert (found.lo[k], found.hi[k]) == pytest.approx((number.min(), number.max()), rel=1e-6)
            assert found.lo[k] <= number.min() and found.hi[k] >= number.max()


def test_boxes_of_a_matrix() -> None:
    """A few entries are read; more are not known."""
    on = np.zeros((1, 20, 20), bool)
    on[0, 4:8, 8:16] = True
    captured = Captured(on, Type.BOOL)
    low, high = np.array([4, 4, 3, 0]), np.array([7, 9, 3, 19])
    found = captured.bounds([np.zeros(4), low, low * 0 + 8], [np.zeros(4), high, low * 0 + 15], 2)
    assert found.lo.tolist()[:3] == [1, 0, 0] and found.hi.tolist()[:3] == [1, 1, 0]
    assert (found.lo[3], found.hi[3]) == (-np.inf, np.inf) and EXACT < 20 * 8


def test_what_is_not_known_is_partial() -> None:
    """Without the tensor, or beyond 53 bits, nothing is claimed."""
    n, m = Var("n", Type.INT), Var("m", Type.INT)
    mask = call("eq", Load("ids", (m,), Type.INT), Load("ids", (n,), Type.INT))
    values = {"M": 8, "N": 8, "q_origin": 0, "k_origin": 0}
    box = (np.array([0]), np.array([3]))
    assert BoxTest(mask, values)(box, box, 0, 0) == (True, False)
    for step, must in ((0, True), (2**60, False)):
        assert BoxTest(mask, values, {"ids": np.zeros(8, int) + step})(box, box, 0, 0) == (True, must)
