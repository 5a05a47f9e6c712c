# SPDX-License-Identifier: Apache-2.0
"""Where the data folders of afc are: `grammar`, `templates`, `runtime`, `cmake`, `docs`.

In a checkout they lie beside the package; a wheel carries them inside it, under `afc/_data`.
"""

from __future__ import annotations

from pathlib import Path

from afc.errors import AfcError

_PACKAGE = Path(__file__).resolve().parent

# A part that each folder must have: a foreign folder of the same name beside an installed package is not
# taken.
_PROOF = {
    "grammar": "prelude",
    "templates": "cpu",
    "runtime": "abi/afc_abi.h",
    "cmake": "afcConfig.cmake",
    "docs": "errors.md",
}


def _find(name: str) -> Path:
    candidates = (_PACKAGE / "_data" / name, _PACKAGE.parent / name)
    for folder in candidates:
        if (folder / _PROOF[name]).exists():
            return folder
    raise AfcError.of(
        "E0901",
        f"the data folder '{name}' of afc is missing",
        notes=[f"looked at {folder}" for folder in candidates],
        hint="the installation is incomplete: install afc again",
    )


def package() -> Path:
    """Folder of the Python package."""
    return _PACKAGE


def grammar() -> Path:
    """Folder of the language: `attn.lark` and `prelude/*.attn`. Raises AfcError E0901 if it is missing."""
    return _find("grammar")


def templates() -> Path:
    """Folder of the Jinja templates, one subfolder per target. Raises AfcError E0901 if it is missing."""
    return _find("templates")


def runtime() -> Path:
    """Folder of the C++ and CUDA headers and of the host sources. Raises AfcError E0901 if it is missing."""
    return _find("runtime")


def cmake() -> Path:
    """Folder of the CMake package. Raises AfcError E0901 if it is missing."""
    return _find("cmake")


def docs() -> Path:
    """Folder of the pages that commands print: `errors.md`. Raises AfcError E0901 if it is missing."""
    return _find("docs")
