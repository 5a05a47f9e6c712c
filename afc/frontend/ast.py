# SPDX-License-Identifier: Apache-2.0
"""Syntax tree of a `.attn` file. Every node has a span; nothing is resolved yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from afc.errors import Span


@dataclass(frozen=True)
class Name:
    """A name used as a value."""

    id: str
    span: Span


@dataclass(frozen=True)
class Literal:
    """A number or boolean; `text` as written (an example's tolerance depends on its digits)."""

    value: float | int | bool
    text: str
    span: Span


@dataclass(frozen=True)
class Unary:
    """`-x` or `not x`."""

    op: str
    operand: Node
    span: Span


@dataclass(frozen=True)
class Binary:
    """An infix operator, `@` included."""

    op: str
    left: Node
    right: Node
    span: Span


@dataclass(frozen=True)
class Compare:
    """A chain `a < b <= c`, meaning the conjunction of its links."""

    ops: tuple[str, ...]
    operands: tuple[Node, ...]
    span: Span


@dataclass(frozen=True)
class Conditional:
    """`if condition then a else b`."""

    condition: Node
    then: Node
    otherwise: Node
    span: Span


@dataclass(frozen=True)
class Keyword:
    """A named argument; `; slope` is short for `; slope = slope`."""

    name: str
    value: Node
    span: Span


@dataclass(frozen=True)
class Call:
    """`f(a, b; name = value)`."""

    function: str
    args: tuple[Node, ...]
    keywords: tuple[Keyword, ...]
    span: Span


@dataclass(frozen=True)
class Index:
    """`t[b, h]`: an element of a captured tensor."""

    base: str
    indices: tuple[Node, ...]
    span: Span


@dataclass(frozen=True)
class Slice:
    """`q[lo:hi]`: columns of q or k.

    As an assignment target without brackets, both are None and `whole` holds.
    """

    base: str
    lo: Node | None
    hi: Node | None
    whole: bool
    span: Span


@dataclass(frozen=True)
class Items:
    """`[a, b]` (a list, in examples) or `(a, b)` (the pair a rotation returns)."""

    items: tuple[Node, ...]
    pair: bool
    span: Span


Node = Union[Name, Literal, Unary, Binary, Compare, Conditional, Call, Index, Slice, Items]  # noqa: UP007


@dataclass(frozen=True)
class Extent:
    """A dimension of a captured tensor; `broadcast`: written `1|B`, size 1 is also accepted."""

    size: Node
    broadcast: bool


@dataclass(frozen=True)
class Parameter:
    """`name[shape]: type grad > bound = default`; every part but the name is optional."""

    name: str
    shape: tuple[Extent, ...] | None
    type: str | None
    grad: bool
    bound: Node | None
    default: Node | None
    span: Span


@dataclass(frozen=True)
class Assignment:
    """`a, b = value`."""

    targets: tuple[Slice, ...]
    value: Node
    span: Span


@dataclass(frozen=True)
class Declaration:
    """A block of any slot, a function, or an attention."""

    kind: str
    name: str
    inputs: tuple[Parameter, ...]
    options: tuple[Parameter, ...]
    pairing: str | None
    result_type: str | None
    body: tuple[Assignment, ...]
    result: Node
    doc: str
    span: Span  # of the name
    extent: Span  # of the whole declaration


@dataclass(frozen=True)
class Example:
    """`example f(x; a = 1) == value`, a number from outside that the formula must reproduce."""

    call: Node
    expected: Node
    span: Span


@dataclass(frozen=True)
class Import:
    """`import "other.attn"`, relative to the importing file."""

    path: str
    span: Span


@dataclass(frozen=True)
class File:
    """A parsed file."""

    path: str
    text: str
    edition: int | None
    declarations: tuple[Declaration, ...]
    examples: tuple[Example, ...]
    imports: tuple[Import, ...]
