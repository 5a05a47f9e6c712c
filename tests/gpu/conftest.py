# SPDX-License-Identifier: Apache-2.0
"""Tests on a GPU. AFC_TEST_ARCH chooses the machine code, e.g.

compute_86:sm_90 for the sm_86 features on an sm_90 device.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        import torch

        usable = torch.cuda.is_available()
    except ImportError:
        usable = False
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if not usable:
                item.add_marker(pytest.mark.skip(reason="no GPU here"))
