# SPDX-License-Identifier: Apache-2.0
"""`afc doctor`: what of a machine afc can use, where it is, and the command that mends what is missing.

Compilers are not only found but tried: each compiles a small text that includes afc's own headers.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from afc import __version__
from afc.build import (
    Arch,
    Cache,
    CppUnit,
    CudaCompiler,
    CudaUnit,
    Toolchain,
    compile_cpp,
    compile_cubin,
    find_cuda,
    find_cxx,
    find_nvcc,
    find_nvrtc,
)
from afc.build.toolchain import Nvcc, find_python_headers
from afc.errors import AfcError, ToolchainError

VARIABLES = (
    "AFC_CACHE_DIR",
    "AFC_CUDA_COMPILER",
    "AFC_NVCC",
    "AFC_NVRTC",
    "CUDA_HOME",
    "CUDA_PATH",
    "CXX",
)
_CPP = '#include "abi/afc_abi.h"\nextern "C" int trial() { return AFC_ABI_VERSION; }\n'
_CUDA = (
    '#include "tile/device.cuh"\nextern "C" __global__ void trial(int *p) { *p = tile::warp_index(*p); }\n'
)
_REINSTALL = "pip install --upgrade --force-reinstall 'cuda-toolkit[nvcc,cudart,cccl]>=13.0,<14'"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. `state`: `ok`, `missing`, or `broken` (found, but it does not work).

    `detail` says what and where; `fix` is the command that mends it; `needed` that no build goes without it;
    `searched` are the places where a missing thing was looked for.
    """

    name: str
    state: str
    detail: str
    fix: str = ""
    needed: bool = False
    searched: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether the machine is not in order: something needed is missing, or something is broken."""
        return self.state == "broken" or (self.state == "missing" and self.needed)


def examine() -> list[Finding]:
    """Everything that a build or a call may need, in the order of a build."""
    return [
        Finding("afc", "ok", f"{__version__}, Python {platform.python_version()}"),
        _cxx(),
        _python_headers(),
        *_cuda_compilers(),
        _driver(),
        *(_package(name) for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "transformers")),
        _cache(),
        *(Finding(name, "ok", os.environ[name]) for name in VARIABLES if os.environ.get(name)),
    ]


def _cxx() -> Finding:
    fix = "apt install g++"
    try:
        cxx = find_cxx()
    except ToolchainError as error:
        return Finding("g++", "missing", "no C++ compiler", fix, True, error.searched)
    problem = _trial(lambda cache: compile_cpp(CppUnit("trial", _CPP, "generic"), Toolchain(cxx), cache))
    if problem:
        return Finding("g++", "broken", f"{cxx}: {problem}", fix, True)
    return Finding("g++", "ok", str(cxx))


def _python_headers() -> Finding:
    try:
        headers = find_python_headers()
    except ToolchainError as error:
        diagnostic = error.diagnostics[0]
        fix = "pip install pybind11" if "pybind11" in diagnostic.message else "apt install python3-dev"
        return Finding("Python headers", "missing", diagnostic.message, fix, True)
    return Finding("Python headers", "ok", f"{headers.include_dirs[0]} ({headers.identity})")


def _cuda_compilers() -> list[Finding]:
    """nvcc, NVRTC, and which of them builds use."""
    findings = []
    searches: dict[str, Callable[[], CudaCompiler]] = {"nvcc": find_nvcc, "NVRTC": find_nvrtc}
    for name, find in searches.items():
        variable = f"AFC_{name.upper()}"
        try:
            findings.append(_tried(name, find()))
        except ToolchainError as error:
            named = bool(os.environ.get(variable))
            state, fix = (
                ("broken", f"unset {variable}, or let it name one that works") if named else ("missing", "")
            )
            findings.append(Finding(name, state, error.diagnostics[0].message, fix, False, error.searched))
    fix = "pip install 'afc[cuda]'"
    try:
        chosen = find_cuda()
        states = {f.name: f.state for f in findings}
        if states.get(chosen.name) == "ok":
            findings.append(Finding("CUDA builds", "ok", f"by {chosen.name} {chosen.version}"))
        else:
            findings.append(Finding("CUDA builds", "broken", f"by {chosen.name}, which does not work", fix))
    except AfcError as error:
        findings.append(Finding("CUDA builds", "missing", error.diagnostics[0].message, fix))
    return findings


def _tried(name: str, compiler: CudaCompiler) -> Finding:
    place = f"{compiler.command[-1]} (version {compiler.version})"
    try:
        cxx = find_cxx()
    except ToolchainError:
        return Finding(name, "broken", f"{place}: it needs a C++ compiler", "apt install g++")
    unit = CudaUnit("trial", _CUDA, Arch.parse(_newest(compiler)))
    problem = _trial(lambda cache: compile_cubin(unit, Toolchain(cxx, compiler), cache))
    if not problem:
        known = sorted(compiler.archs, key=lambda arch: int(arch.removeprefix("sm_")))
        return Finding(name, "ok", f"{place}, {known[0]} to {known[-1]}")
    wheel = "nvidia" in Path(compiler.command[-1]).parts
    fix = (
        _REINSTALL
        if wheel
        else "name another: "
        + ("AFC_NVCC=/path/to/nvcc" if isinstance(compiler, Nvcc) else "AFC_NVRTC=/path/to/libnvrtc.so.13")
    )
    return Finding(name, "broken", f"{place}: {problem}", fix)


def _newest(compiler: CudaCompiler) -> str:
    return "sm_90" if "sm_90" in compiler.archs else compiler.archs[-1]


def _trial(compile_trial: Callable[[Cache], object]) -> str:
    """What is wrong with a compiler that has to compile a small text; empty if nothing is."""
    folder = tempfile.mkdtemp(
        prefix="afc-doctor-"
    )  # a cache of its own: what was built before proves nothing
    try:
        compile_trial(Cache(Path(folder)))
    except ToolchainError as error:
        lines = [line.strip() for line in error.log.splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        return (telling or lines or [error.diagnostics[0].message])[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def _driver() -> Finding:
    """The CUDA driver and its devices. Asks the driver itself, and starts it only to count devices."""
    fix = "install the NVIDIA driver of the GPU (needed to run GPU kernels, not to build them)"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("CUDA driver", "missing", "libcuda.so.1 cannot be opened", fix)
    version, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return Finding("CUDA driver", "broken", "libcuda.so.1 does not tell its version", fix)
    text = f"supports CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if version.value < 12000:
        return Finding("CUDA driver", "broken", f"{text}; 12.0 is needed", fix)
    result = driver.cuInit(0)
    if result != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return Finding("CUDA driver", "missing", f"{text}; it sees no GPU (cuInit: {result})", "nvidia-smi")
    return Finding("CUDA driver", "ok", f"{text}; {', '.join(_devices(driver, count.value)) or 'no GPU'}")


def _devices(driver: ctypes.CDLL, count: int) -> list[str]:
    capability_major, capability_minor = 75, 76  # CUdevice_attribute
    found = []
    for ordinal in range(count):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        values = []
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(name, len(name), device)
        for attribute in (capability_major, capability_minor):
            value = ctypes.c_int()
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            values.append(str(value.value))
        found.append(f"{name.value.decode(errors='replace')} (sm_{''.join(values)})")
    return found


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed (optional)")


def _cache() -> Finding:
    try:
        root = Cache().root
    except AfcError as error:
        return Finding(
            "cache", "broken", error.diagnostics[0].message, "AFC_CACHE_DIR=/a/writable/folder", True
        )
    return Finding("cache", "ok", str(root))


def report(findings: list[Finding]) -> str:
    """Text for a terminal: a line for each finding, and under it where a missing thing was looked for."""
    lines = []
    for finding in findings:
        mark = {"ok": "ok", "missing": "--", "broken": "!!"}[finding.state]
        lines.append(f"{mark:3} {finding.name:17} {finding.detail}")
        if finding.state != "ok":
            lines += [f"      looked at {place}" for place in finding.searched]
        if finding.fix:
            lines.append(f"      mend it by: {finding.fix}")
    return "\n".join(lines)


def as_json(findings: list[Finding]) -> dict[str, object]:
    """The findings as JSON data, by name."""
    return {"schema": 1, "findings": {finding.name: asdict(finding) for finding in findings}}
