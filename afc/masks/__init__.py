# SPDX-License-Identifier: Apache-2.0
"""Mask analysis: from a boolean formula to bounds, and from bounds to runs of tiles."""

from afc.masks.bounds import derive
from afc.masks.runs import key_run, query_run

__all__ = ["derive", "key_run", "query_run"]
