# SPDX-License-Identifier: Apache-2.0
"""CuPy: arrays in and out without torch, CuPy's stream and allocator, and bare cubins in RawModule."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cp = pytest.importorskip("cupy")

import afc  # noqa: E402
from afc import api, paths  # noqa: E402
from afc.frontend import check_file  # noqa: E402
from afc.options import Options  # noqa: E402
from tests.gpu.test_calls import ARCH  # noqa: E402
from tests.support.checks import EXAMPLES  # noqa: E402


def module(name: str = "llama", **options: Any) -> Any:
    return afc.load(EXAMPLES / f"{name}.attn", D=64, dtype="float16", backend="cuda", arch=ARCH, **options)


def sample(m: int = 100, n: int = 130) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(0)
    shapes = ((2, 4, m, 64), (2, 2, n, 64), (2, 2, n, 64))
    return tuple(cp.asarray(generator.standard_normal(shape).astype(np.float16)) for shape in shapes)  # type: ignore[return-value]


def dense(q: Any, k: Any, v: Any, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE in double precision."""
    q, k, v = (cp.asnumpy(x).astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) / 8.0
    if causal:
        s = np.where(np.arange(k.shape[2]) <= np.arange(q.shape[2])[:, None], s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return (p / total) @ v, (top + np.log(total))[..., 0]


def close(got: Any, want: np.ndarray) -> None:
    """Within two roundings to float16 of the largest element."""
    assert np.abs(cp.asnumpy(got).astype(np.float64) - want).max() <= 2 * 2**-11 * np.abs(want).max()


def test_arrays_in_and_out() -> None:
    q, k, v = sample()
    o, lse = module("causal").causal_lm(q, k, v, return_lse=True)
    want, want_lse = dense(q, k, v, causal=True)
    assert isinstance(o, cp.ndarray) and o.dtype == q.dtype and o.device == q.device
    close(o, want)
    assert lse.dtype == np.float32 and np.abs(cp.asnumpy(lse) - want_lse).max() < 1e-4


def test_layouts_and_rotations_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")
    kernel = module()
    for change in (lambda x: x, lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2), lambda x: x[:, :, 1:]):
        arrays = [change(x) for x in sample()]
        o = kernel.llama(*arrays, q_origin=3)
        want = kernel.llama(*(torch.from_dlpack(x) for x in arrays), q_origin=3)
        assert (cp.asnumpy(o) == want.cpu().numpy()).all()
        assert [s // 2 for s in o.strides] == list(want.stride())


def test_rows_that_are_not_aligned_are_copied() -> None:
    q, k, v = sample()
    wide = cp.zeros((*q.shape[:3], 65), np.float16)
    wide[..., 1:] = q
    assert (
        module("full").full_attention(wide[..., 1:], k, v) == module("full").full_attention(q, k, v)
    ).all()


def test_the_current_stream_and_the_allocator_are_cupys() -> None:
    kernel, (q, k, v) = module("causal"), sample(3000, 3000)
    want = kernel.causal_lm(q, k, v)
    stream = cp.cuda.Stream(non_blocking=True)
    pool = cp.cuda.MemoryPool()
    with stream, cp.cuda.using_allocator(pool.malloc):
        late = cp.zeros_like(q)
        for _ in range(200):  # work that the call must wait for
            late += 1
        late[...] = q
        got = kernel.causal_lm(late, k, v)
        assert pool.used_bytes() >= late.nbytes + got.nbytes
    stream.synchronize()
    assert (got == want).all()


class Interface:
    """An array of a framework that has the CUDA array interface alone."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class Dlpack:
    """An array of a framework that has DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("wrap", [Interface, Dlpack])
def test_arrays_of_other_frameworks(wrap: Any) -> None:
    kernel, (q, k, v) = module("causal"), sample()
    assert (kernel.causal_lm(wrap(q), wrap(k), wrap(v)) == kernel.causal_lm(q, k, v)).all()


def test_mixed_calls_name_the_argument() -> None:
    kernel, (q, k, v) = module("causal"), sample()
    with pytest.raises(TypeError, match=r"k: expected a CuPy array, as q is"):
        kernel.causal_lm(q, cp.asnumpy(k), v)
    with pytest.raises((TypeError, ValueError), match=r"v: expected"):
        kernel.causal_lm(cp.asnumpy(q), cp.asnumpy(k), v)
    with pytest.raises(TypeError, match="no kernel for cuda float32"):
        kernel.causal_lm(*(x.astype(np.float32) for x in (q, k, v)))


def test_no_torch(tmp_path: Path) -> None:
    api.compile_file(
        EXAMPLES / "causal.attn", tmp_path / "plain.so", Options(("cuda",), ((64, 64),), ("float16",))
    )
    code = """
import sys, cupy as cp, plain
q = cp.ones((1, 2, 33, 64), cp.float16)
assert (plain.causal_lm(q, q, q) == q).all() and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


# ---- a bare cubin ----

Size4 = ctypes.c_int64 * 4


class Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", Size4))


class Head(ctypes.Structure):
    """The first fields of afc_args; what follows them is zero in this test."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("flags", ctypes.c_int32),
        ("device", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("B", "Hq", "Hk", "M", "N")),
        *((name, Tensor) for name in ("q", "k", "v", "o", "lse")),
    )


def args_bytes() -> int:
    """sizeof(afc_args), by the C compiler."""
    text = '#include "abi/afc_abi.h"\n#include <stdio.h>\nint main() { printf("%zu", sizeof(afc_args)); }\n'
    command = f"gcc -x c -I '{paths.runtime()}' - -o size && ./size"
    done = subprocess.run(command, shell=True, input=text, text=True, capture_output=True, check=True)
    return int(done.stdout)


def test_raw_module_runs_a_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    major, minor = (
        cp.cuda.runtime.getDeviceProperties(0)["major"],
        cp.cuda.runtime.getDeviceProperties(0)["minor"],
    )
    arch = ARCH or f"sm_{major}{minor}"
    command = [sys.executable, "-m", "afc", "compile", str(EXAMPLES / "causal.attn"), "--emit", "cubin"]
    command += ["-D", "D=64", "--dtype", "fp16", "--arch", arch, "-o", str(tmp_path / "lm.cubin")]
    subprocess.run(command, check=True)
    (unit,) = api.units(
        check_file(EXAMPLES / "causal.attn"), Options(("cuda",), ((64, 64),), ("float16",), (arch,))
    )
    launch = unit.plan.forward[-1].kernel
    kernel = cp.RawModule(path=str(tmp_path / "lm.cubin")).get_function(launch.name)
    kernel.max_dynamic_shared_size_bytes = launch.binding.shared_bytes

    q, k, v = sample()
    o, lse = cp.empty_like(q), cp.empty((*q.shape[:3], 1), np.float32)
    size = args_bytes()
    head = Head(2, size, 0, 0, q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse)):
        setattr(head, name, Tensor(x.data.ptr, Size4(*(s // x.itemsize for s in x.strides))))
    args = np.zeros(1, np.dtype([("args", np.uint8, size)]))
    args.view(np.uint8)[: ctypes.sizeof(head)] = np.frombuffer(bytes(head), np.uint8)
    tiles = -(-q.shape[2] // launch.tile.queries)
    kernel(
        (tiles * q.shape[0] * q.shape[1],),
        (32 * launch.binding.warps,),
        (args,),
        shared_mem=launch.binding.shared_bytes,
    )
    want, want_lse = dense(q, k, v, causal=True)
    close(o, want)
    assert np.abs(cp.asnumpy(lse)[..., 0] - want_lse).max() < 1e-4
