# SPDX-License-Identifier: Apache-2.0
"""NVRTC compiles the text that nvcc compiles, without system headers, to kernels of the same size."""

from __future__ import annotations

import re

import pytest

from afc.api import emit, module_spec
from afc.build import (
    Cache,
    CubinResult,
    Toolchain,
    compile_units,
    find_cxx,
    find_nvcc,
    find_nvrtc,
    ptxas_faults,
)
from afc.errors import ToolchainError
from afc.frontend import check_file
from afc.options import Options
from tests.golden.test_golden import ROOT

ARCHS = ("sm_86", "sm_90a", "compute_80")
MORE_REGISTERS = 8  # one step of ptxas' allocation: another version of the compiler may take it


@pytest.fixture(scope="module")
def nvrtc() -> Toolchain:
    try:
        return Toolchain(find_cxx(), find_nvrtc())
    except ToolchainError:
        pytest.skip("no libnvrtc here (pip install 'afc[nvrtc]', or AFC_NVRTC=/path/to/libnvrtc.so.13)")


@pytest.mark.nvcc
@pytest.mark.parametrize("name", ("gemma2", "llama"))
def test_same_kernels_through_nvrtc(nvrtc: Toolchain, name: str) -> None:
    spec = module_spec(
        check_file(ROOT / "examples" / f"{name}.attn"), Options(("cuda",), ((128, 128),), archs=ARCHS)
    )
    (units,) = spec.cuda.values()
    results = [r for r in compile_units(units, nvrtc, Cache()) if isinstance(r, CubinResult)]
    assert [str(r.arch) for r in results] == list(ARCHS)
    assert not [fault for r in results for fault in ptxas_faults(r)]
    assert results[-1].cubin.lstrip().startswith(b"//") and b".target sm_80" in results[-1].cubin
    try:
        nvcc = Toolchain(nvrtc.cxx, find_nvcc())
    except ToolchainError:
        pytest.skip("no nvcc here to compare with")
    for result, other in zip(results, compile_units(units, nvcc, Cache()), strict=True):
        assert isinstance(other, CubinResult)
        ours = {k.name: k.registers for k in result.kernels}
        theirs = {k.name: k.registers for k in other.kernels}
        assert ours.keys() == theirs.keys()
        allowed = 0 if result.toolkit == other.toolkit else MORE_REGISTERS
        assert all(abs(ours[k] - theirs[k]) <= allowed for k in ours), (result.arch, ours, theirs)


def test_device_headers_need_nothing_that_nvrtc_lacks() -> None:
    """Where there is no NVRTC to ask: no system header but the one runtime/rtc stands in for, no built-in
    but those that it defines.
    """
    runtime = ROOT / "runtime"
    stand_ins = {path.name for path in (runtime / "rtc").iterdir()}
    defined = set(re.findall(r"#define (__builtin_\w+)", (runtime / "rtc" / "builtins.h").read_text()))
    headers = [*runtime.glob("ptx/**/*.cuh"), *runtime.glob("tile/**/*.cuh"), *runtime.glob("abi/*.h")]
    assert len(headers) > 20 and stand_ins == {"stdint.h", "builtins.h"}
    for path in headers:
        text = path.read_text(encoding="utf-8")
        missing = set(re.findall(r"#include <([^>]+)>", text)) - stand_ins
        missing |= set(re.findall(r"__builtin_\w+", text)) - defined
        assert not missing, f"{path.name}: {missing}"
    text = emit(ROOT / "examples" / "llama.attn", "cu", Options(("cuda",)))
    assert "#include <" not in text and not set(re.findall(r"__builtin_\w+", text)) - defined
