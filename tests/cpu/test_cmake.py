# SPDX-License-Identifier: Apache-2.0
"""CMake: the C++ tests of the runtime, and attentions as libraries of other projects."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here")


def run(*command: str | Path) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def configure(source: Path, build: Path, *options: str) -> None:
    """With ninja where it is there: it reads the files that a module depends on, and builds in parallel."""
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    command = f"-DAFC_COMMAND={sys.executable};-m;afc"
    run("cmake", *generator, "-S", source, "-B", build, f"-Dafc_DIR={ROOT / 'cmake'}", command, *options)


def test_runtime_through_cmake(tmp_path: Path) -> None:
    configure(ROOT, tmp_path, "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", tmp_path, "--parallel", "2")
    run("ctest", "--test-dir", tmp_path, "--output-on-failure", "--no-tests=error")


def test_the_example_program_computes_attention(tmp_path: Path) -> None:
    configure(ROOT / "examples" / "cpp", tmp_path)
    run("cmake", "--build", tmp_path, "--parallel", "2")
    lines = run(tmp_path / "attend").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["o", "dq", "dk", "dv", "refused"]


PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(outside LANGUAGES C)
find_package(afc REQUIRED CONFIG)
afc_add_attention(one SOURCE one.attn BACKEND cpu DTYPE float32 HEAD 16 OPTIONS --no-backward)
afc_add_attention(two SOURCE two.attn BACKEND cpu DTYPE float64 HEAD 16 DEFINE w=5 OPTIONS --no-backward)
add_executable(outside main.c)
target_link_libraries(outside PRIVATE one two)
"""

# Two modules in one program: each function works on its own table, whatever the linker found first.
MAIN = """
#include <stdio.h>
#include "one.h"
#include "two.h"
int main(void) {
  afc_args args = {0};
  printf("%u %u %d %d\\n", one_module()->entry_count, two_module()->entry_count, ONE_LOCAL_SCALAR_w,
         ONE_LOCAL_CAPTURED_tau);
  args.version = 1;
  printf("%d ", two_local_cpu_float64_16_16_forward(&args));
  printf("[%s] [%d]\\n", one_last_error(), two_last_error()[0] != 0);
  return one_local_cpu_float32_16_16_forward(&args) == AFC_OK;
}
"""
ATTENTION = """import "mask.attn"
score warm(s, h; tau[H]) = s * tau[h]
attention local(q, k, v; w: int > 0, tau[H]) {
    return softmax(near(warm(scaled_dot_product(q, k); tau); w)) @ v
}
"""
PLAIN = """attention local(q, k, v; w: int > 0) {
    return softmax(sliding_window(scaled_dot_product(q, k); w)) @ v
}
"""


def test_two_attentions_in_a_project_of_its_own(tmp_path: Path) -> None:
    source, build = tmp_path / "a project", tmp_path / "build"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(PROJECT)
    (source / "main.c").write_text(MAIN)
    (source / "one.attn").write_text(ATTENTION)
    (source / "two.attn").write_text(PLAIN)
    mask = "mask near(i, j; w: int > 0) = j <= i and i - j < w\n"
    (source / "mask.attn").write_text(mask)
    configure(source, build)
    run("cmake", "--build", build, "--parallel", "2")
    counts, errors = run(build / "outside").splitlines()
    assert counts == "1 1 0 0" and errors.endswith("[] [1]")
    header = (build / "afc" / "one" / "one.h").read_text()
    assert "// args.captured[0]: float [H]" in header and "// args.scalar[0].i: int > 0" in header
    assert "_backward(" not in header
    # what a module is built from, it is built again from
    modules = [build / "afc" / name / f"{name}.so" for name in ("one", "two")]
    before = [module.read_bytes() for module in modules]
    (source / "mask.attn").write_text(mask.replace("j <= i and", "j < i + 1 and"))
    run("cmake", "--build", build, "--parallel", "2")
    assert [module.read_bytes() == old for module, old in zip(modules, before, strict=True)] == [False, True]


def test_wrong_calls_of_the_function_are_refused(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.replace("BACKEND cpu", "BACKENDS cpu"))
    with pytest.raises(AssertionError, match="unknown or empty: BACKENDS;cpu"):
        configure(tmp_path, tmp_path / "build")
