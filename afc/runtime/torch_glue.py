# SPDX-License-Identifier: Apache-2.0
"""PyTorch: operators, shapes for tracing, and autograd.

One forward and one backward operator per attention, defined with `torch.library` (the lowest-overhead way
that torch.compile, export and opcheck understand); autograd is a Function outside them. Workspaces come
from torch's allocator, work goes to the current stream, nothing synchronises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from afc.runtime.describe import CAPTURED_DTYPES, DTYPE_CODES, STORAGES, EntryInfo

if TYPE_CHECKING:
    from afc.runtime.attention import Attention

Tensor = torch.Tensor

# What the operators take besides tensors: float scalars; q_origin, k_origin, kv_len (or NO_KV_LEN) and the
# other scalars; int64 tensors [B] that stand for the first three where batches differ, or nothing; and
# float64 tensors [] on the CPU that stand for the float scalars, or nothing.
Numbers = tuple[list[float], list[Any], list[Tensor | None], list[Tensor]]

CODES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in DTYPE_CODES.items()}
STORAGE_OF: dict[torch.dtype, str] = {getattr(torch, name): name for name in STORAGES}
CAPTURED: dict[str, tuple[torch.dtype, ...]] = {
    kind: tuple(getattr(torch, name) for name in names) for kind, names in CAPTURED_DTYPES.items()
}
NO_KV_LEN = -1
DETERMINISTIC = 1
CUDA_ALIGNMENT = 16
FIXED_ARGUMENTS = 6  # of the autograd function, before the captured tensors

# Operators live as long as the process: an unloaded one would dangle in compiled code.
_LIBRARIES: dict[str, Any] = {}


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _like(x: Tensor, shape: tuple[Any, ...]) -> Tensor:
    """An empty tensor [B, H, L, D] whose heads and rows lie in memory in x's order."""
    if x.stride(1) < x.stride(2):
        b, h, rows, d = shape
        return x.new_empty((b, rows, h, d)).transpose(1, 2)
    return x.new_empty(shape)


def _view(x: Tensor | None) -> tuple[int, int, int, int, int] | None:
    if x is None:
        return None
    s = x.stride()
    return (x.data_ptr(), s[0], s[1], s[2], s[3] if len(s) == 4 else 1)


