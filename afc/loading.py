# SPDX-License-Identifier: Apache-2.0
"""`afc.load` and `afc.prepare`. What is in the cache is loaded without the compiler: nothing here imports
`afc.api` before something has to be built.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from afc import options as opt
from afc.build.cache import Cache
from afc.build.index import recall
from afc.errors import UsageError
from afc.options import Options
from afc.runtime.loading import import_module


def load(
    path: str | Path,
    *,
    D: int | None = None,
    Dqk: int | None = None,
    Dv: int | None = None,
    dtype: Any = None,
    backend: str | None = None,
    arch: str | None = None,
    backward: bool = True,
    **constants: opt.Constant,
) -> ModuleType:
    """Compile (or take from the cache) and import a file's attentions, specialised to one head size and
    dtype.

    `backend` is "cuda" where torch sees a GPU, else "cpu"; `dtype` defaults to bfloat16 on CUDA, float32 on
    the CPU; `arch`
    defaults to the current GPU's. Further keywords fix run-time parameters. Raises SourceError, UsageError,
    ToolchainError; RuntimeError inside torch.compile, and under fake tensors or stream capture where it would
    have to compile: `prepare` does so ahead.
    """
    _check_not_compiling(path)
    return load_module(path, _load_options(D, Dqk, Dv, dtype, backend, arch, backward, constants))


def prepare(
    path: str | Path,
    *,
    D: int | Sequence[int] | None = None,
    Dqk: int | None = None,
    Dv: int | None = None,
    dtype: Any = None,
    backend: str | None = None,
    arch: str | None = None,
    backward: bool = True,
    **constants: opt.Constant,
) -> tuple[ModuleType, ...]:
    """Compile ahead what `load` will be asked for: every combination of the head sizes D and the dtypes.

    The arguments are those of `load`, where D and dtype may be sequences. Lengths, batch and heads need no
    preparation. Gives the modules in the order D, dtype; `load` with one D and dtype then gives the same,
    also under fake tensors and stream capture. Raises what `load` raises, RuntimeError under any of these.
    """
    _check_not_compiling(path)
    modules = []
    for head in D if isinstance(D, Sequence) else (D,):
        for storage in dtype if isinstance(dtype, (list, tuple)) else (dtype,):
            options = _load_options(head, Dqk, Dv, storage, backend, arch, backward, constants)
            modules.append(load_module(path, options))
    return tuple(modules)


def _load_options(
    D: int | None,
    Dqk: int | None,
    Dv: int | None,
    dtype: Any,
    backend: str | None,
    arch: str | None,
    backward: bool,
    constants: dict[str, opt.Constant],
) -> Options:
    chosen = backend or ("cuda" if _cuda_available() else "cpu")
    head_qk = Dqk if Dqk is not None else D if D is not None else opt.DEFAULT_HEAD
    head_v = Dv if Dv is not None else D if D is not None else head_qk
    if D is not None and (Dqk is not None or Dv is not None):
        raise UsageError.of("E0613", "give either D or Dqk and Dv, not both")
    archs = (arch,) if arch else (_device_arch(),) if chosen == "cuda" else ()
    return Options(
        opt.backend_names((chosen,)),
        ((head_qk, head_v),),
        (opt.dtype_name(dtype),) if dtype is not None else (),
        archs,
        tuple(sorted(constants.items())),
        backward,
    )


def load_module(path: str | Path, options: Options) -> ModuleType:
    """Compile into the cache with full options, and import.

    Raises SourceError, UsageError, ToolchainError; RuntimeError where nothing may be compiled now.
    """
    cache = Cache()
    found = recall(cache, Path(path), repr(options))
    if found is None:
        from afc import api

        place = _tracing()
        found = api.module_in_cache(path, options, cache, build=place is None)
        if found is None:
            raise RuntimeError(f"afc.load({str(path)!r}) would compile {place}: {_ahead(path)}")
    return import_module(found)


def _check_not_compiling(path: str | Path) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        raise RuntimeError(f"afc.load({str(path)!r}) inside torch.compile: {_ahead(path)}")


def _tracing() -> str | None:
    """Where the caller stands, if it is where nothing may be compiled."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch._guards.detect_fake_mode() is not None:
        return "under fake tensors"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "during the capture of a CUDA graph"
    return None


def _ahead(path: str | Path) -> str:
    return (
        f"call afc.prepare({str(path)!r}, ...) with the same arguments before, and load the module outside "
        "of traced code"
    )


def _cuda_available() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _device_arch() -> str:
    """The architecture of the current GPU of torch, or of CuPy where torch is missing or sees none."""
    try:
        import torch

        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            return f"sm_{major}{minor}"
    except ImportError:
        pass
    try:
        import cupy

        return f"sm_{cupy.cuda.Device().compute_capability}"
    except (ImportError, RuntimeError):  # CuPy's errors of a missing driver or GPU are RuntimeErrors
        raise UsageError.of(
            "E0615",
            "no GPU is visible to name an architecture by",
            hint="give `arch=`, for example arch='sm_90'",
        ) from None
