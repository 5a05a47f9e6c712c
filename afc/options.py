# SPDX-License-Identifier: Apache-2.0
"""What a user asks a build for, in one object; the only place that reads environment variables of the
compiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from afc.errors import UsageError

BACKENDS = ("cpu", "cuda")
DTYPES = {
    "float64": "float64",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "float32": "float32",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
}
DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
# Code that every GPU from compute capability 8.0 on can run: a GPU runs the machine code of an earlier minor
# version, and the driver compiles the PTX for all that are not of these families. 8.6 has tiles of its own.
DEFAULT_ARCHS = ("sm_80", "sm_86", "sm_90", "sm_120", "compute_80")
DEFAULT_HEAD = 128

Constant = int | float | bool


@dataclass(frozen=True)
class Options:
    """`heads`: (Dqk, Dv) pairs; `dtypes`: storage types, empty for each backend's default; `constants`:
    run-time parameters fixed at compile time; `archs`: `sm_90`, `compute_86:sm_90` for one feature
    level on another, or `compute_80` for PTX."""

    backends: tuple[str, ...] = ("cpu",)
    heads: tuple[tuple[int, int], ...] = ((DEFAULT_HEAD, DEFAULT_HEAD),)
    dtypes: tuple[str, ...] = ()
    archs: tuple[str, ...] = DEFAULT_ARCHS
    constants: tuple[tuple[str, Constant], ...] = ()
    backward: bool = True

    def storages(self, backend: str) -> tuple[str, ...]:
        """Storage types to build for a backend."""
        return self.dtypes or (DEFAULT_DTYPE[backend],)


def dtype_name(text: object) -> str:
    """Canonical name of a storage type, given by a name or as a dtype of torch, NumPy or ml_dtypes.

    Raises UsageError E0610.
    """
    name = str(getattr(text, "__name__", text)).removeprefix("torch.").lower()
    if name not in DTYPES:
        raise UsageError.of(
            "E0610", f"unknown dtype `{text}`", hint=f"one of {', '.join(sorted(set(DTYPES.values())))}"
        )
    return DTYPES[name]


def backend_names(names: Iterable[str]) -> tuple[str, ...]:
    """Checked backends, each once. Raises UsageError E0611."""
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in BACKENDS:
            raise UsageError.of("E0611", f"unknown backend `{name}`", hint=f"one of {', '.join(BACKENDS)}")
    return chosen


def parse_constant(text: str) -> Constant:
    """A value of `-D name=value`: an int, a float, true or false. Raises UsageError E0612."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise UsageError.of("E0612", f"`{text}` is not a number, true or false")


def head_pairs(defines: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """(Dqk, Dv) pairs from `-D D=64,128` or `-D Dqk=192 -D Dv=128`. Raises UsageError E0613."""
    if "D" in defines and ({"Dqk", "Dv"} & set(defines)):
        raise UsageError.of("E0613", "give either D or Dqk and Dv, not both")
    if "Dqk" in defines or "Dv" in defines:
        if not {"Dqk", "Dv"} <= set(defines) or len(defines["Dqk"]) != len(defines["Dv"]):
            raise UsageError.of("E0613", "Dqk and Dv come together, with as many values each")
        return tuple(zip(defines["Dqk"], defines["Dv"], strict=True))
    return tuple((d, d) for d in defines.get("D", (DEFAULT_HEAD,)))


def environment(name: str) -> str | None:
    """An environment variable of the compiler, or None if unset or empty."""
    return os.environ.get(name) or None
