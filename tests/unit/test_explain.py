# SPDX-License-Identifier: Apache-2.0
"""`afc explain`, `afc test` and `afc viz`: their text, and that pictures agree with the mask."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from afc import api, cli, explain, viz
from afc.errors import UsageError
from afc.frontend import check_text
from afc.options import Options

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "explain"
GOLDEN_OPTIONS = {
    "gemma2": Options(("cpu",), ((64, 64),)),
    "mistral": Options(("cpu", "cuda"), ((128, 128),), ("bfloat16",), ("sm_86", "sm_120")),
}
PROGRAM = """## Blocks, documents and a head's own reach.
mask blocks(i, j) = j // 16 <= i // 16
mask same_document(b, i, j; doc[B, M]: int) = doc[b, i] == doc[b, j]
mask reach(h, i, j) = i - j < 8 * (h + 1)
attention packed(q, k, v; doc[B, M]: int, w: int) {
    return softmax(sliding_window(causal(same_document(dot(q, k); doc)); w)) @ v
}
attention by_block(q, k, v) = softmax(reach(blocks(dot(q, k)))) @ v
attention near(q, k, v; w: int = 24) = softmax(sliding_window(causal(dot(q, k)); w)) @ v
example blocks(15, 16) == false
example blocks(16,
    31) == true
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "page.attn"
    path.write_text(PROGRAM)
    return path


# ---- explain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_OPTIONS)
def test_golden(name: str, update_golden: bool) -> None:
    got = explain.explain_file(ROOT / "examples" / f"{name}.attn", GOLDEN_OPTIONS[name], 4096)
    path = GOLDEN / f"{name}.txt"
    if update_golden:
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(got, encoding="utf-8")
    assert path.exists(), f"no golden file {path.name}: run pytest --update-golden and review it"
    assert got == path.read_text(encoding="utf-8"), f"{path.name}: run pytest --update-golden and review"


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.iterdir()} == set(GOLDEN_OPTIONS)


def test_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "E0105"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("E0105: unknown block") and "kausal" in shown and "E0106" not in shown
    assert cli.main(["explain", "e0105"]) == 0 and capsys.readouterr().out == shown
    assert cli.main(["explain", "E0999"]) == 2
    assert "error[E0623]" in capsys.readouterr().err


def test_what_coefficients_depend_on_is_said() -> None:
    text = explain.explain_file(ROOT / "examples" / "qwen2_vl.attn", Options(), 512)
    assert text.count("coefficients for each batch entry") == 2


def test_what_elements_decide_is_said(program: Path) -> None:
    text = explain.explain_file(program, Options(), 512)
    assert "tested tile by tile: doc[b, i] == doc[b, j]; it reads doc" in text
    assert "tested tile by tile: i - j < 8 * (h + 1); it depends on batch or head" in text
    assert "visits at most" in text and "tiles are skipped by: j // 16 <= i // 16" in text
    text = explain.explain_file(program, Options(("cuda",), dtypes=("bfloat16",)), 512)
    assert "tested tile by tile: doc[b, i] == doc[b, j]; it reads doc" in text and "visits at most" in text
    assert "_extents (table): tiles of 8192 rows" in text
    assert re.search(r"_plan_keys_of_128_by_64 \(plan\): .*, after \w+_extents", text)
    assert "assumed for a call: w = 128" in text and "assumed for a call: w = 24" in text
    assert len(re.findall(r"^\w.*\[page.attn:\d+\]$", text, re.M)) == 6  # for both classes of GPUs
    assert re.search(r"on sm80 \(sm_80, sm_90: GPUs with at least 163 KB .*\), bfloat16", text)
    assert re.search(r"on sm86 \(sm_86, sm_120, compute_80: GPUs with at least 99 KB .*\), bfloat16", text)


SEVERAL = """mask odd(i, j) = (i - j) % 2 == 0
attention sink(q, k, v) = softmax(streaming(dot(q, k); w = 100)) @ v
attention every_other(q, k, v) = softmax(sliding_window(causal(odd(dot(q, k))); w = 100)) @ v
"""


def test_what_is_visited_is_what_is_kept(program: Path) -> None:
    """With several runs, from bounds and from a test of tiles, the tiles are those with a kept element."""
    program.write_text(SEVERAL)
    length, tile = 3000, (96, 64)
    text = explain.explain_file(program, Options(), length)
    assert "tiles are skipped outside: j <= 3; or j >= i + -99 and j <= i + 99" in text
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    near = (j <= i) & (i - j < 100)
    for name, kept in (("sink", near | ((j <= i) & (j < 4))), ("every_other", near & ((i - j) % 2 == 0))):
        rows, columns = (np.arange(0, length, t) for t in tile)
        tiles = np.logical_or.reduceat(np.logical_or.reduceat(kept, rows, 0), columns, 1)
        (picture,) = viz.maps(program, Options(), length, name)
        grid = set()
        for piece in picture.steps:
            row = piece.queries.start // tile[0]
            grid |= {(row, piece.keys[0] // tile[1]), (row, piece.keys[-1] // tile[1])}
        assert grid == {(r, c) for r, c in np.argwhere(tiles).tolist()}
        assert "at most" not in picture.caption[0] and f"{picture.visited}" in text


def test_a_fixed_parameter_is_not_assumed(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(program), "--seq", "256", "-D", "w=32", "-D", "D=64"]) == 0
    shown = capsys.readouterr().out
    assert "assumed" not in shown and "w = 32" in shown and "M = N = 256" in shown


def test_what_is_counted_is_what_is_listed(program: Path) -> None:
    for length in (1, 63, 200):
        for unit in api.units(check_text(PROGRAM), Options(("cpu", "cuda"), dtypes=("bfloat16",))):
            values = explain.assumed(unit.program, length)
            steps = list(explain.pieces(unit.plan, length, values))
            seen = np.zeros((length, length), int)
            for step in steps:
                seen[step.queries.start : step.queries.stop, step.keys.start : step.keys.stop] += 1
            full = sum(s.area for s in steps if s.full)
            assert seen.max(initial=0) <= 1
            assert explain.visited(unit.plan, length, values) == explain.Visited(
                len(steps), int(seen.sum()) - full, full, length
            )


@pytest.mark.parametrize(
    "arguments", [["explain", "--seq", "0"], ["viz", "--seq", "0"], ["viz", "--seq", "8193"]]
)
def test_lengths_out_of_range(
    arguments: list[str], program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, str(program)]) == 2
    assert "error[E0624]" in capsys.readouterr().err


