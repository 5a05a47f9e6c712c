# SPDX-License-Identifier: Apache-2.0
"""Mask analysis: from a boolean formula to bounds, to a test of tiles, and from either to runs of tiles."""

from afc.masks.bounds import derive
from afc.masks.boxes import BoxTest
from afc.masks.runs import key_runs, query_runs
from afc.masks.stored import StoredRuns, stored_runs

__all__ = ["BoxTest", "StoredRuns", "derive", "key_runs", "query_runs", "stored_runs"]
