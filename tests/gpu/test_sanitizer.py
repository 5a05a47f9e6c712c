# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer finds nothing in a short list of calls: no bad access, no race, no bad barrier."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.sanitizer import NAMES

ROOT = Path(__file__).parent.parent.parent


def tool_path() -> str | None:
    """compute-sanitizer on PATH or where the toolkit puts it."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/opt/cuda/bin"
    )


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_short_list(tool: str) -> None:
    sanitizer = tool_path()
    if sanitizer is None:
        pytest.skip("no compute-sanitizer here")
    # Each tensor an allocation of its own, so that an access beside it is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.sanitizer"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    assert all(f"ran {name}" in text for name in NAMES), text[-4000:]
    assert "0 errors" in text or "0 hazards" in text, text[-2000:]
