# SPDX-License-Identifier: Apache-2.0
"""Mask plans: bounds are sound for random masks, exact for the common ones, and the same in Python and in
C++.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from afc import paths
from afc.expr.evaluate import evaluate_formula
from afc.frontend import check_text
from afc.ir.masks import MaskPlan, Run
from afc.ir.program import Program
from afc.masks import derive, key_runs, query_runs
from afc.masks.runs import merge

TILE = 8


def plan_of(body: str, parameters: str = "") -> tuple[Program, MaskPlan]:
    text = f"mask f(i, j, m, n; {parameters or 'unused: int = 0'}) = {body}\n"
    options = "; ".join(
        ["s", *([", ".join(p.split(":")[0] for p in parameters.split(", "))] if parameters else [])]
    )
    checked = check_text(
        text
        + f"attention a(q, k, v{'; ' + parameters if parameters else ''}) = "
        + f"softmax(f({options.replace('s', 'dot(q, k)', 1)})) @ v\n"
    )
    program = checked.programs[0]
    return program, derive(s.formula for s in program.masks)


def kept(program: Program, sizes: dict[str, int]) -> np.ndarray:
    m, n = np.arange(sizes["M"])[:, None], np.arange(sizes["N"])[None]
    env = {
        **sizes,
        "m": m,
        "n": n,
        "i": m + sizes["q_origin"],
        "j": n + sizes["k_origin"],
        "b": 0,
        "h": 0,
        "B": 1,
        "H": 1,
        "Hk": 1,
    }
    value = np.ones((sizes["M"], sizes["N"]), bool)
    for step in program.masks:
        value &= evaluate_formula(step.formula, env)[0]
    return value


def check_sound(runs: tuple[Run, ...], rows: np.ndarray, grid: int, what: str) -> None:
    """`rows`: what is kept, [range of one axis, whole other axis]."""
    at = 0
    for run in runs:
        assert at <= run.begin <= run.full_begin <= run.full_end <= run.end <= rows.shape[1], (what, runs)
        assert not rows[:, at : run.begin].any(), f"{what}: a kept element outside {runs}"
        assert rows[:, run.full_begin : run.full_end].all(), (
            f"{what}: a removed element inside the full part of {run}"
        )
        at = run.end
    assert not rows[:, at:].any(), f"{what}: a kept element outside {runs}"
    tiles = [piece.start for run in runs for piece, _ in run.tiles(grid)]
    assert len(tiles) == len(set(tiles)), f"{what}: a tile twice in {runs}"


def check_plan(program: Program, plan: MaskPlan, sizes: dict[str, int]) -> None:
    keep = kept(program, sizes)
    for grid in (1, 6):
        for first in range(0, sizes["M"], TILE):
            last = min(first + TILE, sizes["M"]) - 1
            runs = key_runs(plan, first, last, sizes, grid)
            check_sound(runs, keep[first : last + 1], grid, f"queries {first}..{last}")
        for first in range(0, sizes["N"], TILE):
            last = min(first + TILE, sizes["N"]) - 1
            runs = query_runs(plan, first, last, sizes, grid)
            check_sound(runs, keep[:, first : last + 1].T, grid, f"keys {first}..{last}")


def sizes_of(generator: random.Random, **scalars: int) -> dict[str, int]:
    return {
        "M": generator.randint(1, 40),
        "N": generator.randint(1, 40),
        "q_origin": generator.randint(-20, 40),
        "k_origin": generator.randint(-20, 20),
        **scalars,
    }


COMMON = {
    "causal": "j <= i",
    "window": "abs(i - j) < 5",
    "causal window": "j <= i and abs(i - j) < 5",
    "one sided": "i - j < 7 and i >= j",
    "shifted": "j + 3 <= i",
    "band from both sides": "-4 <= i - j <= 9",
    "anti diagonal": "i + j < 30",
    "last keys": "j >= 5",
    "not the future": "not (j > i)",
    "by index": "n <= m",
    "lengths": "n < N - 3",
    "diagonal": "i == j",
    "negated union": "not (j > i or i - j >= 6)",
    "chunked": "i // 8 == j // 8",
    "this chunk and the last": "0 <= i // 8 - j // 8 <= 1",
    "queries from the fifth on": "i >= 5 and j <= i",
    "sink and window": "j <= i and (j < 4 or i - j < 6)",
    "global or window": "i < 3 or j < 3 or abs(i - j) < 5",
    "negated window": "not (abs(i - j) < 6)",
    "all but the diagonal": "i != j",
    "by branches": "if i < 9 then j <= i else j >= 3",
    "negated branches": "not (if i < 9 then j <= i else j < 3)",
}


@pytest.mark.parametrize("name", COMMON)
def test_common_masks_are_decided_by_bounds(name: str) -> None:
    program, plan = plan_of(COMMON[name])
    assert not plan.residual and (plan.bounds or plan.alternatives)
    generator = random.Random(1)
    for _ in range(25):
        sizes = sizes_of(generator)
        check_plan(program, plan, sizes)
        keep = kept(program, sizes)
        for first in range(sizes["M"]):  # for a single query the runs are exact
            runs = key_runs(plan, first, first, sizes)
            full = sum(run.full_end - run.full_begin for run in runs)
            assert sum(run.end - run.begin for run in runs) == keep[first].sum() == full


def test_run_time_parameters_bound_too() -> None:
    program, plan = plan_of("j <= i and i - j < w and j >= first", "w: int, first: int")
    assert not plan.residual
    generator = random.Random(2)
    for _ in range(50):
        check_plan(
            program, plan, sizes_of(generator, w=generator.randint(1, 60), first=generator.randint(-5, 30))
        )


@pytest.mark.parametrize(
    "body",
    [
        "i % 2 == 0",
        "i * i > j",
        "2 * j <= i",
        "i // 3 == j // 4",
        "m // 3 == n // 3",
        "j < 1 or j == 3 or j == 5 or j == 7 or j == 9",  # too many alternatives
    ],
)
def test_what_does_not_fit_stays_with_the_elements(body: str) -> None:
    program, plan = plan_of(f"({body}) and j <= i + 4")
    assert plan.residual and plan.bounds
    generator = random.Random(3)
    for _ in range(25):
        check_plan(program, plan, sizes_of(generator))


def random_mask(generator: random.Random, depth: int) -> str:
    if depth == 0 or generator.random() < 0.3:
        left = generator.choice(
            [
                "i",
                "j",
                "m",
                "n",
                "i - j",
                "j - i",
                "i + j",
                "-j",
                "2 * i",
                "abs(i - j)",
                "i // 3",
                "j % 4",
                "abs(j - 5)",
                "N - n",
            ]
        )
        right = generator.choice(
            ["i", "j", "n", str(generator.randint(-10, 25)), "i + 3", "j - 2", "M - 1", "w", "w - i"]
        )
        return f"{left} {generator.choice(['<', '<=', '>', '>=', '==', '!='])} {right}"
    a, b = random_mask(generator, depth - 1), random_mask(generator, depth - 1)
    return generator.choice([f"({a}) and ({b})", f"({a}) and ({b})", f"({a}) or ({b})", f"not ({a})"])


def test_random_masks_have_no_unsound_run() -> None:
    generator = random.Random()
    for _ in range(150):
        program, plan = plan_of(random_mask(generator, 3), "w: int")
        for _ in range(3):
            check_plan(program, plan, sizes_of(generator, w=generator.randint(-5, 40)))


def test_no_mask_is_one_full_run() -> None:
    _, plan = plan_of("true")
    sizes = {"M": 9, "N": 30, "q_origin": 0, "k_origin": 0}
    assert key_runs(plan, 0, 8, sizes) == (Run(0, 0, 30, 30),)
    assert Run(0, 0, 30, 30).tiles(8) == [
        (slice(24, 32), False),
        *((slice(t, t + 8), True) for t in (0, 8, 16)),
    ]
    assert Run(3, 5, 14, 16).pieces(4) == [
        (slice(3, 5), False),
        (slice(14, 16), False),
        *((slice(a, b), True) for a, b in ((5, 9), (9, 13), (13, 14))),
    ]


def test_cpp_runs_agree_with_python(tmp_path: Path) -> None:
    """The functions key_run and query_run that are printed, compiled and called for random sizes."""
    from afc import passes
    from afc.render.blocks import CPU, render_blocks
    from afc.schedule.common import semantics

    bodies = [*COMMON.values(), "j <= i and i - j < w", "i % 3 == 0 and j <= i", "i // w >= j // w or j < w"]
    generator = random.Random(4)
    calls, expected, parts = [], [], []
    for number, body in enumerate(bodies):
        program, plan = plan_of(body, "w: int")
        lowered = passes.run(program, {"Dqk": 16, "Dv": 16})
        text = render_blocks(lowered, semantics(lowered, "float32", "float"), CPU).text
        parts.append(f"namespace mask{number} {{\n{text}\n}}")
        for _ in range(20):
            sizes = sizes_of(generator, w=generator.randint(1, 30))
            fields = "".join(f"a.{f} = {sizes[f]}; " for f in ("M", "N", "q_origin", "k_origin"))
            calls.append(f"{{ afc_args a{{}}; {fields}a.scalar[0].i = {sizes['w']};")
            for name, length, runs in (("key_run", "M", key_runs), ("query_run", "N", query_runs)):
                first, last = sorted(generator.randrange(sizes[length]) for _ in range(2))
                grid, several = generator.choice([1, 5, 8]), len(plan.alternatives)
                arguments = f"a, {first}, {last}"
                call = f"show(mask{number}::{name}({arguments}));"
                if several:
                    call = f"{{ Runs<{several}> r; mask{number}::{name}({arguments}, {grid}, r); show(r); }}"
                calls.append(call)
                found = runs(plan, first, last, sizes, grid)
                shown = [f"{r.begin} {r.full_begin} {r.full_end} {r.end}" for r in found]
                expected.append("; ".join(shown or ([] if several else ["0 0 0 0"])))
            calls.append("}")
    source = "\n".join(
        [
            "#include <cstdio>",
            '#include "abi/afc_run.h"',
            '#include "cpu/element.hpp"',
            '#include "cpu/math.hpp"',
            "using Real = float;",
            *parts,
            "static void show(const Run *r, int count) {",
            "  for (int k = 0; k < count; ++k, ++r) {",
            '    const char *between = k ? "; " : "";',
            '    std::printf("%s%d %d %d %d", between, r->begin, r->full_begin, r->full_end, r->end);',
            "  }",
            '  std::printf("\\n");',
            "}",
            "static void show(const Run &r) { show(&r, 1); }",
            "template <int N> static void show(const Runs<N> &r) { show(r.run, r.count); }",
            "int main() {",
            *calls,
            "}",
        ]
    )
    (tmp_path / "runs.cpp").write_text(source)
    subprocess.run(
        ["g++", "-std=c++17", "-O1", f"-I{paths.runtime()}", "-march=x86-64-v3", "runs.cpp", "-o", "runs"],
        cwd=tmp_path,
        check=True,
    )
    got = subprocess.run([str(tmp_path / "runs")], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )[:-1]
    assert got == expected


WALK = """#include <algorithm>
#include <cstdint>
#include <cstdio>
#define __CUDACC__
#define __device__
#define __forceinline__ inline
static struct { unsigned x; } threadIdx;
static unsigned __shfl_sync(unsigned, unsigned value, int) { return value; }
using std::max;
using std::min;
#include "tile/walk.cuh"

