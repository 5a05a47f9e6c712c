# SPDX-License-Identifier: Apache-2.0
"""The plan kernels of GPU targets, executed by the emulator: never unsound on random masks, exact on those of
the field, and the tables of captured tensors behind them.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afc import paths
from afc.expr.nodes import Expr, Type, Var, const
from afc.expr.operators import call
from afc.masks.boxes import BoxTest, reads
from afc.masks.stored import MOST_RUNS, StoredRuns, stored_runs
from afc.render.boxes import TABLE_TYPES, box_function
from afc.render.text import environment
from afc.schedule.stored import CHUNK, CHUNK_EXTENTS, RUN_ROW
from tests.emulator import INCLUDE
from tests.unit.test_boxes import C_TYPES, CODES, Author, Case, in_float32, literal
from tests.unit.test_stored_runs import brute, elements, predicate, tensors

HEAD = """#include "emulator.hpp"
#include "tile/mask_plan.cuh"
"""
DIMENSIONS = {"M": "args.M", "N": "args.N", "q_origin": "places.q_origin", "k_origin": "places.k_origin"}
MAIN = """
static afc_captured captured(void *data, int dtype, std::initializer_list<int64_t> sizes) {
  afc_captured tensor{data, dtype, int(sizes.size()), {}, {}};
  int64_t stride = 1;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    tensor.size[d] = sizes.begin()[d];
    tensor.stride[d] = stride;
    stride *= tensor.size[d];
  }
  return tensor;
}

