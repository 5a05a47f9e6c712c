# SPDX-License-Identifier: Apache-2.0
"""The Jinja context of `templates/host/launch.cpp.j2`: a LaunchPlan as host code."""

from __future__ import annotations

from dataclasses import dataclass

from afc.render.sm80_context import SharesContext


@dataclass(frozen=True)
class KernelRow:
    """A kernel of the images: name of its constant in the host code, C symbol, dynamic shared memory,
    threads, and the part of an image (0: forward, 1: backward) that holds it.
    """

    constant: str
    symbol: str
    shared_bytes: int
    threads: int
    part: int


@dataclass(frozen=True)
class LaunchRow:
    """One launch: the kernel's constant and the grid, as C++ expressions in `args`.

    `then`: from there on, `args.o` is the output before its blocks and `args.d_o` its gradient, in the buffer
    of this name; empty: no change.
    """

    constant: str
    x: str
    y: str
    then: str


@dataclass(frozen=True)
class BufferRow:
    """A part of the workspace: index in `args.buffer`, when it is needed, bytes of a value, count of
    values.
    """

    index: int
    name: str
    needed: str
    bytes: int
    count: str


@dataclass(frozen=True)
class ScalarCheck:
    """A condition on a run-time scalar that must hold."""

    name: str
    condition: str
    expected: str


@dataclass(frozen=True)
class CapturedRow:
    """A captured tensor: a condition on its element type, `dtype` of the call, and what that is in words."""

    name: str
    condition: str
    expected: str


@dataclass(frozen=True)
class PassRow:
    """An entry function and its launches; `deterministic`: those instead where AFC_DETERMINISTIC is set, if
    they are others.
    """

    name: str
    launches: tuple[LaunchRow, ...]
    deterministic: tuple[LaunchRow, ...] = ()


@dataclass(frozen=True)
class LaunchContext:
    """A whole unit of host code."""

    provenance: tuple[str, ...]
    symbol: str
    head_qk: int
    head_v: int
    captured: tuple[CapturedRow, ...]
    backward: bool
    kernels: tuple[KernelRow, ...]
    buffers: tuple[BufferRow, ...]
    scalar_checks: tuple[ScalarCheck, ...]
    passes: tuple[PassRow, ...]
    shares: tuple[SharesContext, ...]
    gradients: tuple[int, ...]  # slots of captured tensors whose gradient may be asked for
    output_blocks: bool
