# SPDX-License-Identifier: Apache-2.0
"""The gate on GPU kernels: its objections, the next smaller tile, and the warning if that does not help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from afc import api
from afc.build import (
    Arch,
    Cache,
    CubinResult,
    CudaUnit,
    FunctionUsage,
    Toolchain,
    compile_cubin,
    ptxas_faults,
)
from afc.build.compile import code_sizes, run_parallel
from afc.errors import ToolchainError
from afc.frontend import check_file
from afc.options import Options
from afc.schedule.plan import next_tiles, schedule
from afc.schedule.targets import sm80
from tests.golden.test_golden import ROOT

CAUSAL = ROOT / "examples" / "causal.attn"
OPTIONS = Options(("cuda",), ((64, 64),), archs=("sm_86",), backward=False)
# Blocks of 4 warps with 4 (and 5) on a multiprocessor leave 128 (and 96) registers to a thread.
SPILLS = sm80.ForwardTile(64, 128, 64, 4, 4, False)
SPILLS_TOO = sm80.ForwardTile(64, 64, 128, 4, 5, False)


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    try:
        return Toolchain.find(cuda=True)
    except ToolchainError:
        pytest.skip("no CUDA compiler here")


def result(usage: FunctionUsage, arch: str = "sm_86") -> CubinResult:
    return CubinResult("k", Arch.parse(arch), b"", (usage,), (), (), "")


def test_limit_of_shared_memory() -> None:
    fits = FunctionUsage("k", True, 255, shared_bytes=1024, dynamic_bytes=98 * 1024)
    assert ptxas_faults(result(fits)) == []
    (fault,) = ptxas_faults(result(replace(fits, dynamic_bytes=98 * 1024 + 16)))
    assert fault.kernel == "k" and "101392 bytes of shared memory, a block has at most 101376" in fault.text
    assert ptxas_faults(result(replace(fits, dynamic_bytes=160 * 1024), "sm_80")) == []
    assert len(ptxas_faults(result(replace(fits, dynamic_bytes=160 * 1024), "sm_120"))) == 1


@pytest.mark.nvcc
def test_code_sizes_are_read_from_the_cubin(toolchain: Toolchain, tmp_path: Path) -> None:
    text = 'extern "C" __global__ void one(int *p) { *p = 1; }\n'
    text += 'extern "C" __global__ void two(int *p, int n) {\n#pragma unroll 64\n'
    text += "  for (int i = 0; i < n; ++i) p[i] = p[i] * i + p[i / 2];\n}\n"
    compiled = compile_cubin(CudaUnit("k", text, Arch.parse("sm_80")), toolchain, Cache(tmp_path))
    sizes = {k.name: k.code_bytes for k in compiled.kernels}
    assert sizes == code_sizes(compiled.cubin) and 0 < sizes["one"] < sizes["two"] and sizes["one"] % 16 == 0
    assert code_sizes(b"// PTX") == code_sizes(b"") == {}


@pytest.mark.nvcc
def test_a_kernel_that_spills_gets_the_next_tile(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiles = sm80.NAMES["sm86"]
    monkeypatch.setitem(sm80.NAMES, "sm86", replace(tiles, forward=(SPILLS, *tiles.forward[1:])))
    report = api.compile_file(CAUSAL, tmp_path / "lm.so", OPTIONS, python=False)
    (note,) = report.notes
    assert (note.level, note.code) == ("note", "E0510") and "causal_lm_forward 128 x 64" in note.message
    assert all(k.spill_bytes == 0 for cubin in report.cubins for k in cubin.kernels)
    lines = api.kernel_figures(check_file(CAUSAL), OPTIONS)
    assert "causal_lm_forward sm_86: " in lines[1] and ", 0 bytes spilled, " in lines[1]
    assert lines[2].startswith("note[E0510]: smaller tiles are used")


@pytest.mark.nvcc
def test_a_kernel_that_spills_with_both_tiles_is_built_with_a_warning(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiles = replace(sm80.NAMES["sm86"], forward=(SPILLS, SPILLS_TOO))
    monkeypatch.setitem(sm80.NAMES, "sm86", tiles)
    report = api.compile_file(CAUSAL, tmp_path / "lm.so", OPTIONS, python=False)
    (warning,) = report.notes
    assert (warning.level, warning.code) == ("warning", "E0510") and (tmp_path / "lm.so").exists()
    assert "causal_lm_forward for sm_86" in warning.message and "bytes spilled" in warning.message
    assert "causal_lm_forward 128 x 64" in warning.message
    with pytest.raises(ToolchainError, match=r"E0510.*causal_lm_forward"):
        api.compile_file(CAUSAL, tmp_path / "strict.so", OPTIONS, python=False, gate="fail")
    assert not (tmp_path / "strict.so").exists()
    assert api.compile_file(CAUSAL, tmp_path / "off.so", OPTIONS, python=False, gate="off").notes == ()


@pytest.mark.nvcc
@pytest.mark.parametrize(("name", "head"), [("llama", 64), ("packed", 128)])
def test_passes_that_are_compiled_apart_have_the_same_code(
    toolchain: Toolchain, name: str, head: int, tmp_path: Path
) -> None:
    """So the record of whole units (tests/golden/manifest.json) holds for modules, whose units have parts."""
    options = Options(("cuda",), ((head, head),), archs=("sm_90",))
    (unit,) = api.units(check_file(ROOT / "examples" / f"{name}.attn"), options)
    whole = unit.cuda(Arch.parse("sm_90"))
    assert [part.name.rpartition("_")[2] for part in whole.split()] == ["forward", "backward"]
    first, *parts = run_parallel(
        lambda one: compile_cubin(one, toolchain, Cache(tmp_path)), [replace(whole, parts=()), *whole.split()]
    )
    assert first.kernels and sorted(first.kernels, key=lambda k: k.name) == sorted(
        (kernel for part in parts for kernel in part.kernels), key=lambda k: k.name
    )
    early = {launch.kernel.name for launch in unit.plan.forward}
    assert {kernel.name for kernel in parts[0].kernels} == early


def test_each_pass_has_its_own_next_tile() -> None:
    (unit,) = api.units(check_file(CAUSAL), Options(("cuda",), ((64, 64),), archs=("sm_86",)))
    assert unit.plan.tile_steps == (0, 0) and next_tiles(unit.plan, True, False) == (1, 0)
    later = schedule(unit.program, "sm86", "bfloat16", (0, 1))
    first, second = (p.backward[-2].kernel.tile for p in (unit.plan, later))
    assert (first.queries, first.keys, second.queries, second.keys) == (64, 128, 64, 64)
    assert later.forward == unit.plan.forward and next_tiles(later, False, True) == (0, 2)
    (largest,) = api.units(check_file(CAUSAL), Options(("cuda",), ((256, 256),), archs=("sm_86",)))
    assert next_tiles(largest.plan, True, False) is None
    (cpu,) = api.units(check_file(CAUSAL), Options(("cpu",), ((64, 64),)))
    assert next_tiles(cpu.plan, True, False) is None
