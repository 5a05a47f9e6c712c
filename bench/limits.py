# SPDX-License-Identifier: Apache-2.0
"""An H200 that holds as many blocks on an SM as a smaller GPU would: ``--limits sm_86``.

Kernels ask for more dynamic shared memory than they use, just so much that an SM takes no more blocks than
the 100 KB and 1536 threads of compute capability 8.6 allow. It does not make the tensor cores slower.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import afc.render.cuda as renderer
from afc.build import Cache
from afc.render.launch_context import KernelRow

RESERVED_BYTES = 1024  # of each block, by the driver
STATIC_BYTES = 512  # kernels declare up to so much beside the dynamic memory
H200_SM_BYTES = 228 * 1024


@dataclass(frozen=True)
class Limits:
    """What an SM holds: bytes of shared memory, and threads."""

    shared_bytes: int
    threads: int

    def blocks(self, dynamic_bytes: int, threads: int) -> int:
        """Blocks at a time on such an SM, registers aside; at least 1."""
        by_memory = self.shared_bytes // (dynamic_bytes + STATIC_BYTES + RESERVED_BYTES)
        return max(1, min(by_memory, self.threads // threads))

    def padded(self, dynamic_bytes: int, threads: int) -> int:
        """Dynamic shared memory with which an SM of an H200 holds no more blocks than this one."""
        least = H200_SM_BYTES // (self.blocks(dynamic_bytes, threads) + 1) + 128 - RESERVED_BYTES
        return max(dynamic_bytes, least // 128 * 128)


KNOWN = {"sm_86": Limits(100 * 1024, 1536)}


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Modules that are built within launch their kernels with the limits of this name; None changes nothing.

    Raises ValueError for a name that is not known.
    """
    if name is None:
        yield
        return
    if name not in KNOWN:
        raise ValueError(f"limits: expected one of {', '.join(KNOWN)}, got {name!r}")
    limits = KNOWN[name]

    def row(constant: str, symbol: str, shared_bytes: int, threads: int, part: int) -> KernelRow:
        return KernelRow(constant, symbol, limits.padded(shared_bytes, threads), threads, part)

    # A cache of its own: what is recorded there by file and options must not be taken for the plain module.
    cache = {"AFC_CACHE_DIR": str(Cache().root / f"limits-{name}")}
    with patch.object(renderer, "KernelRow", row), patch.dict(os.environ, cache):
        yield
