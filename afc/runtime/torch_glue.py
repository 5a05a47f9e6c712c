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

from afc.runtime.describe import EntryInfo

if TYPE_CHECKING:
    from afc.runtime.attention import Attention

Tensor = torch.Tensor

DTYPE_CODES = {
    torch.bool: 0,
    torch.int32: 1,
    torch.int64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.float32: 5,
    torch.float64: 6,
}
STORAGES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
CAPTURED_DTYPES = {
    "float": (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    "int": (torch.int32, torch.int64),
    "bool": (torch.bool,),
}
DETERMINISTIC = 1
CUDA_ALIGNMENT = 16
FIXED_ARGUMENTS = 8  # of the autograd function, before the captured tensors

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


def _dimensions(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Sizes by the names that the language gives them."""
    (b, h, m, dqk), (_, hk, n, _) = q.shape, k.shape
    return {"B": b, "H": h, "Hk": hk, "M": m, "N": n, "Dqk": dqk, "Dv": v.shape[3]}


def _captured_view(x: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return (x.data_ptr(), DTYPE_CODES[x.dtype], tuple(x.shape), tuple(x.stride()))


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
            _define(library, key)
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

    # ---- the call -----------------------------------------------------------------------------------------

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: dict[str, Any],
        q_origin: int,
        k_origin: int,
        return_lse: bool,
        deterministic: bool,
    ) -> Any:
        attention = self.attention
        attention.check_names(options)
        scalars = attention.scalars(options)
        for argument, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise attention.fail(TypeError, argument, "a torch.Tensor", type(x).__name__)
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        entry = self.check(q, k, v)
        captured = self.captured(q, k, v, options)
        self.check_mode(entry, q_origin, k_origin, deterministic)
        if return_lse and not entry.lse:
            raise ValueError(
                f"{self.name}: return_lse: its normalizer has no sum over the keys, hence no LSE"
            )
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *captured))
        if needs_grad:
            if not entry.backward:
                raise NotImplementedError(f"{self.name}: this module was built without its backward pass")
            o, lse = self.function(q, k, v, scalars, q_origin, k_origin, deterministic, return_lse, *captured)
        else:
            o, lse = self.forward_op(q, k, v, captured, scalars, q_origin, k_origin)
        return (o, lse) if return_lse else o

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> EntryInfo:
        """The entry that runs the call. Raises TypeError or ValueError that names the argument."""
        fail = self.attention.fail
        for argument, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4:
                raise fail(
                    ValueError, argument, "4 dimensions [batch, heads, rows, head size]", str(tuple(x.shape))
                )
            if x.layout is not torch.strided:
                raise fail(TypeError, argument, "a strided tensor", str(x.layout))
            if x.dtype not in STORAGES:
                raise fail(TypeError, argument, "float64, float32, bfloat16 or float16", str(x.dtype))
            if x.dtype != q.dtype:
                raise fail(TypeError, argument, f"q's dtype {q.dtype}", str(x.dtype))
            if x.device != q.device:
                raise fail(ValueError, argument, f"q's device {q.device}", str(x.device))
        b, h, _, dqk = q.shape
        if k.shape[0] != b or k.shape[3] != dqk:
            raise fail(
                ValueError,
                "k",
                f"shape [{b}, Hk, N, {dqk}] to go with q {tuple(q.shape)}",
                str(tuple(k.shape)),
            )
        if v.shape[:3] != k.shape[:3]:
            raise fail(
                ValueError,
                "v",
                f"shape [{k.shape[0]}, {k.shape[1]}, {k.shape[2]}, Dv] to go with k",
                str(tuple(v.shape)),
            )
        hk = k.shape[1]
        if (hk == 0 and h != 0) or (hk != 0 and h % hk != 0):
            raise fail(ValueError, "k", f"a number of heads that divides q's {h}", str(hk))
        if q.device.type not in ("cpu", "cuda"):
            raise fail(ValueError, "q", "a CPU or CUDA tensor", str(q.device))
        if q.device.type == "cuda" and q.dtype in (torch.float32, torch.float64):
            raise fail(
                TypeError,
                "q",
                "bfloat16 or float16 on CUDA (convert with .to(torch.bfloat16), or use autocast)",
                str(q.dtype),
            )
        entry = self.attention.entry(q.device.type, STORAGES[q.dtype], dqk, v.shape[3])
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
        known = _dimensions(q, k, v) | {n: x for n, x in options.items() if isinstance(x, int)}
        tensors = []
        for info in self.attention.info.tensors:
            x = options[info.name]
            if not isinstance(x, Tensor):
                raise self.attention.fail(TypeError, info.name, "a torch.Tensor", type(x).__name__)
            if x.dtype not in CAPTURED_DTYPES[info.type]:
                wanted = " or ".join(str(d).removeprefix("torch.") for d in CAPTURED_DTYPES[info.type])
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
        self, q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], scalars: list[float]
    ) -> list[tuple[int, ...]]:
        """Shapes of the captured tensors as the kernels see them."""
        infos = self.attention.info.tensors
        if not any(info.grad for info in infos):
            return [tuple(x.shape) for x in captured]
        names = [s.name for s in self.attention.info.scalars]
        known = _dimensions(q, k, v) | {n: int(x) for n, x in zip(names, scalars, strict=True)}
        return [
            self.attention.check_captured(info, tuple(x.shape), known)
            for info, x in zip(infos, captured, strict=True)
        ]

    def check_mode(self, entry: EntryInfo, q_origin: Any, k_origin: Any, deterministic: bool) -> None:
        for argument, value in (("q_origin", q_origin), ("k_origin", k_origin)):
            if isinstance(value, Tensor):
                raise NotImplementedError(
                    f"{self.name}: {argument}: a tensor is not supported by this module; pass an int"
                )
        if (deterministic or torch.are_deterministic_algorithms_enabled()) and not entry.deterministic:
            raise NotImplementedError(
                f"{self.name}: deterministic: the backward pass of {entry} adds dQ in no fixed order"
            )

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
        scalars: list[float],
        q_origin: int,
        k_origin: int,
        deterministic: bool,
    ) -> None:
        b, h, m, _ = q.shape
        sizes = (b, h, k.shape[1], m, k.shape[2])
        cuda = q.device.type == "cuda"
        threads = 1 if cuda else torch.get_num_threads()
        kinds = [s.type for s in self.attention.info.scalars]
        values = tuple(
            float(x) if kind == "float" else int(x) for x, kind in zip(scalars, kinds, strict=True)
        )
        device = -1
        if cuda:
            device = q.device.index if q.device.index is not None else torch.cuda.current_device()
        shapes = self.full_shapes(q, k, v, captured, scalars)
        captured_views = tuple(_captured_view(x.expand(s)) for x, s in zip(captured, shapes, strict=True))
        infos = self.attention.info.tensors
        gradient_views = tuple(
            None if x is None or info.grad_is_zero else _captured_view(x.expand(s))
            for info, x, s in zip(infos, gradients, shapes, strict=True)
        )
        workspace_bytes = self.module._afc_workspace(
            entry.index, backward, device, sizes, q_origin, k_origin, threads, gradient_views
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
        )

    def run_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: list[Tensor],
        scalars: list[float],
        q_origin: int,
        k_origin: int,
    ) -> tuple[Tensor, Tensor]:
        entry = self.attention.entry(q.device.type, STORAGES[q.dtype], q.shape[3], v.shape[3])
        if entry.target == "cuda":
            q, k, v = _aligned(q), _aligned(k), _aligned(v)
        o, lse = self.fake_forward(q, k, v, captured, scalars, q_origin, k_origin)
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
        )
        none: list[Tensor | None] = [None] * len(captured)
        self._run(entry, False, q, k, v, tensors, captured, none, scalars, q_origin, k_origin, False)
        return o, lse

    def fake_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: list[Tensor],
        scalars: list[float],
        q_origin: int,
        k_origin: int,
    ) -> tuple[Tensor, Tensor]:
        b, h, m, _ = q.shape
        return _like(q, (b, h, m, v.shape[3])), q.new_empty((b, h, m), dtype=_lse_dtype(q.dtype))

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
        scalars: list[float],
        q_origin: int,
        k_origin: int,
        deterministic: bool,
        wanted: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        entry = self.attention.entry(q.device.type, STORAGES[q.dtype], q.shape[3], v.shape[3])
        dq, dk, dv, _ = self.fake_backward(
            d_o, dlse, q, k, v, o, lse, captured, scalars, q_origin, k_origin, deterministic, wanted
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
        )
        self._run(
            entry, True, q, k, v, tensors, captured, gradients, scalars, q_origin, k_origin, deterministic
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
        scalars: list[float],
        q_origin: int,
        k_origin: int,
        deterministic: bool,
        wanted: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        gradients = [x.new_empty(x.shape) for x, want in zip(captured, wanted, strict=True) if want]
        return _like(q, tuple(q.shape)), _like(k, tuple(k.shape)), _like(v, tuple(v.shape)), gradients


def _define(library: Any, key: str) -> None:
    common = "Tensor[] captured, float[] scalars, SymInt q_origin, SymInt k_origin"
    library.define(f"{key}_forward(Tensor q, Tensor k, Tensor v, {common}) -> (Tensor, Tensor)")
    library.define(
        f"{key}_backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"{common}, "
        "bool deterministic, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor[])"
    )


def _autograd_function(glue: TorchGlue) -> Any:
    class AttentionFunction(torch.autograd.Function):
        """Saves q, k, v, o, LSE and the captured tensors; P is recomputed. No second derivative."""

        @staticmethod
        def forward(
            ctx: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            scalars: list[float],
            q_origin: int,
            k_origin: int,
            deterministic: bool,
            return_lse: bool,
            *captured: Tensor,
        ) -> tuple[Tensor, Tensor]:
            o, lse = glue.forward_op(q, k, v, list(captured), scalars, q_origin, k_origin)
            ctx.save_for_backward(q, k, v, o, lse, *captured)
            ctx.scalars, ctx.origins, ctx.deterministic, ctx.return_lse = (
                scalars,
                (q_origin, k_origin),
                deterministic,
                return_lse,
            )
            if not return_lse:
                ctx.mark_non_differentiable(lse)
            return o, lse

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, d_o: Tensor, dlse: Tensor) -> Any:
            q, k, v, o, lse, *captured = ctx.saved_tensors
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
                ctx.scalars,
                *ctx.origins,
                ctx.deterministic,
                wanted,
            )
            found = iter(gradients)
            none = [None] * (FIXED_ARGUMENTS - 3)
            return dq, dk, dv, *none, *(next(found) if want else None for want in wanted)

    return AttentionFunction.apply
