# SPDX-License-Identifier: Apache-2.0
"""The syntax tree as text: a line per node with its place, what it holds indented below it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from afc.errors import Span
from afc.frontend import ast


def dump(file: ast.File) -> str:
    """Every field of every node, in the order of the source; spans as the place where they begin."""
    lines = [f"File edition {file.edition or 1}"]
    for group in (file.imports, file.declarations, file.examples):
        lines += [f"  {line}" for node in group for line in _lines("", node)]
    return "\n".join(lines) + "\n"


def _lines(label: str, value: Any) -> list[str]:
    head = f"{label}: " if label else ""
    if isinstance(value, tuple):
        if not value or not all(map(is_dataclass, value)):
            return [f"{head}{', '.join(map(str, value)) or 'none'}"]
        return [f"{label}:", *(f"  {line}" for item in value for line in _lines("", item))]
    if not is_dataclass(value):
        return [head + ("none" if value is None else repr(value))]
    place = getattr(value, "span", None)
    where = f"  [{place.line}:{place.column}]" if isinstance(place, Span) else ""
    lines = [f"{head}{type(value).__name__}{where}"]
    for field in fields(value):
        if field.name not in ("span", "extent"):
            lines += [f"  {line}" for line in _lines(field.name, getattr(value, field.name))]
    return lines
