# SPDX-License-Identifier: Apache-2.0
"""The C++ tests of the runtime, built and run through CMake."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here")
def test_runtime_through_cmake(tmp_path: Path) -> None:
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", str(tmp_path), "--parallel", "2"],
        ["ctest", "--test-dir", str(tmp_path), "--output-on-failure", "--no-tests=error"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
