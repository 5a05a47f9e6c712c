# SPDX-License-Identifier: Apache-2.0
"""The whole compiler in single calls: check, emit, compile."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from afc import passes
from afc.build import (
    Arch,
    BuildReport,
    Cache,
    CppUnit,
    CubinResult,
    CudaUnit,
    Fault,
    ModuleEntry,
    ModuleSpec,
    Settle,
    Toolchain,
    Variant,
    build_module,
    cached_module,
    check_ptxas,
    compile_cubin,
    compile_cubins,
    find_module,
    ptxas_faults,
)
from afc.build.artifact import check_destination, module_stem, write_file
from afc.build.index import remember
from afc.errors import Diagnostic, UsageError, render
from afc.expr.nodes import Const, Expr, Op, Var
from afc.frontend import Checked, check_file
from afc.frontend.dump import dump
from afc.frontend.parser import parse
from afc.header import header_text
from afc.ir.program import Param, Program, TensorParam
from afc.ir.tiled import LaunchPlan
from afc.options import Options
from afc.render.cpu import render_cpu
from afc.render.cuda import render_cuda
from afc.runtime.describe import ABI_VERSION
from afc.schedule.plan import next_tiles, schedule
from afc.schedule.targets import cpu, sm80

Gate = Literal["warn", "fail", "off"]


@dataclass(frozen=True)
class Unit:
    """One attention at one (Dqk, Dv, dtype, backend), on GPUs for one class of them: its program after the
    passes, its plan, its texts.
    """

    program: Program
    plan: LaunchPlan
    backend: str
    archs: tuple[str, ...]  # those of the class that the build is for
    symbol: str
    host_text: str  # C++: the CPU code, or the launch code of the GPU kernels
    device_text: str | None  # CUDA
    passes: tuple[tuple[str, str], ...] = ()  # the CUDA text of each, by name

    @property
    def configuration(self) -> str:
        """The name of the module's entry, which units for other classes of GPUs share."""
        return self.symbol if self.backend == "cpu" else self.symbol.removesuffix(f"_{self.plan.target}")

    @property
    def gpus(self) -> str:
        """The unit's target and, of GPUs, what the class is and which architectures of it are built."""
        target = self.plan.target
        if self.backend == "cpu":
            return target
        return f"{target} ({', '.join(self.archs) or 'none'}: {sm80.class_text(target)})"

    @property
    def variant(self) -> Variant:
        """The unit's functions, for the choice among those of an entry."""
        backward = f"{self.symbol}_backward" if self.plan.backward else None
        shared = sm80.NAMES[self.plan.target].shared_bytes
        names = (f"{self.symbol}_forward", backward, f"{self.symbol}_workspace", f"{self.symbol}_images")
        return Variant(*names, shared)

    def cuda(self, arch: Arch) -> CudaUnit:
        """The unit's GPU code, to compile for an architecture."""
        assert self.device_text is not None
        kernels = [launch.kernel for launch in self.plan.launches]
        shared = tuple((kernel.name, kernel.binding.shared_bytes) for kernel in kernels)
        return CudaUnit(self.symbol, self.device_text, arch, dynamic_shared=shared, parts=self.passes)


def _entry(group: tuple[Unit, ...]) -> ModuleEntry:
    """The row of the module's table for the units of one configuration, a unit for each class of GPUs."""
    unit, gpu = group[0], group[0].backend != "cpu"
    s = unit.plan.semantics
    description = {
        "attention": unit.program.name,
        "target": unit.backend,
        "storage": s.storage,
        "Dqk": s.head_qk,
        "Dv": s.head_v,
        "backward": bool(unit.plan.backward),
        "lse": s.has_sum,
        "deterministic": unit.plan.deterministic,
        "classes": {u.plan.target: list(u.archs) for u in group} if gpu else {},
    }
    name = unit.configuration
    return ModuleEntry(
        unit.program.name,
        json.dumps(description),
        f"{name}_forward",
        f"{name}_backward" if unit.plan.backward else None,
        f"{name}_workspace",
        "generic" if gpu else cpu.ISA,
        tuple(u.variant for u in group) if gpu else (),
    )