static void launch(const char *name, void (*kernel)(afc_args), int threads, int64_t blocks,
                   const afc_args &args) {
  const emulator::Kernel row[] = {{name, kernel}};
  const emulator::Kernels all = {row, 1};
  const afc_gpu_kernel one[] = {{name, 0, threads}};
  afc_gpu_module module = {reinterpret_cast<const afc_gpu_images *>(&all), one, 1};
  if (afc_gpu_launch(&module, 0, unsigned(blocks), 1, 1, &args, 0) != AFC_OK) {
    std::fprintf(stderr, "%s: %s\\n", name, afc_last_error());
    std::exit(1);
  }
}
"""


def run_program(folder: Path, text: str) -> list[list[float]]:
    """The numbers of each line that a program with kernels prints."""
    includes = [f"-I{INCLUDE}", f"-I{paths.runtime()}", f"-I{paths.runtime() / 'abi'}"]
    head = '#include <cstdio>\n#include <cstdlib>\n#include <initializer_list>\n#include "host/driver.h"\n'
    head += '#include "host/status.h"\n'
    (folder / "plan.cpp").write_text(head + text)
    sources = ["plan.cpp", str(INCLUDE / "emulator.cpp"), str(paths.runtime() / "host" / "status.cpp")]
    command = ["g++", "-std=c++17", "-O1", "-march=x86-64-v3", "-w", *includes, *sources, "-o", "plan"]
    subprocess.run(command, cwd=folder, check=True)
    shown = subprocess.run([str(folder / "plan")], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return [[float(x) for x in line.split()] for line in shown.stdout.splitlines()]


@dataclass
class Planned:
    """A mask at a call, with the tiles (queries, keys) that it is planned for."""

    mask: Expr
    tensors: dict[str, Any]
    values: dict[str, Any]
    tile: tuple[int, int]

    def table_rows(self) -> list[dict[str, Any]]:
        """The tables of the mask's reads, as the templates take them."""
        names, rows, before = list(self.tensors), [], 0
        for read in reads(self.mask):
            shape = self.tensors[read.tensor].shape
            axis = -1 if read.axis is None else read.axis
            own = 0 if axis < 0 else self.tensors[read.tensor].size // shape[axis] * -(-shape[axis] // CHUNK)
            rows.append(
                {
                    "slot": names.index(read.tensor),
                    "name": read.tensor,
                    "type": TABLE_TYPES[read.type],
                    "rank": len(shape),
                    "axis": axis,
                    "chunks": str(own),
                    "before": str(before),
                }
            )
            before += own
        return rows

    def text(self, number: int) -> str:
        """The kernels, and a function that runs them and prints the rows of runs of batch 1 and head 1."""
        scalars = {
            "w": ("w", "args.scalar[0].i", Type.INT),
            "rate": ("rate", "args.scalar[1].f", Type.FLOAT),
        }
        rows = self.table_rows()
        box = box_function(
            self.mask, DIMENSIONS, scalars, [row["axis"] for row in rows], "const tile::Places &places"
        )
        parts = [f"namespace case{number} {{", box]
        tabled = [row for row in rows if row["axis"] >= 0]
        if tabled:
            parts.append(_extents(f"extents_{number}", tabled))
        words = {"m": "queries", "n": "keys"}
        for own, other, sizes in (("m", "n", self.tile), ("n", "m", self.tile[::-1])):
            parts.append(
                _render(
                    "plan",
                    name=f"plan_{own}_{number}",
                    warps=4,
                    own=own,
                    other=other,
                    owns=words[own],
                    others=words[other],
                    own_tile=sizes[0],
                    other_tile=sizes[1],
                    by_head=True,
                    runs_buffer=1,
                    extents_buffer=0 if tabled else None,
                    tables=rows,
                )
            )
        chunks = sum(int(row["chunks"]) for row in tabled)
        lines = [f"args.{name} = {self.values[name]};" for name in ("M", "N", "q_origin", "k_origin")]
        lines.append(f"args.scalar[0].i = {self.values['w']}; args.scalar[1].f = {self.values['rate']};")
        for slot, (name, tensor) in enumerate(self.tensors.items()):
            numbers = ", ".join(literal(x) for x in tensor.ravel().tolist())
            parts.append(f"static {C_TYPES[tensor.dtype.name]} {name}_[] = {{{numbers}}};")
            sizes_text = ", ".join(map(str, tensor.shape))
            lines.append(
                f"args.captured[{slot}] = captured({name}_, {CODES[tensor.dtype.name]}, {{{sizes_text}}});"
            )
        if tabled:
            lines.append(f"args.buffer[0] = std::malloc({chunks * CHUNK_EXTENTS * 24});")
            lines.append(f'launch("extents_{number}", extents_{number}, 512, {chunks}, args);')
        for own, size, tile in (("m", self.values["M"], self.tile[0]), ("n", self.values["N"], self.tile[1])):
            count = -(-size // tile)
            lines += [
                f"args.buffer[1] = std::malloc({4 * count * RUN_ROW * 16});",
                f'launch("plan_{own}_{number}", plan_{own}_{number}, 128, {count}, args);',
                f"for (int t = 0; t < {count}; ++t) {{",
                f"  const int4 *row = static_cast<int4 *>(args.buffer[1]) + ({3 * count} + t) * {RUN_ROW};",
                '  std::printf("%d %d %d ", row->x, row->y, row->z);',
                "  for (int k = 1; k <= row->x; ++k) {",
                '    std::printf("%d %d %d %d ", row[k].x, row[k].y, row[k].z, row[k].w);',
                "  }",
                '  std::printf("\\n");',
                "}",
            ]
        body = "\n  ".join(["afc_args args{};", "args.B = args.Hq = args.Hk = 2;", *lines])
        return "\n".join([*parts, f"static void run() {{\n  {body}\n}}\n}}"])

    def classes(self, lines: Sequence[Sequence[float]]) -> tuple[Any, Any]:
        """[tiles of queries, tiles of keys]: 0 empty, 1 partial, 2 full, by the runs of either axis."""
        counts = [-(-self.values[name] // tile) for name, tile in zip("MN", self.tile, strict=True)]
        found = np.zeros(counts, int), np.zeros(counts[::-1], int)
        for own, table in enumerate(found):
            for t in range(counts[own]):
                count, partial, total, *runs = map(int, lines[own * counts[0] + t])
                at = 0
                for first, full_first, full_last, last in np.array(runs).reshape(count, 4).tolist():
                    assert at <= first <= full_first <= full_last <= last <= counts[1 - own]
                    assert first < last
                    at = last
                    table[t, first:last] = 1
                    table[t, full_first:full_last] = 2
                assert (total, partial) == ((table[t] > 0).sum(), (table[t] == 1).sum())
        return found[0], found[1].T

    def unsound(self, found: Any, kept: Any) -> bool:
        """Whether a kept element is left out, or a removed one is in a full tile."""
        want = brute(kept, self.tile)
        return bool(((found == 0) & (want > 0)).any() or ((found == 2) & (want < 2)).any())


def _render(template: str, **context: Any) -> str:
    return environment("sm80").get_template(f"{template}.cu.j2").render(**context)


def _extents(name: str, tables: list[dict[str, Any]]) -> str:
    return _render("extents", name=name, threads=512, chunk=CHUNK, buffer=0, tables=tables)


def planned(folder: Path, cases: Sequence[Planned]) -> list[tuple[Any, Any]]:
    """The classes of the tiles of each case."""
    texts = [HEAD, MAIN, *(case.text(k) for k, case in enumerate(cases))]
    calls = "\n".join(f"  case{k}::run();" for k in range(len(cases)))
    lines = run_program(folder, "\n".join([*texts, f"int main() {{\n{calls}\n}}\n"]))
    found, at = [], 0
    for case in cases:
        count = sum(-(-case.values[name] // tile) for name, tile in zip("MN", case.tile, strict=True))
        found.append(case.classes(lines[at : at + count]))
        at += count
    assert at == len(lines)
    return found


def in_python(case: Planned, b: int, h: int) -> tuple[Any, Any]:
    """What the plan pass in Python gives."""
    test = BoxTest(case.mask, case.values, case.tensors)
    size = case.values["M"], case.values["N"]
    counts = [-(-s // t) for s, t in zip(size, case.tile, strict=True)]
    found = []
    for by_keys in (False, True):
        runs = stored_runs(test, size, case.tile, by_keys, b, h).at_most(MOST_RUNS)
        table = np.zeros(counts[::-1] if by_keys else counts, int)
        other = 0 if by_keys else 1
        for t in range(len(table)):
            for run in runs.of(t):
                for piece, full in run.tiles(case.tile[other]):
                    table[t, piece.start // case.tile[other]] = 2 if full else 1
        if by_keys and size[1] % case.tile[1]:
            table[-1] = np.minimum(table[-1], 1)  # a ragged tile of keys has no full tiles
        found.append(table.T if by_keys else table)
    return found[0], found[1]


def test_random_masks(tmp_path: Path) -> None:
    """Integers, floats with NaN and infinities, captured tensors: sound, and as sharp as in Python."""
    seed = random.randrange(2**32)
    author = Author(seed)
    cases, kept = [], []
    for _ in range(30):
        case = Case.of(author, 1)
        tile = author.random.choice([(16, 4), (8, 16), (32, 2), (5, 7)])
        for tensor in case.tensors:  # a dimension of size 1 takes any index of the reference
            if case.tensors[tensor].shape[0] == 1:
                case.tensors[tensor] = np.repeat(case.tensors[tensor], 10, axis=0)
        cases.append(Planned(case.mask, case.tensors, case.values, tile))
        again = Case(case.mask, case.tensors, case.values, 1, 1, [], case.ends)
        kept.append(_elements(again))
    decided = np.zeros(2, int)
    for case, elements_kept, found in zip(cases, kept, planned(tmp_path, cases), strict=True):
        python = in_python(case, 1, 1)
        for by_keys in (False, True):
            wrong = case.unsound(found[by_keys], elements_kept)
            assert not wrong, f"seed {seed}: {case.mask}"
            decided += [(found[by_keys] != 1).sum(), (python[by_keys] != 1).sum()]
    assert decided[0] > 0.9 * decided[1] > 0


def _elements(case: Case) -> Any:
    """What a mask keeps as the kernels compute it: every float a float32, batch 1 and head 1."""
    m, n = np.arange(case.values["M"])[:, None], np.arange(case.values["N"])[None]
    positions = {"i": m + case.values["q_origin"], "j": n + case.values["k_origin"]}
    env = {**case.values, **positions, "m": m, "n": n, "b": 1, "h": 1}
    with np.errstate(all="ignore"):
        found = in_float32(case.mask, env, case.tensors)
    return np.broadcast_to(found, (case.values["M"], case.values["N"]))


FIELD = ("causal", "window", "document", "document, causal", "global or window", "block sparse")


def test_masks_of_the_field(tmp_path: Path) -> None:
    """The class of every tile is that of its elements, for either axis; tiles of keys may be ragged."""
    length, tile = 1100, (96, 16)  # 69 tiles of keys: two levels of boxes
    values = {"M": length, "N": length, "q_origin": 0, "k_origin": 0, "w": 1, "rate": 0.0, "B": 2, "H": 2}
    cases = []
    for name in FIELD:
        arrays = {k: np.repeat(x, 2, axis=0) for k, x in tensors(1).items()}
        if name == "block sparse":
            arrays["on"] = np.repeat(arrays["on"], 2, axis=1)
        mask = predicate(name)
        used = {read.tensor for read in reads(mask)}
        cases.append(Planned(mask, {k: x for k, x in arrays.items() if k in used}, values, tile))
    for name, case, found in zip(FIELD, cases, planned(tmp_path, cases), strict=True):
        want = brute(elements(case.mask, values, case.tensors), tile)
        by_queries, by_keys = want.copy(), want.copy()
        by_queries[:, -1] = np.minimum(by_queries[:, -1], 1)  # ragged
        by_keys[-1] = np.minimum(by_keys[-1], 1)
        by_keys[:, -1] = np.minimum(by_keys[:, -1], 1)
        np.testing.assert_array_equal(found[0], by_queries, err_msg=name)
        np.testing.assert_array_equal(found[1], by_keys, err_msg=name)


def test_more_runs_than_there_is_room_for(tmp_path: Path) -> None:
    """The smallest gaps are closed, as in Python; nothing is lost."""
    i, j = Var("i", Type.INT), Var("j", Type.INT)
    near = call("lt", call("mod", call("add", call("mul", i, j), j), const(7)), const(2))
    far = call("or", call("lt", call("mod", j, const(11)), const(3)), call("lt", j, const(40)))
    values = {"M": 40, "N": 1500, "q_origin": 0, "k_origin": 0, "w": 1, "rate": 0.0}
    cases = [Planned(mask, {}, values, (8, 2)) for mask in (far, near, call("and", near, far))]
    for case, found in zip(cases, planned(tmp_path, cases), strict=True):
        for mine, python in zip(found, in_python(case, 1, 1), strict=True):
            np.testing.assert_array_equal(mine, python)
    few = StoredRuns(np.array([0, 3]), np.array([[0, 2, 4, 4], [5, 5, 9, 9], [20, 21, 21, 21]]))
    assert few.at_most(3).runs.tolist() == few.runs.tolist()
    assert few.at_most(2).runs.tolist() == [[0, 5, 9, 9], [20, 21, 21, 21]]
    assert all(a.end <= b.begin for a, b in pairwise(few.at_most(2).of(0)))


RANGES = """
extern "C" __global__ void ranges(afc_args args) {
  const auto *extents = static_cast<const afc::Extent *>(args.buffer[0]);
  const afc::Table table = afc::table_of<2, 1>(args.captured[0], extents, 6);
  const int *ends = static_cast<int *>(args.buffer[2]) + 3 * threadIdx.x;
  const auto found = afc::bounds_at<float, 1>(table, afc::Ints(ends[0]), afc::Ints(ends[1], ends[2]));
  double *to = static_cast<double *>(args.buffer[1]) + 3 * threadIdx.x;
  to[0] = found.lo, to[1] = found.hi, to[2] = found.nan;
}
"""


@pytest.mark.parametrize("size", [1, 32, 500, 8192, 20001])
def test_ranges_of_a_tensor(tmp_path: Path, size: int) -> None:
    """Bounds of ranges of any place and length, through all levels of extents."""
    g = np.random.default_rng(size)
    count = 256
    values = g.standard_normal((2, size)).astype(np.float32)
    values[1, size // 3 : size // 3 + 3] = np.nan
    first = g.integers(0, size, count)
    length = np.minimum(2 ** g.integers(0, 16, count), size)
    first = np.where(g.random(count) < 0.5, first // length * length, first)
    last = np.minimum(first + length, size) - 1
    row = g.integers(0, 2, count)
    (tmp_path / "values.bin").write_bytes(values.tobytes())
    ends = np.stack([row, first, last], axis=1)
    numbers = ", ".join(map(str, ends.ravel().tolist()))
    tables = [
        {
            "slot": 0,
            "name": "t",
            "type": "float",
            "rank": 2,
            "axis": 1,
            "chunks": str(2 * -(-size // CHUNK)),
            "before": "0",
        }
    ]
    main = f"""
static int ends[] = {{{numbers}}};
static double results[{3 * count}];
static float values[{2 * size}];
int main() {{
  std::FILE *file = std::fopen("{tmp_path}/values.bin", "rb");
  if (std::fread(values, 4, {2 * size}, file) != {2 * size}) return 1;
  afc_args args{{}};
  args.captured[0] = captured(values, AFC_FLOAT32, {{2, {size}}});
  args.buffer[0] = std::malloc({6 * CHUNK_EXTENTS * 24});
  args.buffer[1] = results;
  args.buffer[2] = ends;
  launch("extents", extents, 512, {tables[0]["chunks"]}, args);
  launch("ranges", ranges, {count}, 1, args);
  for (double *x = results; x < results + {3 * count}; x += 3) {{
    std::printf("%.17g %.17g %g\\n", x[0], x[1], x[2]);
  }}
}}
"""
    kernel = _extents("extents", tables)
    lines = run_program(tmp_path, "\n".join([HEAD, MAIN, kernel, RANGES, main]))
    for (r, a, b), (lo, hi, nan) in zip(ends.tolist(), lines, strict=True):
        part = values[r, a : b + 1]
        number = part[~np.isnan(part)]
        assert nan == np.isnan(part).any()
        if len(number):
            assert (lo, hi) == (number.min(), number.max())
        else:
            assert (lo, hi) == (-np.inf, np.inf)
