# SPDX-License-Identifier: Apache-2.0
"""Rounding of float64 arrays to a storage type and back, as the kernels do it (round to nearest, ties to
even).
"""

from __future__ import annotations

from typing import Any

import numpy as np


def to_storage(x: Any, dtype: str) -> Any:
    """`x` rounded to `dtype` ("float64", "float32", "float16", "bfloat16"), returned as float64."""
    if dtype == "bfloat16":
        return _bfloat16(np.asarray(x, np.float32))
    with np.errstate(over="ignore"):
        return np.asarray(np.asarray(x, np.dtype(dtype)), np.float64)


def _bfloat16(x: Any) -> Any:
    bits = x.view(np.uint32) if x.ndim else np.asarray(x).reshape(1).view(np.uint32).reshape(())
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    kept = np.where(np.isnan(x), bits | np.uint32(0x400000), rounded).astype(np.uint32)
    return np.asarray(kept.view(np.float32), np.float64)
