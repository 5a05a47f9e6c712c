# SPDX-License-Identifier: Apache-2.0
"""Protocol: how the roles of a warp-specialised kernel share memory.

Data only: `afc/schedule/protocols.py` builds it, `afc/reference/protocol.py` runs it.

A kernel that loads, multiplies and stores in different warps is a set of roles, each a straight script of
synchronisation operations with structured loops. The arithmetic is left out: what stays is who touches which
stage of which buffer, and what it waits for first.

      producer ──CopyIn──> buffer stage ──Read──> consumer
         │                     │                     │
         │    full barrier: bytes have arrived       │
         ├──────────────ExpectBytes──────────Wait────┤
         │    empty barrier: nobody reads any more   │
         └──────────────Wait───────────────Arrive────┘

Rules the scripts follow, and the simulator checks:

* Stage and parity of a wait come from a pipeline state (stage, phase) that each role keeps for itself. It
  starts at (0, 0), advances once per use of a stage, flips its phase when it wraps, and is carried from work
  item to work item.
* A role waits for every phase of a barrier, in order, or for none; likewise it arrives once in every phase.
* A barrier that guards something free at the start (`free_at_start`, the "empty" kind) is waited for with the
  opposite parity (`Wait.flip`), so that the first round passes at once.
* Loops of all roles run over one `TileRange`: whoever prints the kernel prints all loops from the same
  object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, Union

from afc.ir.masks import Run

WARP = 32
WARPGROUP = 4  # warps
REGISTER_FILE = 65536  # 32-bit registers of an SM
SHARED_BYTES = 232448  # of a block, at most
NAMED_BARRIERS = 16

RunKind = Literal["partial", "full"]
CURRENT, PREVIOUS = 0, -1  # tile of an access, relative to the tile a loop stands at


# ---- what is shared --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkItem:
    """What a block works on at a time: a tile of one axis, and how many tiles of the other it walks.

    `heads`: the walk is repeated for each query head of a group.
    """

    partial: int = 0
    full: int = 0
    heads: int = 1

    @staticmethod
    def of(run: Run, size: int, heads: int = 1) -> WorkItem:
        """The work item whose walk is a mask's run, in an aligned grid of tiles of `size` indices."""
        kinds = [full for _, full in run.tiles(size)]
        return WorkItem(kinds.count(False), kinds.count(True), heads)


@dataclass(frozen=True)
class TileRange:
    """The tiles that a work item walks, in order; the one description all roles' loops are generated from."""

    axis: Literal["queries", "keys"]
    runs: tuple[RunKind, ...] = ("partial", "full")

    def tiles(self, item: WorkItem) -> tuple[tuple[int, RunKind, int], ...]:
        """(head of the group, run, position in the run) of every tile; possibly none."""
        counts = {"partial": item.partial, "full": item.full}
        return tuple((h, run, k) for h in range(item.heads) for run in self.runs for k in range(counts[run]))


@dataclass(frozen=True)
class Pipeline:
    """A ring of stages. Each role that uses it has its own (stage, phase).

    A ring of buffers may have two: where a role waits next, and what it releases next.
    """

    name: str
    stages: int = 1


@dataclass(frozen=True)
class Barrier:
    """An mbarrier per stage. A phase completes when `count` arrivals and all expected bytes are in."""

    name: str
    stages: int
    count: int
    counts_bytes: bool = False
    free_at_start: bool = False


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier of a block (`bar.sync id, participants`). `participants`: threads."""

    name: str
    id: int
    participants: int


@dataclass(frozen=True)
class Buffer:
    """A ring of tiles in shared memory, `bytes` each. `parts`: equal pieces that can be accessed one by one.

    `alias`: the buffer whose memory it occupies, from that one's first byte on.
    """

    name: str
    stages: int
    bytes: int
    parts: int = 1
    alias: str | None = None


# ---- operations ------------------------------------------------------------------------------------------
# `at` names the pipeline whose state gives the stage, or is a fixed stage. `tile` says which tile the data
# belongs to: CURRENT or PREVIOUS of the loop, None if there is one per work item.

At = Union[str, int]  # noqa: UP007


@dataclass(frozen=True)
class Wait:
    """Block until the barrier completes the phase of the pipeline's parity, or with `flip` of the other."""

    barrier: str
    at: str
    flip: bool = False