template <int N> static void show(const Run (&parts)[N], int grid, int length, int members) {
  Runs<N> runs;
  runs.clear();
  for (const Run &part : parts) runs.add(part);
  runs.merge(grid, length);
  tile::GroupWalkOf<tile::RunsWalk<N>> walk;
  walk.walk.set(runs, grid);
  walk.repeat(members);
  auto at = walk.begin();
  for (int step = 0; step < walk.count; ++step, at = walk.next(at)) {
    std::printf("%d %d %d;", at.member, walk.tile(at), step >= walk.partial);
  }
  std::printf("\\n");
}
"""


def test_gpu_walks_over_several_runs(tmp_path: Path) -> None:
    """The walk of the CUDA kernels, compiled for the host: for each head, the tiles of `Run.tiles`."""
    generator = random.Random(5)
    calls, expected = [], []
    for _ in range(400):
        length, grid, members = (generator.randint(1, high) for high in (200, 40, 3))
        parts = []
        for _ in range(generator.randint(2, 4)):
            run = Run(*sorted(generator.randint(0, length) for _ in range(4)))
            parts.append(run if run.full_begin < run.full_end else Run(run.begin, run.end, run.end, run.end))
        texts = ", ".join(f"{{{r.begin}, {r.full_begin}, {r.full_end}, {r.end}}}" for r in parts)
        calls.append(f"{{ const Run p[] = {{{texts}}}; show(p, {grid}, {length}, {members}); }}")
        tiles = [
            (piece.start // grid, full)
            for run in merge(parts, grid, length)
            for piece, full in run.tiles(grid)
        ]
        expected.append(sorted((member, *tile) for member in range(members) for tile in tiles))
    (tmp_path / "walk.cpp").write_text("\n".join([WALK, "int main() {", *calls, "}"]))
    command = ["g++", "-std=c++17", "-O1", f"-I{paths.runtime()}", "walk.cpp", "-o", "walk"]
    subprocess.run(command, cwd=tmp_path, check=True)
    shown = subprocess.run([str(tmp_path / "walk")], capture_output=True, text=True, check=True).stdout
    for line, want in zip(shown.split("\n")[:-1], expected, strict=True):
        steps = [tuple(map(int, step.split())) for step in line.split(";")[:-1]]
        assert sorted(steps) == want
        assert [full for *_, full in steps] == sorted(full for *_, full in steps)  # partial ones first
