# SPDX-License-Identifier: Apache-2.0
"""Compiling texts: CUDA to machine code for one architecture (cubin), C++ to an object; and the gate on what
ptxas reports.

Every compiler runs in an empty folder of its own, with an argument list (never a shell), a time limit, and
header folders under short relative names, so that no path of the machine reaches the result: equal inputs
give equal bytes.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from afc import paths
from afc.build.cache import Cache, cache_key
from afc.build.sources import included_headers
from afc.build.toolchain import Arch, CudaCompiler, Nvrtc, Tool, Toolchain
from afc.errors import Diagnostic, ToolchainError

# No --split-compile: it saves a quarter of the time, but kernels get up to 8 registers more.
NVCC_FLAGS = ("-O3", "-std=c++17", "-Xptxas", "-v")
NVRTC_FLAGS = (
    "-std=c++17",
    "--ptxas-options=-v",
    "--device-as-default-execution-space",  # constexpr functions without an annotation
    "--pre-include=builtins.h",
)
CXX_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
)  # no -ffast-math: infinities, NaN and the order of operations mean something
ISA_FLAGS = {
    "generic": (),
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4",),
}

COMPILE_SECONDS = 600.0

# Shared memory of a block by compute capability, static and dynamic; what is not listed has the least.
SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 110: 227 << 10}
LEAST_SHARED = 99 << 10
CODE_BYTES = 64 << 10  # of a shipped kernel: more does not stay in the instruction caches

_log = logging.getLogger("afc.build")

_HEADER_SUFFIXES = (".h", ".hpp", ".cuh")


@dataclass(frozen=True)
class CudaUnit:
    """A CUDA text to compile for one architecture.

    `name` is the stem of the file; `include_dirs` come before runtime/. `dynamic_shared`: (kernel, bytes)
    that launches ask for, which no compiler sees and the gate adds to what it reports. `parts`: (name, text)
    of texts that together have the kernels of `text`, and whose machine code is the same.
    """

    name: str
    text: str
    arch: Arch
    include_dirs: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    dynamic_shared: tuple[tuple[str, int], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}.cu for {self.arch}"

    def split(self) -> tuple[CudaUnit, ...]:
        """The parts, each as a unit of its own, to be compiled side by side; without any, the unit itself."""
        found = tuple(replace(self, name=f"{self.name}_{n}", text=t, parts=()) for n, t in self.parts)
        return found or (self,)


@dataclass(frozen=True)
class CppUnit:
    """A C++ text to compile for one instruction set (a key of ISA_FLAGS).

    `include_dirs` come before runtime/. `salt` stands for whatever else the result depends on, such as
    headers included by angle brackets.
    """

    name: str
    text: str
    isa: str = "x86-64-v3"
    include_dirs: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    salt: str = ""

    def __str__(self) -> str:
        return f"{self.name}.cpp for {self.isa}"


@dataclass(frozen=True)
class FunctionUsage:
    """What ptxas reports of a function. For entries alone: `registers`, static `shared_bytes`, the
    `dynamic_bytes` of shared memory that launches add, and `code_bytes` of machine code.
    """

    name: str
    entry: bool
    registers: int = 0
    spill_bytes: int = 0  # stores and loads
    stack_bytes: int = 0
    shared_bytes: int = 0
    dynamic_bytes: int = 0
    code_bytes: int = 0


@dataclass(frozen=True)
class CubinResult:
    """Machine code for one architecture, or PTX where the architecture says so, and what ptxas reports (of
    PTX nothing). `warnings` include all of the C75xx kind.
    """

    name: str
    arch: Arch
    cubin: bytes
    kernels: tuple[FunctionUsage, ...]
    functions: tuple[FunctionUsage, ...]  # device functions that were not inlined
    warnings: tuple[str, ...]
    log: str
    hit: bool = False  # taken from the cache
    toolkit: int = 0  # version of CUDA that compiled it, 13000 for 13.0


@dataclass(frozen=True)
class ObjectResult:
    """An object file for the linker."""

    name: str
    data: bytes
    log: str
    hit: bool = False  # taken from the cache


# ---- running a compiler --------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    """The environment with messages in English, and a current folder whose name does not depend on the
    machine.

    Compilers write the name of the current folder into line tables; they take it from PWD where that is
    right.
    """
    variables = {**os.environ, "LC_ALL": "C"}
    if os.path.isdir("/proc/self/cwd"):
        variables["PWD"] = "/proc/self/cwd"
    return variables


def run_tool(command: Sequence[str], folder: Path, seconds: float = COMPILE_SECONDS) -> tuple[int, str]:
    """Exit status and output of a command run in `folder`; it and all that it started end at the time limit.

    Raises subprocess.TimeoutExpired, and OSError if the program cannot be started.
    """
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=seconds)
    except BaseException:  # the time limit, or an interrupt: no compiler is left running
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, log


@dataclass(frozen=True)
class _Job:
    """One run of a compiler. `command` lacks the include folders and the two file names."""

    label: str
    source_name: str
    text: str
    output_name: str
    command: tuple[str, ...]
    include_dirs: tuple[Path, ...]
    code: str  # of the error if the compiler rejects the text
    seconds: float
    dated: bool = False  # whether the compiler writes the dates of its inputs into a line table


def _fail(
    job: _Job, code: str, message: str, command: Sequence[str], log: str, cache: Cache
) -> ToolchainError:
    kept = cache.keep_failure(
        Path(job.source_name).stem,
        {job.source_name: job.text, "command.txt": " ".join(command) + "\n", "log.txt": log},
    )
    diagnostic = Diagnostic(code, "error", message, notes=(f"source, command and log are kept in {kept}",))
    return ToolchainError(diagnostic, command=command, log=log)


def _write_undated(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.utime(path, (0, 0))


def _place_headers(source: Path, destination: Path, dated: bool) -> None:
    """Makes a folder of headers visible under another name; as copies without dates if they are recorded."""
    if not dated:
        destination.symlink_to(source.resolve(), target_is_directory=True)
        return
    for path in source.rglob("*"):
        if path.suffix in _HEADER_SUFFIXES:
            copy = destination / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _write_undated(copy, path.read_bytes())


def _run_job(job: _Job, cache: Cache) -> tuple[bytes, str]:
    """Output file and log of a job. Raises ToolchainError, with the files kept."""
    with tempfile.TemporaryDirectory(prefix="afc-build-") as temporary:
        folder = Path(temporary)
        _write_undated(folder / job.source_name, job.text.encode())
        command = list(job.command)
        for number, include_dir in enumerate(job.include_dirs):
            _place_headers(include_dir, folder / f"include{number}", job.dated)
            command += ["-I", f"include{number}"]
        command += [job.source_name, "-o", job.output_name]
        try:
            status, log = run_tool(command, folder, job.seconds)
        except subprocess.TimeoutExpired as error:
            message = f"{job.label}: the compiler did not end within {job.seconds:.0f} s"
            raise _fail(job, "E0514", message, command, "", cache) from error
        except OSError as error:
            raise _fail(
                job, job.code, f"{job.label}: the compiler cannot be started: {error}", command, "", cache
            ) from error
        output = folder / job.output_name
        if status != 0 or not output.exists():
            raise _fail(
                job, job.code, f"{job.label}: the compiler failed (exit status {status})", command, log, cache
            )
        return output.read_bytes(), log


# ---- reading what ptxas says ---------------------------------------------------------------------

_COMPILING = re.compile(r"Compiling entry function '([^']+)' for '")
_PROPERTIES = re.compile(r"Function properties for '?([^\s']+)'?")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SERIALIZED = re.compile(r"\(C75\d\d\)")
_WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)


def parse_ptxas(log: str) -> tuple[FunctionUsage, ...]:
    """Resources of every function in a log of `ptxas -v`, in the order of the log."""
    usages: dict[str, FunctionUsage] = {}
    entry = current = ""
    for line in log.splitlines():
        if match := _COMPILING.search(line):
            entry = match.group(1)
            usages[entry] = FunctionUsage(entry, entry=True)
        elif match := _PROPERTIES.search(line):
            current = match.group(1)
            usages.setdefault(current, FunctionUsage(current, entry=False))
        elif (match := _FRAME.search(line)) and current:
            stack, stores, loads = (int(text) for text in match.groups())
            usages[current] = replace(usages[current], stack_bytes=stack, spill_bytes=stores + loads)
        elif (match := _REGISTERS.search(line)) and entry:
            shared = _SHARED.search(line)
            shared_bytes = int(shared.group(1)) if shared else 0
            usages[entry] = replace(usages[entry], registers=int(match.group(1)), shared_bytes=shared_bytes)
    return tuple(usages.values())


def code_sizes(cubin: bytes) -> dict[str, int]:
    """Bytes of machine code of each kernel: the sections .text.<kernel> of a cubin, an ELF file of 64 bits.

    Empty for anything else.
    """
    if cubin[:5] != b"\x7fELF\x02" or len(cubin) < 64:
        return {}
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names = struct.unpack_from("<3H", cubin, 58)
    rows = [struct.unpack_from("<II4Q", cubin, table + number * entry) for number in range(count)]
    start = rows[names][4]
    sizes = {}
    for name, _, _, _, _, size in rows:
        text = cubin[start + name : cubin.index(b"\0", start + name)].decode()
        if text.startswith(".text."):
            sizes[text.removeprefix(".text.")] = size
    return sizes


def _cubin_result(unit: CudaUnit, cubin: bytes, log: str, hit: bool, toolkit: int) -> CubinResult:
    usages = parse_ptxas(log)
    warnings = tuple(line for line in log.splitlines() if _WARNING.search(line) or _SERIALIZED.search(line))
    dynamic, code = dict(unit.dynamic_shared), {} if unit.arch.ptx else code_sizes(cubin)
    kernels = tuple(
        replace(usage, dynamic_bytes=dynamic.get(usage.name, 0), code_bytes=code.get(usage.name, 0))
        for usage in usages
        if usage.entry
    )
    functions = tuple(usage for usage in usages if not usage.entry)
    return CubinResult(unit.name, unit.arch, cubin, kernels, functions, warnings, log, hit, toolkit)


@dataclass(frozen=True)
class Fault:
    """What the gate objects to in one kernel; `kernel` is empty where the compiler does not say which."""

    kernel: str
    text: str

    def __str__(self) -> str:
        return self.text


def _usage_faults(usage: FunctionUsage, arch: Arch) -> Iterator[str]:
    where = f"{'kernel' if usage.entry else 'function'} {usage.name} for {arch}"
    if usage.spill_bytes or usage.stack_bytes:
        yield (
            f"{where}: {usage.registers} registers, {usage.spill_bytes} bytes spilled, {usage.stack_bytes} "
            "bytes of stack"
        )
    shared, most = usage.shared_bytes + usage.dynamic_bytes, SHARED_BYTES.get(arch.capability, LEAST_SHARED)
    if shared > most:
        yield f"{where}: {shared} bytes of shared memory, a block has at most {most}"


def ptxas_faults(result: CubinResult) -> list[Fault]:
    """What the gate objects to: spilled registers, a stack frame, more shared memory than a block has,
    serialised wgmma (C75xx).
    """
    faults = [
        Fault(usage.name if usage.entry else "", text)
        for usage in (*result.kernels, *result.functions)
        for text in _usage_faults(usage, result.arch)
    ]
    for line in result.warnings:
        if _SERIALIZED.search(line):
            kernel = next((k.name for k in result.kernels if k.name in line), "")
            faults.append(Fault(kernel, f"{result.name} for {result.arch}: {line.strip()}"))
    return faults


def check_ptxas(*results: CubinResult) -> None:
    """The gate, strict: raises ToolchainError E0510, one diagnostic for each fault.

    Each names kernel, architecture and figures.
    """
    faulty = [result for result in results if ptxas_faults(result)]
    if not faulty:
        return
    hint = "choose a smaller tile or fewer stages, or build without the gate to look at it"
    faults = [str(fault) for result in faulty for fault in ptxas_faults(result)]
    log = "\n".join(result.log for result in faulty)
    raise ToolchainError([Diagnostic("E0510", "error", fault, hint=hint) for fault in faults], log=log)


# ---- compiling -----------------------------------------------------------------------------------


def _check_arch(arch: Arch, compiler: CudaCompiler) -> None:
    if compiler.supports(arch):
        return
    known = ", ".join(compiler.archs)
    message = f"{compiler.name} {compiler.version} cannot compile for {arch}; it knows {known}"
    hint = "name another CUDA compiler: AFC_NVCC=/path/to/nvcc"
    if isinstance(compiler, Nvrtc) and f"sm_{arch.capability}" in compiler.archs:
        hint = f"NVRTC compiles for one level of features: --arch {arch.real}, or use nvcc"
    raise ToolchainError.of("E0504", message, hint=hint)


def _host_compiler(cxx: Tool) -> str:
    """The program that nvcc calls for preprocessing: it takes no launcher in front."""
    return next(word for word in cxx.command if Path(word).name not in ("ccache", "sccache"))


def _cuda_flags(unit: CudaUnit, compiler: CudaCompiler) -> tuple[str, ...]:
    """Arguments of the CUDA compiler that shape its output, without paths."""
    lines = () if unit.arch.ptx else ("-lineinfo",)  # the driver's own compiler makes no use of them
    if isinstance(compiler, Nvrtc):
        return (f"--gpu-architecture={unit.arch.real}", *NVRTC_FLAGS, *lines, *unit.flags)
    kind = "-ptx" if unit.arch.ptx else "-cubin"
    code = f"arch={unit.arch.virtual},code={unit.arch.real}"
    return (kind, "-gencode", code, *NVCC_FLAGS, *lines, *unit.flags)


def _rtc_folder() -> Path:
    """Headers that NVRTC gets in place of the system's."""
    return paths.runtime() / "rtc"


