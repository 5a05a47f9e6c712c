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
from afc.build.toolchain import (
    NVRTC_WORKER,
    Arch,
    Nvcc,
    Nvrtc,
    Tool,
    Toolchain,
    find_cuda,
    find_cxx,
    find_nvcc,
    find_nvrtc,
)
from afc.errors import ToolchainError, UsageError


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


# A library with NVRTC's functions. Its machine code tells the options; a text with `broken` fails.
FAKE_NVRTC = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static char output[4096];
static const char *name_, *log_ = "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
                                 "ptxas info    : Used 40 registers\n";
const char *nvrtcGetErrorString(int result) { return result == 6 ? "COMPILATION" : "FAULT"; }
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = NUMBER; return 0; }
int nvrtcGetNumSupportedArchs(int *count) { *count = 2; return 0; }
int nvrtcGetSupportedArchs(int *archs) { archs[0] = 80; archs[1] = 90; return 0; }
int nvrtcCreateProgram(void **program, const char *text, const char *name, int n, void *, void *) {
  *program = strdup(text);
  name_ = strdup(name);
  return n == 0 ? 0 : 1;
}
int nvrtcDestroyProgram(void **program) { return 0; }
int nvrtcCompileProgram(char *program, int count, const char **options) {
  sprintf(output, "\177ELF %s", name_);
  for (int i = 0; i < count; ++i) sprintf(output + strlen(output), " %s", options[i]);
  if (strstr(program, "crash")) abort();
  return strstr(program, "broken") ? 6 : 0;
}
int nvrtcGetProgramLogSize(void *program, size_t *size) { *size = strlen(log_) + 1; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { strcpy(log, log_); return 0; }
int nvrtcGetCUBINSize(void *program, size_t *size) { *size = strlen(output); return 0; }
int nvrtcGetCUBIN(void *program, char *cubin) { memcpy(cubin, output, strlen(output)); return 0; }
int nvrtcGetPTXSize(void *program, size_t *size) { *size = strlen(output) + 1; return 0; }
int nvrtcGetPTX(void *program, char *ptx) { strcpy(ptx, output); return 0; }
"""


def make_nvrtc(folder: Path, number: int, name: str = "libnvrtc.so.13") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", f"-DNUMBER={number}", "-", "-o", str(folder / name)]
    subprocess.run(command, input=FAKE_NVRTC.encode(), check=True)
    return folder / name


def test_nvrtc_is_found_in_the_documented_order(tmp_path: Path) -> None:
    newer, older = tmp_path / "newer", tmp_path / "older"
    make_nvrtc(newer / "nvidia" / "cu13" / "lib", 2)
    make_nvrtc(older / "nvidia" / "cuda_nvrtc" / "lib", 3, "libnvrtc.so.12")
    environ = {
        "AFC_NVRTC": str(make_nvrtc(tmp_path / "named", 1)),
        "CUDA_HOME": str(make_nvrtc(tmp_path / "home" / "lib64", 4).parent.parent),
        "CUDA_PATH": str(make_nvrtc(tmp_path / "path" / "targets" / "x86_64-linux" / "lib", 5).parents[3]),
    }
    assert find_nvrtc(str(make_nvrtc(tmp_path / "option", 0)), environ, []).version == "13.0"
    assert find_nvrtc(None, environ, [older]).version == "13.1"
    del environ["AFC_NVRTC"]
    assert find_nvrtc(None, environ, [newer, older]).version == "13.2"
    assert find_nvrtc(None, environ, [older]).version == "13.3"
    assert find_nvrtc(None, environ, []).version == "13.4"
    del environ["CUDA_HOME"]
    assert find_nvrtc(None, environ, []).archs == ("sm_80", "sm_90")
    with pytest.raises(ToolchainError, match=r"E0501.*libnvrtc"):
        find_nvrtc(str(tmp_path / "libnvrtc.so.13"), environ, [newer])


def test_choice_of_the_cuda_compiler(tmp_path: Path) -> None:
    """nvcc, else NVRTC; the one that is named, and no other in its place."""
    site = tmp_path / "site"
    library = make_nvrtc(site / "nvidia" / "cu13" / "lib", 1)
    environ = {
        "CUDA_HOME": str(make_nvcc(tmp_path / "home" / "bin", 3).parent.parent),
        "PATH": "/usr/bin:/bin",
    }
    assert find_cuda(None, environ, [site]).version == "13.9.3"
    assert find_cuda("nvrtc", environ, [site]).version == "13.1"
    assert find_cuda(None, {**environ, "AFC_CUDA_COMPILER": "nvrtc"}, [site]).name == "NVRTC"
    assert find_cuda("nvcc", {**environ, "AFC_CUDA_COMPILER": "nvrtc"}, [site]).name == "nvcc"
    assert find_cuda(None, {**environ, "AFC_NVRTC": str(library)}, []).name == "NVRTC"
    named = {**environ, "AFC_NVRTC": str(library), "AFC_NVCC": str(tmp_path / "home" / "bin" / "nvcc")}
    assert find_cuda(None, named, []).name == "nvcc"
    with pytest.raises(ToolchainError, match="AFC_NVCC"):
        find_cuda(None, {"AFC_NVCC": str(tmp_path / "gone")}, [site])
    with pytest.raises(UsageError, match=r"E0505.*`clang`"):
        find_cuda("clang", environ, [site])


def test_nvrtc_serves_where_there_is_no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afc.build.toolchain._standard_folders", list)
    make_nvrtc(tmp_path / "nvidia" / "cu13" / "lib", 1)
    assert find_cuda(None, {"PATH": "/nowhere"}, [tmp_path]).name == "NVRTC"
    monkeypatch.setattr("afc.build.toolchain.NVRTC_WORKER", ("false",))
    with pytest.raises(ToolchainError, match=r"E0501.*no CUDA compiler was found") as caught:
        find_cuda(None, {"PATH": "/nowhere"}, [])
    assert [place.split(": ")[1] for place in caught.value.searched] == [
        "nvcc",
        "libnvrtc.so.13",
        "libnvrtc.so.12",
    ]


def test_a_text_through_nvrtc(tmp_path: Path) -> None:
    library = make_nvrtc(tmp_path / "lib", 0)
    toolchain = Toolchain(CXX, find_nvrtc(str(library), {}, []))
    cache = Cache(tmp_path / "cache")
    unit = CudaUnit("k", '#include "abi/afc_abi.h"\n', Arch.parse("sm_90a"), flags=("-DA=1",))
    result = compile_cubin(unit, toolchain, cache)
    assert result.cubin.startswith(b"\x7fELF k.cu --gpu-architecture=sm_90a -std=c++17 ")
    assert result.cubin.endswith(b" -lineinfo -DA=1 -I include0 -I include1")
    assert [kernel.registers for kernel in result.kernels] == [40] and result.toolkit == 13000
    assert compile_cubin(unit, toolchain, cache).hit
    ptx = compile_cubin(CudaUnit("k", "", Arch.parse("compute_80")), toolchain, cache)
    assert b"--gpu-architecture=compute_80" in ptx.cubin and b"\0" not in ptx.cubin
    with pytest.raises(ToolchainError, match=r"E0511.*exit status 1") as caught:
        compile_cubin(CudaUnit("k", "broken", unit.arch), toolchain, cache)
    assert "COMPILATION" in caught.value.log_tail
    with pytest.raises(ToolchainError, match="E0511"):  # it ends a process of its own, not this one
        compile_cubin(CudaUnit("k", "crash", unit.arch), toolchain, cache)
    with pytest.raises(
        ToolchainError, match=r"E0504.*NVRTC 13.0 cannot compile for compute_80:sm_90"
    ) as caught:
        compile_cubin(CudaUnit("k", "", Arch.parse("compute_80:sm_90")), toolchain, cache)
    assert "--arch sm_90" in str(caught.value)


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
    later = Arch.parse("compute_80")
    assert later.ptx and not mixed.ptx and (later.capability, str(later)) == (80, "compute_80")
    for bad in ("90", "sm_", "sm_90b", "sm_86:sm_90", "compute_86:compute_90", "compute_86:"):
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
    rtc = Nvrtc((*NVRTC_WORKER, "libnvrtc.so.13"), "13.0", "NVRTC 13.0, 7 bytes", ("sm_80",))
    clang = Tool(("clang++",), "19.0.0", "clang 19.0.0")
    assert unit_key(unit, Toolchain(CXX, rtc)) == unit_key(unit, Toolchain(clang, rtc)) != key
    others = [
        unit_key(CudaUnit("k", '#include "h.h"\nint y;\n', unit.arch, (tmp_path,)), FAKE),
        unit_key(CudaUnit("k", unit.text, Arch.parse("sm_90"), (tmp_path,)), FAKE),
        unit_key(CudaUnit("k", unit.text, Arch.parse("compute_80:sm_90"), (tmp_path,)), FAKE),
        unit_key(CudaUnit("k", unit.text, unit.arch, (tmp_path,), ("-DA=1",)), FAKE),
        unit_key(unit, newer),
        unit_key(unit, Toolchain(CXX, rtc)),
        unit_key(CudaUnit("k", unit.text, Arch.parse("compute_80"), (tmp_path,)), FAKE),
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
