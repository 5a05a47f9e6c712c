# SPDX-License-Identifier: Apache-2.0
"""Golden files: the emitted text of the examples, reviewed like code.

`pytest --update-golden` rewrites them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from afc.api import emit
from afc.options import Options

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(__file__).parent / "files"
PROGRAMS = (
    "alibi",
    "bert",
    "bigbird",
    "causal",
    "gemma2",
    "gptj",
    "headwise_norm",
    "learned_sink",
    "llama",
    "mistral",
    "packed",
    "qwen2_vl",
    "qwen3",
    "sigmoid",
    "softmax1",
    "t5_decoder",
)
SMALL = ("sm_86",)  # one class of GPUs; the other differs in tiles alone
STAGES = {
    "program": ("program.txt", Options(("cpu",), ((64, 64),))),
    "tiled": ("plan.txt", Options(("cpu", "cuda"), ((64, 64),), archs=SMALL)),
    "cpp": ("cpp", Options(("cpu",), ((64, 64),), ("float32",))),
    "cu": ("cu", Options(("cuda",), ((128, 128),), ("bfloat16",), SMALL)),
    "launch": ("launch.cpp", Options(("cuda",), ((128, 128),), ("bfloat16",), SMALL)),
}


def text(name: str, stage: str) -> str:
    options = STAGES[stage][1]
    return emit(ROOT / "examples" / f"{name}.attn", stage, options)


CASES = [(name, stage) for name in PROGRAMS for stage in STAGES]
# Sections of the CPU text of programs that GPUs refuse: file, program and the start of the section's banner.
PARTS = {"rope_mixed.turned.cpp": ("rope_mixed", "backward: captured tensors that rotations")}


def part(name: str) -> str:
    """The section of a golden file, up to the next banner."""
    program, banner = PARTS[name]
    sections = text(program, "cpp").split("// ---- ")
    (found,) = [section for section in sections if section.startswith(banner)]
    return f"// ---- {found}"


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_golden(name: str, stage: str, update_golden: bool) -> None:
    path = FOLDER / f"{name}.{STAGES[stage][0]}"
    got = text(name, stage)
    if update_golden:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(got, encoding="utf-8")
    assert path.exists(), f"no golden file {path.name}: run pytest --update-golden and review it"
    want = path.read_text(encoding="utf-8")
    assert got == want, f"{path.name} differs: run pytest --update-golden and review the difference"


@pytest.mark.parametrize("name", PARTS)
def test_golden_part(name: str, update_golden: bool) -> None:
    path, got = FOLDER / name, part(name)
    if update_golden:
        path.write_text(got, encoding="utf-8")
    assert path.exists(), f"no golden file {name}: run pytest --update-golden and review it"
    want = path.read_text(encoding="utf-8")
    assert got == want, f"{name} differs: run pytest --update-golden and review the difference"


def test_no_golden_file_is_left_over() -> None:
    known = {f"{name}.{STAGES[stage][0]}" for name, stage in CASES}
    assert {p.name for p in FOLDER.iterdir()} == known | set(PARTS)


def test_different_programs_have_different_text() -> None:
    for stage in STAGES:
        names = [name for name, of in CASES if of == stage]
        assert len({text(name, stage) for name in names}) == len(names), stage


@pytest.mark.parametrize("seed", ["0", "1", "12345"])
def test_text_does_not_depend_on_the_hash_seed(seed: str) -> None:
    code = (
        "from tests.golden.test_golden import *\n"
        "print(''.join(text(n, s) for n in ('alibi', 'llama') for s in STAGES), end='')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert run.stdout == "".join(text(n, s) for n in ("alibi", "llama") for s in STAGES)


def test_text_carries_no_path_and_no_date() -> None:
    for name in PROGRAMS:
        for stage in STAGES:
            content = text(name, stage)
            assert str(ROOT) not in content and "20" + "26" not in content, (name, stage)
