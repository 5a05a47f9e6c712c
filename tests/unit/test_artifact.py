# SPDX-License-Identifier: Apache-2.0
"""From hand-written entries to a module: compile, link, import, call, errors.

The launch path runs on a driver that only records what it is asked.
"""

from __future__ import annotations

import array
import ctypes
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from afc import paths
from afc.build import (
    Arch,
    Cache,
    CppUnit,
    CudaUnit,
    Image,
    ModuleContent,
    ModuleEntry,
    ModuleSpec,
    Toolchain,
    Variant,
    build_module,
    cached_module,
    compile_cpp,
    link_module,
)
from afc.build.artifact import c_string, check_destination, module_stem, stub_text
from afc.errors import ToolchainError, UsageError

CPU_TEXT = r"""
#include "host/status.h"

extern "C" int64_t affine_workspace(const afc_args *args, int backward) {
  if (args->N == 77) {
    afc_fail(AFC_UNSUPPORTED, "N: 77 is not supported");
    return -1;
  }
  return backward ? 0 : 256 * args->B;
}

// o = FACTOR * q + scalar[0] + captured[0][0], one row
extern "C" int affine_forward(const afc_args *args) {
  if (args->q.data == nullptr) return afc_fail(AFC_BAD_ARGUMENT, "q: expected a tensor, got none");
  if (args->flags & AFC_ACCUMULATE) {
    return afc_fail(AFC_UNSUPPORTED, "flags: AFC_ACCUMULATE is not supported");
  }
  if (args->threads == 99) throw 1;
  if (args->threads == 98) return 5;
  const float *q = static_cast<const float *>(args->q.data);
  float *o = static_cast<float *>(args->o.data);
  const float *captured = static_cast<const float *>(args->captured[0].data);
  const float shift = captured ? *captured : 0.0f;
  for (int64_t m = 0; m < args->M; ++m) {
    const float scaled = FACTOR * q[m * args->q.stride[2]];
    o[m * args->o.stride[2]] = scaled + static_cast<float>(args->scalar[0].f) + shift;
  }
  return AFC_OK;
}
"""

LAUNCH_TEXT = r"""
#include "host/driver.h"
#include "host/status.h"

extern "C" const afc_gpu_images triple_images;
static const afc_gpu_kernel kernels[] = {{"triple", 60000, 64, 1}};  // in the second part of an image
static afc_gpu_module gpu = {&triple_images, kernels, 1};

extern "C" int triple_forward(const afc_args *args) {
  return afc_gpu_launch(&gpu, 0, static_cast<unsigned>((args->M + 63) / 64), 2, 3, args, 1);
}
"""

CUDA_TEXT = r"""
#include "abi/afc_abi.h"
extern "C" __global__ void triple(const __grid_constant__ afc_args args) {
  const int m = blockIdx.x * 64 + threadIdx.x;
  if (m < args.M) ((float *)args.o.data)[m] = 3.0f * ((const float *)args.q.data)[m];
}
"""

AFFINE = ModuleEntry(
    "affine", json.dumps({"target": "cpu"}), "affine_forward", None, "affine_workspace", isa="x86-64-v3"
)
TRIPLE = ModuleEntry("triple", json.dumps({"target": "sm_80"}), "triple_forward")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("a cache ü"))


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    return Toolchain.find(cuda=False)


def cpu_spec(factor: float) -> ModuleSpec:
    text = CPU_TEXT.replace("FACTOR", f"{factor}f")
    return ModuleSpec((AFFINE,), json.dumps({"source": f'"é??/{factor}'}), (CppUnit("affine", text),))


