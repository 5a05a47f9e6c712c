# SPDX-License-Identifier: Apache-2.0
"""The C++ program of the examples, built for the GPU by CMake."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cpu.test_cmake import ROOT, configure, run


def cudart() -> bool:
    folders = (Path("/usr/local/cuda/lib64"), Path("/usr/local/cuda/targets/x86_64-linux/lib"))
    return any(list(folder.glob("libcudart*")) for folder in folders)


@pytest.mark.skipif(shutil.which("cmake") is None or not cudart(), reason="needs cmake and the CUDA runtime")
def test_the_example_program_computes_attention_on_the_gpu(tmp_path: Path) -> None:
    configure(ROOT / "examples" / "cpp", tmp_path, "-DBACKEND=cuda")
    run("cmake", "--build", tmp_path, "--parallel", "2")
    lines = run(tmp_path / "attend").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["o", "dq", "dk", "dv", "refused"]
