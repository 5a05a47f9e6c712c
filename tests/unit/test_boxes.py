# SPDX-License-Identifier: Apache-2.0
"""The three-valued test of boxes: never unsound on random masks, exact on the common ones."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afc import paths
from afc.expr.evaluate import evaluate
from afc.expr.nodes import Const, Expr, Load, Op, Type, Var, const
from afc.expr.operators import OPERATORS, call, to_float
from afc.expr.printer import attn
from afc.masks.boxes import COMPARISONS, LOGIC, NUMBERS, BoxTest, reads
from afc.masks.tables import BLOCK, EXACT, Captured
from afc.render.boxes import TABLE_TYPES, box_function

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

ARITHMETIC = ("add", "sub", "mul", "max", "min", "abs", "neg", "select")


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
            [
                "add",
                "sub",
                "sub",
                "mul",
                "floordiv",
                "mod",
                "max",
                "min",
                "abs",
                "neg",
                "select",
                "ipow",
                "to_int",
            ]
        )
        if name in ("floordiv", "mod"):
            divisor = pick([const(self.random.randint(1, 30)), Var("w", Type.INT)])
            return call(name, self.integer(depth - 1), divisor)
        if name == "to_int":
            return call(name, self.float(depth - 1))
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
        more = [
            "add",
            "sub",
            "mul",
            "div",
            "floor",
            "ceil",
            "exp",
            "log",
            "tanh",
            "sin",
            "cos",
            "sqrt",
            "pow",
        ]
        return self.operation(self.random.choice([*ARITHMETIC, *more]), self.float, depth)

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


@dataclass
class Case:
    """A random mask at a random call, what it keeps in float64 and in float32, and random boxes."""

    mask: Expr
    tensors: dict[str, Any]
    values: dict[str, Any]
    b: int
    h: int
    kept: list[Any]
    ends: list[tuple[Any, Any]]  # first and last queries, first and last keys

    @classmethod
    def of(cls, author: Author, boxes: int) -> Case:
        mask, tensors, g = author.condition(3), author.tensors(), author.numbers
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
        positions = {"i": m + values["q_origin"], "j": n + values["k_origin"]}
        env = {**values, **positions, "m": m, "n": n, "b": b, "h": h}
        with np.errstate(all="ignore"):
            kept = [evaluate(mask, env, tensors), in_float32(mask, env, tensors)]
        ends = []
        for size in (rows, columns):
            first = g.integers(0, size, boxes)
            ends.append((first, np.minimum(first + g.choice([1, 4, 16, 40, 80, LENGTH], boxes), size) - 1))
        return cls(mask, tensors, values, b, h, [np.broadcast_to(k, (rows, columns)) for k in kept], ends)

    def wrong(self, may: Any, must: Any, kept: list[Any]) -> list[str]:
        """Boxes called empty with a kept element, or full with a removed one."""
        found = []
        for k in range(len(may)):
            box = tuple(slice(first[k], last[k] + 1) for first, last in self.ends)
            for elements in kept:
                if (not may[k] and elements[box].any()) or (must[k] and not elements[box].all()):
                    found.append(f"{box}: may {may[k]}, must {must[k]}: {self}")
        return found

    def __str__(self) -> str:
        return f"{attn(self.mask)} with {self.values}, b {self.b}, h {self.h}"


def test_random_masks_have_no_unsound_box() -> None:
    """110,000 boxes of random masks: integers, floats with NaN and infinities, captured tensors."""
    seed = random.randrange(2**32)
    author = Author(seed)
    decided = 0
    for _ in range(MASKS):
        case = Case.of(author, BOXES)
        may, must = BoxTest(case.mask, case.values, case.tensors)(*case.ends, case.b, case.h)
        found = case.wrong(may, must, case.kept)
        assert not found, f"seed {seed}: {found[0]}"
        decided += int((must | ~may).sum())
    assert decided > 0.4 * MASKS * BOXES


def test_operators_without_bounds_are_known() -> None:
    """A new operator has a rule here, or is added to those whose values are not followed."""
    without = set(OPERATORS) - {*NUMBERS, *LOGIC, *COMPARISONS, "select"}
    functions = {"exp", "log", "tanh", "sigmoid", "sin", "cos", "sqrt", "rsqrt", "pow"}
    assert without == {*functions, "random", "row_mean"}


# ---- the emitted test ------------------------------------------------------------------------------------

CODES = {"bool": 0, "int64": 2, "float32": 5, "float64": 6}
C_TYPES = {"bool": "bool", "int64": "int64_t", "float32": "float", "float64": "double"}
PROGRAM = """#include <cmath>
#include <cstdio>
#include <initializer_list>

#include "cpu/bounds.hpp"

static afc_args args;
static afc::Table tables[16];

static afc_captured captured(void *data, int dtype, std::initializer_list<int64_t> sizes) {
  afc_captured tensor{data, dtype, int(sizes.size()), {}, {}};
  int64_t stride = 1;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    tensor.size[d] = sizes.begin()[d];
    tensor.stride[d] = tensor.size[d] == 1 ? 0 : stride;
    stride *= tensor.size[d];
    if (tensor.size[d] == 1) tensor.size[d] = 10;  // takes any index below
  }
  return tensor;
}

template <class T> static void set_table(int k, int slot, int axis) {
  static afc::Extent extents[16][4096];
  tables[k] = {&args.captured[slot], axis, nullptr};
  if (axis >= 0) afc::tabulate<T>(1, tables[k], extents[k], 4096);
}