@dataclass(frozen=True)
class Arrive:
    """Arrive; `count` defaults to one per warp of the role."""

    barrier: str
    at: str
    count: int | None = None


@dataclass(frozen=True)
class ExpectBytes:
    """Arrive once and announce bytes that the current phase has to wait for."""

    barrier: str
    at: str
    bytes: int


@dataclass(frozen=True)
class CopyIn:
    """Asynchronous copy into a stage. Its bytes are counted by the barrier when it lands, some time later."""

    buffer: str
    at: str
    barrier: str
    tile: int | None = None


@dataclass(frozen=True)
class Read:
    """Read a stage, or one part of it. An asynchronous read (wgmma) lasts until a WaitGroup covers its group.

    `registers`: accumulators and operands that belong to the tensor core for as long.
    """

    buffer: str
    at: At
    tile: int | None = None
    registers: tuple[str, ...] = ()
    asynchronous: bool = True
    part: int | None = None


@dataclass(frozen=True)
class Touch:
    """Ordinary instructions read or write these registers."""

    registers: tuple[str, ...]


@dataclass(frozen=True)
class CommitGroup:
    """Close the group of asynchronous reads issued since the last one."""


@dataclass(frozen=True)
class WaitGroup:
    """Block until at most `pending` of the latest groups of asynchronous reads run."""

    pending: int


@dataclass(frozen=True)
class Write:
    """Write one part of a stage with ordinary stores (the generic proxy)."""

    buffer: str
    at: At
    part: int = 0
    tile: int | None = None


@dataclass(frozen=True)
class ProxyFence:
    """Make the role's own ordinary stores visible to asynchronous reads (wgmma, bulk stores)."""


@dataclass(frozen=True)
class NamedSync:
    """Arrive at a named barrier and block. `participants` overrides the barrier's own number."""

    barrier: str
    participants: int | None = None


@dataclass(frozen=True)
class NamedArrive:
    """Arrive at a named barrier and go on."""

    barrier: str
    participants: int | None = None


@dataclass(frozen=True)
class StoreOut:
    """Asynchronous copy (or reduction) of a stage or a part to global memory, in a group of its own."""

    buffer: str
    at: At
    tile: int | None = None
    part: int | None = None


@dataclass(frozen=True)
class WaitStoreRead:
    """Block until at most `pending` of the latest StoreOuts still read shared memory."""

    pending: int = 0


@dataclass(frozen=True)
class SetRegisters:
    """Take registers from the block's pool, blocking until there are enough, or give some back."""

    registers: int


@dataclass(frozen=True)
class FetchItem:
    """The role's next work item: its own arithmetic, or an atomic counter if one role fetches for all."""


@dataclass(frozen=True)
class PublishItem:
    """Write the role's work item, or that there is none, for others to take (ordinary store)."""

    buffer: str
    at: str


@dataclass(frozen=True)
class TakeItem:
    """Read the work item that another role published (ordinary load)."""

    buffer: str
    at: str


@dataclass(frozen=True)
class AdvancePipeline:
    """Next stage; the phase flips at the wrap."""

    pipeline: str


@dataclass(frozen=True)
class ResetPipeline:
    """Back to (0, 0), as if declared inside the loop over work items. No correct persistent kernel has it."""

    pipeline: str


@dataclass(frozen=True)
class ForItems:
    """Repeat while the role has a work item."""

    body: Script