def units(checked: Checked, options: Options) -> tuple[Unit, ...]:
    """Everything that a build of a file consists of, as text; units for several classes of GPUs side by side,
    the best first. Raises SourceError and UsageError.
    """
    if not checked.programs:
        raise UsageError.of(
            "E0614", f"{checked.path} declares no attention", hint="write `attention name(q, k, v) { ... }`"
        )
    known = {p.name for program in checked.programs for p in program.scalars}
    unknown = [n for n, _ in options.constants if n not in known]
    if unknown:
        raise UsageError.of(
            "E0621",
            f"no attention of {checked.path} has a run-time parameter `{unknown[0]}`",
            hint=f"parameters: {', '.join(sorted(known)) or 'none'}",
        )
    made = []
    for program in checked.programs:
        own = {n: v for n, v in options.constants if n in {p.name for p in program.scalars}}
        for head_qk, head_v in options.heads:
            lowered = passes.run(program, {"Dqk": head_qk, "Dv": head_v, **own})
            for backend in options.backends:
                for storage in options.storages(backend):
                    for target, archs in _targets(backend, options).items():
                        plan = schedule(lowered, target, storage)
                        made.append(_unit(lowered, plan, backend, archs, options.backward))
    return tuple(made)


def _unit(program: Program, plan: LaunchPlan, backend: str, archs: tuple[str, ...], backward: bool) -> Unit:
    if not backward:
        buffers = tuple(b for b in plan.buffers if "forward" in b.passes)
        plan = replace(plan, backward=(), deterministic_backward=(), buffers=buffers)
    s = plan.semantics
    symbol = f"{program.name}_{backend}_{s.storage}_{s.head_qk}_{s.head_v}"
    if backend == "cpu":
        return Unit(program, plan, backend, archs, symbol, render_cpu(program, plan, symbol), None)
    symbol = f"{symbol}_{plan.target}"
    texts = render_cuda(program, plan, symbol)
    return Unit(program, plan, backend, archs, symbol, texts.host, texts.device, texts.passes)


def _targets(backend: str, options: Options) -> dict[str, tuple[str, ...]]:
    """The targets that a backend is built for, the best first, each with its part of the architectures. For
    GPUs that is one for each class of tiles; PTX has those that fit every GPU.
    """
    if backend == "cpu":
        return {"cpu": ()}
    found: dict[str, list[str]] = {name: [] for name in sm80.NAMES}
    for text in options.archs:
        arch = Arch.parse(text)
        found[sm80.name_for(None if arch.ptx else arch.virtual_capability)].append(text)
    return {name: tuple(archs) for name, archs in found.items() if archs} or {sm80.SMALLEST: ()}


def module_spec(checked: Checked, options: Options) -> ModuleSpec:
    """Texts, tables and metadata of a module."""
    return _spec(checked, units(checked, options), options)


def _spec(checked: Checked, made: tuple[Unit, ...], options: Options) -> ModuleSpec:
    cpp, cuda, entries = [], {}, []
    for _, units_of in itertools.groupby(made, lambda unit: unit.configuration):
        group = tuple(units_of)
        entry = _entry(group)
        entries.append(entry)
        for unit in group:
            cpp.append(CppUnit(unit.symbol, unit.host_text, entry.isa))
            if unit.device_text is not None:
                cuda[unit.variant.images] = tuple(unit.cuda(Arch.parse(arch)) for arch in unit.archs)
    return ModuleSpec(tuple(entries), _metadata(checked, made, options.archs), tuple(cpp), cuda)