def _captured_view(x: Tensor, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """x as the kernels see it, expanded to `shape`."""
    if x.shape != shape:
        x = x.expand(shape)
    return (x.data_ptr(), CODES[x.dtype], tuple(x.shape), tuple(x.stride()))


def _traced(x: Any) -> Tensor:
    """A float of a traced call as a tensor. It is made by a product because Dynamo leaves a factor open for
    other values, while constructors and the float arguments of an operator fix it (PyTorch 2.13).
    """
    return torch.mul(torch.ones((), dtype=torch.float64), x)


def _autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast computes attention in; like PyTorch, it leaves float64 alone."""
    if not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where the GPU kernels could not load 16 bytes at a time from it."""
    if x.stride(3) == 1 and x.data_ptr() % CUDA_ALIGNMENT == 0 and all(s % 8 == 0 for s in x.stride()[:3]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class TorchGlue:
    """The torch side of one attention."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.name = attention.__name__
        self.module = attention.module
        key = f"{self.name}_{attention.info.key}"
        library = torch.library.Library("afc", "FRAGMENT")  # type: ignore[no-untyped-call]
        if key not in _LIBRARIES:
            _define(library, key, attention.info.output_blocks)
            _LIBRARIES[key] = library
        self.library = _LIBRARIES[key]
        self._register(key)
        self.forward_op = getattr(torch.ops.afc, f"{key}_forward").default
        self.backward_op = getattr(torch.ops.afc, f"{key}_backward").default
        self.function = _autograd_function(self)

    def _register(self, key: str) -> None:
        """Point the operators at this module's code (a rebuilt module of the same text replaces an older
        one).
        """
        if getattr(self.library, "_afc_registered", False):
            return
        for op, run, fake in (
            (f"{key}_forward", self.run_forward, self.fake_forward),
            (f"{key}_backward", self.run_backward, self.fake_backward),
        ):
            for dispatch in ("CPU", "CUDA"):
                self.library.impl(op, run, dispatch)
            torch.library.register_fake(f"afc::{op}", fake, lib=self.library)
        self.library._afc_registered = True

    @staticmethod
    def takes(x: Any) -> bool:
        """Whether a call with x as q is torch's."""
        return isinstance(x, Tensor)

    # ---- the call -----------------------------------------------------------------------------------------

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: dict[str, Any],
        q_origin: Any,
        k_origin: Any,
        kv_len: Any,
        return_lse: bool,
        deterministic: bool,
    ) -> Any:
        attention = self.attention
        attention.check_names(options)
        for argument, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise attention.fail(TypeError, argument, "a torch.Tensor", type(x).__name__)
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (_autocast(x) for x in (q, k, v))
        entry = self.check(q, k, v)
        captured = self.captured(q, k, v, options)
        deterministic = self.check_mode(entry, deterministic)
        scalars = attention.scalars(options, torch.compiler.is_compiling())
        numbers = self.numbers(entry, q, k, scalars, (q_origin, k_origin, kv_len))
        attention.check_lse(entry, return_lse)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *captured))
        if needs_grad:
            if not entry.backward:
                raise NotImplementedError(f"{self.name}: this module was built without its backward pass")
            o, lse = self.function(q, k, v, numbers, deterministic, return_lse, *captured)
        else:
            o, lse, *_ = self.forward_op(q, k, v, captured, *numbers)
        return (o, lse) if return_lse else o

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> EntryInfo:
        """The entry that runs the call. Raises TypeError or ValueError that names the argument."""
        fail = self.attention.fail
        for argument, x in (("q", q), ("k", k), ("v", v)):
            if x.layout is not torch.strided:
                raise fail(TypeError, argument, "a strided tensor", str(x.layout))
            if x.dtype not in STORAGE_OF:
                raise fail(TypeError, argument, "float64, float32, bfloat16 or float16", str(x.dtype))
            if x.dtype != q.dtype:
                raise fail(TypeError, argument, f"q's dtype {q.dtype}", str(x.dtype))
            if x.device != q.device:
                raise fail(ValueError, argument, f"q's device {q.device}", str(x.device))
        self.attention.check_shapes(q.shape, k.shape, v.shape)
        if q.device.type not in ("cpu", "cuda"):
            raise fail(ValueError, "q", "a CPU or CUDA tensor", str(q.device))
        if q.device.type == "cuda" and q.dtype in (torch.float32, torch.float64):
            raise fail(
                TypeError,
                "q",
                "bfloat16 or float16 on CUDA (convert with .to(torch.bfloat16), or use autocast)",
                str(q.dtype),
            )
        entry = self.attention.entry(q.device.type, STORAGE_OF[q.dtype], q.shape[3], v.shape[3])
        for argument, x in (("q", q), ("k", k), ("v", v)):
            if x.stride(3) != 1 and x.shape[3] > 1:
                raise fail(
                    ValueError,
                    argument,
                    "stride 1 in the last dimension (call .contiguous())",
                    f"strides {tuple(x.stride())}",
                )
        return entry

    def captured(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> list[Tensor]:
        """Captured tensors in signature order, checked. Those that may take a gradient keep their shape, so
        that the gradient has it; the others are expanded to what the kernels see.
        """
        if not self.attention.info.tensors:
            return []
        known = self.attention.known_sizes(q.shape, k.shape, v.shape, options)
        tensors = []
        for info in self.attention.info.tensors:
            x = options[info.name]
            if not isinstance(x, Tensor):
                raise self.attention.fail(TypeError, info.name, "a torch.Tensor", type(x).__name__)
            if x.dtype not in CAPTURED[info.type]:
                wanted = " or ".join(CAPTURED_DTYPES[info.type])
                raise self.attention.fail(TypeError, info.name, wanted, str(x.dtype))
            if x.device != q.device:
                raise self.attention.fail(ValueError, info.name, f"q's device {q.device}", str(x.device))
            if x.requires_grad and not info.grad and torch.is_grad_enabled():
                raise self.attention.fail(
                    ValueError,
                    info.name,
                    "a tensor without requires_grad (its parameter is not declared `grad`)",
                    "one that requires a gradient",
                )
            full = self.attention.check_captured(info, tuple(x.shape), known)
            tensors.append(x if info.grad else x.expand(full))
        return tensors

    def full_shapes(
        self, q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], values: tuple[float, ...]
    ) -> list[tuple[int, ...]]:
        """Shapes of the captured tensors as the kernels see them; `values`: the run-time scalars."""
        infos = self.attention.info.tensors
        if not any(info.grad for info in infos):
            return [tuple(x.shape) for x in captured]
        names = [s.name for s in self.attention.info.scalars]
        scalars = {n: int(x) for n, x in zip(names, values, strict=True)}
        known = self.attention.known_sizes(q.shape, k.shape, v.shape, scalars)
        return [
            self.attention.check_captured(info, tuple(x.shape), known)
            for info, x in zip(infos, captured, strict=True)
        ]

    def check_mode(self, entry: EntryInfo, deterministic: bool) -> bool:
        """Whether gradients must have the same bits each time. Raises NotImplementedError if they cannot."""
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        if deterministic and not entry.deterministic:
            raise NotImplementedError(
                f"{self.name}: deterministic: the backward pass of {entry} adds dQ in no fixed order"
            )
        return deterministic

    def numbers(
        self, entry: EntryInfo, q: Tensor, k: Tensor, scalars: list[int | float], places: tuple[Any, Any, Any]
    ) -> Numbers:
        """Run-time scalars and places (q_origin, k_origin, kv_len) as the operators take them, checked."""
        q_origin, k_origin, kv_len = places
        ints: list[Any]
        per_batch: list[Tensor | None] = []
        if kv_len is None and type(k_origin) is int and (q_origin is None or type(q_origin) is int):
            ints = [q_origin or 0, k_origin, NO_KV_LEN]  # the usual call, which pays for nothing else
        else:
            ints, per_batch = self.places(entry, q, k, places)
        floats: list[Any] = []
        for info, value in zip(self.attention.info.scalars, scalars, strict=True):
            (floats if info.type == "float" else ints).append(value)
        if floats and q.device.type == "cpu" and torch.compiler.is_compiling():
            return [], ints, per_batch, [_traced(x) for x in floats]
        return floats, ints, per_batch, []

    def places(
        self, entry: EntryInfo, q: Tensor, k: Tensor, places: tuple[Any, Any, Any]
    ) -> tuple[list[Any], list[Tensor | None]]:
        """q_origin, k_origin and kv_len as ints, and as tensors where they are tensors."""
        names = ("q_origin", "k_origin", "kv_len")
        q_origin, k_origin, kv_len = (
            self.place(entry, q, name, x) for name, x in zip(names, places, strict=True)
        )
        if isinstance(kv_len, (int, torch.SymInt)) and not 0 <= kv_len <= k.shape[2]:
            expected = f"a number of keys in 0..{k.shape[2]}"
            raise self.attention.fail(ValueError, "kv_len", expected, str(kv_len))
        if q_origin is None:
            q_origin = 0 if kv_len is None else k_origin + kv_len - q.shape[2]
        given, nothing = (q_origin, k_origin, kv_len), (0, 0, NO_KV_LEN)
        ints = [
            none if x is None or isinstance(x, Tensor) else x for x, none in zip(given, nothing, strict=True)
        ]
        per_batch = [x if isinstance(x, Tensor) else None for x in given]
        return ints, per_batch if any(x is not None for x in per_batch) else []

    def place(self, entry: EntryInfo, q: Tensor, name: str, value: Any) -> Any:
        """An origin or a number of keys: an int, or an int64 tensor [B]; None where a default is to be found.

        Raises TypeError, ValueError, NotImplementedError.
        """
        if value is None and name != "k_origin":
            return None
        if not isinstance(value, Tensor):
            if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
                raise self.attention.fail(TypeError, name, "an int or an int tensor, 0-d or [B]", repr(value))
            return value
        if value.dtype not in CAPTURED["int"]:
            raise self.attention.fail(TypeError, name, "an int32 or int64 tensor", str(value.dtype))
        if value.device != q.device:
            raise self.attention.fail(ValueError, name, f"q's device {q.device}", str(value.device))
        if value.dim() > 1 or (value.dim() == 1 and value.shape[0] != q.shape[0]):
            expected = f"shape [] or [{q.shape[0]}]"
            raise self.attention.fail(ValueError, name, expected, str(tuple(value.shape)))
        return value.to(torch.int64).expand(q.shape[0]).contiguous()

    # ---- operators ----------------------------------------------------------------------------------------

    def _run(
        self,
        entry: EntryInfo,
        backward: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: tuple[Any, ...],
        captured: list[Tensor],
        gradients: list[Tensor | None],
        floats: list[float],
        ints: list[int],
        per_batch: list[Tensor | None],
        reals: list[Tensor],
        deterministic: bool,
    ) -> None:
        b, h, m, _ = q.shape
        sizes = (b, h, k.shape[1], m, k.shape[2])
        cuda = q.device.type == "cuda"
        threads = 1 if cuda else torch.get_num_threads()
        q_origin, k_origin, kv_len, *others = ints
        values: tuple[Any, ...] = ()
        if others or floats or reals:
            real, whole = iter(floats or [x.item() for x in reals]), iter(others)
            kinds = (s.type for s in self.attention.info.scalars)
            values = tuple(next(real if kind == "float" else whole) for kind in kinds)
        if kv_len != NO_KV_LEN:
            lengths = torch.full((b,), kv_len, dtype=torch.int64, device=q.device)
            per_batch = [*(per_batch[:2] or (None, None)), lengths]
        pointers = tuple(0 if x is None else x.data_ptr() for x in per_batch) if per_batch else ()
        device = -1
        if cuda:
            device = q.device.index if q.device.index is not None else torch.cuda.current_device()
        captured_views: tuple[Any, ...] = ()
        gradient_views: tuple[Any, ...] = ()
        if captured:
            shapes = self.full_shapes(q, k, v, captured, values)
            captured_views = tuple(_captured_view(x, s) for x, s in zip(captured, shapes, strict=True))
            infos = self.attention.info.tensors
            gradient_views = tuple(
                None if x is None or info.grad_is_zero else _captured_view(x, s)
                for info, x, s in zip(infos, gradients, shapes, strict=True)
            )
        workspace_bytes = self.module._afc_workspace(
            entry.index, backward, device, sizes, q_origin, k_origin, threads, gradient_views, *pointers
        )
        workspace = (
            torch.empty(workspace_bytes + 256, dtype=torch.uint8, device=q.device)
            if workspace_bytes
            else None
        )
        pointer = 0 if workspace is None else (workspace.data_ptr() + 255) // 256 * 256
        stream = torch.cuda.current_stream(q.device).cuda_stream if cuda else 0
        self.module._afc_run(
            entry.index,
            backward,
            DETERMINISTIC if deterministic else 0,
            device,
            sizes,
            tensors,
            captured_views,
            gradient_views,
            values,
            q_origin,
            k_origin,
            pointer,
            workspace_bytes,
            stream,
            threads,
            *pointers,
        )

    def run_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: list[Tensor],
        floats: list[float],
        ints: list[int],
        per_batch: list[Tensor | None],
        reals: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """o and LSE and, of an attention with output blocks, o before them."""
        entry = self.attention.entry(q.device.type, STORAGE_OF[q.dtype], q.shape[3], v.shape[3])
        if entry.target == "cuda":
            q, k, v = _aligned(q), _aligned(k), _aligned(v)
        results = self.fake_forward(q, k, v, captured, floats, ints, per_batch, reals)
        o, lse, *raw = results
        tensors = (
            _view(q),
            _view(k),
            _view(v),
            _view(o),
            _view(lse),
            None,
            None,
            None,
            None,
            None,
            *map(_view, raw),
        )
        none: list[Tensor | None] = [None] * len(captured)
        self._run(entry, False, q, k, v, tensors, captured, none, floats, ints, per_batch, reals, False)
        return results

    def fake_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: list[Tensor],
        floats: list[float],
        ints: list[int],
        per_batch: list[Tensor | None],
        reals: list[Tensor],
    ) -> tuple[Tensor, ...]:
        b, h, m, _ = q.shape
        o, lse = _like(q, (b, h, m, v.shape[3])), q.new_empty((b, h, m), dtype=_lse_dtype(q.dtype))
        return (o, lse, torch.empty_like(o)) if self.attention.info.output_blocks else (o, lse)

    def run_backward(
        self,
        d_o: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        captured: list[Tensor],
        floats: list[float],
        ints: list[int],
        per_batch: list[Tensor | None],
        reals: list[Tensor],
        deterministic: bool,
        wanted: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Gradients; o is the output before the output blocks."""
        entry = self.attention.entry(q.device.type, STORAGE_OF[q.dtype], q.shape[3], v.shape[3])
        dq, dk, dv, _ = self.fake_backward(
            d_o, dlse, q, k, v, o, lse, captured, floats, ints, per_batch, reals, deterministic, wanted
        )
        gradients = [
            x.new_zeros(x.shape, dtype=lse.dtype) if want else None
            for x, want in zip(captured, wanted, strict=True)
        ]
        if entry.target == "cuda":
            d_o, q, k, v, o = _aligned(d_o), _aligned(q), _aligned(k), _aligned(v), _aligned(o)
        tensors = (
            _view(q),
            _view(k),
            _view(v),
            _view(o),
            _view(lse),
            _view(d_o),
            _view(dlse),
            _view(dq),
            _view(dk),
            _view(dv),
            *((_view(o),) if self.attention.info.output_blocks else ()),
        )
        self._run(
            entry, True, q, k, v, tensors, captured, gradients, floats, ints, per_batch, reals, deterministic
        )
        pairs = zip(captured, gradients, strict=True)
        return dq, dk, dv, [g.to(x.dtype) for x, g in pairs if g is not None]

    def fake_backward(
        self,
        d_o: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        captured: list[Tensor],
        floats: list[float],
        ints: list[int],
        per_batch: list[Tensor | None],
        reals: list[Tensor],
        deterministic: bool,
        wanted: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        gradients = [x.new_empty(x.shape) for x, want in zip(captured, wanted, strict=True) if want]
        return _like(q, tuple(q.shape)), _like(k, tuple(k.shape)), _like(v, tuple(v.shape)), gradients


def _define(library: Any, key: str, output_blocks: bool) -> None:
    # Ints are SymInt: a float in a schema, or an int among floats, would be compiled in, value by value.
    # Traced calls on the CPU have their floats in `reals`.
    common = "Tensor[] captured, float[] floats, SymInt[] ints, Tensor?[] per_batch, Tensor[] reals"
    results = "(Tensor, Tensor, Tensor)" if output_blocks else "(Tensor, Tensor)"
    library.define(f"{key}_forward(Tensor q, Tensor k, Tensor v, {common}) -> {results}")
    library.define(
        f"{key}_backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"{common}, "
        "bool deterministic, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor[])"
    )


def _autograd_function(glue: TorchGlue) -> Any:
    class AttentionFunction(torch.autograd.Function):
        """Saves q, k, v, o (before output blocks), LSE and the captured tensors; P is recomputed. No second
        derivative.
        """

        @staticmethod
        def forward(
            ctx: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            numbers: Numbers,
            deterministic: bool,
            return_lse: bool,
            *captured: Tensor,
        ) -> tuple[Tensor, Tensor]:
            floats, ints, per_batch, reals = numbers
            o, lse, *raw = glue.forward_op(q, k, v, list(captured), floats, ints, per_batch, reals)
            ctx.save_for_backward(q, k, v, raw[0] if raw else o, lse, *per_batch, *reals, *captured)
            ctx.floats, ctx.ints, ctx.per_batch, ctx.reals = floats, ints, len(per_batch), len(reals)
            ctx.deterministic, ctx.return_lse = deterministic, return_lse
            if not return_lse:
                ctx.mark_non_differentiable(lse)
            return o, lse

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, d_o: Tensor, dlse: Tensor) -> Any:
            q, k, v, o, lse, *others = ctx.saved_tensors
            per_batch, others = others[: ctx.per_batch], others[ctx.per_batch :]
            reals, captured = others[: ctx.reals], others[ctx.reals :]
            wanted = list(ctx.needs_input_grad[FIXED_ARGUMENTS:])
            dq, dk, dv, gradients = glue.backward_op(
                d_o,
                dlse if ctx.return_lse else None,
                q,
                k,
                v,
                o,
                lse,
                captured,
                ctx.floats,
                ctx.ints,
                per_batch,
                reals,
                ctx.deterministic,
                wanted,
            )
            found = iter(gradients)
            none = [None] * (FIXED_ARGUMENTS - 3)
            return dq, dk, dv, *none, *(next(found) if want else None for want in wanted)

    return AttentionFunction.apply
