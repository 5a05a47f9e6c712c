# SPDX-License-Identifier: Apache-2.0
"""Most of the time of these tests goes into compiling kernels, so one run draws a share of them at random.

`--emulate-all` runs them all; AFC_EMULATOR_DRAW repeats a draw. What is not parametrised always runs.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

SHARE = 0.1
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--emulate-all") or config.getoption("keyword"):
        return
    drawn = [item for item in items if FOLDER in item.path.parents and hasattr(item, "callspec")]
    if len(drawn) < 2:  # one was asked for by name
        return
    seed = os.environ.get("AFC_EMULATOR_DRAW") or str(random.SystemRandom().randrange(10**6))
    random.Random(seed).shuffle(drawn)
    reason = f"not drawn (AFC_EMULATOR_DRAW={seed}); --emulate-all runs it"
    for item in drawn[int(SHARE * len(drawn)) + 1 :]:
        item.add_marker(pytest.mark.skip(reason=reason))