def _cuda_job(unit: CudaUnit, toolchain: Toolchain, seconds: float) -> _Job:
    compiler = toolchain.require_cuda()
    _check_arch(unit.arch, compiler)
    command = (*compiler.command, *_cuda_flags(unit, compiler))
    include_dirs = (*unit.include_dirs, paths.runtime())
    if isinstance(compiler, Nvrtc):
        include_dirs = (*include_dirs, _rtc_folder())
    else:
        command = (*command, "-ccbin", _host_compiler(toolchain.cxx))
    output = f"{unit.name}.{'ptx' if unit.arch.ptx else 'cubin'}"
    return _Job(
        str(unit), f"{unit.name}.cu", unit.text, output, command, include_dirs, "E0511", seconds, True
    )


def _cpp_job(unit: CppUnit, toolchain: Toolchain, seconds: float) -> _Job:
    command = (*toolchain.cxx.command, *CXX_FLAGS, *ISA_FLAGS[unit.isa], *unit.flags, "-c")
    include_dirs = (*unit.include_dirs, paths.runtime())
    return _Job(
        str(unit), f"{unit.name}.cpp", unit.text, f"{unit.name}.o", command, include_dirs, "E0512", seconds
    )


@lru_cache(maxsize=1)
def abi_version() -> int:
    """AFC_ABI_VERSION of the header that modules are compiled with."""
    text = (paths.runtime() / "abi" / "afc_abi.h").read_text(encoding="utf-8")
    match = re.search(r"^#define AFC_ABI_VERSION (\d+)", text, re.MULTILINE)
    assert match is not None, "afc_abi.h defines no AFC_ABI_VERSION"
    return int(match.group(1))


