# SPDX-License-Identifier: Apache-2.0
"""A module as sources: what it is built from, and building it, into a file or into the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from afc.build.artifact import (
    LINK_FLAGS,
    Image,
    ModuleContent,
    ModuleEntry,
    check_destination,
    host_units,
    link_module,
    stub_text,
    write_file,
)
from afc.build.cache import Cache, cache_key
from afc.build.compile import (
    CppUnit,
    CubinResult,
    CudaUnit,
    ObjectResult,
    abi_version,
    check_ptxas,
    compile_units,
    unit_key,
)
from afc.build.toolchain import Toolchain
from afc.errors import Diagnostic


@dataclass(frozen=True)
class ModuleSpec:
    """The sources of a module.

    `cpp` are the texts of the CPU target and of launch code; `cuda` maps the C symbol of an image table
    (declared by the launch code as `extern "C" const afc_gpu_images <symbol>;`) to the units in it, one per
    architecture, which are compiled in parts where they have some. `metadata` and the entries' descriptions
    are JSON.
    """

    entries: tuple[ModuleEntry, ...]
    metadata: str
    cpp: tuple[CppUnit, ...] = ()
    cuda: Mapping[str, tuple[CudaUnit, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildReport:
    """What a build made: the file, the cubins with ptxas' report, how many units came from the cache; `notes`
    are what the gate has to say.
    """

    path: Path
    cubins: tuple[CubinResult, ...]
    units: int
    hits: int
    notes: tuple[Diagnostic, ...] = ()


def _all_units(spec: ModuleSpec, python: bool) -> list[CudaUnit | CppUnit]:
    """In the order of starting compilers, those that take longest first: CUDA units by image table, host
    sources, the module's C++ units.
    """
    cuda = [part for group in spec.cuda.values() for unit in group for part in unit.split()]
    return [*cuda, *host_units(python=python, gpu=bool(cuda)), *spec.cpp]


def _compile_all(
    spec: ModuleSpec, toolchain: Toolchain, cache: Cache, *, jobs: int | None, python: bool
) -> tuple[list[CubinResult], list[ObjectResult]]:
    """Results of the module's units. Host sources are compiled beside them; the link finds them cached."""
    units = _all_units(spec, python)
    results = compile_units(units, toolchain, cache, jobs=jobs)
    cubins = [result for result in results if isinstance(result, CubinResult)]
    objects = [result for result in results if isinstance(result, ObjectResult)]
    return cubins, objects[len(objects) - len(spec.cpp) :]


def compile_cubins(
    spec: ModuleSpec, toolchain: Toolchain, cache: Cache, *, jobs: int | None = None, python: bool = True
) -> dict[str, tuple[CubinResult, ...]]:
    """GPU code of a module by image table. What else it needs is compiled beside it, into the cache: a build
    that follows has nothing left to compile. Raises ToolchainError.
    """
    return _by_table(spec, _compile_all(spec, toolchain, cache, jobs=jobs, python=python)[0])


def _by_table(spec: ModuleSpec, cubins: list[CubinResult]) -> dict[str, tuple[CubinResult, ...]]:
    remaining = iter(cubins)
    return {
        symbol: tuple(next(remaining) for unit in group for _ in unit.split())
        for symbol, group in spec.cuda.items()
    }


def _content(spec: ModuleSpec, cubins: list[CubinResult], objects: list[ObjectResult]) -> ModuleContent:
    tables = _by_table(spec, cubins).items()
    images = {symbol: tuple(map(Image.of, results)) for symbol, results in tables}
    return ModuleContent(spec.entries, spec.metadata, tuple(item.data for item in objects), images)


Settle = Callable[
    [ModuleSpec, Mapping[str, tuple[CubinResult, ...]]], tuple[ModuleSpec, tuple[Diagnostic, ...]]
]


def build_module(
    spec: ModuleSpec,
    destination: Path,
    toolchain: Toolchain,
    cache: Cache,
    *,
    gate: bool = True,
    jobs: int | None = None,
    python: bool = True,
    settle: Settle | None = None,
) -> BuildReport:
    """Builds `destination` (a name like kernel.so, which is then its module name) from sources.

    `gate` refuses kernels that spill, have a stack frame or miss another limit; `settle` sees the GPU code
    by image table and gives what is linked, the module itself or another, and notes for the report. `jobs`
    bounds compilers at once; python=False leaves the Python part out. Raises UsageError for a bad
    destination, before anything is compiled, and ToolchainError; nothing half-written is left.
    """
    stem = check_destination(destination)
    cubins, objects = _compile_all(spec, toolchain, cache, jobs=jobs, python=python)
    units = len(cubins) + len(objects)
    hits = sum(cubin.hit for cubin in cubins) + sum(item.hit for item in objects)
    notes: tuple[Diagnostic, ...] = ()
    if settle is not None:
        settled, notes = settle(spec, _by_table(spec, cubins))
        if settled is not spec:
            spec = settled
            cubins, objects = _compile_all(spec, toolchain, cache, jobs=jobs, python=python)
    if gate:
        check_ptxas(*cubins)
    content = _content(spec, cubins, objects)
    module = link_module(stem, content, toolchain, cache, python=python)
    write_file(module, destination, executable=True)
    return BuildReport(destination, tuple(cubins), units, hits, notes)


def _module_key(stem: str, spec: ModuleSpec, toolchain: Toolchain, gate: bool) -> str:
    """Key of a whole module: its units, its host sources, its table."""
    groups = ",".join(f"{symbol}:{len(group)}" for symbol, group in spec.cuda.items())
    table = stub_text(stem, ModuleContent(spec.entries, spec.metadata))
    salt = "\n".join([groups, *(unit_key(unit, toolchain) for unit in _all_units(spec, python=True)), table])
    flags = [*LINK_FLAGS, f"gate={gate}"]
    return cache_key([], flags=flags, compiler="", arch="", abi_version=abi_version(), salt=salt)


def cached_module(
    stem: str,
    spec: ModuleSpec,
    toolchain: Toolchain,
    cache: Cache,
    *,
    gate: bool = True,
    jobs: int | None = None,
    settle: Settle | None = None,
) -> Path:
    """Path of the module `stem` in the cache, built (as `build_module` does) if it is not there.

    It is found by `spec`, whatever `settle` makes of it. Raises ToolchainError.
    """

    def build(folder: Path) -> None:
        destination = folder / f"{stem}.so"
        build_module(spec, destination, toolchain, cache, gate=gate, jobs=jobs, settle=settle)

    entry = cache.get_or_build(_module_key(stem, spec, toolchain, gate), f"module {stem}", build)
    return entry.path(f"{stem}.so")


def find_module(
    stem: str, spec: ModuleSpec, toolchain: Toolchain, cache: Cache, *, gate: bool = True
) -> Path | None:
    """Path of the module that `cached_module` would give, if it is there. Builds and writes nothing."""
    entry = cache.lookup(_module_key(stem, spec, toolchain, gate))
    return None if entry is None else entry.path(f"{stem}.so")