# ---- test ------------------------------------------------------------------------------------------------


def test_examples_that_hold(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", str(program)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{program}:10: ok     example blocks(15, 16) == false",
        f"{program}:11: ok     example blocks(16, 31) == true",
    ]


def test_an_example_that_does_not_hold(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text(PROGRAM + "example causal(3, 4) == true\nexample rope(1.0, 0.0, 1, 0) == (0.5, 0.8)\n")
    assert cli.main(["test", str(program)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["ok", "ok", "wrong", "wrong"]
    assert lines[2].endswith("example causal(3, 4) == true   (the formula gives false)")


def test_a_file_with_other_mistakes(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text("score f(s) = t\nexample causal(3, 4) == true\n")
    assert cli.main(["test", str(program), str(ROOT / "grammar" / "prelude" / "attention.attn")]) == 1
    shown = capsys.readouterr()
    assert "error[E0101]" in shown.err and f"{program}:" not in shown.out and "prelude" in shown.out


# ---- viz -------------------------------------------------------------------------------------------------


def test_the_maps_agree_with_the_mask(program: Path) -> None:
    (picture,) = viz.maps(program, Options(), 100, "near")
    i, j = np.arange(100)[:, None], np.arange(100)[None]
    kept = (j <= i) & (i - j < 24)
    assert np.array_equal(picture.cells, np.where(kept, viz.ALL, viz.NONE))
    visited = np.zeros_like(kept)
    for piece in picture.steps:
        part = np.s_[piece.queries.start : piece.queries.stop, piece.keys.start : piece.keys.stop]
        visited[part] = True
        assert not piece.full or kept[part].all()
    assert not (kept & ~visited).any()


def test_cells_of_several_elements(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viz, "CELLS", 25)
    (picture,) = viz.maps(program, Options(), 99, "by_block")
    i, j = np.arange(99)[:, None], np.arange(99)[None]
    kept = (j // 16 <= i // 16) & (i - j < 8)
    assert picture.step == 4 and picture.by_head and "batch 0, head 0" in picture.caption
    for row in range(25):
        for column in range(25):
            part = kept[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            want = viz.ALL if part.all() else viz.SOME if part.any() else viz.NONE
            assert picture.cells[row, column] == want


def test_what_a_tensor_decides_is_open(program: Path) -> None:
    (picture,) = viz.maps(program, Options(constants=(("w", 9),)), 64, "packed")
    assert picture.cells.max() == viz.SOME and picture.open == ("doc[b, i] == doc[b, j]",)
    assert "doc[b, i]" in viz.svg([picture]) and "doc[b, i]" in viz.text([picture])


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.attn")), ids=lambda p: p.stem)
def test_every_example_is_explained_and_drawn(path: Path) -> None:
    assert "the forward kernel visits" in explain.explain_file(path, Options(), 150)
    for picture in viz.maps(path, Options(), 150):
        seen = np.zeros((150, 150), bool)
        for piece in picture.steps:
            part = np.s_[piece.queries.start : piece.queries.stop, piece.keys.start : piece.keys.stop]
            seen[part] = True
            assert not piece.full or (picture.cells[part] == viz.ALL).all()
        assert picture.open or not (picture.cells[~seen] != viz.NONE).any()
        assert viz.text([picture]) and viz.svg([picture])


def test_svg_is_well_formed_and_stays_inside(program: Path, tmp_path: Path) -> None:
    output = tmp_path / "map.svg"
    assert cli.main(["viz", str(program), "--seq", "130", "-D", "w=9", "-o", str(output)]) == 0
    root = ElementTree.fromstring(output.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    words = [t.text or "" for t in root.iter(f"{space}text")]
    assert (
        any(w.startswith("packed: same_document") for w in words) and "tiles of the forward kernel" in words
    )
    boxes = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", output.read_text())
    assert boxes
    for x, y, width, height in (map(float, box) for box in boxes):
        assert width > 0 and height > 0 and max(x + width, y + height) <= viz.SIDE + 0.02


def test_text(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["viz", str(program), "--seq", "4", "--attention", "near", "-D", "w=2"]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "near: causal, sliding_window(w = w), 4 positions"
    assert lines[3:7] == ["#...", "##..", ".##.", "..##"]


def test_unknown_attention_and_output(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        viz.maps(program, Options(), 64, "nea")
    assert caught.value.diagnostics[0].code == "E0625" and "did you mean `near`?" in str(caught.value)
    assert cli.main(["viz", str(program), "-o", str(tmp_path / "no" / "map.svg")]) == 2
    assert "error[E0521]" in capsys.readouterr().err


def test_none_of_this_imports_torch(program: Path) -> None:
    code = (
        "import sys, afc.cli\n"
        f"for c in ('explain', 'test', 'viz'):\n    assert afc.cli.main([c, {str(program)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