def load(path: Path) -> ModuleType:
    """Imports a module file under its own name, without afc.runtime getting at it."""
    name = path.name.split(".")[0]
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def plain_runtime(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    """Replaces afc.runtime by one that only notes the modules attached to it."""
    attached: list[ModuleType] = []
    runtime = ModuleType("afc.runtime")
    runtime.__dict__["attach"] = attached.append
    monkeypatch.setitem(sys.modules, "afc.runtime", runtime)
    return attached


@pytest.fixture(scope="session")
def two_kernels(
    tmp_path_factory: pytest.TempPathFactory, cache: Cache, toolchain: Toolchain
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("modules")
    files = []
    for name, factor in (("one", 2.0), ("two", 5.0)):
        (folder / name).mkdir()
        files.append(folder / name / "kernel.so")
        build_module(cpu_spec(factor), files[-1], toolchain, cache)
    return files[0], files[1]


class Call:
    """Arguments of one call on rows of float32."""

    def __init__(self, values: Sequence[float] = (1.0, 2.0, 3.0)) -> None:
        self.q = array.array("f", values)
        self.o = array.array("f", [0.0] * len(values))
        self.raw = ctypes.create_string_buffer(4096)
        self.workspace = (ctypes.addressof(self.raw) + 255) // 256 * 256

    def __call__(self, module: Any, **changes: Any) -> list[float]:
        tensors = [(t.buffer_info()[0], 0, 0, 1, 1) for t in (self.q, self.o)]
        rows = len(self.q)
        arguments = {
            "entry": 0,
            "backward": False,
            "flags": 0,
            "device": -1,
            "sizes": (1, 1, 1, rows, 3),
            "tensors": (tensors[0], None, None, tensors[1], *([None] * 6)),
            "captured": (),
            "grad_captured": (),
            "scalars": (0.5,),
            "q_origin": 0,
            "k_origin": 0,
            "workspace_ptr": self.workspace,
            "workspace_bytes": 256,
            "stream": 0,
            "threads": 1,
        }
        assert set(changes) <= set(arguments)
        module._afc_run(*{**arguments, **changes}.values())
        return list(self.o)


# ---- modules in Python ----


def test_two_modules_of_one_name_give_their_own_kernels(
    two_kernels: tuple[Path, Path], plain_runtime: list[ModuleType]
) -> None:
    one, two = map(load, two_kernels)
    assert one.__name__ == two.__name__ == "kernel" and one is not two
    assert Call()(one) == [2.5, 4.5, 6.5] and Call()(two) == [5.5, 10.5, 15.5]
    assert json.loads(one._afc_metadata) == {"source": '"é??/2.0'} != json.loads(two._afc_metadata)
    assert one._afc_entries == ['{"target": "cpu"}'] and one._afc_abi_version == 3
    assert plain_runtime == [one, two]


def test_workspace(two_kernels: tuple[Path, Path]) -> None:
    module = load(two_kernels[0])
    assert module._afc_workspace(0, False, -1, (3, 1, 1, 5, 5), 0, 0, 1, ()) == 768
    assert module._afc_workspace(0, True, -1, (3, 1, 1, 5, 5), 0, 0, 1, ()) == 0
    with pytest.raises(NotImplementedError, match="affine: N: 77 is not supported"):
        module._afc_workspace(0, False, -1, (3, 1, 1, 5, 77), 0, 0, 1, ())


def test_captured_tensor_and_scalars(two_kernels: tuple[Path, Path]) -> None:
    shift = array.array("f", [100.0])
    captured = ((shift.buffer_info()[0], 5, (1,), (1,)), None)
    assert Call([1.0])(load(two_kernels[0]), captured=captured, scalars=(0.25, 7)) == [102.25]


NONE = (None,) * 10
BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tensors": NONE}, ValueError, "affine: q: expected a tensor, got none"),
    ({"flags": 2}, NotImplementedError, "affine: flags: AFC_ACCUMULATE is not supported"),
    ({"flags": 64}, NotImplementedError, "affine: flags: .* 0x40"),
    ({"backward": True}, NotImplementedError, "built without its backward pass"),
    ({"threads": 99}, RuntimeError, "affine: unexpected C\\+\\+ exception"),
    ({"threads": 98}, RuntimeError, "affine: failed with status 5"),
    ({"entry": 1}, ValueError, "entry: expected an index below 1, got 1"),
    ({"entry": "0"}, TypeError, "entry: expected an int, got str"),
    ({"device": 0.0}, TypeError, "device: expected an int, got float"),
    ({"device": 2**40}, ValueError, "device: 1099511627776 does not fit in 32 bits"),
    ({"sizes": (1, 1, 1, 3)}, ValueError, "sizes: expected 5 to 5 items, got 4"),
    ({"sizes": (1, 1, 1, -1, 3)}, ValueError, "M: expected a size in 0..2147483647, got -1"),
    ({"sizes": (1, 3, 2, 3, 3)}, ValueError, "Hq: expected a multiple .* Hq = 3 with Hk = 2"),
    ({"sizes": (1, 3, 0, 3, 3)}, ValueError, "Hq: expected a multiple .* Hq = 3 with Hk = 0"),
    ({"q_origin": 2**30 - 3}, ValueError, "q_origin: expected positions below"),
    ({"k_origin": -(2**30)}, ValueError, "k_origin: expected positions below"),
    ({"tensors": [None] * 10}, TypeError, "tensors: expected a tuple, got list"),
    (
        {"tensors": (1, *NONE[1:])},
        TypeError,
        r"tensors\[0\]: expected \(pointer, s0, s1, s2, s3\) or None, got int",
    ),
    ({"captured": (None,) * 9}, ValueError, "captured: expected 0 to 8 items, got 9"),
    ({"captured": ((0, 7, (), ()),)}, ValueError, r"captured\[0\]: expected a dtype code in 0..6, got 7"),
    ({"captured": ((0, 5, (1,), ()),)}, ValueError, "captured: expected 1 to 1 items, got 0"),
    ({"scalars": ("x",)}, TypeError, "scalars: expected an int, got str"),
    ({"workspace_bytes": 255}, ValueError, "workspace: expected at least 256 bytes, got 255"),
    ({"workspace_ptr": 0}, ValueError, "workspace: expected at least 256 bytes, got 0"),
    ({"workspace_ptr": 264}, ValueError, "workspace: expected an address aligned to 256 bytes"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), BAD_CALLS)
def test_bad_calls(
    two_kernels: tuple[Path, Path], changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    call = Call()
    with pytest.raises(kind, match=text):
        call(load(two_kernels[0]), **changes)
    assert list(call.o) == [0.0, 0.0, 0.0]


def test_number_of_arguments(two_kernels: tuple[Path, Path]) -> None:
    with pytest.raises(TypeError, match="_afc_run: expected 15 positional arguments, got 2"):
        load(two_kernels[0])._afc_run(0, False)


def run_python(script: str, *arguments: str | Path, environ: dict[str, str] | None = None) -> str:
    """Output of a script in a fresh interpreter that cannot see the afc package."""
    command = [sys.executable, "-I", "-c", script, *map(str, arguments)]
    variables = {**os.environ, **(environ or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=variables, cwd="/", check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BARE_SCRIPT = """
import sys, os
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.modules["afc"] = None  # importing it fails, as where it is not installed
import kernel
bytes = kernel._afc_workspace(0, False, -1, (1, 1, 1, 1, 1), 0, 0, 1, ())
print(len(kernel._afc_entries), bytes, "torch" in sys.modules)
for name in ("affine", "other"):
    try:
        getattr(kernel, name)
    except AttributeError as error:
        print(error)
"""


def test_module_works_raw_without_the_package(two_kernels: tuple[Path, Path]) -> None:
    first, affine, other = run_python(BARE_SCRIPT, two_kernels[0]).splitlines()
    assert first == "1 256 False"
    assert affine.startswith(
        "module 'kernel' holds the attention 'affine', but its Python callable comes from the `afc`"
    )
    assert other == "module 'kernel' has no attribute 'other'"


def test_symbols_and_libraries(two_kernels: tuple[Path, Path]) -> None:
    def lines(*command: str) -> list[str]:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    symbols = {line.split()[-1] for line in lines("nm", "-D", "--defined-only", str(two_kernels[0]))}
    functions = {f"kernel_{name}" for name in ("module", "last_error", "affine_forward", "affine_workspace")}
    assert symbols == {"PyInit_kernel", "afc_abi_version", "afc_describe", "afc_last_error"} | functions
    needed = " ".join(line for line in lines("readelf", "-d", str(two_kernels[0])) if "NEEDED" in line)
    assert not any(name in needed for name in ("torch", "python", "cudart", "libcuda"))
    (stack,) = [line for line in lines("readelf", "-lW", str(two_kernels[0])) if "GNU_STACK" in line]
    assert "RWE" not in stack
    assert str(paths.runtime()).encode() not in two_kernels[0].read_bytes()


# ---- building ----


def test_builds_are_reproducible_and_cached(tmp_path: Path, cache: Cache, toolchain: Toolchain) -> None:
    target = tmp_path / "kernel.so"
    build_module(cpu_spec(2.0), target, toolchain, cache)
    first = target.read_bytes()
    report = build_module(cpu_spec(2.0), target, toolchain, cache)
    assert target.read_bytes() == first and report.hits == report.units == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.so"]
    path = cached_module("kernel", cpu_spec(2.0), toolchain, cache)
    assert path.read_bytes() == first and path == cached_module("kernel", cpu_spec(2.0), toolchain, cache)
    assert path != cached_module("kernel", cpu_spec(3.0), toolchain, cache)
    assert path != cached_module("other", cpu_spec(2.0), toolchain, cache)


@pytest.mark.parametrize(
    "name", ["my-kernel.so", "2fast.so", "class.so", "kernel.dll", "kernel", "a.b.so", ".so", "kërnel.so"]
)
def test_bad_output_names(name: str) -> None:
    with pytest.raises(UsageError, match="E0520") as caught:
        module_stem(Path(name))
    assert caught.value.exit_code == 2
    if name == "my-kernel.so":
        assert "my_kernel.so" in str(caught.value)


def test_good_output_names() -> None:
    assert module_stem(Path("a b/kernel_2.so")) == "kernel_2"
    assert module_stem(Path("kernel" + importlib.machinery.EXTENSION_SUFFIXES[0])) == "kernel"


def test_bad_output_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"E0521.*no folder"):
        check_destination(tmp_path / "none" / "kernel.so")
    (tmp_path / "kernel.so").mkdir()
    with pytest.raises(UsageError, match=r"E0521.*is a folder"):
        check_destination(tmp_path / "kernel.so")


def test_undefined_function_is_found_when_linking(cache: Cache, toolchain: Toolchain) -> None:
    content = ModuleContent((ModuleEntry("f", "{}", "nobody_defines_this"),), "{}")
    with pytest.raises(ToolchainError, match=r"E0513.*nothing defines nobody_defines_this"):
        link_module("kernel", content, toolchain, cache)


def test_entries_are_checked() -> None:
    with pytest.raises(ValueError, match="no C symbol"):
        ModuleEntry("f", "{}", "not a symbol")
    with pytest.raises(ValueError):
        ModuleEntry("f", "{not json", "f")


def test_c_string() -> None:
    assert c_string('a"\\\n1é?') == '"a\\"\\\\\\0121\\303\\251\\077"'
    assert [len(line) for line in c_string("x" * 150).split("\n    ")] == [102, 52]


def test_stub_text_has_a_row_per_image_and_entry() -> None:
    images = (Image(Arch.parse("sm_86"), b"abc", 13000), Image(Arch.parse("compute_86:sm_90"), b"d"))
    text = stub_text("kernel", ModuleContent((AFFINE, TRIPLE), "{}", (), {"triple_images": images}))
    assert "{86, 86, 0, false, 13000, triple_images_data_0, 3},  // sm_86" in text
    assert "{90, 86, 0, false, 0, triple_images_data_1, 1},  // compute_86:sm_90" in text
    assert "workspace_1, forward_1, nullptr}," in text and "PyInit_kernel" in text
    assert "PyInit" not in stub_text("kernel", ModuleContent((AFFINE,), "{}"), python=False)


C_PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include "abi/afc_abi.h"
int main() {
  const afc_module *module = afc_describe();
  float q = 3, o = 0;
  char workspace[512] __attribute__((aligned(256)));
  afc_args args;
  memset(&args, 0, sizeof(args));
  args.version = AFC_ABI_VERSION; args.bytes = sizeof(args); args.device = -1;
  args.B = args.Hq = args.Hk = args.M = args.N = 1;
  args.q.data = &q; args.o.data = &o; args.workspace = workspace; args.workspace_bytes = sizeof(workspace);
  int status = module->entries[0].forward(&args);
  printf("%s %d %g [%s]\n", module->entries[0].name, status, o, afc_last_error());
  args.num_splits = 2;
  status = module->entries[0].forward(&args);
  printf("%d %s\n", status, afc_last_error());
  args.num_splits = 0; args.bytes = 8;
  status = module->entries[0].forward(&args);
  printf("%d %s\n", status, afc_last_error());
  return afc_abi_version() == AFC_ABI_VERSION ? 0 : 1;
}
"""


def test_use_from_c_without_python(tmp_path: Path, cache: Cache, toolchain: Toolchain) -> None:
    build_module(cpu_spec(2.0), tmp_path / "kernel.so", toolchain, cache, python=False)
    (tmp_path / "main.c").write_text(C_PROGRAM)
    command = ("gcc", "-I", str(paths.runtime()), "main.c", "./kernel.so", "-Wl,-rpath,$ORIGIN", "-o", "main")
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run(["./main"], cwd=tmp_path, capture_output=True, text=True, check=True)
    good, reserved, size = done.stdout.splitlines()
    assert good == "affine 0 6 []"
    assert reserved == "1 num_splits: not supported by this module, must be zero"
    assert size.startswith("1 args: expected call interface 3 of ") and size.endswith(
        "got version 3 of 8 bytes"
    )


# ---- launching ----

# Records what the launch code asks of the driver, one line per call. AFC_FAKE_ARCHS lists the devices.
DRIVER_TEXT = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "host/driver_api.h"
using namespace afc_driver;
#define API extern "C" __attribute__((visibility("default"))) Result
static thread_local long stack[8];
static thread_local int depth;
static pid_t owner;
static char *names[64];
static long count;
static void note(const char *text, long a, long b) {
  printf("%s %ld %ld\n", text, a, b);
  fflush(stdout);
}
static int arch(int device) {
  const char *list = getenv("AFC_FAKE_ARCHS");
  for (int i = 0; i < device && list; ++i) {
    list = strchr(list, ',');
    if (list) ++list;
  }
  return list && *list ? atoi(list) : -1;
}
API cuInit(unsigned) {
  if (owner != 0 && owner != getpid()) return 3;
  owner = getpid();
  note("init", 0, 0);
  return arch(0) < 0 ? 100 : 0;
}
static int version() {
  const char *text = getenv("AFC_FAKE_VERSION");
  return text ? atoi(text) : 13000;
}
API cuDriverGetVersion(int *out) {
  *out = version();
  return 0;
}
API cuGetErrorName(Result, const char **name) {
  *name = "CUDA_ERROR_FAKE";
  return 0;
}
API cuGetErrorString(Result, const char **text) {
  *text = "recorded";
  return 0;
}
API cuDeviceGet(Device *out, int ordinal) {
  *out = ordinal;
  return arch(ordinal) < 0 ? 101 : 0;
}
API cuDeviceGetCount(int *out) {
  *out = 0;
  while (arch(*out) >= 0) ++*out;
  return 0;
}
API cuDeviceGetAttribute(int *out, int attribute, Device device) {
  switch (attribute) {
    case kCapabilityMajor:
      *out = arch(device) / 10;
      return 0;
    case kCapabilityMinor:
      *out = arch(device) % 10;
      return 0;
    case kMultiprocessorCount:
      *out = 132;
      return 0;
    case kSharedBytesOptin:
      *out = arch(device) == 87 ? 48000 : arch(device) == 80 ? 166912 : arch(device) == 90 ? 232448 : 101376;
      return 0;
    default:
      return 1;
  }
}
API cuDeviceGetName(char *name, int bytes, Device device) {
  snprintf(name, bytes, "Fake %d", device);
  return 0;
}
API cuDevicePrimaryCtxRetain(Context *out, Device device) {
  note("retain", device, 0);
  *out = (Context)(long)(device + 1);
  return 0;
}
API cuCtxPushCurrent_v2(Context context) {
  stack[++depth] = (long)context;
  return 0;
}
API cuCtxPopCurrent_v2(Context *out) {
  *out = (Context)stack[depth--];
  return 0;
}
API cuCtxGetCurrent(Context *out) {
  *out = (Context)stack[depth];
  return 0;
}
API cuCtxGetDevice(Device *out) {
  *out = (int)stack[depth] - 1;
  return stack[depth] ? 0 : 201;
}
API cuThreadExchangeStreamCaptureMode(int *mode) {
  static thread_local int now;
  int old = now;
  now = *mode;
  *mode = old;
  note("capture", now, 0);
  return 0;
}
API cuLibraryLoadData(Library *out, const void *code, int *, void **, unsigned, int *, void **, unsigned) {
  note((const char *)code, 0, 0);
  const bool ptx = strncmp((const char *)code, "ptx", 3) == 0;
  if (version() < 13000) return ptx ? kUnsupportedPtxVersion : kNoBinaryForGpu;
  names[++count] = (char *)code;
  *out = (Library)count;
  return 0;
}
API cuLibraryGetKernel(Kernel *out, Library library, const char *name) {
  *out = (Kernel)library;
  return strcmp(name, "triple") || strstr(names[(long)library], "other") ? 500 : 0;
}
API cuKernelSetAttribute(int attribute, int value, Kernel, Device device) {
  note("shared", value, device);
  return attribute == kMaxDynamicSharedBytes ? 0 : 1;
}
API cuKernelGetFunction(Function *out, Kernel kernel) {
  *out = (Function)kernel;
  return 0;
}
API cuLaunchKernelEx(const LaunchConfig *config, Function function, void **parameters, void **) {
  printf("launch %s device %ld grid %u %u %u block %u shared %u stream %ld early %u args %u\n",
         names[(long)function], stack[depth] - 1, config->grid_x, config->grid_y, config->grid_z,
         config->block_x, config->shared_bytes, (long)config->stream, config->attribute_count,
         *(unsigned *)parameters[0]);
  fflush(stdout);
  return config->grid_x > 1000 ? 700 : 0;
}
"""

LAUNCH_SCRIPT = """
import sys, os, threading
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.modules["afc"] = None
import kernel
def run(device=0, rows=100, stream=7):
    try:
        sizes, tensors = (1, 1, 1, rows, 1), (None,) * 10
        kernel._afc_run(0, False, 0, device, sizes, tensors, (), (), (), 0, 0, 0, 0, stream, 1)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
exec(sys.argv[2])
"""

Launch = Callable[..., list[str]]


@pytest.fixture(scope="session")
def fake_images() -> dict[str, tuple[Image, ...]]:
    archs = ("sm_80", "sm_86", "compute_86:sm_90", "sm_90", "sm_90a", "sm_120")
    cubins = [Image(Arch.parse(name), f"cubin-{name}\0".encode(), 13000) for name in archs]
    ptx = Image(Arch.parse("compute_86"), b"ptx-86", 13000)
    return {"triple_images": (*cubins, ptx)}


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory, toolchain: Toolchain) -> Path:
    """The folder of the recording driver."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER_TEXT)
    compiler = [*toolchain.cxx.command, "-std=c++17", "-shared", "-fPIC", "-I", str(paths.runtime())]
    subprocess.run([*compiler, "driver.cpp", "-o", "libcuda.so.1"], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="session")
def launch(
    tmp_path_factory: pytest.TempPathFactory,
    cache: Cache,
    toolchain: Toolchain,
    driver: Path,
    fake_images: dict[str, Any],
) -> Launch:
    """Runs a script on a module whose images are only names, with the recording driver; returns its lines."""
    folder = tmp_path_factory.mktemp("launch")
    launcher = compile_cpp(CppUnit("launch", LAUNCH_TEXT, isa="generic"), toolchain, cache)
    content = ModuleContent((TRIPLE,), "{}", (launcher.data,), fake_images)
    (folder / "kernel.so").write_bytes(link_module("kernel", content, toolchain, cache))

    def run(archs: str, script: str, version: str = "13000") -> list[str]:
        environ = {"LD_LIBRARY_PATH": str(driver), "AFC_FAKE_ARCHS": archs, "AFC_FAKE_VERSION": version}
        return run_python(LAUNCH_SCRIPT, folder / "kernel.so", script, environ=environ).splitlines()

    return run


def test_first_launch_prepares_and_later_ones_only_launch(launch: Launch) -> None:
    line = "launch cubin-sm_90a device 0 grid 2 2 3 block 64 shared 60000 stream 7 early 1 args 3"
    prepare = ["init 0 0", "retain 0 0", "capture 2 0", "cubin-sm_90a 0 0", "shared 60000 0", "capture 0 0"]
    assert launch("90", "run(); run()") == [*prepare, line, line]
    assert launch("90", "run(rows=0)") == []  # an empty grid does not even start the driver


@pytest.mark.parametrize(
    ("device", "image", "early"),
    [
        ("80", "cubin-sm_80", 0),
        ("86", "cubin-sm_86", 0),
        ("89", "cubin-sm_86", 0),
        ("90", "cubin-sm_90a", 1),
        ("121", "cubin-sm_120", 1),
        ("100", "ptx-86", 0),
    ],
)
def test_choice_of_image(launch: Launch, device: str, image: str, early: int) -> None:
    assert launch(device, "run()")[-1].startswith(f"launch {image} device 0 ")
    assert f"early {early}" in launch(device, "run()")[-1]


def test_devices_share_an_image_and_each_has_its_context(launch: Launch) -> None:
    lines = launch("86,89,80", "run(1); run(0); run(2); run(1)")
    assert [line.split(" grid")[0] for line in lines if line.startswith("launch")] == [
        "launch cubin-sm_86 device 1",
        "launch cubin-sm_86 device 0",
        "launch cubin-sm_80 device 2",
        "launch cubin-sm_86 device 1",
    ]
    assert [line for line in lines if line.startswith("cubin")] == ["cubin-sm_86 0 0", "cubin-sm_80 0 0"]
    assert [line for line in lines if line.startswith("shared")] == [
        "shared 60000 1",
        "shared 60000 0",
        "shared 60000 2",
    ]


def test_launch_errors(launch: Launch) -> None:
    (error,) = [line for line in launch("75", "run()") if "Error" in line]
    assert error == (
        "RuntimeError triple: no kernel for this device: Fake 0 is sm_75, the module holds sm_80, sm_86, "
        "compute_86:sm_90, sm_90, sm_90a, sm_120, compute_86; build it with 'afc compile --arch sm_75'"
    )
    (error,) = [line for line in launch("87", "run()") if "Error" in line]
    assert "needs 60000 bytes of shared memory" in error and "at most 48000" in error
    assert launch("90", "run(3)")[-1] == "ValueError triple: device: expected a CUDA device below 1, got 3"
    assert launch("90", "run(-1)")[-1] == "ValueError triple: device: expected a CUDA device in 0..63, got -1"
    error = launch("90", "run(rows=64 * 2000)")[-1]
    assert "launch of triple with grid (2000, 2, 3), 64 threads" in error and "CUDA_ERROR_FAKE" in error
    assert "driver does not start: recorded (100" in launch("", "run()")[-1]


@pytest.mark.parametrize(
    ("device", "image", "otherwise"),
    [
        ("86", "sm_86", "with an older CUDA compiler"),
        ("100", "compute_86", "for this device: 'afc compile --arch sm_100'"),
    ],
)
def test_a_driver_that_is_too_old_for_the_code(
    launch: Launch, device: str, image: str, otherwise: str
) -> None:
    error = launch(device, "run(); run()", "12040")[-1]
    assert error == (
        "RuntimeError triple: the driver is too old for this module: it supports CUDA 12.4, the code for "
        f"{image} was compiled by CUDA 13.0; update the driver, or build the module {otherwise}"
    )


def test_fork_before_the_first_launch_works_and_after_it_is_an_error(launch: Launch) -> None:
    script = "pid = os.fork(); run(); pid and os.waitpid(pid, 0)"
    assert sum(line.startswith("launch") for line in launch("90", script)) == 2
    script = "run(); pid = os.fork(); pid or run(); pid and os.waitpid(pid, 0)"
    lines = launch("90", script)
    assert sum(line.startswith("launch") for line in lines) == 1
    assert "RuntimeError triple: this process was forked from one that had launched GPU kernels" in lines[-1]


def test_threads_prepare_once(launch: Launch) -> None:
    script = """
threads = [threading.Thread(target=lambda: [run() for _ in range(20)]) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
"""
    lines = launch("90", script)
    assert sum(line.startswith("launch cubin-sm_90a") for line in lines) == 160
    assert (
        sum(line.startswith("cubin") for line in lines) == sum(line.startswith("init") for line in lines) == 1
    )


# ---- classes of GPUs ----

CLASSES = {"wide": 166400, "small": 100864}  # shared memory of a block


def variant(name: str, backward: bool = False) -> Variant:
    back = f"triple_{name}_backward" if backward else None
    return Variant(
        f"triple_{name}_forward", back, f"triple_{name}_workspace", f"triple_{name}_images", CLASSES[name]
    )


@pytest.fixture(scope="session")
def of_classes(
    tmp_path_factory: pytest.TempPathFactory, cache: Cache, toolchain: Toolchain, driver: Path
) -> Callable[[str, str, str, str], list[str]]:
    """Runs a script on a module with two classes; the architectures of each, and those of the devices."""
    made: dict[tuple[str, str], Path] = {}

    def module_for(wide: str, small: str) -> Path:
        objects, images = [], {}
        for name, archs in (("wide", wide), ("small", small)):
            text = LAUNCH_TEXT.replace("triple_", f"triple_{name}_").replace(
                "60000", str(CLASSES[name] - 100)
            )
            text += f'extern "C" int64_t triple_{name}_workspace(const afc_args *, int) {{ return 0; }}\n'
            objects.append(compile_cpp(CppUnit(name, text, isa="generic"), toolchain, cache).data)
            images[f"triple_{name}_images"] = tuple(
                Image(arch, f"{'ptx' if arch.ptx else name}{part}-{arch}\0".encode(), 13000)
                for arch in map(Arch.parse, archs.split())
                for part in ("-other", "")  # the kernel is in the second part of each
            )
        entry = replace(TRIPLE, workspace="triple_workspace", variants=(variant("wide"), variant("small")))
        folder = tmp_path_factory.mktemp("classes")
        content = ModuleContent((entry,), "{}", tuple(objects), images)
        (folder / "kernel.so").write_bytes(link_module("kernel", content, toolchain, cache))
        return folder / "kernel.so"

    def run(wide: str, small: str, devices: str, script: str) -> list[str]:
        if (wide, small) not in made:
            made[wide, small] = module_for(wide, small)
        environ = {"LD_LIBRARY_PATH": str(driver), "AFC_FAKE_ARCHS": devices}
        return run_python(LAUNCH_SCRIPT, made[wide, small], script, environ=environ).splitlines()

    return run


@pytest.mark.parametrize(
    ("wide", "small", "device", "image"),
    [
        ("sm_80 sm_90", "sm_86 sm_120 compute_80", "80", "wide-sm_80"),
        ("sm_80 sm_90", "sm_86 sm_120 compute_80", "90", "wide-sm_90"),
        ("sm_80 sm_90", "sm_86 sm_120 compute_80", "89", "small-sm_86"),
        ("sm_80 sm_90", "sm_86 sm_120 compute_80", "121", "small-sm_120"),
        ("sm_80 sm_90", "sm_86 sm_120 compute_80", "100", "ptx-compute_80"),
        ("sm_80", "compute_80", "86", "ptx-compute_80"),  # the machine code would need more shared memory
        ("sm_80", "sm_120 compute_80", "90", "ptx-compute_80"),
        ("sm_90", "compute_86:sm_90", "90", "wide-sm_90"),
        ("sm_80", "compute_86:sm_90", "90", "small-compute_86:sm_90"),
    ],
)
def test_choice_of_class(of_classes: Any, wide: str, small: str, device: str, image: str) -> None:
    lines = of_classes(wide, small, device, "run(); run()")
    assert [line.split(" device")[0] for line in lines if "launch" in line] == [f"launch {image}"] * 2
    assert sum(line.startswith("retain") for line in lines) == 1


def test_devices_of_two_classes_in_one_process(of_classes: Any) -> None:
    lines = of_classes("sm_80 sm_90", "sm_86", "89,90,80", "run(0); run(1); run(2); run(0)")
    assert [line.split(" grid")[0] for line in lines if line.startswith("launch")] == [
        "launch small-sm_86 device 0",
        "launch wide-sm_90 device 1",
        "launch wide-sm_80 device 2",
        "launch small-sm_86 device 0",
    ]


def test_devices_of_no_class(of_classes: Any) -> None:
    (error,) = [line for line in of_classes("sm_80 sm_90", "sm_120", "75", "run()") if "Error" in line]
    assert error == (
        "RuntimeError triple: no kernel for this device: Fake 0 is sm_75, the module holds sm_80, sm_90, "
        "sm_120; build it with 'afc compile --arch sm_75'"
    )
    (error,) = [line for line in of_classes("sm_80 sm_90", "sm_120", "86", "run()") if "Error" in line]
    assert "needs 166300 bytes of shared memory" in error and error.endswith("'afc compile --arch sm_86'")
    assert of_classes("sm_80 sm_90", "sm_120", "90", "run(3)")[-1] == (
        "ValueError triple: device: expected a CUDA device below 1, got 3"
    )


def test_a_single_class_needs_no_device_to_be_found() -> None:
    entry = replace(TRIPLE, workspace="triple_workspace", variants=(variant("small"),))
    text = stub_text("kernel", ModuleContent((entry,), "{}"))
    assert "  return triple_small_forward(args);" in text and "afc_gpu_choose" not in text


def find_nvcc_or_none() -> Toolchain | None:
    try:
        return Toolchain.find(cuda=True)
    except ToolchainError:
        return None


CUDA = find_nvcc_or_none()


@pytest.mark.skipif(CUDA is None, reason="needs the CUDA compiler")
def test_real_cubins_in_a_module(tmp_path: Path, cache: Cache) -> None:
    assert CUDA is not None
    units = tuple(CudaUnit("triple", CUDA_TEXT, Arch.parse(name)) for name in ("sm_86", "sm_90a"))
    spec = ModuleSpec(
        (TRIPLE,), "{}", (CppUnit("launch", LAUNCH_TEXT, isa="generic"),), {"triple_images": units}
    )
    report = build_module(spec, tmp_path / "kernel.so", CUDA, cache)
    data = (tmp_path / "kernel.so").read_bytes()
    assert len(report.cubins) == 2 and all(cubin.cubin in data for cubin in report.cubins)


def driver_is_there() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(driver_is_there(), reason="needs a machine without a CUDA driver")
def test_launch_without_a_driver(
    tmp_path: Path, cache: Cache, toolchain: Toolchain, fake_images: dict[str, Any]
) -> None:
    launcher = compile_cpp(CppUnit("launch", LAUNCH_TEXT, isa="generic"), toolchain, cache)
    content = ModuleContent((TRIPLE,), "{}", (launcher.data,), fake_images)
    (tmp_path / "kernel.so").write_bytes(link_module("kernel", content, toolchain, cache))
    first, second = run_python(LAUNCH_SCRIPT, tmp_path / "kernel.so", "run(); run()").splitlines()
    assert first == second
    assert first.startswith("RuntimeError triple: no CUDA driver: libcuda.so.1 cannot be opened")


LAYOUT_TEXT = r"""
#include <stddef.h>
#include <cuda.h>
#include "host/driver_api.h"
#define SAME(ours, theirs) static_assert((long long)(ours) == (long long)(theirs), #theirs)
using namespace afc_driver;
SAME(kSuccess, CUDA_SUCCESS);
SAME(kInvalidImage, CUDA_ERROR_INVALID_IMAGE);
SAME(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(kInvalidPtx, CUDA_ERROR_INVALID_PTX);
SAME(kUnsupportedPtxVersion, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
SAME(kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(kCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(kCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(kSharedBytesOptin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(kMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(kProgrammaticStreamSerialization, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(sizeof(LaunchAttribute), sizeof(CUlaunchAttribute));
SAME(alignof(LaunchAttribute), alignof(CUlaunchAttribute));
SAME(offsetof(LaunchAttribute, value), offsetof(CUlaunchAttribute, value));
SAME(sizeof(LaunchConfig), sizeof(CUlaunchConfig));
SAME(offsetof(LaunchConfig, block_x), offsetof(CUlaunchConfig, blockDimX));
SAME(offsetof(LaunchConfig, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
SAME(offsetof(LaunchConfig, stream), offsetof(CUlaunchConfig, hStream));
SAME(offsetof(LaunchConfig, attributes), offsetof(CUlaunchConfig, attrs));
SAME(offsetof(LaunchConfig, attribute_count), offsetof(CUlaunchConfig, numAttrs));
SAME(sizeof(Device), sizeof(CUdevice));
"""


def cuda_header_folder() -> Path | None:
    candidates = [Path("/usr/local/cuda/include"), *sorted(Path("/usr/local").glob("cuda-*/include"))]
    return next((folder for folder in candidates if (folder / "cuda.h").exists()), None)


@pytest.mark.skipif(cuda_header_folder() is None, reason="needs cuda.h")
def test_driver_declarations_agree_with_cuda_h(cache: Cache, toolchain: Toolchain) -> None:
    folder = cuda_header_folder()
    assert folder is not None
    compile_cpp(CppUnit("layout", LAYOUT_TEXT, isa="generic", include_dirs=(folder,)), toolchain, cache)
