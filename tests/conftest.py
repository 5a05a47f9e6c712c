# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures. Tests are foldered by what they need: unit (nothing), golden, cpu (g++, torch), gpu (a
device), emulator (g++, torch: the CUDA kernels on the CPU).
"""

from __future__ import annotations

import os

# One thread unless a test asks for more: tests run in as many processes as there are cores, and a team of
# threads that waits for a core spins for seconds. Before torch is imported, which reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files that differ")
    parser.addoption("--emulate-all", action="store_true", help="run GPU kernels on the CPU in all cases")
    parser.addoption(
        "--update-manifest",
        action="store_true",
        help="compile GPU kernels that changed and record their figures",
    )


@pytest.fixture
def update_manifest(request: pytest.FixtureRequest) -> bool:
    """Whether the manifest of GPU kernels is to be brought up to date."""
    return bool(request.config.getoption("--update-manifest"))


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))