def _settler(
    checked: Checked,
    options: Options,
    made: tuple[Unit, ...],
    toolchain: Toolchain,
    cache: Cache,
    *,
    jobs: int | None = None,
    python: bool = True,
) -> Settle:
    """What chooses tiles that pass the gate, as far as there are such, and tells what to say of them.

    A unit with a kernel that does not pass gets the next smaller tile there. If that passes, a note says so;
    else a warning names what is wrong with the better of the two.
    """

    def settle(
        spec: ModuleSpec, results: Mapping[str, tuple[CubinResult, ...]]
    ) -> tuple[ModuleSpec, tuple[Diagnostic, ...]]:
        first = _faults(results)
        if not any(first.values()):
            return spec, ()
        next_units = {unit.symbol: smaller(unit, first.get(unit.symbol, [])) for unit in made}
        tried = tuple(unit for unit in next_units.values() if unit is not None)
        trial = _spec(checked, tried, options)
        second = _faults(compile_cubins(trial, toolchain, cache, jobs=jobs, python=python)) if tried else {}
        final, notes = [], []
        for unit in made:
            chosen, faults, other = unit, first.get(unit.symbol, []), next_units[unit.symbol]
            left = faults
            if other is not None and len(second[unit.symbol]) < len(faults):
                chosen, left = other, second[unit.symbol]
            final.append(chosen)
            notes += _gate_notes(chosen, faults, left)
        return _spec(checked, tuple(final), options), tuple(notes)

    return settle


def _faults(results: Mapping[str, tuple[CubinResult, ...]]) -> dict[str, list[Fault]]:
    """What the gate objects to, by the symbol of the unit."""
    return {
        table.removesuffix("_images"): [fault for result in group for fault in ptxas_faults(result)]
        for table, group in results.items()
    }


def smaller(unit: Unit, faults: list[Fault]) -> Unit | None:
    """The unit with the next smaller tile in the passes that have faults; None if there is none."""
    if not faults:
        return None
    names = {fault.kernel for fault in faults}
    late = {launch.kernel.name for launch in unit.plan.backward}
    forward = any(launch.kernel.name in names for launch in unit.plan.forward) or "" in names
    steps = next_tiles(unit.plan, forward, bool(late & names) or ("" in names and bool(late)))
    if steps is None:
        return None
    plan = schedule(unit.program, unit.plan.target, unit.plan.semantics.storage, steps)
    return _unit(unit.program, plan, unit.backend, unit.archs, bool(late))


def kernel_figures(checked: Checked, options: Options) -> list[str]:
    """Lines on the GPU kernels of a file, compiled with the tiles that the gate leaves them; and its notes.

    Raises what `compile_file` raises.
    """
    toolchain, cache = Toolchain.find(cuda="cuda" in options.backends), Cache()
    made = units(checked, options)
    first = _spec(checked, made, options)
    settle = _settler(checked, options, made, toolchain, cache, python=False)
    spec, notes = settle(first, compile_cubins(first, toolchain, cache, python=False))
    lines: list[str] = []
    gpus = {unit.variant.images: unit.gpus for unit in made if unit.device_text is not None}
    for table, results in compile_cubins(spec, toolchain, cache, python=False).items():
        lines.append(f"  tiles of {gpus[table]}:")
        for result in results:
            lines += [
                f"    {k.name} {result.arch}: {k.registers} registers, {k.spill_bytes} bytes spilled, "
                f"{k.stack_bytes} of stack, {k.shared_bytes + k.dynamic_bytes} of shared memory, "
                f"{k.code_bytes} of code"
                for k in result.kernels
            ]
    return [*(lines or ["  none: this is not a GPU build (--backend cuda)"]), *map(render, notes)]


def _gate_notes(unit: Unit, faults: list[Fault], left: list[Fault]) -> list[Diagnostic]:
    """What to say of a unit with `faults` at first, of which are `left` with the tiles that it has now."""
    tiles = ", ".join(
        f"{launch.kernel.name} {launch.kernel.tile.queries} x {launch.kernel.tile.keys}"
        for launch in unit.plan.launches
        if launch.kernel.kind in ("forward", "backward")
    )
    if left:
        hint = "the kernels are right, but slow: a smaller head size or a simpler score helps"
        return [Diagnostic("E0510", "warning", f"{fault} (tiles: {tiles})", hint=hint) for fault in left]
    return [Diagnostic("E0510", "note", f"smaller tiles are used ({tiles}): {fault}") for fault in faults[:1]]


