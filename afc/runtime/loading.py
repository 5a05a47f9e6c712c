# SPDX-License-Identifier: Apache-2.0
"""Importing a built module by path, under a name of its own, so that two files of one name never meet."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

_LOADED: dict[Path, ModuleType] = {}


class KernelModule(ModuleType):
    """What a built module is once its attentions are attached: a copy of it is itself, and pickling stores
    its path, so that models which hold one can be copied and saved.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelModule:
        return self

    def __reduce__(self) -> tuple[Any, tuple[str | None]]:
        return import_module, (self.__file__,)


def import_module(path: Path | str) -> ModuleType:
    """The module at `path`; the same object for the same path. Raises ImportError."""
    path = Path(path).resolve()
    if path not in _LOADED:
        if not path.is_file():
            raise ImportError(
                f"the compiled module {path} is gone: build it again with afc.load or `afc compile`"
            )
        name = (
            f"afc_modules_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.{path.name.partition('.')[0]}"
        )
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a module that Python can import")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _LOADED[path] = module
    return _LOADED[path]


def restore_attention(path: str, name: str) -> Any:
    """An attention by its module's path and its name: what pickling one stores."""
    return getattr(import_module(path), name)
