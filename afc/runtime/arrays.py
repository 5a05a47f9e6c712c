# SPDX-License-Identifier: Apache-2.0
"""Calls with NumPy arrays and DLPack objects, on the CPU: the forward pass, NumPy arrays out, no torch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from afc.runtime.describe import CAPTURED_DTYPES, DTYPE_CODES, STORAGES

if TYPE_CHECKING:
    from afc.runtime.attention import Attention
    from afc.runtime.describe import EntryInfo

Array = Any  # np.ndarray

HOST_DEVICES = (1, 3, 11)  # DLPack's codes of memory that the CPU reads: kDLCPU, kDLCUDAHost, kDLROCMHost
WORKSPACE_ALIGNMENT = 256


def call_with_arrays(
    attention: Attention,
    q: Any,
    k: Any,
    v: Any,
    options: dict[str, Any],
    places: tuple[Any, Any, Any],
    return_lse: bool,
) -> Any:
    """o [B, H, M, Dv] in q's dtype and stride order, with `return_lse` also LSE [B, H, M]; without gradients.

    Raises TypeError or ValueError that names the argument.
    """
    attention.check_names(options)
    scalars = attention.scalars(options)
    q, k, v = (_as_numpy(attention, n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    entry = _check(attention, q, k, v)
    attention.check_lse(entry, return_lse)
    captured = _captured(attention, q, k, v, options)
    q_origin, k_origin, kv_len = (
        _place(attention, name, x, q.shape[0])
        for name, x in zip(("q_origin", "k_origin", "kv_len"), places, strict=True)
    )
    if q_origin is None:
        q_origin = np.int64(0) if kv_len is None else k_origin + kv_len - q.shape[2]
    return _run(attention, entry, (q, k, v), captured, scalars, (q_origin, k_origin, kv_len), return_lse)


def _as_numpy(attention: Attention, argument: str, x: Any) -> Array:
    """x without a copy. Raises TypeError, ValueError."""
    masked = isinstance(x, np.ma.MaskedArray)  # its mask would be lost
    if isinstance(x, np.ndarray) and not masked:
        return _readable(attention, argument, x)
    wanted = "a NumPy array or a DLPack object, as q is"
    if argument == "q":
        wanted = "a torch.Tensor, a NumPy array or a DLPack object"
    if masked or _is_torch(x) or not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        raise attention.fail(TypeError, argument, wanted, type(x).__name__)
    device = int(x.__dlpack_device__()[0])
    if device not in HOST_DEVICES:
        raise attention.fail(
            ValueError, argument, "memory of the CPU (or torch tensors)", f"DLPack device type {device}"
        )
    try:
        return _readable(attention, argument, np.from_dlpack(x))
    except (BufferError, RuntimeError, TypeError) as error:  # what producers and NumPy raise
        raise TypeError(
            f"{attention.__name__}: {argument}: expected a DLPack object that NumPy can read "
            f"(bfloat16: a NumPy array of ml_dtypes.bfloat16), got {type(x).__name__}: {error}"
        ) from error


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _readable(attention: Attention, argument: str, x: Array) -> Array:
    """x, if kernels can read its elements where they lie."""
    if not x.dtype.isnative:
        raise attention.fail(TypeError, argument, "elements in the byte order of the machine", x.dtype.str)
    if not x.flags.aligned or any(s % x.itemsize for s in x.strides):
        expected = "aligned elements (np.require(x, requirements='A'))"
        raise attention.fail(ValueError, argument, expected, f"strides of {x.strides} bytes")
    return x


def _strides(x: Array) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(s // x.itemsize for s in x.strides)


def _check(attention: Attention, q: Array, k: Array, v: Array) -> EntryInfo:
    """The entry that runs the call."""
    for argument, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype.name not in STORAGES:
            expected = "float64, float32, float16 or ml_dtypes.bfloat16"
            raise attention.fail(TypeError, argument, expected, str(x.dtype))
        if x.dtype != q.dtype:
            raise attention.fail(TypeError, argument, f"q's dtype {q.dtype}", str(x.dtype))
    attention.check_shapes(q.shape, k.shape, v.shape)
    for argument, x in (("q", q), ("k", k), ("v", v)):
        if x.size and x.shape[3] > 1 and x.strides[3] != x.itemsize:
            expected = "stride 1 in the last dimension (np.ascontiguousarray)"
            raise attention.fail(ValueError, argument, expected, f"strides {_strides(x)}")
    return attention.entry("cpu", q.dtype.name, q.shape[3], v.shape[3])


def _captured(attention: Attention, q: Array, k: Array, v: Array, options: dict[str, Any]) -> list[Array]:
    """Captured arrays in signature order, broadcast to the shapes that the kernels see."""
    known = attention.known_sizes(q.shape, k.shape, v.shape, options)
    arrays = []
    for info in attention.info.tensors:
        x = _as_numpy(attention, info.name, options[info.name])
        if x.dtype.name not in CAPTURED_DTYPES[info.type]:
            raise attention.fail(TypeError, info.name, " or ".join(CAPTURED_DTYPES[info.type]), str(x.dtype))
        arrays.append(np.broadcast_to(x, attention.check_captured(info, x.shape, known)))
    return arrays


def _place(attention: Attention, name: str, value: Any, batch: int) -> Any:
    """An origin or a number of keys in int64: 0-d, or [B]; None where a default is to be found."""
    if value is None and name != "k_origin":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer, np.ndarray)):
        expected = "an int or an int array, 0-d or [B]"
        raise attention.fail(TypeError, name, expected, repr(value))
    x = np.asarray(value)
    if x.dtype.kind not in "iu":
        raise attention.fail(TypeError, name, "integers", str(x.dtype))
    if x.shape not in ((), (batch,)):
        raise attention.fail(ValueError, name, f"shape () or ({batch},)", str(x.shape))
    return x.astype(np.int64)


def _run(
    attention: Attention,
    entry: EntryInfo,
    tensors: tuple[Array, Array, Array],
    captured: list[Array],
    scalars: list[int | float],
    places: tuple[Array, Array, Array],
    return_lse: bool,
) -> Any:
    q, k, v = tensors
    b, h, m, _ = q.shape
    sizes, threads = (b, h, k.shape[1], m, k.shape[2]), _threads()
    o = _empty_like(q, (b, h, m, v.shape[3]))
    lse = np.empty((b, h, m, 1), np.float64 if entry.storage == "float64" else np.float32)
    per_batch = [None if x is None else np.ascontiguousarray(np.broadcast_to(x, (b,))) for x in places]
    pointers = [0 if x is None else x.ctypes.data for x in per_batch]
    origins = [0, 0]
    for n, origin in enumerate(places[:2]):  # one origin for all: no table of coefficients for each batch
        if np.ndim(origin) == 0:
            origins[n], pointers[n] = int(origin), 0
    module = attention.module
    size = module._afc_workspace(entry.index, False, -1, sizes, *origins, threads, (), *pointers)
    workspace = np.empty(size + WORKSPACE_ALIGNMENT, np.uint8)
    start = -(-workspace.ctypes.data // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    module._afc_run(
        entry.index,
        False,
        0,
        -1,
        sizes,
        (*((x.ctypes.data, *_strides(x)) for x in (q, k, v, o, lse)), None, None, None, None, None),
        tuple((x.ctypes.data, DTYPE_CODES[x.dtype.name], x.shape, _strides(x)) for x in captured),
        (),
        tuple(scalars),
        *origins,
        start,
        size,
        0,
        threads,
        *pointers,
    )
    return (o, lse[..., 0]) if return_lse else o


def _empty_like(x: Array, shape: tuple[int, ...]) -> Array:
    """An empty array [B, H, L, D] whose heads and rows lie in memory in x's order."""
    if x.strides[1] < x.strides[2]:
        b, h, rows, d = shape
        return np.empty((b, rows, h, d), x.dtype).swapaxes(1, 2)
    return np.empty(shape, x.dtype)


def _threads() -> int:
    """Those of torch where it is imported, else OMP_NUM_THREADS, else the processors of this process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else len(os.sched_getaffinity(0))