def _metadata(checked: Checked, made: tuple[Unit, ...], archs: tuple[str, ...]) -> str:
    source = Path(checked.path).name
    attentions: dict[str, Any] = {}
    for unit in made:
        program = unit.program
        # Two modules share torch operators only if they hold the same code for the same devices.
        text = hashlib.sha256(",".join(archs).encode())
        for other in made:
            if other.program.name == program.name:
                text.update((other.host_text + (other.device_text or "")).encode())
        attentions[program.name] = {
            "doc": program.doc,
            "key": text.hexdigest()[:16],
            "parameters": [_parameter(p, program) for p in program.params],
            "output_blocks": bool(program.output_steps),
        }
    doc = f"Attention kernels of {source}, built by afc: {', '.join(attentions)}."
    return json.dumps(
        {
            "abi": ABI_VERSION,
            "source": source,
            "doc": doc,
            "attentions": attentions,
            "command": f"afc compile {source} -o kernel.so {{options}}",
        }
    )


def _parameter(param: Param, program: Program) -> dict[str, Any]:
    if isinstance(param, TensorParam):
        shape = [[_size(e.size), e.broadcast] for e in param.shape]
        return {
            "name": param.name,
            "kind": "tensor",
            "type": param.type.value,
            "shape": shape,
            "grad": param.grad,
            "grad_is_zero": param.name not in program.learned,
        }
    default = None if param.default is None else param.default.value
    return {
        "name": param.name,
        "kind": "scalar",
        "type": param.type.value,
        "default": default,
        "positive": param.positive,
    }


def _size(expr: Expr) -> Any:
    match expr:
        case Const(value=value):
            return int(value)
        case Var(name=name):
            return name
        case Op(name="add" | "sub" | "mul" | "neg" | "floordiv" as name, args=args):
            return [name, *map(_size, args)]
    raise UsageError.of("E0204", "the size of a captured tensor is built from dimensions, ints, + - * and //")


def compile_file(
    path: str | Path,
    output: str | Path,
    options: Options | None = None,
    *,
    gate: Gate = "warn",
    jobs: int | None = None,
    cuda_compiler: str | None = None,
    python: bool = True,
    header: str | Path | None = None,
    depfile: str | Path | None = None,
) -> BuildReport:
    """Compile a `.attn` file to a module that Python imports and C programs link.

    `gate` is what happens to GPU kernels that spill registers or miss another limit. "warn": they get the
    next smaller tile, and warnings if that does not help; "fail": errors E0510; "off": nothing.
    python=False leaves the Python part out, with what it needs to build. `header` is a C header to write,
    `depfile` a rule for make and ninja that names the files the module depends on.

    `cuda_compiler` is "nvcc" or "nvrtc"; by default nvcc, and NVRTC where there is no nvcc.

    Raises SourceError, UsageError, ToolchainError.
    """
    options = options or Options()
    checked, destination = check_file(path), Path(output)
    check_destination(destination)
    toolchain, cache = Toolchain.find(cuda="cuda" in options.backends, compiler=cuda_compiler), Cache()
    made = units(checked, options)
    settle = _settler(checked, options, made, toolchain, cache, jobs=jobs, python=python)
    spec = _spec(checked, made, options)
    report = build_module(
        spec,
        destination,
        toolchain,
        cache,
        gate=gate == "fail",
        jobs=jobs,
        python=python,
        settle=settle if gate == "warn" else None,
    )
    if header is not None:
        write_file(header_text(module_stem(destination), spec).encode(), Path(header))
    if depfile is not None:
        write_file(_make_rule(destination, checked).encode(), Path(depfile))
    return report


def _make_rule(output: Path, checked: Checked) -> str:
    """`output: sources`, as make reads it."""
    sources = [name for name in checked.texts if Path(name).is_file()]
    names = [re.sub(r"([ #\\])", r"\\\1", name).replace("$", "$$") for name in (str(output), *sources)]
    return f"{names[0]}: {' '.join(names[1:])}\n"


