# SPDX-License-Identifier: Apache-2.0
"""afc: a compiler for attention.

    errors, options  ->  expr (scalar formulas)  ->  ir (Program, MaskPlan, TiledKernel, LaunchPlan)
        ->  frontend, passes, masks, schedule, reference, render  ->  api, cli
    build (toolchain, cache, artefact) and runtime (calls from Python) see text and files, never IR; `loading`
    is on top of both, and calls the api only where something has to be built.

    kernel = afc.load("llama.attn", D=64, dtype=torch.bfloat16)      # compiled once, cached
    o = kernel.llama(q, k, v)

`docs/architecture.md` is the map.
"""

__version__ = "0.1.0"

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afc.api import compile_file
    from afc.errors import AfcError, SourceError, ToolchainError, UsageError
    from afc.frontend import check_file
    from afc.loading import load, prepare

__all__ = [
    "AfcError",
    "SourceError",
    "ToolchainError",
    "UsageError",
    "__version__",
    "check_file",
    "compile_file",
    "load",
    "prepare",
]

_HOME = {
    "load": "afc.loading",
    "prepare": "afc.loading",
    "compile_file": "afc.api",
    "check_file": "afc.frontend",
    "AfcError": "afc.errors",
    "SourceError": "afc.errors",
    "ToolchainError": "afc.errors",
    "UsageError": "afc.errors",
}


def __getattr__(name: str) -> Any:
    """Public names, imported at first use: a built module imports `afc.runtime` alone, and quickly."""
    if name not in _HOME:
        raise AttributeError(f"module 'afc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