def unit_key(unit: CudaUnit | CppUnit, toolchain: Toolchain) -> str:
    """Cache key of what a unit compiles to."""
    headers = included_headers(unit.text, [*unit.include_dirs, paths.runtime()])
    texts = [unit.text, *(text for _, text in headers)]
    # arguments within CXX belong to the compiler's identity; where it lies does not
    host = " ".join((toolchain.cxx.banner, *toolchain.cxx.command[1:]))
    if isinstance(unit, CudaUnit):
        cuda = toolchain.require_cuda()
        flags, arch, salt = _cuda_flags(unit, cuda), str(unit.arch), "cuda"
        if isinstance(cuda, Nvrtc):
            compiler = cuda.banner
            texts += [path.read_text(encoding="utf-8") for path in sorted(_rtc_folder().iterdir())]
        else:
            compiler = f"{host}\n{cuda.banner}"
    else:
        flags, arch, salt = (*CXX_FLAGS, *ISA_FLAGS[unit.isa], *unit.flags), unit.isa, f"c++ {unit.salt}"
        compiler = host
    return cache_key(texts, flags=flags, compiler=compiler, arch=arch, abi_version=abi_version(), salt=salt)


def _compile(
    unit: CudaUnit | CppUnit, job: _Job, toolchain: Toolchain, cache: Cache
) -> tuple[bytes, str, bool]:
    """Output, log, and whether both came from the cache."""

    def build(folder: Path) -> None:
        _log.info("compiling %s", job.label)
        output, log = _run_job(job, cache)
        (folder / "output").write_bytes(output)
        (folder / "log.txt").write_text(log, encoding="utf-8")
        (folder / job.source_name).write_text(job.text, encoding="utf-8")

    entry = cache.get_or_build(unit_key(unit, toolchain), job.label, build)
    return entry.read("output"), entry.read("log.txt").decode(), entry.hit