def module_in_cache(path: str | Path, options: Options, cache: Cache, *, build: bool) -> Path | None:
    """The module of a file in the cache; if it is not there, it is built, or None without `build`.

    Raises SourceError, UsageError, ToolchainError.
    """
    checked = check_file(path)
    made = units(checked, options)
    spec = _spec(checked, made, options)
    toolchain = Toolchain.find(cuda="cuda" in options.backends)
    settle = _settler(checked, options, made, toolchain, cache)

    def settle_and_warn(
        first: ModuleSpec, results: Mapping[str, tuple[CubinResult, ...]]
    ) -> tuple[ModuleSpec, tuple[Diagnostic, ...]]:
        settled, notes = settle(first, results)
        for note in notes:
            if note.level == "warning":
                warnings.warn(render(note), RuntimeWarning, stacklevel=2)
        return settled, notes

    stem = "".join(c if c.isalnum() else "_" for c in Path(path).stem)
    stem = stem if stem.isidentifier() else f"kernel_{stem}"
    found = find_module(stem, spec, toolchain, cache, gate=False)
    if found is None and build:
        found = cached_module(stem, spec, toolchain, cache, gate=False, settle=settle_and_warn)
    if found is not None:
        tools = [*toolchain.cxx.command, *(toolchain.cuda.command if toolchain.cuda else ())]
        remember(cache, Path(path), repr(options), checked.texts, tools, found)
    return found


def emit_code(
    path: str | Path,
    form: str,
    options: Options,
    *,
    cuda_compiler: str | None = None,
    gate: Gate = "warn",
) -> tuple[bytes, str, tuple[Diagnostic, ...]]:
    """GPU code of a file with one attention, for one head size, dtype and architecture: a `cubin`, such as
    cupy.RawModule loads, or `ptx`; the GPUs that its tiles are for, in words; and the gate's warnings. Each
    kernel's one parameter is an afc_args by value. The tiles are those of the plan, whatever the gate says:
    whoever launches the kernels has to know.

    Raises SourceError, UsageError E0626, ToolchainError.
    """
    made = units(check_file(path), replace(options, backends=("cuda",)))
    archs = options.archs
    configurations = len({unit.configuration for unit in made})
    if configurations != 1 or len(archs) != 1:
        raise UsageError.of(
            "E0626",
            f"--emit {form} gives the code of one attention, head size, dtype and architecture; "
            f"here are {configurations} configuration(s) for {', '.join(archs)}",
            hint="for example: -D D=64 --dtype bf16 --arch sm_90",
        )
    arch = Arch.parse(archs[0])
    if form == "ptx":
        arch = Arch.parse(arch.virtual)
    elif arch.ptx:
        raise UsageError.of("E0626", f"--emit cubin --arch {arch}: {arch} is PTX, not machine code")
    result = compile_cubin(made[0].cuda(arch), Toolchain.find(cuda=True, compiler=cuda_compiler), Cache())
    if gate == "fail":
        check_ptxas(result)
    faults = ptxas_faults(result) if gate == "warn" else []
    return result.cubin, made[0].gpus, tuple(_gate_notes(made[0], faults, faults))


def emit(path: str | Path, stage: str, options: Options) -> str:
    """Text of a stage: `ast` (the file's syntax tree), `program` (after all passes), `plan`, `tiled`, `cpp`
    (CPU code), `cu` (CUDA), `launch`. From `plan` on there is a text for each class of GPUs, which it names.
    """
    checked = check_file(path)
    if stage == "ast":
        return dump(parse(checked.text, checked.path))
    if stage in ("program", "plan", "tiled"):
        from afc.ir.printer import print_plan, print_program

        made = units(checked, options)
        if stage == "program":
            programs = {unit.configuration: unit.program for unit in made}
            return "\n".join(map(print_program, programs.values()))
        return "\n".join(print_plan(unit.plan, stage) for unit in made)
    wanted = {"cpp": "cpu", "cu": "cuda", "launch": "cuda"}
    if stage not in wanted:
        raise UsageError.of(
            "E0616", f"unknown stage `{stage}`", hint="ast, program, plan, tiled, cpp, cu, launch"
        )
    made = units(checked, replace(options, backends=(wanted[stage],)))
    return "\n".join((u.device_text or "") if stage == "cu" else u.host_text for u in made)
