# SPDX-License-Identifier: Apache-2.0
"""Finding compilers, running them, and reading what ptxas says."""

from __future__ import annotations

import pickle
import stat
import subprocess
import time
from pathlib import Path

import pytest

from afc.build.cache import Cache
from afc.build.compile import (
    CppUnit,
    CubinResult,
    CudaUnit,
    check_ptxas,
    compile_cpp,
    compile_cubin,
    compile_units,
    parse_ptxas,
    run_parallel,
    run_tool,
    unit_key,
)
from afc.build.sources import canonical, included_headers
from afc.build.toolchain import Arch, Nvcc, Tool, Toolchain, find_cxx, find_nvcc
from afc.errors import ToolchainError


def nvcc_is_there() -> bool:
    try:
        find_nvcc()
    except ToolchainError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not nvcc_is_there(), reason="needs the CUDA compiler")

FAKE_NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 13.9, V13.9.{number}" ;;
  --list-gpu-code) echo sm_80; echo sm_90 ;;
esac
"""


def make_nvcc(folder: Path, number: int) -> Path:
    folder.mkdir(parents=True)
    path = folder / "nvcc"
    path.write_text(FAKE_NVCC.format(number=number))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---- finding ----


def test_cxx_tells_its_version() -> None:
    cxx = find_cxx()
    assert cxx.version.count(".") == 2 and cxx.version in cxx.banner


def test_nvcc_is_found_in_the_documented_order(tmp_path: Path) -> None:
    site = tmp_path / "site packages"
    make_nvcc(site / "nvidia" / "cu13" / "bin", 2)
    environ = {
        "AFC_NVCC": str(make_nvcc(tmp_path / "named", 1)),
        "CUDA_HOME": str(make_nvcc(tmp_path / "home" / "bin", 3).parent.parent),
        "CUDA_PATH": str(make_nvcc(tmp_path / "path" / "bin", 4).parent.parent),
        "PATH": f"{make_nvcc(tmp_path / 'search', 5).parent}:/usr/bin:/bin",
    }
    option = str(make_nvcc(tmp_path / "option", 0))
    assert find_nvcc(option, environ, [site]).version == "13.9.0"
    for number, name in enumerate(("AFC_NVCC", "", "CUDA_HOME", "CUDA_PATH", "PATH"), start=1):
        assert find_nvcc(None, environ, [site]).version == f"13.9.{number}"
        if name:
            environ.pop(name)
        else:
            site = tmp_path / "empty"


def test_missing_nvcc_lists_every_place(tmp_path: Path) -> None:
    environ = {"AFC_NVCC": str(tmp_path / "gone"), "CUDA_HOME": str(tmp_path)}
    with pytest.raises(ToolchainError) as caught:
        find_nvcc(None, environ, [])
    assert caught.value.diagnostics[0].code == "E0501"
    # a tool that was named must work: nothing else is taken in its place
    assert [place.split(":")[0] for place in caught.value.searched] == ["AFC_NVCC"]
    text = str(caught.value)
    assert str(tmp_path / "gone") in text and "no such program" in text and "AFC_NVCC=" in text


def test_missing_cxx_lists_every_place() -> None:
    with pytest.raises(ToolchainError) as caught:
        find_cxx(None, {"PATH": "/nowhere"})
    assert caught.value.diagnostics[0].code == "E0502"
    assert len(caught.value.searched) == 2
    assert caught.value.exit_code == 3


def test_broken_nvcc_is_reported_with_its_reason(tmp_path: Path) -> None:
    path = make_nvcc(tmp_path / "bin", 1)
    path.write_text("#!/bin/sh\necho 'no license' >&2; exit 7\n")
    with pytest.raises(ToolchainError) as caught:
        find_nvcc(str(path), {}, [])
    assert "exit status 7: no license" in str(caught.value)


def test_toolchain_error_survives_pickling() -> None:
    with pytest.raises(ToolchainError) as caught:
        find_cxx("/no/such/compiler", {})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.searched == caught.value.searched


def test_arch() -> None:
    plain, mixed, special = Arch.parse("sm_86"), Arch.parse("compute_86:sm_90"), Arch.parse("sm_90a")
    assert (plain.virtual, plain.real, str(plain)) == ("compute_86", "sm_86", "sm_86")
    assert (mixed.capability, mixed.virtual_capability, str(mixed)) == (90, 86, "compute_86:sm_90")
    assert (special.capability, special.suffix) == (90, "a")
    for bad in ("90", "sm_", "sm_90b", "sm_86:sm_90", "compute_86"):
        with pytest.raises(ValueError, match="architecture"):
            Arch.parse(bad)


# ---- texts ----


def test_canonical_text() -> None:
    text = (
        '#line 3 "a.attn"\nint a = 1\'000; // one\n'
        '/* two\n lines */ char q = \'"\', s[] = "// kept /* too */";\n\n'
        "  # line 7\nchar c = L'\\''; // ' gone\nint/**/b; // continued \\\n line\nint d;\n"
    )
    kept = "int a = 1'000;\n  char q = '\"', s[] = \"// kept /* too */\";\nchar c = L'\\'';\nint b;\nint d;"
    assert canonical(text) == kept


def test_raw_strings_are_left_alone() -> None:
    text = 'auto r = R"x(/* raw )"  \n#line 1\n)x"; // stays\n'
    assert canonical(text) == text


def test_included_headers_are_found_once_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "tile").mkdir()
    (tmp_path / "tile" / "a.h").write_text('#include "b.h"\n#include <vector>\n')
    (tmp_path / "tile" / "b.h").write_text('#include "tile/a.h"\n#include "c.h"\n')
    (tmp_path / "c.h").write_text("int c;\n")
    found = included_headers('#include "tile/a.h"\n  # include "c.h"\n#include "none.h"\n', [tmp_path])
    assert [name for name, _ in found] == ["tile/a.h", "b.h", "c.h"]


# ---- keys ----

CXX = Tool(("/usr/bin/g++",), "12.2.0", "g++ 12.2.0")
NVCC = Nvcc(("/opt/nvcc",), "13.0.88", "nvcc 13.0.88", ("sm_80", "sm_90"))
FAKE = Toolchain(CXX, NVCC)


def test_key_of_a_unit(tmp_path: Path) -> None:
    (tmp_path / "h.h").write_text("int h;\n")
    unit = CudaUnit("k", '#include "h.h"\nint x;\n', Arch.parse("sm_80"), (tmp_path,))
    key = unit_key(unit, FAKE)
    same = CudaUnit("k", '#include "h.h"\n// a comment\nint x; // more\n', unit.arch, (tmp_path,))
    moved = Toolchain(Tool(("/elsewhere/g++",), "12.2.0", "g++ 12.2.0"), NVCC)
    assert unit_key(same, FAKE) == key == unit_key(unit, moved)
    newer = Toolchain(CXX, Nvcc(("/opt/nvcc",), "13.1.0", "nvcc 13.1.0", ("sm_80",)))
    others = [
        unit_key(CudaUnit("k", '#include "h.h"\nint y;\n', unit.arch, (tmp_path,)), FAKE),
        unit_key(CudaUnit("k", unit.text, Arch.parse("sm_90"), (tmp_path,)), FAKE),
        unit_key(CudaUnit("k", unit.text, Arch.parse("compute_80:sm_90"), (tmp_path,)), FAKE),
        unit_key(CudaUnit("k", unit.text, unit.arch, (tmp_path,), ("-DA=1",)), FAKE),
        unit_key(unit, newer),
        unit_key(CppUnit("k", unit.text, include_dirs=(tmp_path,)), FAKE),
        unit_key(CppUnit("k", unit.text, isa="generic", include_dirs=(tmp_path,)), FAKE),
    ]
    (tmp_path / "h.h").write_text("int changed;\n")
    others.append(unit_key(unit, FAKE))
    assert len({key, *others}) == len(others) + 1


# ---- what ptxas says ----

PTXAS_LOG = """ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 16 bytes cumulative stack size
ptxas info    : Compiling entry function 'clean' for 'sm_90a'
ptxas info    : Function properties for clean
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Function properties for __internal_slow
    40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'clean'