@dataclass(frozen=True)
class ForTiles:
    """Once per tile from number `first` on. Afterwards the role still stands at the last tile."""

    range: TileRange
    body: Script
    first: int = 0


@dataclass(frozen=True)
class IfTiles:
    """Only if the work item has a tile: prologue and tail of a software pipeline."""

    range: TileRange
    body: Script


Op = Union[  # noqa: UP007
    Wait,
    Arrive,
    ExpectBytes,
    CopyIn,
    Read,
    Touch,
    CommitGroup,
    WaitGroup,
    Write,
    ProxyFence,
    NamedSync,
    NamedArrive,
    StoreOut,
    WaitStoreRead,
    SetRegisters,
    FetchItem,
    PublishItem,
    TakeItem,
    AdvancePipeline,
    ResetPipeline,
    ForItems,
    ForTiles,
    IfTiles,
]
Script = tuple[Op, ...]


# ---- a kernel --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """Warps that run one script in step. `registers`: per thread, once the script has set them."""

    name: str
    warps: int
    registers: int
    script: Script

    @property
    def threads(self) -> int:
        """Threads of the role."""
        return self.warps * WARP


@dataclass(frozen=True)
class Protocol:
    """The synchronisation of one kernel. Raises ValueError for a name that nothing declares."""

    name: str
    pipelines: tuple[Pipeline, ...]
    barriers: tuple[Barrier, ...]
    named: tuple[NamedBarrier, ...]
    buffers: tuple[Buffer, ...]
    roles: tuple[Role, ...]

    def __post_init__(self) -> None:
        verify(self)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return sum(role.threads for role in self.roles)

    @property
    def launch_registers(self) -> int:
        """Registers per thread at launch, one block to an SM: a multiple of 8, at most 255."""
        return min(REGISTER_FILE // self.threads // 8 * 8, 255)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the buffers; one that aliases another takes none."""
        return sum(b.stages * b.bytes for b in self.buffers if b.alias is None)


def walk(script: Script) -> Iterator[Op]:
    """Every operation of a script, loops before their bodies."""
    for op in script:
        yield op
        if isinstance(op, (ForItems, ForTiles, IfTiles)):
            yield from walk(op.body)


def rewrite(script: Script, change: Callable[[Op], Script]) -> Script:
    """The script with every operation replaced by `change` of it, bodies first."""
    out: list[Op] = []
    for op in script:
        if isinstance(op, (ForItems, ForTiles, IfTiles)):
            op = replace(op, body=rewrite(op.body, change))
        out += change(op)
    return tuple(out)


def spell(op: Op) -> str:
    """An operation as text, without bodies and defaults."""
    values = {f.name: getattr(op, f.name) for f in fields(op) if f.name != "body"}
    defaults = {f.name: f.default for f in fields(op)}
    shown = [_spell_field(name, value) for name, value in values.items() if value != defaults[name]]
    return f"{type(op).__name__}({', '.join(shown)})"


def _spell_field(name: str, value: object) -> str:
    if isinstance(value, TileRange):
        return f"{value.axis}: {' then '.join(value.runs)}"
    return (
        f"{name}={value}"
        if name in ("tile", "part", "flip", "first", "asynchronous", "registers")
        else str(value)
    )


def text(protocol: Protocol) -> str:
    """Every role's script, indented: the protocol on one screen."""
    lines = [f"protocol {protocol.name}: {protocol.threads} threads, {protocol.shared_bytes} bytes shared"]
    for role in protocol.roles:
        lines.append(f"{role.name} ({role.warps} warps, {role.registers} registers)")
        lines += _lines(role.script, 1)
    return "\n".join(lines) + "\n"


def _lines(script: Script, depth: int) -> Iterator[str]:
    for op in script:
        yield "    " * depth + spell(op)
        if isinstance(op, (ForItems, ForTiles, IfTiles)):
            yield from _lines(op.body, depth + 1)


# ---- well-formedness -------------------------------------------------------------------------------------


def verify(protocol: Protocol) -> None:
    """Raise ValueError unless every name is declared once and every stage fits the ring it is used with."""
    declared = {
        "pipeline": [p.name for p in protocol.pipelines],
        "barrier": [b.name for b in protocol.barriers] + [b.name for b in protocol.named],
        "buffer": [b.name for b in protocol.buffers],
        "role": [r.name for r in protocol.roles],
    }
    for kind, names in declared.items():
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{protocol.name}: two declarations of {kind} {name!r}")
    if sum(role.warps for role in protocol.roles) % WARPGROUP:
        raise ValueError(f"{protocol.name}: the warps of all roles must fill warpgroups of {WARPGROUP}")
    for buffer in protocol.buffers:
        _verify_buffer(protocol, buffer)
    for role in protocol.roles:
        for op in walk(role.script):
            _verify_op(protocol, role, op, declared)


def _verify_buffer(protocol: Protocol, buffer: Buffer) -> None:
    if buffer.bytes % buffer.parts:
        raise ValueError(f"{protocol.name}: {buffer.bytes} bytes of {buffer.name!r} in {buffer.parts} parts")
    if buffer.alias is None:
        return
    under = next((b for b in protocol.buffers if b.name == buffer.alias and b.alias is None), None)
    if under is None:
        raise ValueError(f"{protocol.name}: {buffer.name!r} aliases {buffer.alias!r}, which has no memory")
    if buffer.stages * buffer.bytes > under.stages * under.bytes:
        raise ValueError(f"{protocol.name}: {buffer.name!r} does not fit into {buffer.alias!r}")


def _verify_op(protocol: Protocol, role: Role, op: Op, declared: dict[str, list[str]]) -> None:
    where = f"{protocol.name}, {role.name}: {spell(op)}"
    for kind in ("pipeline", "barrier", "buffer"):
        name = getattr(op, kind, None)
        if name is not None and name not in declared[kind]:
            raise ValueError(f"{where}: no {kind} {name!r}")
    at = getattr(op, "at", None)
    if isinstance(at, str) and at not in declared["pipeline"]:
        raise ValueError(f"{where}: no pipeline {at!r}")
    rings = {b.name: b.stages for b in protocol.barriers} | {b.name: b.stages for b in protocol.buffers}
    pipelines = {p.name: p.stages for p in protocol.pipelines}
    for name in (getattr(op, "barrier", None), getattr(op, "buffer", None)):
        if isinstance(at, str) and name in rings and rings[name] != pipelines[at]:
            raise ValueError(f"{where}: {name!r} has {rings[name]} stages, pipeline {at!r} {pipelines[at]}")
        if isinstance(at, int) and name in rings and not 0 <= at < rings[name]:
            raise ValueError(f"{where}: {name!r} has {rings[name]} stages")
    _verify_kinds(protocol, op, where)


def _verify_kinds(protocol: Protocol, op: Op, where: str) -> None:
    """mbarriers and named barriers have different operations; only barriers that count bytes expect some."""
    barriers = {b.name: b for b in protocol.barriers}
    if isinstance(op, (NamedSync, NamedArrive)) and op.barrier in barriers:
        raise ValueError(f"{where}: {op.barrier!r} is not a named barrier")
    if isinstance(op, (Wait, Arrive, ExpectBytes, CopyIn)) and op.barrier not in barriers:
        raise ValueError(f"{where}: {op.barrier!r} is a named barrier")
    if isinstance(op, (ExpectBytes, CopyIn)) and not barriers[op.barrier].counts_bytes:
        raise ValueError(f"{where}: {op.barrier!r} does not count bytes")
    if isinstance(op, (Write, Read, StoreOut)):
        parts = next(b.parts for b in protocol.buffers if b.name == op.buffer)
        if op.part is not None and not 0 <= op.part < parts:
            raise ValueError(f"{where}: {op.buffer!r} has {parts} parts")