def compile_cubin(
    unit: CudaUnit, toolchain: Toolchain, cache: Cache, *, seconds: float = COMPILE_SECONDS
) -> CubinResult:
    """Machine code of a CUDA text, from the cache where it is there.

    Raises ToolchainError: E0501 no CUDA compiler, E0504 unknown architecture, E0511 text rejected, E0514 time
    limit.
    The gate is a call of its own, `check_ptxas`.
    """
    cubin, log, hit = _compile(unit, _cuda_job(unit, toolchain, seconds), toolchain, cache)
    return _cubin_result(unit, cubin, log, hit, toolchain.require_cuda().toolkit)


def compile_cpp(
    unit: CppUnit, toolchain: Toolchain, cache: Cache, *, seconds: float = COMPILE_SECONDS
) -> ObjectResult:
    """Object of a C++ text, from the cache where it is there.

    Raises ToolchainError: E0512 text rejected, E0514 time limit.
    """
    data, log, hit = _compile(unit, _cpp_job(unit, toolchain, seconds), toolchain, cache)
    return ObjectResult(unit.name, data, log, hit)


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run_parallel(
    function: Callable[[_Item], _Result], items: Sequence[_Item], jobs: int | None = None
) -> list[_Result]:
    """`function` of each item, at most `jobs` (default: usable processors) at once.

    The first failure in order is raised.
    """
    limit = jobs or len(os.sched_getaffinity(0))
    if len(items) <= 1 or limit == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(limit, len(items))) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def compile_units(
    units: Sequence[CudaUnit | CppUnit], toolchain: Toolchain, cache: Cache, *, jobs: int | None = None
) -> list[CubinResult | ObjectResult]:
    """Compiles several units at once; results in the order of `units`. Raises as the single functions do."""

    def one(unit: CudaUnit | CppUnit) -> CubinResult | ObjectResult:
        if isinstance(unit, CudaUnit):
            return compile_cubin(unit, toolchain, cache)
        return compile_cpp(unit, toolchain, cache)

    return run_parallel(one, units, jobs)
