# SPDX-License-Identifier: Apache-2.0
"""The gate on shipped kernels: a manifest of their figures, by the hash of what is compiled.

A unit whose text, headers, flags and compiler are as recorded needs no compiler: its figures are known (those
of the next smaller tile, where the first does not pass). What
has changed since is compiled here (a few units, chosen at random, if there are many), and a few of the others
to see that the record is right. `pytest tests/golden/test_manifest.py --update-manifest` compiles all that
has changed and records it: about a quarter of an hour on two processors after a change of a header.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from afc.api import Unit, smaller, units
from afc.build import (
    Arch,
    Cache,
    CubinResult,
    FunctionUsage,
    Toolchain,
    compile_cubin,
    ptxas_faults,
)
from afc.build.compile import CODE_BYTES, run_parallel, unit_key
from afc.build.toolchain import Tool
from afc.errors import ToolchainError, UsageError
from afc.frontend import check_file
from afc.options import Options
from afc.schedule.targets import sm80

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
MANIFEST = Path(__file__).parent / "manifest.json"
FIGURES = ("registers", "spill_bytes", "stack_bytes", "shared_bytes", "dynamic_bytes", "code_bytes")
CHANGED, UNCHANGED = 4, 2  # units compiled at most in one run, of either kind
ALL_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "compute_86:sm_90")
TWO_ARCHS = ("sm_86", "sm_90")
NO_HOST = Tool((), "", "")  # the preprocessor leaves no trace in machine code

# Every example that GPU targets compile, in both dtypes; two of them for every architecture and head size.
SHAPES = (("float16", 64, TWO_ARCHS), ("bfloat16", 128, TWO_ARCHS))
MORE = (
    ("llama", "bfloat16", (64, 128), ALL_ARCHS),
    ("gemma2", "float16", (64, 128), ALL_ARCHS),
    ("llama", "bfloat16", (32, 96, 192, 256), TWO_ARCHS),
)


@dataclass(frozen=True)
class Shipped:
    """A unit of the manifest, for one architecture."""

    unit: Unit
    arch: Arch

    def compile(self, toolchain: Toolchain) -> CubinResult:
        """With the first tile that passes the gate, of two, as `afc compile` does."""
        result = compile_cubin(self.unit.cuda(self.arch), toolchain, Cache())
        faults = ptxas_faults(result)
        other = smaller(self.unit, faults) if faults else None
        return result if other is None else compile_cubin(other.cuda(self.arch), toolchain, Cache())


@lru_cache(maxsize=1)
def shipped() -> dict[str, Shipped]:
    """Every unit of the manifest, by name."""
    wanted = [(path.stem, *shape) for path in sorted(EXAMPLES.glob("*.attn")) for shape in SHAPES]
    wanted += [(name, dtype, head, archs) for name, dtype, heads, archs in MORE for head in heads]
    found = {}
    for name, dtype, head, archs in wanted:
        for arch in archs:  # each has the tiles of its class
            options = Options(("cuda",), ((head, head),), (dtype,), (arch,))
            try:
                built = units(check_file(EXAMPLES / f"{name}.attn"), options)
            except UsageError:  # what this target does not compile
                continue
            for unit in built:
                found[f"{unit.program.name} {dtype} {head} {arch}"] = Shipped(unit, Arch.parse(arch))
    return found


def recorded() -> dict[str, dict[str, object]]:
    return json.loads(MANIFEST.read_text(encoding="utf-8"))["units"] if MANIFEST.exists() else {}


def record(result: CubinResult, key: str) -> dict[str, object]:
    return {"key": key, "kernels": {k.name: [getattr(k, f) for f in FIGURES] for k in result.kernels}}


def too_large(name: str, result: CubinResult, known: dict[str, dict[str, object]]) -> list[str]:
    """Kernels of more machine code than the limit, and more than recorded."""
    kernels = known.get(name, {}).get("kernels", {})
    assert isinstance(kernels, dict)
    code = FIGURES.index("code_bytes")
    texts = []
    for kernel in result.kernels:
        most = max(CODE_BYTES, kernels[kernel.name][code] if kernel.name in kernels else 0)
        if kernel.code_bytes > most:
            texts.append(
                f"{name}: {kernel.name}: {kernel.code_bytes} bytes of machine code, more than {most}"
            )
    return texts


def write(entries: dict[str, dict[str, object]], compiler: str) -> None:
    lines = [f"    {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
    text = f'{{\n  "compiler": {json.dumps(compiler)},\n  "figures": {json.dumps(FIGURES)},\n  "units": {{\n'
    MANIFEST.write_text(text + ",\n".join(lines) + "\n  }\n}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    try:
        return Toolchain.find(cuda=True, compiler="nvcc")
    except ToolchainError:
        pytest.skip("no nvcc here")


@pytest.mark.nvcc
def test_changed_kernels_pass_the_gate(toolchain: Toolchain, update_manifest: bool) -> None:
    compiler = Toolchain(NO_HOST, toolchain.cuda)
    known, found = recorded(), shipped()
    keys = {name: unit_key(x.unit.cuda(x.arch), compiler)[:16] for name, x in found.items()}
    same = [name for name in found if name in known and known[name]["key"] == keys[name]]
    changed = [name for name in found if name not in same]
    seed = int(os.environ.get("AFC_MANIFEST_SEED", random.SystemRandom().randrange(10**6)))
    pick = random.Random(seed)
    chosen = changed if update_manifest else pick.sample(changed, min(CHANGED, len(changed)))
    again = [] if update_manifest else pick.sample(same, min(UNCHANGED, len(same)))
    print(f"AFC_MANIFEST_SEED={seed}: {len(changed)} changed, {len(same)} as recorded")
    names = (*chosen, *again)
    made = run_parallel(lambda name: found[name].compile(toolchain), names)
    results = dict(zip(names, made, strict=True))
    faults = [f"{name}: {fault}" for name, result in results.items() for fault in ptxas_faults(result)]
    if not update_manifest:
        faults += [text for name, result in results.items() for text in too_large(name, result, known)]
    assert not faults, f"AFC_MANIFEST_SEED={seed}\n" + "\n".join(faults)
    if update_manifest:
        fresh = {name: record(result, keys[name]) for name, result in results.items()}
        assert toolchain.cuda is not None
        write(
            {name: fresh.get(name, known.get(name, {})) for name in found}, f"nvcc {toolchain.cuda.version}"
        )
    for name in again:
        assert record(results[name], keys[name]) == known[name], f"AFC_MANIFEST_SEED={seed}: {name}"


def test_every_record_passes_the_gate() -> None:
    """No figures that the gate refuses are committed."""
    entries = recorded()
    assert len(entries) >= 100
    for name, entry in entries.items():
        kernels = entry["kernels"]
        assert isinstance(kernels, dict) and any(k.endswith("_forward") for k in kernels), name
        usages = tuple(
            FunctionUsage(k, True, **dict(zip(FIGURES, figures, strict=True)))
            for k, figures in kernels.items()
        )
        arch = Arch.parse(name.rpartition(" ")[2])
        assert ptxas_faults(CubinResult(name, arch, b"", usages, (), (), "")) == [], name


def test_shared_memory_fits_every_gpu_of_a_class() -> None:
    for name in ("llama", "causal", "gptj"):
        for d in (16, 32, 64, 96, 128, 160, 192, 256):
            if name == "gptj" and d < 32:  # its rotation has 64 columns
                continue
            built = units(check_file(EXAMPLES / f"{name}.attn"), Options(("cuda",), ((d, d),)))
            assert {unit.plan.target for unit in built} == set(sm80.NAMES)
            for unit in built:
                for kernel in (launch.kernel for launch in unit.plan.launches):
                    most = sm80.NAMES[unit.plan.target].shared_bytes
                    assert kernel.binding.shared_bytes <= most, (name, d, kernel.name)
