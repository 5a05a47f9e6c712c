# SPDX-License-Identifier: Apache-2.0
"""Finding the compilers, and what they say about themselves.

A tool that the caller names (argument or environment) must work: no other is taken silently in its place.
Versions come from the binary, never from the path it was found under.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from afc.errors import Diagnostic, ToolchainError, UsageError

CUDA_COMPILERS = ("nvcc", "nvrtc")
CUDA_HINT = (
    "pip install 'afc[cuda]', or name one: AFC_NVCC=/path/to/nvcc, AFC_NVRTC=/path/to/libnvrtc.so.13; the "
    "CPU target needs none"
)

_PROBE_SECONDS = 60.0

# How NVRTC is run: see nvrtc_worker.py. -I: neither the environment nor the current folder matter.
NVRTC_WORKER = (sys.executable, "-I", str(Path(__file__).with_name("nvrtc_worker.py")))
_LIBRARY_FOLDERS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")

_Found = TypeVar("_Found", bound="Tool")


@dataclass(frozen=True)
class Arch:
    """A GPU architecture to compile for: features of `virtual`, machine code of `real`.

    `Arch.parse("sm_90a")` gives (compute_90a, sm_90a); `Arch.parse("compute_86:sm_90")` machine code for
    sm_90 that uses only features of sm_86; `Arch.parse("compute_80")` PTX, which the driver compiles for any
    GPU from sm_80 on: there `real` is `virtual`.
    """

    virtual: str
    real: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"compute_\d{2,3}[af]?", self.virtual):
            raise ValueError(f"architecture: expected compute_NN[a|f], got {self.virtual!r}")
        if not re.fullmatch(r"sm_\d{2,3}[af]?", self.real) and self.real != self.virtual:
            raise ValueError(f"architecture: expected sm_NN[a|f], got {self.real!r}")

    @classmethod
    def parse(cls, text: str) -> Arch:
        """`sm_XX`, `compute_XX:sm_YY` or `compute_XX`. Raises ValueError for anything else."""
        virtual, colon, real = text.partition(":")
        if colon:
            if not real.startswith("sm_"):
                raise ValueError(f"architecture: expected sm_NN[a|f], got {real!r}")
            return cls(virtual, real)
        return cls(text.replace("sm_", "compute_", 1), text)

    def __str__(self) -> str:
        plain = self.virtual.removeprefix("compute_") == self.real.removeprefix("sm_")
        return self.real if plain or self.ptx else f"{self.virtual}:{self.real}"

    @property
    def ptx(self) -> bool:
        """Whether this is PTX, not machine code."""
        return self.real == self.virtual

    @property
    def capability(self) -> int:
        """Ten times the compute capability of the machine code."""
        return int(re.sub(r"\D", "", self.real))

    @property
    def virtual_capability(self) -> int:
        """Ten times the compute capability whose features are used."""
        return int(re.sub(r"\D", "", self.virtual))

    @property
    def suffix(self) -> str:
        """`a` or `f` where the machine code is specific to a capability or a family, else empty."""
        return self.real[-1] if self.real[-1] in "af" else ""


@dataclass(frozen=True)
class Tool:
    """A compiler that answered: its command, its version number and all that it prints about itself."""

    command: tuple[str, ...]
    version: str
    banner: str

    def __str__(self) -> str:
        return f"{' '.join(self.command)} (version {self.version})"


@dataclass(frozen=True)
class CudaCompiler(Tool):
    """A compiler of CUDA texts, with the real architectures that it knows (`sm_80`, ...; without `a`
    variants).
    """

    archs: tuple[str, ...] = ()
    name = "CUDA compiler"

    def supports(self, arch: Arch) -> bool:
        """Whether this compiler can compile for `arch`."""
        return f"sm_{arch.capability}" in self.archs

    @property
    def toolkit(self) -> int:
        """The version as the driver counts it: 13000 for 13.0, 12080 for 12.8 without the last digit."""
        major, minor = (int(part) for part in self.version.split(".")[:2])
        return 1000 * major + 10 * minor


@dataclass(frozen=True)
class Nvcc(CudaCompiler):
    """The compiler driver of the CUDA toolkit. It calls the C++ compiler to preprocess."""

    name = "nvcc"


@dataclass(frozen=True)
class Nvrtc(CudaCompiler):
    """The run-time compiler of CUDA, a library, run through `nvrtc_worker.py`. It needs no C++ compiler, and
    cannot compile features of one architecture for another.
    """

    name = "NVRTC"

    def supports(self, arch: Arch) -> bool:
        same = arch.ptx or arch.virtual.removeprefix("compute_") == arch.real.removeprefix("sm_")
        return same and super().supports(arch)


@dataclass(frozen=True)
class Candidate:
    """A place where a tool may be: whose idea it is, the command, and whether the user asked for it."""

    source: str
    command: tuple[str, ...]
    explicit: bool = False


def _run(command: tuple[str, ...], *arguments: str) -> str:
    """Output of a short query. Raises OSError if it cannot be started or fails."""
    try:
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"no answer within {_PROBE_SECONDS:.0f} s") from error
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise OSError(f"exit status {done.returncode}: {last[0]}")
    return done.stdout


def _resolve(command: tuple[str, ...], path: str | None) -> tuple[str, ...]:
    if ".so" in Path(command[0]).name:  # a library; a bare name is left to the dynamic linker
        if os.sep in command[0] and not Path(command[0]).is_file():
            raise OSError("no such library")
        return command
    found = shutil.which(command[0], path=path)
    if found is None:
        raise OSError("no such program")
    return (found, *command[1:])


def _probe_cxx(command: tuple[str, ...]) -> Tool:
    banner = _run(command, "--version").strip()
    match = re.search(r"\b\d+\.\d+\.\d+", banner)
    if match is None:
        raise OSError("it does not print a version")
    return Tool(command, match.group(), banner)


def _probe_nvcc(command: tuple[str, ...]) -> Nvcc:
    banner = _run(command, "--version").strip()
    match = re.search(r"\bV(\d+\.\d+\.\d+)", banner)
    if match is None:
        raise OSError("it does not print a CUDA version")
    archs = tuple(_run(command, "--list-gpu-code").split())
    return Nvcc(command, match.group(1), banner, archs)


def _probe_nvrtc(command: tuple[str, ...]) -> Nvrtc:
    banner, _, archs = _run((*NVRTC_WORKER, *command)).strip().partition("\n")
    match = re.match(r"NVRTC (\d+\.\d+), ", banner)
    if match is None:
        raise OSError("it does not answer as NVRTC does")
    return Nvrtc((*NVRTC_WORKER, *command), match.group(1), banner, tuple(archs.split()))


def _search(
    candidates: Iterator[Candidate],
    probe: Callable[[tuple[str, ...]], _Found],
    path: str | None,
    missing: Diagnostic,
) -> _Found:
    searched: list[str] = []
    for candidate in candidates:
        try:
            return probe(_resolve(candidate.command, path))
        except OSError as error:
            searched.append(f"{candidate.source}: {' '.join(candidate.command)}: {error}")
            if candidate.explicit:
                break
    raise ToolchainError(missing, searched=searched)


def _cxx_candidates(option: str | None, environ: Mapping[str, str]) -> Iterator[Candidate]:
    if option:
        yield Candidate("option", tuple(shlex.split(option)), explicit=True)
    if environ.get("CXX", "").strip():
        yield Candidate("CXX", tuple(shlex.split(environ["CXX"])), explicit=True)
    yield Candidate("PATH", ("g++",))
    yield Candidate("PATH", ("c++",))


def site_folders() -> list[Path]:
    """Folders of installed Python packages, in the order of import."""
    names = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return [Path(name) for name in dict.fromkeys(names) if name and Path(name).is_dir()]


def _toolkit_number(folder: Path) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", folder.name))


def _wheel_candidates(sites: list[Path]) -> Iterator[Candidate]:
    """nvcc of the CUDA wheels from PyPI: nvidia/cu13/bin/nvcc, and nvidia/cuda_nvcc/bin/nvcc for CUDA 12,
    whose wheels from PyPI hold ptxas only.
    """
    for site in sites:
        for folder in _wheel_folders(site, "cuda_nvcc"):
            yield Candidate("Python package", (str(folder / "bin" / "nvcc"),))


def _wheel_folders(site: Path, older: str) -> list[Path]:
    """Roots of CUDA within installed packages: those of CUDA 13 and later, then that of a package of CUDA
    12.
    """
    newer = sorted((site / "nvidia").glob("cu[0-9]*"), key=_toolkit_number, reverse=True)
    return [folder for folder in (*newer, site / "nvidia" / older) if folder.is_dir()]


def _nvcc_candidates(
    option: str | None, environ: Mapping[str, str], sites: list[Path]
) -> Iterator[Candidate]:
    if option:
        yield Candidate("option", (option,), explicit=True)
    if environ.get("AFC_NVCC", "").strip():
        yield Candidate("AFC_NVCC", (environ["AFC_NVCC"],), explicit=True)
    yield from _wheel_candidates(sites)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(variable):
            yield Candidate(variable, (str(Path(environ[variable]) / "bin" / "nvcc"),))
    yield Candidate("PATH", ("nvcc",))
    for folder in _standard_folders():
        yield Candidate("standard place", (str(folder / "bin" / "nvcc"),))


def _standard_folders() -> list[Path]:
    return [
        Path("/usr/local/cuda"),
        *sorted(Path("/usr/local").glob("cuda-*"), key=_toolkit_number, reverse=True),
    ]


def _nvrtc_candidates(
    option: str | None, environ: Mapping[str, str], sites: list[Path]
) -> Iterator[Candidate]:
    if option:
        yield Candidate("option", (option,), explicit=True)
    if environ.get("AFC_NVRTC", "").strip():
        yield Candidate("AFC_NVRTC", (environ["AFC_NVRTC"],), explicit=True)
    roots = [("Python package", folder) for site in sites for folder in _wheel_folders(site, "cuda_nvrtc")]
    roots += [(name, Path(environ[name])) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    roots += [("standard place", folder) for folder in _standard_folders()]
    for source, root in roots:
        for library in _nvrtc_libraries(root):
            yield Candidate(source, (str(library),))
    yield Candidate("library path", ("libnvrtc.so.13",))
    yield Candidate("library path", ("libnvrtc.so.12",))


def _nvrtc_libraries(root: Path) -> list[Path]:
    """libnvrtc.so.13 and the like under a root of CUDA: the shortest name of each folder, or the name that
    would be there.
    """
    found = []
    for folder in _LIBRARY_FOLDERS:
        names = sorted((root / folder).glob("libnvrtc.so.[0-9]*"), key=lambda path: len(path.name))
        found += names[:1]
    return found or [root / "lib" / "libnvrtc.so"]


def find_cxx(option: str | None = None, environ: Mapping[str, str] | None = None) -> Tool:
    """The C++ compiler: `option` or CXX (which may hold arguments), else g++ or c++ on PATH.

    Raises ToolchainError E0502 with every place tried.
    """
    variables = os.environ if environ is None else environ
    missing = Diagnostic(
        "E0502",
        "error",
        "no C++ compiler was found",
        hint="install g++ (Debian: apt install g++), or name one: CXX=/path/to/g++",
    )
    return _search(_cxx_candidates(option, variables), _probe_cxx, variables.get("PATH"), missing)


def find_nvcc(
    option: str | None = None, environ: Mapping[str, str] | None = None, sites: list[Path] | None = None
) -> Nvcc:
    """nvcc: `option` or AFC_NVCC, else CUDA wheels, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda*.

    `sites` are the folders searched for wheels, by default those of this interpreter. Raises ToolchainError
    E0501 with every place tried.
    """
    variables = os.environ if environ is None else environ
    missing = Diagnostic("E0501", "error", "no CUDA compiler (nvcc) was found", hint=CUDA_HINT)
    folders = site_folders() if sites is None else sites
    candidates = _nvcc_candidates(option, variables, folders)
    return _search(candidates, _probe_nvcc, variables.get("PATH"), missing)


def find_nvrtc(
    option: str | None = None, environ: Mapping[str, str] | None = None, sites: list[Path] | None = None
) -> Nvrtc:
    """libnvrtc: `option` or AFC_NVRTC, else CUDA wheels, CUDA_HOME, CUDA_PATH, /usr/local/cuda*, and what the
    dynamic linker finds.

    Raises ToolchainError E0501 with every place tried.
    """
    variables = os.environ if environ is None else environ
    missing = Diagnostic("E0501", "error", "no NVRTC library (libnvrtc.so) was found", hint=CUDA_HINT)
    folders = site_folders() if sites is None else sites
    candidates = _nvrtc_candidates(option, variables, folders)
    return _search(candidates, _probe_nvrtc, variables.get("PATH"), missing)


def find_cuda(
    kind: str | None = None, environ: Mapping[str, str] | None = None, sites: list[Path] | None = None
) -> CudaCompiler:
    """The compiler of CUDA texts: of `kind` or AFC_CUDA_COMPILER ("nvcc" or "nvrtc") where one is named; else
    what AFC_NVCC or AFC_NVRTC names; else nvcc, and NVRTC where there is no nvcc.

    Raises ToolchainError E0501 with every place tried, UsageError E0505 for another kind.
    """
    variables = os.environ if environ is None else environ
    wanted = kind or variables.get("AFC_CUDA_COMPILER", "").strip() or None
    if wanted is None and not variables.get("AFC_NVCC") and variables.get("AFC_NVRTC"):
        wanted = "nvrtc"
    if wanted not in (None, *CUDA_COMPILERS):
        raise UsageError.of(
            "E0505", f"unknown CUDA compiler `{wanted}`", hint=f"one of {', '.join(CUDA_COMPILERS)}"
        )
    if wanted == "nvrtc":
        return find_nvrtc(None, variables, sites)
    try:
        return find_nvcc(None, variables, sites)
    except ToolchainError as nvcc:
        if wanted == "nvcc" or variables.get("AFC_NVCC"):
            raise
        try:
            return find_nvrtc(None, variables, sites)
        except ToolchainError as nvrtc:
            missing = Diagnostic("E0501", "error", "no CUDA compiler was found", hint=CUDA_HINT)
            raise ToolchainError(missing, searched=(*nvcc.searched, *nvrtc.searched)) from None


@dataclass(frozen=True)
class PythonHeaders:
    """Include folders for the module's Python part, and what identifies the binary interface they give."""

    include_dirs: tuple[Path, ...]
    identity: str  # interpreter ABI tag and pybind11 version


