# SPDX-License-Identifier: Apache-2.0
"""A cell's callable from afc: the only place in the harness that knows afc's interface."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

import torch

from bench import limits
from bench.cells import Cell
from bench.inputs import Attend

REPOSITORY = Path(__file__).resolve().parent.parent


def attend(cell: Cell, device: torch.device, arch: str | None = None, within: str | None = None) -> Attend:
    """Compile (or take from the cache) the cell's program; any rotation happens inside the kernel.

    ``arch`` overrides the target that afc would pick for this machine, ``within`` names ``bench.limits``.
    Raises what afc raises.
    """
    afc = importlib.import_module("afc")
    path, _, name = cell.program.partition(":")
    options = {} if arch is None else {"arch": arch}
    with limits.applied(within):
        kernel = afc.load(REPOSITORY / path, D=cell.D, dtype=cell.dtype, backend=device.type, **options)
    return cast(Attend, getattr(kernel, name))
