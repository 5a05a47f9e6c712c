# SPDX-License-Identifier: Apache-2.0
"""Act once torch has been imported, without importing it.

`import kernel` usually comes before `import torch` (imports are sorted), and a module must not cost the
1.5 s of torch by itself. Yet torch.compile cannot register operators while it traces a first call, so they
must be there as soon as torch is: this finder steps aside after letting the real one find torch, and runs
the callbacks when torch is ready.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _TorchFinder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> Any:
            execute(module)
            while self.callbacks:
                self.callbacks.pop()()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _TorchFinder()


def after_torch(callback: Callable[[], None]) -> None:
    """Run `callback` now if torch is imported, else right after its import."""
    if "torch" in sys.modules:
        callback()
        return
    _FINDER.callbacks.append(callback)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