"""


def test_ptxas_report_is_read() -> None:
    forward, clean, slow = parse_ptxas(PTXAS_LOG)
    assert (
        forward.name,
        forward.registers,
        forward.spill_bytes,
        forward.stack_bytes,
        forward.shared_bytes,
    ) == (("forward", 168, 56, 16, 1024))
    assert (clean.registers, clean.spill_bytes, clean.stack_bytes, clean.shared_bytes) == (40, 0, 0, 0)
    assert not slow.entry and slow.stack_bytes == 40


def test_gate_names_kernel_arch_and_figures() -> None:
    usages = parse_ptxas(PTXAS_LOG)
    warning = PTXAS_LOG.splitlines()[-1]
    result = CubinResult("llama", Arch.parse("sm_90a"), b"", usages[:2], usages[2:], (warning,), PTXAS_LOG)
    with pytest.raises(ToolchainError) as caught:
        check_ptxas(result)
    messages = [diagnostic.message for diagnostic in caught.value.diagnostics]
    assert {diagnostic.code for diagnostic in caught.value.diagnostics} == {"E0510"}
    assert messages[0] == "kernel forward for sm_90a: 168 registers, 56 bytes spilled, 16 bytes of stack"
    assert "function __internal_slow" in messages[1] and "C7510" in messages[2] and len(messages) == 3
    check_ptxas(CubinResult("llama", Arch.parse("sm_90a"), b"", usages[1:2], (), (), ""))


# ---- running compilers ----


def test_time_limit_ends_the_whole_process_group(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_tool(["/bin/sh", "-c", "sleep 60 & wait"], tmp_path, seconds=0.3)
    assert time.monotonic() - start < 10


def test_parallel_results_keep_their_order() -> None:
    assert run_parallel(lambda x: x * x, [3, 1, 2], jobs=2) == [9, 1, 4]

    def fail(x: int) -> int:
        raise ValueError(str(x))

    with pytest.raises(ValueError, match="7"):
        run_parallel(fail, [7, 8, 9], jobs=2)


def test_cpp_error_shows_the_log_and_keeps_the_source(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "a cache ü")
    unit = CppUnit("broken", "int f( { return 0; }\n", isa="generic")
    with pytest.raises(ToolchainError) as caught:
        compile_cpp(unit, Toolchain(find_cxx()), cache)
    error = caught.value
    assert error.diagnostics[0].code == "E0512" and "broken.cpp for generic" in error.diagnostics[0].message
    assert "broken.cpp:1" in error.log_tail and error.command[0] == find_cxx().command[0]
    kept = Path(error.diagnostics[0].notes[0].split(" kept in ")[1])
    assert (kept / "broken.cpp").read_text() == unit.text and (kept / "log.txt").read_text() == error.log
    assert cache.entries() == []


def test_equal_units_give_equal_bytes_in_any_folder(tmp_path: Path) -> None:
    unit = CppUnit("f", '#include "abi/afc_abi.h"\nconst char *f() { return __FILE__; }\n', isa="generic")
    one = compile_cpp(unit, Toolchain(find_cxx()), Cache(tmp_path / "one"))
    two = compile_cpp(unit, Toolchain(find_cxx()), Cache(tmp_path / "two"))
    assert one.data == two.data and not two.hit
    assert compile_cpp(unit, Toolchain(find_cxx()), Cache(tmp_path / "two")).hit


CUDA_TEXT = """#include "abi/afc_abi.h"
extern "C" __global__ void twice(const __grid_constant__ afc_args args) {
  ((float *)args.o.data)[threadIdx.x] = 2.0f * ((const float *)args.q.data)[threadIdx.x];
}
"""


@needs_nvcc
def test_cubins_of_several_archs(tmp_path: Path) -> None:
    toolchain = Toolchain.find(cuda=True)
    archs = [Arch.parse(name) for name in ("sm_86", "compute_86:sm_90", "sm_90a")]
    units = [CudaUnit("twice", CUDA_TEXT, arch) for arch in archs]
    results = compile_units(units, toolchain, Cache(tmp_path), jobs=2)
    for arch, result in zip(archs, results, strict=True):
        assert isinstance(result, CubinResult) and result.arch == arch
        assert result.cubin[:4] == b"\x7fELF" and str(tmp_path).encode() not in result.cubin
        assert [kernel.name for kernel in result.kernels] == ["twice"] and result.kernels[0].registers > 0
        check_ptxas(result)
    again = compile_cubin(units[0], toolchain, Cache(tmp_path / "other"))
    assert (
        isinstance(results[0], CubinResult) and again.cubin == results[0].cubin
    )  # no path of the machine inside


@needs_nvcc
def test_gate_stops_a_real_stack_frame(tmp_path: Path) -> None:
    text = (
        'extern "C" __global__ void frame(float *p, int n) {\n'
        "  float a[64];\n  for (int i = 0; i < 64; ++i) a[i] = p[i];\n"
        "  for (int i = 0; i < n; ++i) a[(int)p[i] & 63] += 1.0f;\n"
        "  for (int i = 0; i < 64; ++i) p[i] = a[i];\n}\n"
    )
    result = compile_cubin(
        CudaUnit("frame", text, Arch.parse("sm_80")), Toolchain.find(cuda=True), Cache(tmp_path)
    )
    with pytest.raises(ToolchainError, match=r"E0510.*kernel frame for sm_80: .* 256 bytes of stack"):
        check_ptxas(result)


@needs_nvcc
def test_cuda_errors(tmp_path: Path) -> None:
    toolchain, cache = Toolchain.find(cuda=True), Cache(tmp_path)
    with pytest.raises(ToolchainError, match=r"E0504.*cannot compile for sm_35"):
        compile_cubin(CudaUnit("k", CUDA_TEXT, Arch.parse("sm_35")), toolchain, cache)
    with pytest.raises(ToolchainError, match="E0511") as caught:
        compile_cubin(
            CudaUnit("k", "__global__ void k() { nothing(); }", Arch.parse("sm_80")), toolchain, cache
        )
    assert "nothing" in caught.value.log_tail
    with pytest.raises(ToolchainError, match="E0501"):
        compile_cubin(CudaUnit("k", CUDA_TEXT, Arch.parse("sm_80")), Toolchain(toolchain.cxx), cache)
