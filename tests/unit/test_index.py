# SPDX-License-Identifier: Apache-2.0
"""Modules that are in the cache are found without reading the language; never a wrong one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from afc import api
from afc.build import index
from afc.build.cache import Cache
from afc.options import Options
from tests.golden.test_golden import ROOT

OPTIONS = Options(heads=((16, 16),), backward=False)
LIBRARY = "mask near(i, j) = abs(i - j) < {width}\n"
PROGRAM = 'import "library.attn"\nattention lm(q, k, v) = softmax(near(scaled_dot_product(q, k))) @ v\n'


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "library.attn").write_text(LIBRARY.format(width=8))
    path = tmp_path / "lm.attn"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def build(path: Path, cache: Cache, options: Options = OPTIONS) -> Path:
    found = api.module_in_cache(path, options, cache, build=True)
    assert found is not None
    return found


def recall(path: Path, cache: Cache, options: Options = OPTIONS) -> Path | None:
    return index.recall(cache, path, repr(options))


def test_an_equal_call_is_answered_by_the_record(program: Path, cache: Cache) -> None:
    assert recall(program, cache) is None and not cache.root.exists()
    module = build(program, cache)
    assert recall(program, cache) == module
    assert recall(program, cache, Options(heads=((32, 32),), backward=False)) is None
    os.utime(program)  # the date of a program does not count, its text does
    assert recall(program, cache) == module
    cache.clean()
    assert recall(program, cache) is None


def _edit(name: str, old: str, new: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, _module: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "program": _edit("lm.attn", "near(", "causal("),
    "comment": _edit("lm.attn", "attention", "## Documentation.\nattention"),
    "import": _edit("library.attn", "< 8", "< 9"),
    "no import": lambda folder, _: (folder / "library.attn").unlink(),
    "module": lambda _, module: module.write_bytes(module.read_bytes()[:-1] + b"?"),
    "no module": lambda _, module: module.unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_is_noticed(
    program: Path, cache: Cache, change: Callable[[Path, Path], object]
) -> None:
    change(program.parent, build(program, cache))
    assert recall(program, cache) is None


def test_another_compiler_is_noticed(program: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = program.parent / "cxx"
    compiler.write_text('#!/bin/sh\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    module = build(program, cache)
    assert recall(program, cache) == module
    compiler.write_text('#!/bin/sh\nexec g++ -g0 "$@"\n')
    assert recall(program, cache) is None
    monkeypatch.delenv("CXX")
    assert recall(program, cache) is None


def test_another_afc_is_noticed(program: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(program, cache)
    monkeypatch.setattr(index, "_afc_itself", lambda: "another")
    assert recall(program, cache) is None
    assert build(program, cache) == module == recall(program, cache)  # the same text gives the same entry


def test_a_text_that_changes_during_the_build_is_not_taken_for_the_new_one(
    program: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = api.check_file

    def then_edit(path: Path) -> object:
        found = checked(path)
        _edit("library.attn", "< 8", "< 9")(program.parent, program)
        _edit("lm.attn", "near(", "causal(")(program.parent, program)
        return found

    monkeypatch.setattr(api, "check_file", then_edit)
    module = build(program, cache)
    assert recall(program, cache) is None
    (program.parent / "library.attn").write_text(LIBRARY.format(width=8))
    program.write_text(PROGRAM)
    assert recall(program, cache) == module


def test_damaged_records_are_nothing(program: Path, cache: Cache) -> None:
    build(program, cache)
    (record,) = (cache.root / "loads").iterdir()
    good = json.loads(record.read_text())
    for text in ("", "[]", "{}", json.dumps({**good, "entry": 1}), json.dumps({**good, "module": "x.so"})):
        record.write_text(text)
        assert recall(program, cache) is None


WARM = """
import sys, afc
kernel = afc.load(sys.argv[1], D=16, backend="cpu", backward=False)
print("afc.api" in sys.modules, "numpy" in sys.modules, kernel.causal_lm)
"""


def test_a_warm_load_imports_no_compiler(tmp_path: Path) -> None:
    environ = {**os.environ, "AFC_CACHE_DIR": str(tmp_path)}
    shown = []
    for _ in range(2):
        command = [sys.executable, "-c", WARM, str(ROOT / "examples" / "causal.attn")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, cwd=ROOT)
        shown.append(done.stdout.split()[:2])
    assert shown == [["True", "True"], ["False", "False"]]
