# SPDX-License-Identifier: Apache-2.0
"""From Python: check, emit, compile, load.

kernel = afc.load("llama.attn", D=64, dtype=torch.bfloat16)      # compiled once, cached
o = kernel.llama(q, k, v)
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from afc import options as opt
from afc import passes
from afc.build import (
    Arch,
    BuildReport,
    Cache,
    CppUnit,
    CudaUnit,
    ModuleEntry,
    ModuleSpec,
    Toolchain,
    build_module,
    cached_module,
    find_module,
)
from afc.errors import UsageError
from afc.expr.nodes import Const, Expr, Op, Var
from afc.frontend import Checked, check_file
from afc.frontend.dump import dump
from afc.frontend.parser import parse
from afc.ir.program import Param, Program, TensorParam
from afc.ir.tiled import LaunchPlan
from afc.options import Options
from afc.render.cpu import render_cpu
from afc.render.cuda import render_cuda
from afc.runtime.describe import ABI_VERSION
from afc.runtime.loading import import_module
from afc.schedule.plan import schedule
from afc.schedule.targets import cpu

TARGET_OF = {"cpu": "cpu", "cuda": "sm80"}


@dataclass(frozen=True)
class Unit:
    """One attention at one (Dqk, Dv, dtype, backend): its program after the passes, its plan, its texts."""

    program: Program
    plan: LaunchPlan
    backend: str
    symbol: str
    host_text: str  # C++: the CPU code, or the launch code of the GPU kernels
    device_text: str | None  # CUDA

    def entry(self, archs: tuple[str, ...]) -> ModuleEntry:
        """The row of the module's table. `archs`: what the unit's GPU code is compiled for."""
        s = self.plan.semantics
        description = {
            "attention": self.program.name,
            "target": self.backend,
            "storage": s.storage,
            "Dqk": s.head_qk,
            "Dv": s.head_v,
            "backward": bool(self.plan.backward),
            "lse": s.has_sum,
            "deterministic": self.plan.deterministic,
            "archs": [] if self.device_text is None else list(archs),
        }
        backward = f"{self.symbol}_backward" if self.plan.backward else None
        return ModuleEntry(
            self.program.name,
            json.dumps(description),
            f"{self.symbol}_forward",
            backward,
            f"{self.symbol}_workspace",
            cpu.ISA if self.backend == "cpu" else "generic",
        )


def units(checked: Checked, options: Options) -> tuple[Unit, ...]:
    """Everything that a build of a file consists of, as text. Raises SourceError and UsageError."""
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
                made += [_unit(lowered, backend, s, options) for s in options.storages(backend)]
    return tuple(made)


def _unit(program: Program, backend: str, storage: str, options: Options) -> Unit:
    plan = schedule(program, TARGET_OF[backend], storage)
    if not options.backward:
        buffers = tuple(b for b in plan.buffers if "forward" in b.passes)
        plan = replace(plan, backward=(), deterministic_backward=(), buffers=buffers)
    symbol = f"{program.name}_{backend}_{storage}_{plan.semantics.head_qk}_{plan.semantics.head_v}"
    if backend == "cpu":
        return Unit(program, plan, backend, symbol, render_cpu(program, plan, symbol), None)
    host, device = render_cuda(program, plan, symbol)
    return Unit(program, plan, backend, symbol, host, device)


def module_spec(checked: Checked, options: Options) -> ModuleSpec:
    """Texts, tables and metadata of a module."""
    made = units(checked, options)
    archs = tuple(Arch.parse(a) for a in options.archs)
    cpp, cuda, entries = [], {}, []
    for unit in made:
        entry = unit.entry(options.archs)
        cpp.append(CppUnit(unit.symbol, unit.host_text, entry.isa))
        if unit.device_text is not None:
            cuda[f"{unit.symbol}_images"] = tuple(
                CudaUnit(unit.symbol, unit.device_text, arch) for arch in archs
            )
        entries.append(entry)
    return ModuleSpec(tuple(entries), _metadata(checked, made, options.archs), tuple(cpp), cuda)


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
    gate: bool = True,
    jobs: int | None = None,
) -> BuildReport:
    """Compile a `.attn` file to a module that Python imports.

    Raises SourceError, UsageError, ToolchainError.
    """
    options = options or Options()
    spec = module_spec(check_file(path), options)
    toolchain = Toolchain.find(cuda="cuda" in options.backends)
    return build_module(spec, Path(output), toolchain, Cache(), gate=gate, jobs=jobs)


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
    spec = module_spec(check_file(path), options)
    toolchain = Toolchain.find(cuda="cuda" in options.backends)
    stem = "".join(c if c.isalnum() else "_" for c in Path(path).stem)
    stem = stem if stem.isidentifier() else f"kernel_{stem}"
    place = _tracing()
    if place is None:
        return import_module(cached_module(stem, spec, toolchain, Cache()))
    found = find_module(stem, spec, toolchain, Cache())
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
    import torch

    if not torch.cuda.is_available():
        raise UsageError.of(
            "E0615",
            "no GPU is visible to name an architecture by",
            hint="give `arch=`, for example arch='sm_90'",
        )
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def emit(path: str | Path, stage: str, options: Options) -> str:
    """Text of a stage: `ast` (the file's syntax tree), `program` (after all passes), `plan`, `tiled`, `cpp`
    (CPU code), `cu` (CUDA), `launch`.
    """
    checked = check_file(path)
    if stage == "ast":
        return dump(parse(checked.text, checked.path))
    if stage in ("program", "plan", "tiled"):
        from afc.ir.printer import print_plan, print_program

        parts = []
        for unit in units(checked, options):
            parts.append(print_program(unit.program) if stage == "program" else print_plan(unit.plan, stage))
        return "\n".join(parts)
    wanted = {"cpp": "cpu", "cu": "cuda", "launch": "cuda"}
    if stage not in wanted:
        raise UsageError.of(
            "E0616", f"unknown stage `{stage}`", hint="ast, program, plan, tiled, cpp, cu, launch"
        )
    made = units(checked, replace(options, backends=(wanted[stage],)))
    return "\n".join((u.device_text or "") if stage == "cu" else u.host_text for u in made)
