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

from afc.errors import Diagnostic, ToolchainError

_PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Arch:
    """A GPU architecture to compile for: features of `virtual`, machine code of `real`.

    `Arch.parse("sm_90a")` gives (compute_90a, sm_90a); `Arch.parse("compute_86:sm_90")` machine code for
    sm_90 that uses only features of sm_86.
    """

    virtual: str
    real: str

    def __post_init__(self) -> None:
        for value, prefix in ((self.virtual, "compute_"), (self.real, "sm_")):
            if not re.fullmatch(prefix + r"\d{2,3}[af]?", value):
                raise ValueError(f"architecture: expected {prefix}NN[a|f], got {value!r}")

    @classmethod
    def parse(cls, text: str) -> Arch:
        """`sm_XX` or `compute_XX:sm_YY`. Raises ValueError for anything else."""
        virtual, colon, real = text.partition(":")
        if colon:
            return cls(virtual, real)
        return cls(text.replace("sm_", "compute_", 1), text)

    def __str__(self) -> str:
        plain = self.virtual.removeprefix("compute_") == self.real.removeprefix("sm_")
        return self.real if plain else f"{self.virtual}:{self.real}"

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
class Nvcc(Tool):
    """The CUDA compiler, with the real architectures that it knows (`sm_80`, ...; without `a` variants)."""

    archs: tuple[str, ...] = ()

    def supports(self, arch: Arch) -> bool:
        """Whether this compiler can produce machine code for `arch`."""
        return arch.real.rstrip("af") in self.archs


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


def _search(
    candidates: Iterator[Candidate],
    probe: Callable[[tuple[str, ...]], Tool],
    path: str | None,
    missing: Diagnostic,
) -> Tool:
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
    """nvcc of the CUDA wheels from PyPI: nvidia/cu13/bin/nvcc. The wheels for CUDA 12 hold no nvcc."""
    for site in sites:
        for folder in sorted((site / "nvidia").glob("cu[0-9]*"), key=_toolkit_number, reverse=True):
            yield Candidate("Python package", (str(folder / "bin" / "nvcc"),))


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
    yield Candidate("standard place", ("/usr/local/cuda/bin/nvcc",))
    for folder in sorted(Path("/usr/local").glob("cuda-*"), key=_toolkit_number, reverse=True):
        yield Candidate("standard place", (str(folder / "bin" / "nvcc"),))


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
    """The CUDA compiler: `option` or AFC_NVCC, else CUDA wheels, CUDA_HOME, CUDA_PATH, PATH,
    /usr/local/cuda*.

    `sites` are the folders searched for wheels, by default those of this interpreter. Raises ToolchainError
    E0501 with every place tried.
    """
    variables = os.environ if environ is None else environ
    missing = Diagnostic(
        "E0501",
        "error",
        "no CUDA compiler (nvcc) was found",
        hint="pip install 'afc[cuda]', or name one: AFC_NVCC=/path/to/nvcc; the CPU target needs none",
    )
    folders = site_folders() if sites is None else sites
    found = _search(_nvcc_candidates(option, variables, folders), _probe_nvcc, variables.get("PATH"), missing)
    assert isinstance(found, Nvcc)
    return found


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
    nvcc: Nvcc | None = None

    @classmethod
    def find(cls, *, cuda: bool, cxx: str | None = None, nvcc: str | None = None) -> Toolchain:
        """Compilers for a build; `cxx` and `nvcc` override the search. Raises ToolchainError."""
        return cls(_cached_cxx(cxx), _cached_nvcc(nvcc) if cuda else None)

    def require_nvcc(self) -> Nvcc:
        """nvcc, or ToolchainError E0501 if this tool chain was made without it."""
        if self.nvcc is None:
            raise ToolchainError(
                Diagnostic("E0501", "error", "this build has CUDA sources, but no CUDA compiler was set")
            )
        return self.nvcc


@lru_cache(maxsize=8)
def _find_cxx_for(option: str | None, _environment: tuple[str | None, ...]) -> Tool:
    return find_cxx(option)


@lru_cache(maxsize=8)
def _find_nvcc_for(option: str | None, _environment: tuple[str | None, ...]) -> Nvcc:
    return find_nvcc(option)


def _cached_cxx(option: str | None) -> Tool:
    return _find_cxx_for(option, tuple(os.environ.get(name) for name in ("CXX", "PATH")))


def _cached_nvcc(option: str | None) -> Nvcc:
    names = ("AFC_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH")
    return _find_nvcc_for(option, tuple(os.environ.get(name) for name in names))
