# SPDX-License-Identifier: Apache-2.0
"""Calls without torch: NumPy arrays and DLPack objects on the CPU, CuPy arrays and what CuPy can read on the
GPU. The forward pass; arrays of the same library out.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from afc.runtime.describe import CAPTURED_DTYPES, DTYPE_CODES, STORAGES

if TYPE_CHECKING:
    from afc.runtime.attention import Attention
    from afc.runtime.describe import EntryInfo

Array = Any  # of NumPy or CuPy

HOST_DEVICES = (1, 3, 11)  # DLPack's codes of memory that the CPU reads: kDLCPU, kDLCUDAHost, kDLROCMHost
CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
WORKSPACE_ALIGNMENT = 256
CUDA_ALIGNMENT = 16


class NumpyArrays:
    """Arrays of NumPy, and DLPack objects in memory of the CPU."""

    name, target = "NumPy", "cpu"
    wanted = "a NumPy array or a DLPack object, as q is"
    readable = "a DLPack object that NumPy can read"
    module: Any = np

    def own(self, x: Any) -> bool:
        """Whether x is an array of this library."""
        return isinstance(x, np.ndarray)

    def convert(self, attention: Attention, argument: str, x: Any) -> Array:
        """x of another library, without a copy. Raises TypeError, ValueError."""
        if _is_torch(x) or not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
            raise attention.fail(TypeError, argument, self.wanted, type(x).__name__)
        device = int(x.__dlpack_device__()[0])
        if device not in HOST_DEVICES:
            came = f"DLPack device type {device}"
            raise attention.fail(ValueError, argument, "memory of the CPU (or torch tensors)", came)
        return np.from_dlpack(x)

    def check(self, attention: Attention, argument: str, x: Array, q: Array | None) -> None:
        """Raises ValueError if kernels cannot read the elements of x where they lie."""
        if not x.flags.aligned:
            expected = "aligned elements (np.require(x, requirements='A'))"
            raise attention.fail(ValueError, argument, expected, f"strides of {x.strides} bytes")

    def prepare(self, x: Array) -> Array:
        """x, as kernels load it."""
        return x

    def pointer(self, x: Array) -> int:
        """Address of the first element."""
        return int(x.ctypes.data)

    def device(self, x: Array) -> int:
        """Ordinal of the device that the kernels run on; -1 for the CPU."""
        return -1

    def on_device(self, x: Array) -> AbstractContextManager[Any]:
        """While it is open, new arrays are made where x is."""
        return nullcontext()

    def stream(self) -> int:
        """The current stream."""
        return 0

    def threads(self) -> int:
        """Those of torch where it is imported, else OMP_NUM_THREADS, else the processors of this process."""
        torch = sys.modules.get("torch")
        if torch is not None:
            return int(torch.get_num_threads())
        wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        return int(wanted) if wanted.isdigit() and int(wanted) > 0 else len(os.sched_getaffinity(0))


class CupyArrays(NumpyArrays):
    """Arrays of CuPy, and objects in memory of a GPU that CuPy reads in place (`__cuda_array_interface__`,
    DLPack). Results and the workspace come from CuPy's allocator, kernels run on CuPy's current stream.
    """

    name, target = "CuPy", "cuda"
    wanted = "a CuPy array, as q is, or one that CuPy can read"
    readable = "an array of a GPU that CuPy can read"

    def __init__(self, cupy: Any) -> None:
        self.module = cupy

    def own(self, x: Any) -> bool:
        return isinstance(x, self.module.ndarray)

    def convert(self, attention: Attention, argument: str, x: Any) -> Array:
        if _is_torch(x) or not _on_gpu(x):
            raise attention.fail(TypeError, argument, self.wanted, type(x).__name__)
        if hasattr(x, "__cuda_array_interface__"):
            return self.module.asarray(x)
        return self.module.from_dlpack(x)

    def check(self, attention: Attention, argument: str, x: Array, q: Array | None) -> None:
        if q is not None and x.device.id != q.device.id:
            expected, came = f"an array on q's device {q.device.id}", f"one on device {x.device.id}"
            raise attention.fail(ValueError, argument, expected, came)

    def prepare(self, x: Array) -> Array:
        """A copy where kernels could not load 16 bytes at a time from x."""
        rows = all(s % CUDA_ALIGNMENT == 0 for s in x.strides[:-1])
        if x.size == 0 or (x.data.ptr % CUDA_ALIGNMENT == 0 and rows):
            return x
        return x.copy(order="C")

    def pointer(self, x: Array) -> int:
        return int(x.data.ptr)

    def device(self, x: Array) -> int:
        return int(x.device.id)

    def on_device(self, x: Array) -> AbstractContextManager[Any]:
        return self.module.cuda.Device(x.device.id)  # type: ignore[no-any-return]

    def stream(self) -> int:
        return int(self.module.cuda.get_current_stream().ptr)

    def threads(self) -> int:
        return 1


Arrays = NumpyArrays  # what both have in common


def _on_gpu(x: Any) -> bool:
    """Whether x says that it lies in memory of an NVIDIA GPU."""
    if hasattr(x, "__cuda_array_interface__"):
        return True
    return hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) in CUDA_DEVICES


def _library(attention: Attention, q: Any) -> Arrays:
    """The library of a call with q. Raises TypeError for memory of a GPU without CuPy."""
    if not _on_gpu(q) or _is_torch(q):
        return NumpyArrays()
    try:
        import cupy
    except ImportError:
        expected = "an array of the CPU, a torch.Tensor, or CuPy to be installed (pip install 'afc[cupy]')"
        raise attention.fail(TypeError, "q", expected, f"{type(q).__name__} in memory of a GPU") from None
    return CupyArrays(cupy)


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
    Arrays of CuPy where q is on a GPU, else of NumPy.

    Raises TypeError or ValueError that names the argument.
    """
    attention.check_names(options)
    scalars = attention.scalars(options)
    arrays = _library(attention, q)
    q = _as_array(attention, arrays, "q", q, None)
    k, v = (_as_array(attention, arrays, n, x, q) for n, x in (("k", k), ("v", v)))
    entry = _check(attention, arrays, q, k, v)
    attention.check_lse(entry, return_lse)
    captured = _captured(attention, arrays, q, k, v, options)
    q_origin, k_origin, kv_len = (
        _place(attention, name, x, q.shape[0])
        for name, x in zip(("q_origin", "k_origin", "kv_len"), places, strict=True)
    )
    if q_origin is None:
        q_origin = np.int64(0) if kv_len is None else k_origin + kv_len - q.shape[2]
    numbers = (q_origin, k_origin, kv_len)
    with arrays.on_device(q):
        return _run(attention, arrays, entry, (q, k, v), captured, scalars, numbers, return_lse)


