# SPDX-License-Identifier: Apache-2.0
"""The Python callable of an attention: argument checks with names, and the choice of the entry that runs."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from afc.runtime.describe import (
    AttentionInfo,
    EntryInfo,
    ModuleInfo,
    ScalarInfo,
    TensorInfo,
    size_text,
    size_value,
)
from afc.runtime.loading import restore_attention

MAX_POSITION = 2**30
RESERVED = {"q_origin": None, "k_origin": 0, "kv_len": None, "return_lse": False, "deterministic": False}


class Attention:
    """One attention of a module, called as `module.name(q, k, v, ...)`.

    q [B, H, M, Dqk], k [B, Hk, N, Dqk], v [B, Hk, N, Dv] (H a multiple of Hk), all of one dtype and
    device, any strides with a unit last stride. Returns o [B, H, M, Dv] in q's dtype and stride order, and
    with `return_lse` also the natural-log LSE [B, H, M] in float32 (float64 for float64), both
    differentiable. NumPy arrays and DLPack objects in CPU memory give NumPy arrays, CuPy arrays and what
    CuPy reads in GPU memory CuPy arrays; without gradients.
    """

    def __init__(self, module: Any, info: ModuleInfo, name: str) -> None:
        self.module = module
        self.module_info = info
        self.info: AttentionInfo = info.attentions[name]
        self.__name__ = name
        self.__qualname__ = name
        self.__module__ = module.__name__
        self.__doc__ = _docstring(self.info)
        self.__signature__ = _signature(self.info)
        self.entries = {(e.target, e.storage, e.head_qk, e.head_v): e for e in self.info.entries}
        self.glue: Any = None

    def __repr__(self) -> str:
        return f"<attention {self.__module__}.{self.__name__}{self.__signature__}>"

    def prepare(self) -> None:
        """Register the torch operators. Happens by itself as soon as torch is imported."""
        if self.glue is None:
            from afc.runtime.torch_glue import TorchGlue

            self.glue = TorchGlue(self)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        q_origin: Any = None,
        k_origin: Any = 0,
        kv_len: Any = None,
        return_lse: bool = False,
        deterministic: bool = False,
        **options: Any,
    ) -> Any:
        if self.glue is None and "torch" in sys.modules:
            self.prepare()
        if self.glue is None or not self.glue.takes(q):
            from afc.runtime.arrays import call_with_arrays

            return call_with_arrays(self, q, k, v, options, (q_origin, k_origin, kv_len), return_lse)
        return self.glue(q, k, v, options, q_origin, k_origin, kv_len, return_lse, deterministic)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attention:
        return self  # it holds nothing that could differ

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return restore_attention, (self.module.__file__, self.__name__)

    # ---- choices and checks, independent of the array library ---------------------------------------------

    def fail(self, kind: type[Exception], argument: str, expected: str, came: str) -> Exception:
        """An error that names the argument, what was expected and what came."""
        return kind(f"{self.__name__}: {argument}: expected {expected}, got {came}")

    def entry(self, target: str, storage: str, head_qk: int, head_v: int) -> EntryInfo:
        """The entry for a call. Raises TypeError with the command that would build it."""
        found = self.entries.get((target, storage, head_qk, head_v))
        if found is None:
            raise self.missing(target, storage, head_qk, head_v)
        return found

    def missing(self, target: str, storage: str, head_qk: int, head_v: int) -> TypeError:
        heads = f"-D D={head_qk}" if head_qk == head_v else f"-D Dqk={head_qk} -D Dv={head_v}"
        options = f"--backend {target} {heads} --dtype {storage}"
        held = "; ".join(str(e) for e in self.info.entries)
        return TypeError(
            f"{self.__name__}: this module has no kernel for {target} {storage} Dqk={head_qk} Dv={head_v} "
            f"(it holds: {held}). "
            f"Build one with `{self.module_info.command.replace('{options}', options)}`"
        )

    def scalars(self, options: dict[str, Any], traced: bool = False) -> list[int | float]:
        """Values of the run-time scalars in signature order, checked. Of a `traced` call the ranges of floats
        are left to the kernel: the values are not known yet.
        """
        values: list[int | float] = []
        for scalar in self.info.scalars:
            value = options.get(scalar.name, scalar.default)
            values.append(self.scalar(scalar, value, scalar.name in options, traced))
        return values

    def scalar(self, info: ScalarInfo, value: Any, given: bool, traced: bool) -> int | float:
        if value is None and not given:
            raise TypeError(f"{self.__name__}: missing argument `{info.name}` ({info.type})")
        if info.type == "bool":
            if not isinstance(value, bool):
                raise self.fail(TypeError, info.name, "a bool", repr(value))
            return int(value)
        if isinstance(value, bool) or not isinstance(value, (int, float) if info.type == "float" else int):
            raise self.fail(
                TypeError, info.name, f"{'a float' if info.type == 'float' else 'an int'}", repr(value)
            )
        if info.positive and not (traced and info.type == "float") and not value > 0:
            raise self.fail(ValueError, info.name, "a value greater than 0", repr(value))
        if info.type == "int" and not -MAX_POSITION < value < MAX_POSITION:
            raise self.fail(
                ValueError,
                info.name,
                f"an int between {1 - MAX_POSITION} and {MAX_POSITION - 1}",
                repr(value),
            )
        return float(value) if info.type == "float" else int(value)

    def check_names(self, options: dict[str, Any]) -> None:
        """Raises TypeError for a keyword the attention does not have, or a missing tensor."""
        for name in options:
            if name not in self.info.order:
                known = ", ".join((*self.info.order, *RESERVED))
                raise TypeError(
                    f"{self.__name__}: unexpected argument `{name}`; its named arguments are {known}"
                )
        for tensor in self.info.tensors:
            if tensor.name not in options:
                raise TypeError(
                    f"{self.__name__}: missing argument `{tensor.name}` "
                    f"(a {tensor.type} tensor {_shape_text(tensor)})"
                )

    def check_shapes(self, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
        """Raises ValueError where shapes of q, k and v do not fit."""
        for argument, shape in (("q", q), ("k", k), ("v", v)):
            if len(shape) != 4:
                expected = "4 dimensions [batch, heads, rows, head size]"
                raise self.fail(ValueError, argument, expected, str(tuple(shape)))
        if k[0] != q[0] or k[3] != q[3]:
            expected = f"shape [{q[0]}, Hk, N, {q[3]}] to go with q {tuple(q)}"
            raise self.fail(ValueError, "k", expected, str(tuple(k)))
        if v[:3] != k[:3]:
            expected = f"shape [{k[0]}, {k[1]}, {k[2]}, Dv] to go with k"
            raise self.fail(ValueError, "v", expected, str(tuple(v)))
        if (k[1] == 0 and q[1] != 0) or (k[1] != 0 and q[1] % k[1] != 0):
            raise self.fail(ValueError, "k", f"a number of heads that divides q's {q[1]}", str(k[1]))

    def check_lse(self, entry: EntryInfo, return_lse: bool) -> None:
        """Raises ValueError where an LSE is asked for that does not exist."""
        if return_lse and not entry.lse:
            raise ValueError(
                f"{self.__name__}: return_lse: its normalizer has no sum over the keys, hence no LSE"
            )

    @staticmethod
    def known_sizes(
        q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], options: dict[str, Any]
    ) -> dict[str, int]:
        """Values of the names that sizes of captured tensors may read."""
        sizes = {"B": q[0], "H": q[1], "Hk": k[1], "M": q[2], "N": k[2], "Dqk": q[3], "Dv": v[3]}
        return sizes | {n: x for n, x in options.items() if isinstance(x, int)}

    def check_captured(
        self, info: TensorInfo, shape: tuple[int, ...], known: dict[str, int]
    ) -> tuple[int, ...]:
        """Check a captured tensor's shape; a plain capitalised size that is not known yet is bound to it.

        Returns the shape that the kernels see: dimensions of size 1 that may broadcast are expanded.
        """
        full = []
        if len(shape) != len(info.shape):
            raise self.fail(
                ValueError,
                info.name,
                f"shape {_shape_text(info)}",
                f"{len(shape)} dimensions, {tuple(shape)}",
            )
        for axis, (size, broadcast) in enumerate(info.shape):
            got = shape[axis]
            if isinstance(size, str) and size not in known and not (broadcast and got == 1):
                known[size] = got
            wanted = size_value(size, known)
            full.append(got if wanted is None else wanted)
            if wanted is not None and got != wanted and not (broadcast and got == 1):
                raise self.fail(
                    ValueError,
                    info.name,
                    f"shape {_shape_text(info)} with {size_text(size)} = {wanted}",
                    str(tuple(shape)),
                )
        return tuple(full)


def _shape_text(info: TensorInfo) -> str:
    return "[" + ", ".join(("1|" if one else "") + size_text(size) for size, one in info.shape) + "]"


def _signature(info: AttentionInfo) -> inspect.Signature:
    positional = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("q", "k", "v")]
    named = []
    scalars = {s.name: s for s in info.scalars}
    for name in info.order:
        default = scalars[name].default if name in scalars else None
        empty = inspect.Parameter.empty
        named.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=empty if default is None else default
            )
        )
    for name, value in RESERVED.items():
        named.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value))
    return inspect.Signature([*positional, *named])


def _docstring(info: AttentionInfo) -> str:
    lines = [
        info.doc or f"Attention `{info.name}`.",
        "",
        "q [B, H, M, Dqk], k [B, Hk, N, Dqk], v [B, Hk, N, Dv]; H is a multiple of Hk.",
    ]
    lines += [f"{t.name} {_shape_text(t)}: {t.type} tensor." for t in info.tensors]
    lines += [f"{s.name}: {s.type}{' > 0' if s.positive else ''}." for s in info.scalars]
    lines += [
        "q_origin, k_origin: positions of row 0 of q and of k; ints, or int tensors [] or [B].",
        "kv_len: number of keys, as the origins; later rows of k and v are never read. Then q_origin is by",
        "default k_origin + kv_len - M, which ends q where the keys end; else 0.",
        "return_lse: also return the natural-log LSE [B, H, M], differentiable.",
        "deterministic: gradients with the same bits each time, or NotImplementedError.",
        "",
        f"Built for: {'; '.join(str(e) for e in info.entries)}.",
    ]
    return "\n".join(lines)
