# SPDX-License-Identifier: Apache-2.0
"""What a module says of itself: its entries, their signatures, and how it was built. Written by `afc.api`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Dtypes by the names that NumPy and PyTorch share: those of q, k and v, the codes of the call interface, and
# what captured tensors of a declared type may have.
STORAGES = ("float64", "float32", "bfloat16", "float16")
DTYPE_CODES = {"bool": 0, "int32": 1, "int64": 2, "float16": 3, "bfloat16": 4, "float32": 5, "float64": 6}
CAPTURED_DTYPES = {
    "float": ("float32", "float16", "bfloat16", "float64"),
    "int": ("int32", "int64"),
    "bool": ("bool",),
}
ABI_VERSION = 3

Size = int | str | tuple[Any, ...]  # a number, a name, or (operator, operands...)


@dataclass(frozen=True)
class TensorInfo:
    """A captured tensor: sizes as small expressions, `broadcast` where size 1 is also accepted; type float,
    int, bool; `grad` where the module gives its gradient, which is 0 where no score depends on it.
    """

    name: str
    shape: tuple[tuple[Size, bool], ...]
    type: str
    grad: bool
    grad_is_zero: bool


@dataclass(frozen=True)
class ScalarInfo:
    """A run-time scalar: type float, int or bool, a default or None, `positive` where it must be > 0."""

    name: str
    type: str
    default: float | int | bool | None
    positive: bool


@dataclass(frozen=True)
class EntryInfo:
    """One configuration: index in the module's table, target, storage type, head sizes; on GPUs the
    architectures of each class that there is code for, the best class first.
    """

    index: int
    attention: str
    target: str
    storage: str
    head_qk: int
    head_v: int
    backward: bool
    lse: bool
    deterministic: bool
    classes: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        return f"{self.target} {self.storage} Dqk={self.head_qk} Dv={self.head_v}"


@dataclass(frozen=True)
class AttentionInfo:
    """Signature and documentation of one attention. `output_blocks`: it has some, and its backward reads the
    output before them.
    """

    name: str
    doc: str
    key: str
    output_blocks: bool
    tensors: tuple[TensorInfo, ...]
    scalars: tuple[ScalarInfo, ...]
    order: tuple[str, ...]
    entries: tuple[EntryInfo, ...]


@dataclass(frozen=True)
class ModuleInfo:
    """A whole module. `command`: how to build one that holds more (`{options}` is replaced)."""

    source: str
    doc: str
    command: str
    attentions: Mapping[str, AttentionInfo]


def read_module(module: Any) -> ModuleInfo:
    """Parse a module's metadata. Raises ImportError where its call interface is not this package's."""
    data = json.loads(module._afc_metadata)
    if data["abi"] != ABI_VERSION:
        raise ImportError(
            f"module {module.__name__}: built for call interface {data['abi']}, this afc has {ABI_VERSION}; "
            f"rebuild it with `{data['command']}`"
        )
    entries = [_entry(index, json.loads(text)) for index, text in enumerate(module._afc_entries)]
    attentions = {}
    for name, item in data["attentions"].items():
        attentions[name] = AttentionInfo(
            name,
            item["doc"],
            item["key"],
            bool(item["output_blocks"]),
            tuple(_tensor(p) for p in item["parameters"] if p["kind"] == "tensor"),
            tuple(
                ScalarInfo(p["name"], p["type"], p["default"], p["positive"])
                for p in item["parameters"]
                if p["kind"] == "scalar"
            ),
            tuple(p["name"] for p in item["parameters"]),
            tuple(e for e in entries if e.attention == name),
        )
    return ModuleInfo(data["source"], data["doc"], data["command"], attentions)


def _tensor(data: Mapping[str, Any]) -> TensorInfo:
    shape = tuple((_size(size), bool(one)) for size, one in data["shape"])
    return TensorInfo(data["name"], shape, data["type"], bool(data["grad"]), bool(data["grad_is_zero"]))


def _size(data: Any) -> Size:
    return (data[0], *map(_size, data[1:])) if isinstance(data, list) else data


def _entry(index: int, data: Mapping[str, Any]) -> EntryInfo:
    return EntryInfo(
        index,
        data["attention"],
        data["target"],
        data["storage"],
        data["Dqk"],
        data["Dv"],
        data["backward"],
        data["lse"],
        data["deterministic"],
        tuple((name, tuple(archs)) for name, archs in data["classes"].items()),
    )


def size_value(size: Size, known: Mapping[str, int]) -> int | None:
    """Value of a size, or None where it reads a name that is not known yet."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return known.get(size)
    operator, *operands = size
    values = [size_value(o, known) for o in operands]
    if any(v is None for v in values):
        return None
    a, b = (values * 2)[:2]
    assert a is not None and b is not None
    return {"add": a + b, "sub": a - b, "mul": a * b, "neg": -a, "floordiv": a // b if b else 0}[operator]


def size_text(size: Size) -> str:
    """A size as people write it."""
    if not isinstance(size, tuple):
        return str(size)
    operator, *operands = size
    symbol = {"add": " + ", "sub": " - ", "mul": "*", "floordiv": " // ", "neg": "-"}[operator]
    parts = [size_text(o) for o in operands]
    return symbol + parts[0] if operator == "neg" else symbol.join(parts)
