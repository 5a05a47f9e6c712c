# SPDX-License-Identifier: Apache-2.0
"""From texts to an importable module: compile, check, link, write.

    toolchain   finding g++, nvcc and NVRTC, their versions
    sources     what of a text reaches the machine code
    cache       entries on disk, made once, verified when read
    index       which entry a call of `afc.load` got the last time
    compile     texts to objects and cubins; the gate on ptxas' report
    artifact    linking one shared object with its Python part
    module      all of it in one call, `build_module`; `cached_module` does the same into the cache

Names are imported at first use: loading a module that is in the cache needs few of them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afc.build.artifact import (
        Image,
        ModuleContent,
        ModuleEntry,
        Variant,
        link_module,
    )
    from afc.build.cache import (
        Cache,
    )
    from afc.build.compile import (
        CppUnit,
        CubinResult,
        CudaUnit,
        Fault,
        FunctionUsage,
        ObjectResult,
        check_ptxas,
        compile_cpp,
        compile_cubin,
        compile_units,
        ptxas_faults,
    )
    from afc.build.module import (
        BuildReport,
        ModuleSpec,
        Settle,
        build_module,
        cached_module,
        compile_cubins,
        find_module,
    )
    from afc.build.toolchain import (
        Arch,
        CudaCompiler,
        Nvcc,
        Nvrtc,
        Tool,
        Toolchain,
        find_cuda,
        find_cxx,
        find_nvcc,
        find_nvrtc,
    )

__all__ = [
    "Arch",
    "BuildReport",
    "Cache",
    "CppUnit",
    "CubinResult",
    "CudaCompiler",
    "CudaUnit",
    "Fault",
    "FunctionUsage",
    "Image",
    "ModuleContent",
    "ModuleEntry",
    "ModuleSpec",
    "Nvcc",
    "Nvrtc",
    "ObjectResult",
    "Settle",
    "Tool",
    "Toolchain",
    "Variant",
    "build_module",
    "cached_module",
    "check_ptxas",
    "compile_cpp",
    "compile_cubin",
    "compile_cubins",
    "compile_units",
    "find_cuda",
    "find_cxx",
    "find_module",
    "find_nvcc",
    "find_nvrtc",
    "link_module",
    "ptxas_faults",
]

_HOME = {
    "Image": "artifact",
    "ModuleContent": "artifact",
    "ModuleEntry": "artifact",
    "Variant": "artifact",
    "link_module": "artifact",
    "Cache": "cache",
    "CppUnit": "compile",
    "CubinResult": "compile",
    "CudaUnit": "compile",
    "Fault": "compile",
    "FunctionUsage": "compile",
    "ObjectResult": "compile",
    "check_ptxas": "compile",
    "compile_cpp": "compile",
    "compile_cubin": "compile",
    "compile_units": "compile",
    "ptxas_faults": "compile",
    "BuildReport": "module",
    "ModuleSpec": "module",
    "Settle": "module",
    "build_module": "module",
    "cached_module": "module",
    "compile_cubins": "module",
    "find_module": "module",
    "Arch": "toolchain",
    "CudaCompiler": "toolchain",
    "Nvcc": "toolchain",
    "Nvrtc": "toolchain",
    "Tool": "toolchain",
    "Toolchain": "toolchain",
    "find_cuda": "toolchain",
    "find_cxx": "toolchain",
    "find_nvcc": "toolchain",
    "find_nvrtc": "toolchain",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'afc.build' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"afc.build.{_HOME[name]}"), name)