def _as_array(attention: Attention, arrays: Arrays, argument: str, x: Any, q: Array | None) -> Array:
    """x in the call's library, without a copy. Raises TypeError, ValueError."""
    if isinstance(x, np.ma.MaskedArray):  # its mask would be lost
        raise attention.fail(TypeError, argument, arrays.wanted, type(x).__name__)
    if not arrays.own(x):
        if q is None and not _on_gpu(x) and (_is_torch(x) or not hasattr(x, "__dlpack__")):
            wanted = "a torch.Tensor, a NumPy array or a DLPack object"
            raise attention.fail(TypeError, argument, wanted, type(x).__name__)
        try:
            x = arrays.convert(attention, argument, x)
        except (BufferError, RuntimeError, TypeError) as error:  # what producers and libraries raise
            if str(error).startswith(f"{attention.__name__}: {argument}: "):
                raise
            raise TypeError(
                f"{attention.__name__}: {argument}: expected {arrays.readable} "
                f"(bfloat16: a {arrays.name} array of ml_dtypes.bfloat16), got {type(x).__name__}: {error}"
            ) from error
    if not x.dtype.isnative:
        raise attention.fail(TypeError, argument, "elements in the byte order of the machine", x.dtype.str)
    if any(s % x.itemsize for s in x.strides):
        expected = "aligned elements (np.require(x, requirements='A'))"
        raise attention.fail(ValueError, argument, expected, f"strides of {x.strides} bytes")
    arrays.check(attention, argument, x, q)
    return x


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _strides(x: Array) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(s // x.itemsize for s in x.strides)


def _check(attention: Attention, arrays: Arrays, q: Array, k: Array, v: Array) -> EntryInfo:
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
            expected = f"stride 1 in the last dimension ({arrays.name}'s ascontiguousarray)"
            raise attention.fail(ValueError, argument, expected, f"strides {_strides(x)}")
    return attention.entry(arrays.target, q.dtype.name, q.shape[3], v.shape[3])


def _captured(
    attention: Attention, arrays: Arrays, q: Array, k: Array, v: Array, options: dict[str, Any]
) -> list[Array]:
    """Captured arrays in signature order, broadcast to the shapes that the kernels see."""
    known = attention.known_sizes(q.shape, k.shape, v.shape, options)
    found = []
    for info in attention.info.tensors:
        x = _as_array(attention, arrays, info.name, options[info.name], q)
        if x.dtype.name not in CAPTURED_DTYPES[info.type]:
            raise attention.fail(TypeError, info.name, " or ".join(CAPTURED_DTYPES[info.type]), str(x.dtype))
        found.append(arrays.module.broadcast_to(x, attention.check_captured(info, x.shape, known)))
    return found


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
    arrays: Arrays,
    entry: EntryInfo,
    tensors: tuple[Array, Array, Array],
    captured: list[Array],
    scalars: list[int | float],
    places: tuple[Array, Array, Array],
    return_lse: bool,
) -> Any:
    q, k, v = (arrays.prepare(x) for x in tensors)
    b, h, m, _ = q.shape
    sizes, threads, device = (b, h, k.shape[1], m, k.shape[2]), arrays.threads(), arrays.device(q)
    o = _empty_like(arrays, tensors[0], (b, h, m, v.shape[3]))
    lse = arrays.module.empty((b, h, m, 1), np.float64 if entry.storage == "float64" else np.float32)
    per_batch = [
        None if x is None else arrays.module.asarray(np.ascontiguousarray(np.broadcast_to(x, (b,))))
        for x in places
    ]
    pointers = [0 if x is None else arrays.pointer(x) for x in per_batch]
    origins = [0, 0]
    for n, origin in enumerate(places[:2]):  # one origin for all: no table of coefficients for each batch
        if np.ndim(origin) == 0:
            origins[n], pointers[n] = int(origin), 0
    module = attention.module
    size = module._afc_workspace(entry.index, False, device, sizes, *origins, threads, (), *pointers)
    workspace = arrays.module.empty(size + WORKSPACE_ALIGNMENT, np.uint8)
    start = -(-arrays.pointer(workspace) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    module._afc_run(
        entry.index,
        False,
        0,
        device,
        sizes,
        (*((arrays.pointer(x), *_strides(x)) for x in (q, k, v, o, lse)), None, None, None, None, None),
        tuple((arrays.pointer(x), DTYPE_CODES[x.dtype.name], x.shape, _strides(x)) for x in captured),
        (),
        tuple(scalars),
        *origins,
        start,
        size,
        arrays.stream(),
        threads,
        *pointers,
    )
    return (o, lse[..., 0]) if return_lse else o


def _empty_like(arrays: Arrays, x: Array, shape: tuple[int, ...]) -> Array:
    """An empty array [B, H, L, D] whose heads and rows lie in memory in x's order."""
    if x.strides[1] < x.strides[2]:
        b, h, rows, d = shape
        return arrays.module.empty((b, rows, h, d), x.dtype).swapaxes(1, 2)
    return arrays.module.empty(shape, x.dtype)