static void show(const afc::Truth &found) { std::printf("%d %d\\n", found.may, found.must); }
static void show(const afc::RunList &found) {
  for (int k = 0; k < found.count; ++k) {
    const Run &r = found.run[k];
    std::printf("%d %d %d %d ", r.begin, r.full_begin, r.full_end, r.end);
  }
  std::printf("\\n");
}
"""


def literal(value: Any) -> str:
    """A number in C++."""
    if isinstance(value, float) and not np.isfinite(value):
        return "NAN" if np.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
    return str(value).lower() + ("ll" if isinstance(value, int) and abs(value) > 2**31 else "")


def emitted(case: Case, number: int, real: str) -> tuple[str, str]:
    """(functions, calls) of a case: the class of each box, then the runs of keys of each first end."""
    names = list(case.tensors)
    arrays, calls = [], []
    for slot, (name, tensor) in enumerate(case.tensors.items()):
        kind = tensor.dtype.name
        numbers = ", ".join(literal(x) for x in tensor.ravel().tolist())
        arrays.append(f"static {C_TYPES[kind]} {name}[] = {{{numbers}}};")
        sizes = ", ".join(map(str, tensor.shape))
        calls.append(f"args.captured[{slot}] = captured({name}, {CODES[kind]}, {{{sizes}}});")
    for k, read in enumerate(reads(case.mask)):
        axis = -1 if read.axis is None or case.tensors[read.tensor].shape[read.axis] == 1 else read.axis
        calls.append(f"set_table<{TABLE_TYPES[read.type]}>({k}, {names.index(read.tensor)}, {axis});")
    calls += [f"args.{name} = {case.values[name]};" for name in ("M", "N", "q_origin", "k_origin")]
    calls.append(f"args.scalar[0].i = {case.values['w']}; args.scalar[1].f = {case.values['rate']};")
    scalars = {
        "w": ("w", "args.scalar[0].i", Type.INT),
        "rate": ("rate", "args.scalar[1].f", Type.FLOAT),
    }
    text = box_function(case.mask, {"M": "args.M", "N": "args.N"}, scalars)
    numbers = ", ".join(f"{{{', '.join(map(str, ends))}}}" for ends in zip(*sum(case.ends, ()), strict=True))
    arrays.append(f"static const int64_t boxes[][4] = {{{numbers}}};")
    test = f"keep_box(args, tables, {case.b}, {case.h}, afc::Ints(x[0], x[1])"
    calls.append(f"for (auto &x : boxes) show({test}, afc::Ints(x[2], x[3])));")
    calls.append(
        "for (auto &x : boxes) {\n"
        "  show(afc::runs_of(memory, 16, args.N, [&](int64_t first, int64_t end) {\n"
        f"    return {test}, afc::Ints(first, end - 1));\n  }}));\n}}"
    )
    body = "\n".join(calls)
    head = f"namespace case{number} {{\nusing Real = {real};\n"
    return "\n".join([head, *arrays, text, f"static void run() {{\nRun memory[64];\n{body}\n}}\n}}"]), (
        f"case{number}::run();"
    )


def test_the_emitted_test_has_no_unsound_box(tmp_path: Path) -> None:
    """The C++ of random masks, compiled: boxes by both compute types, and the runs found by them."""
    seed, boxes = random.randrange(2**32), 30
    author = Author(seed)
    cases = [Case.of(author, boxes) for _ in range(60)]
    parts = [emitted(case, k, ("double", "float")[k % 2]) for k, case in enumerate(cases)]
    main = "int main() {\n" + "\n".join(call for _, call in parts) + "\n}\n"
    (tmp_path / "boxes.cpp").write_text("\n".join([PROGRAM, *(text for text, _ in parts), main]))
    command = ["g++", "-std=c++17", "-O1", "-fopenmp", "-march=x86-64-v3", f"-I{paths.runtime()}"]
    subprocess.run([*command, "boxes.cpp", "-o", "boxes"], cwd=tmp_path, check=True)
    shown = subprocess.run([str(tmp_path / "boxes")], capture_output=True, text=True, check=True).stdout
    lines = shown.split("\n")[:-1]
    assert len(lines) == 2 * boxes * len(cases)
    decided = np.zeros(2, int)
    for k, case in enumerate(cases):
        mine = lines[2 * boxes * k : 2 * boxes * (k + 1)]
        may, must = np.array([[int(x) for x in line.split()] for line in mine[:boxes]]).T == 1
        elements = case.kept[k % 2]
        found = case.wrong(may, must, [elements])
        assert not found, f"seed {seed}: {found[0]}"
        python = BoxTest(case.mask, case.values, case.tensors)(*case.ends, case.b, case.h)
        decided += np.array([(must | ~may).sum(), (python.must | ~python.may).sum()])
        for row, line in enumerate(mine[boxes:]):
            runs = np.array([int(x) for x in line.split()]).reshape(-1, 4)
            kept = elements[case.ends[0][0][row] : case.ends[0][1][row] + 1]
            at = 0
            for begin, full_begin, full_end, end in runs.tolist():
                assert at <= begin <= full_begin <= full_end <= end <= case.values["N"]
                assert not kept[:, at:begin].any() and kept[:, full_begin:full_end].all(), (
                    f"seed {seed}: {case}"
                )
                at = end
            assert not kept[:, at:].any(), f"seed {seed}: {case}"
            touching = runs[1:, 0] == runs[:-1, 3]  # only where each has a full part
            assert (runs[:, 1] < runs[:, 2])[1:][touching].all(), f"seed {seed}: {case}"
            assert (runs[:, 1] < runs[:, 2])[:-1][touching].all(), f"seed {seed}: {case}"
    assert decided[0] > 0.9 * decided[1] > 0  # as sharp as the test in Python


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