def find_python_headers() -> PythonHeaders:
    """Headers of this interpreter and of pybind11. Raises ToolchainError E0503 if one is missing."""
    include = Path(sysconfig.get_path("include"))
    problem, hint = "", ""
    if not (include / "Python.h").exists():
        problem, hint = (
            f"Python.h is missing in {include}",
            "install the Python headers (Debian: apt install python3-dev)",
        )
    try:
        import pybind11
    except ModuleNotFoundError:
        problem, hint = "the package pybind11 is missing", "pip install pybind11"
    if problem:
        raise ToolchainError(Diagnostic("E0503", "error", problem, hint=hint))
    identity = f"{sysconfig.get_config_var('SOABI')} pybind11-{pybind11.__version__}"
    return PythonHeaders((include, Path(pybind11.get_include())), identity)


@dataclass(frozen=True)
class Toolchain:
    """The compilers of a build. Those not needed are not looked for: see `Toolchain.find`."""

    cxx: Tool
    cuda: CudaCompiler | None = None

    @classmethod
    def find(cls, *, cuda: bool, cxx: str | None = None, compiler: str | None = None) -> Toolchain:
        """Compilers for a build; `cxx` overrides the search, `compiler` ("nvcc" or "nvrtc") says which CUDA
        compiler. Raises ToolchainError, UsageError E0505.
        """
        return cls(_cached_cxx(cxx), _cached_cuda(compiler) if cuda else None)

    def require_cuda(self) -> CudaCompiler:
        """The CUDA compiler, or ToolchainError E0501 if this tool chain was made without one."""
        if self.cuda is None:
            raise ToolchainError(
                Diagnostic("E0501", "error", "this build has CUDA sources, but no CUDA compiler was set")
            )
        return self.cuda


@lru_cache(maxsize=8)
def _find_cxx_for(option: str | None, _environment: tuple[str | None, ...]) -> Tool:
    return find_cxx(option)


@lru_cache(maxsize=8)
def _find_cuda_for(kind: str | None, _environment: tuple[str | None, ...]) -> CudaCompiler:
    return find_cuda(kind)


def _cached_cxx(option: str | None) -> Tool:
    return _find_cxx_for(option, tuple(os.environ.get(name) for name in ("CXX", "PATH")))


def _cached_cuda(kind: str | None) -> CudaCompiler:
    names = ("AFC_CUDA_COMPILER", "AFC_NVCC", "AFC_NVRTC", "CUDA_HOME", "CUDA_PATH", "PATH")
    return _find_cuda_for(kind, tuple(os.environ.get(name) for name in names))
