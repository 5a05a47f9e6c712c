# SPDX-License-Identifier: Apache-2.0
"""The protocol simulator: runs a kernel's barrier scripts in random interleavings, and names what goes wrong.

Roles are coroutines that stop before each operation. A seeded scheduler picks who goes next among the roles
that can, the copies in flight and the wgmma groups in flight:

      roles ─────────┐                       ┌── barrier: arrivals, bytes, phase
      copies ────────┼── scheduler (seed) ───┤
      wgmma groups ──┘                       └── cell (buffer stage, part): content, readers, order

Luck finds few races, so order is checked as well as timing. Every role carries a vector clock; arrivals leave
it at a barrier, waits take it along. An access is wrong if the accesses it depends on are not *before* it in
this order, even where they happen to be over in this interleaving. Ordinary stores have a second time, that
of the proxy fence after them, and only that one counts for wgmma and bulk stores. Data is a tag (work item,
tile), so that reading the wrong tile is found too. Arithmetic is not modelled: `afc/reference/tiled.py` does
that. Nor are the warps of one role: they run in step, and what they owe each other is not checked.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn, Union

from afc.ir.protocol import (
    NAMED_BARRIERS,
    REGISTER_FILE,
    SHARED_BYTES,
    AdvancePipeline,
    Arrive,
    At,
    Barrier,
    Buffer,
    CommitGroup,
    CopyIn,
    ExpectBytes,
    FetchItem,
    ForItems,
    ForTiles,
    IfTiles,
    NamedArrive,
    NamedBarrier,
    NamedSync,
    Op,
    Protocol,
    ProxyFence,
    PublishItem,
    Read,
    ResetPipeline,
    Role,
    Script,
    SetRegisters,
    StoreOut,
    TakeItem,
    TileRange,
    Touch,
    Wait,
    WaitGroup,
    WaitStoreRead,
    WorkItem,
    Write,
    spell,
    walk,
)

TRACE_TAIL = 24

Tag = tuple[int, str]  # work item, tile of it
Time = tuple[int, int]  # index into a clock, and the count there


class Fault(str, Enum):
    """What a finding is. The value is its name in reports."""

    DEADLOCK = "deadlock"
    WRONG_PHASE = "wrong phase"
    REFILL_BEFORE_READ = "refill before read"
    READ_BEFORE_WRITE = "read before write"
    PROXY_FENCE = "missing proxy fence"
    ALIAS = "alias overlap"
    ARRIVAL_COUNT = "arrival count"
    BYTE_COUNT = "byte count"
    BARRIER_REUSE = "barrier re-use"
    PARTICIPANTS = "participant count"
    SKIPPED_ITEM = "skipped work item"
    TILE_COUNT = "tile count"
    REGISTERS_IN_FLIGHT = "registers in flight"
    REGISTER_BUDGET = "register budget"
    SHARED_BUDGET = "shared memory budget"
    LEFTOVER = "leftover transactions"


@dataclass(frozen=True)
class Finding:
    """One fault: who ran into it, what happened, and the operations before it, newest last."""

    fault: Fault
    role: str
    message: str
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.fault.value}: {self.role}: {self.message}"
        return "\n".join((head, *(f"    {line}" for line in self.trace)))


class _Found(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def explore(protocol: Protocol, work: Sequence[WorkItem], seeds: Iterable[int]) -> Finding | None:
    """The first finding over many interleavings of one list of work items, or None."""
    return next((found for seed in seeds if (found := simulate(protocol, work, seed))), None)


def simulate(protocol: Protocol, work: Sequence[WorkItem], seed: int = 0) -> Finding | None:
    """What goes wrong when one block runs `work` in the interleaving that `seed` picks, or None."""
    budget = inspect(protocol)
    if budget:
        return budget[0]
    try:
        _Machine(protocol, tuple(work), seed).run()
    except _Found as found:
        return found.finding
    return None


# ---- what needs no run -----------------------------------------------------------------------------------


def inspect(protocol: Protocol) -> list[Finding]:
    """Findings about budgets and participant counts."""
    return [*_registers(protocol), *_shared(protocol), *_named(protocol)]


def _registers(protocol: Protocol) -> Iterator[Finding]:
    """The pool is what the launch allocated: less than the file where its share is not a multiple of 8."""
    pool = min(REGISTER_FILE, protocol.launch_registers * protocol.threads)
    wanted = sum(role.threads * role.registers for role in protocol.roles)
    if wanted > pool:
        each = ", ".join(f"{r.name} {r.threads} x {r.registers}" for r in protocol.roles)
        message = f"{wanted} registers wanted of {pool}: {each}; setmaxnreg would block for ever"
        yield Finding(Fault.REGISTER_BUDGET, protocol.name, message)
    for role in protocol.roles:
        if role.registers % 8 or not 24 <= role.registers <= 256:
            message = f"{role.registers} registers; setmaxnreg takes multiples of 8 from 24 to 256"
            yield Finding(Fault.REGISTER_BUDGET, role.name, message)


def _shared(protocol: Protocol) -> Iterator[Finding]:
    if protocol.shared_bytes > SHARED_BYTES:
        message = f"{protocol.shared_bytes} bytes of {SHARED_BYTES}"
        yield Finding(Fault.SHARED_BUDGET, protocol.name, message)


def _named(protocol: Protocol) -> Iterator[Finding]:
    """Every role that names a barrier takes part in each of its rounds, so their threads add up to it."""
    ids = Counter(b.id for b in protocol.named)
    for barrier in protocol.named:
        if ids[barrier.id] > 1 or not 1 <= barrier.id < NAMED_BARRIERS:  # 0 is __syncthreads
            message = f"id {barrier.id} of {barrier.name!r} is taken or out of range"
            yield Finding(Fault.BARRIER_REUSE, protocol.name, message)
        uses = [(role, op) for role in protocol.roles for op in walk(role.script) if _names(op, barrier)]
        for role, op in uses:
            if (own := getattr(op, "participants", None)) not in (None, barrier.participants):
                message = f"{own} threads at {barrier.name!r}, which waits for {barrier.participants}"
                yield Finding(Fault.PARTICIPANTS, role.name, message)
        present = [role for role in protocol.roles if any(role is user for user, _ in uses)]
        threads = sum(role.threads for role in present)
        if threads != barrier.participants:
            names = ", ".join(role.name for role in present) or "nobody"
            message = f"{barrier.name!r} waits for {barrier.participants} threads; {names} bring {threads}"
            yield Finding(Fault.PARTICIPANTS, protocol.name, message)


def _names(op: Op, barrier: NamedBarrier) -> bool:
    return isinstance(op, (NamedSync, NamedArrive)) and op.barrier == barrier.name


# ---- state -----------------------------------------------------------------------------------------------


@dataclass
class _Cell:
    """A part of a stage of a buffer: the unit that is written at once."""

    buffer: Buffer
    stage: int
    part: int
    readers: frozenset[int]  # roles that read it at all
    overlaps: list[_Cell] = field(default_factory=list)
    content: Tag | None = None
    previous: Tag | None = None
    lost_to: str = ""  # buffer that overwrote the content
    copying: bool = False
    written: Time = (0, 0)
    generic: bool = False
    fenced: Time | None = None
    reads: dict[int, Time] = field(default_factory=dict)  # role -> end of its latest read of this content
    open: Counter[int] = field(default_factory=Counter)  # role -> asynchronous reads not yet waited for

    @property
    def name(self) -> str:
        part = f".{self.part}" if self.buffer.parts > 1 else ""
        return f"{self.buffer.name}[{self.stage}]{part}"

    @property
    def span(self) -> tuple[int, int]:
        size = self.buffer.bytes // self.buffer.parts
        first = self.stage * self.buffer.bytes + self.part * size
        return first, first + size

    def replace(self, content: Tag | None) -> None:
        """New content: the old readers do not count for it."""
        self.previous, self.content, self.lost_to = self.content or self.previous, content, ""
        self.reads.clear()
        for other in self.overlaps:
            if other.content is not None:
                other.previous, other.content, other.lost_to = other.content, None, self.buffer.name


@dataclass
class _Phase:
    """An mbarrier of one stage. `flips`: phases completed; the parity of the current one is its low bit."""

    barrier: Barrier
    stage: int
    clock: list[int]
    pending: int
    bytes: int = 0
    flips: int = 0
    completed: list[int] = field(default_factory=list)  # clock of the last completed phase

    @property
    def name(self) -> str:
        return f"{self.barrier.name}[{self.stage}]"

    def __str__(self) -> str:
        came = self.barrier.count - self.pending
        outstanding = f", {self.bytes} bytes outstanding" if self.barrier.counts_bytes else ""
        return f"{self.name}: {self.flips} phases done, {came} of {self.barrier.count} arrivals{outstanding}"


@dataclass
class _Round:
    """A named barrier. `rounds`: the clocks of completed rounds."""

    barrier: NamedBarrier
    clock: list[int]
    threads: int = 0
    participants: int = 0
    present: list[int] = field(default_factory=list)
    rounds: list[list[int]] = field(default_factory=list)


@dataclass(eq=False)
class _Group:
    """Asynchronous reads of one role that are waited for together."""

    role: _Role
    bulk: bool
    cells: list[_Cell] = field(default_factory=list)
    registers: set[str] = field(default_factory=set)
    finished: bool = False


@dataclass(eq=False)
class _Copy:
    """A copy in flight."""

    cells: list[_Cell]
    tag: Tag
    phase: _Phase
    round: int  # phase it was issued in
    clock: list[int]
    engine: int


@dataclass(frozen=True)
class _Blocked:
    """The second half of a NamedSync: blocked until the round is complete."""

    barrier: str
    round: int


_Step = Union[Op, _Blocked]  # noqa: UP007


@dataclass(eq=False)
class _Role:
    """A role at run time."""

    role: Role
    index: int
    clock: list[int]
    registers: int
    pipelines: dict[str, tuple[int, int]]
    steps: Iterator[_Step] = field(default_factory=lambda: iter(()))
    next: _Step | None = None
    item: int | None = None
    fetched: int = 0
    visited: list[int] = field(default_factory=list)
    range: TileRange | None = None
    tile: int = 0
    waits: defaultdict[str, list[Time]] = field(default_factory=lambda: defaultdict(list))
    arrivals: Counter[str] = field(default_factory=Counter)
    group: _Group | None = None
    groups: list[_Group] = field(default_factory=list)
    stores: list[_Group] = field(default_factory=list)
    unfenced: list[_Cell] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def now(self) -> Time:
        return self.index, self.clock[self.index]

    def knows(self, time: Time) -> bool:
        """Whether an event is before everything the role does from here on."""
        return self.clock[time[0]] >= time[1]

    def release(self, clock: list[int]) -> None:
        """Leave the clock with whoever takes it later; what follows is not covered."""
        _join(clock, self.clock)
        self.clock[self.index] += 1


_Actor = Union[_Role, _Copy, _Group]  # noqa: UP007


def _join(clock: list[int], other: list[int]) -> None:
    for i, time in enumerate(other):
        if time > clock[i]:
            clock[i] = time


def _covers(clock: list[int], other: list[int]) -> bool:
    return all(a >= b for a, b in zip(clock, other, strict=True))


# ---- the machine -----------------------------------------------------------------------------------------


class _Machine:
    """One block, one list of work items, one interleaving."""

    def __init__(self, protocol: Protocol, work: tuple[WorkItem, ...], seed: int) -> None:
        self.protocol, self.work, self.random = protocol, work, random.Random(seed)
        self.trace: deque[tuple[Any, ...]] = deque(maxlen=TRACE_TAIL)
        self.steps = 0
        self.operations = [tuple(walk(role.script)) for role in protocol.roles]
        rings = [(b.name, stage) for b in protocol.buffers for stage in range(b.stages)]
        self.engines = {ring: len(protocol.roles) + i for i, ring in enumerate(rings)}
        self.width = len(protocol.roles) + len(rings)
        self.phases = {
            b.name: [_Phase(b, s, self._zero(), b.count) for s in range(b.stages)] for b in protocol.barriers
        }
        self.named = {b.name: _Round(b, self._zero()) for b in protocol.named}
        self.cells = {b.name: self._buffer(b) for b in protocol.buffers}
        self._overlap()
        self.roles = [self._role(role, i) for i, role in enumerate(protocol.roles)]
        self.waiting = {b.name: self._using(Wait, "barrier", b.name) for b in protocol.barriers}
        self.arriving = {
            b.name: self._using((Arrive, ExpectBytes), "barrier", b.name) for b in protocol.barriers
        }
        self.flights: list[_Copy | _Group] = []
        self.pool = 0  # the launch gave everything to the roles in equal shares
        # Uneven speeds: one role that rarely gets its turn, memory that is slow to different degrees.
        self.slow = self.random.choice([None, *self.roles])
        self.lag = self.random.choice((0.0, 0.5, 0.95))
        self.burst = self.random.choice((1, 3, 12))
        self.ready_of: dict[type, Callable[[_Role, Any], bool]] = {
            Wait: self._wait_ready,
            _Blocked: self._blocked_ready,
            WaitGroup: self._group_ready,
            WaitStoreRead: self._store_ready,
            SetRegisters: self._registers_ready,
        }
        self.execute_of: dict[type, Callable[[_Role, Any], None]] = {
            Wait: self._wait,
            Arrive: self._arrive,
            ExpectBytes: self._expect,
            CopyIn: self._copy,
            Read: self._read,
            Touch: self._touch,
            CommitGroup: self._commit,
            WaitGroup: self._wait_group,
            Write: self._write,
            ProxyFence: self._fence,
            NamedSync: self._named_arrive,
            NamedArrive: self._named_arrive,
            _Blocked: self._unblock,
            StoreOut: self._store,
            WaitStoreRead: self._wait_store,
            SetRegisters: self._set_registers,
            FetchItem: self._fetch,
            PublishItem: self._publish,
            TakeItem: self._take,
            AdvancePipeline: self._advance,
            ResetPipeline: self._reset,
        }

    def _zero(self) -> list[int]:
        return [0] * self.width

    def _buffer(self, buffer: Buffer) -> list[list[_Cell]]:
        """Cells by stage and part."""
        kinds = (Read, StoreOut, TakeItem)
        readers = [self._using(kinds, "buffer", buffer.name, part) for part in range(buffer.parts)]
        return [[_Cell(buffer, s, p, by) for p, by in enumerate(readers)] for s in range(buffer.stages)]

    def _using(self, kinds: type | tuple[type, ...], field_: str, name: str, part: int = 0) -> frozenset[int]:
        """Roles whose scripts have such operations on a barrier or a part of a buffer."""
        return frozenset(
            i
            for i, ops in enumerate(self.operations)
            for op in ops
            if isinstance(op, kinds) and getattr(op, field_) == name
            if getattr(op, "part", None) in (None, part)
        )

    def _overlap(self) -> None:
        """Connect the cells that occupy the same bytes."""
        flat = [cell for stages in self.cells.values() for parts in stages for cell in parts]
        for cell in flat:
            home = cell.buffer.alias or cell.buffer.name
            for other in flat:
                same = home == (other.buffer.alias or other.buffer.name) and cell.buffer is not other.buffer
                if same and cell.span[0] < other.span[1] and other.span[0] < cell.span[1]:
                    cell.overlaps.append(other)

    def _role(self, role: Role, index: int) -> _Role:
        pipelines = {p.name: (0, 0) for p in self.protocol.pipelines}
        state = _Role(role, index, self._zero(), self.protocol.launch_registers, pipelines)
        state.clock[index] = 1
        state.steps = self._unroll(state, role.script)
        state.next = next(state.steps, None)
        return state

    # ---- scheduling ----

    def run(self) -> None:
        """Until every role is through its script. Raises _Found."""
        while any(role.next is not None for role in self.roles):
            actor = self._pick()
            for _ in range(self.random.randint(1, self.burst)):
                self._step(actor)
                if not isinstance(actor, _Role) or actor.next is None or not self._ready(actor):
                    break
        self._exit()

    def _pick(self) -> _Actor:
        """Who goes next: anyone who can, the laggards with less luck."""
        running = [role for role in self.roles if role.next is not None]
        favoured: list[_Actor] = [role for role in running if role is not self.slow]
        if self.random.random() >= self.lag:
            favoured += self.flights
        if favoured and self._ready(first := self.random.choice(favoured)):
            return first
        ready = [a for a in favoured if self._ready(a)]
        ready = ready or [a for a in (*running, *self.flights) if self._ready(a)]
        if not ready:
            self._stuck(running)
        return self.random.choice(ready)

    def _ready(self, actor: _Actor) -> bool:
        if isinstance(actor, _Role):
            check = self.ready_of.get(type(actor.next))
            return check is None or check(actor, actor.next)
        if isinstance(actor, _Group):  # groups of a role finish in order
            queue = actor.role.stores if actor.bulk else actor.role.groups
            return next(g for g in queue if not g.finished) is actor
        return True

    def _step(self, actor: _Actor) -> None:
        self.steps += 1
        if isinstance(actor, _Copy):
            self.flights.remove(actor)
            self.trace.append((self.steps, "memory", f"{actor.cells[0].name} has landed", None, None))
            self._land(actor)
        elif isinstance(actor, _Group):
            self.flights.remove(actor)
            actor.finished = True
        else:
            op = actor.next
            state = actor.pipelines.get(getattr(op, "at", ""))
            self.trace.append((self.steps, actor.name, op, actor.item, state))
            self.execute_of[type(op)](actor, op)
            actor.next = next(actor.steps, None)

    def _unroll(self, role: _Role, script: Script) -> Iterator[_Step]:
        """The role's coroutine: loops decide as late as they can, after the operation before them ran."""
        for op in script:
            match op:
                case ForItems(body=body):
                    while role.item is not None:
                        yield from self._unroll(role, body)
                case ForTiles(range=tiles, body=body, first=first):
                    role.range = tiles
                    for tile in range(first, len(self._tiles(role))):
                        role.tile = tile
                        yield from self._unroll(role, body)
                case IfTiles(range=tiles, body=body):
                    role.range = tiles
                    if self._tiles(role):
                        yield from self._unroll(role, body)
                case NamedSync(barrier=barrier):
                    yield op
                    yield _Blocked(barrier, self._round_of(role, barrier))
                case _:
                    yield op

    def _tiles(self, role: _Role) -> tuple[Any, ...]:
        if role.item is None or role.range is None:
            raise ValueError(f"{role.name}: a loop over tiles before a work item was fetched or taken")
        return role.range.tiles(self.work[role.item])

    # ---- reports ----

    def _found(self, fault: Fault, role: str, message: str) -> NoReturn:
        raise _Found(Finding(fault, role, message, tuple(_line(*entry) for entry in self.trace)))

    def _stuck(self, running: list[_Role]) -> NoReturn:
        """Nobody can go on: the barrier that explains it, else everyone's reason."""
        for role in running:
            if isinstance(role.next, Wait):
                self._explain(role, self._phase(role, role.next.barrier, role.next.at))
            if isinstance(role.next, SetRegisters):
                message = f"{spell(role.next)} finds too few registers in the pool"
                self._found(Fault.REGISTER_BUDGET, role.name, message)
        reasons = "; ".join(f"{role.name} at {self._reason(role)}" for role in running)
        self._found(Fault.DEADLOCK, ", ".join(role.name for role in running), reasons)

    def _explain(self, role: _Role, phase: _Phase) -> None:
        """A barrier that has all it will ever get in this phase and yet is not complete."""
        if phase.pending == 0:
            self._found(Fault.BYTE_COUNT, role.name, f"waits for bytes nobody copies; {phase}")
        arriving = self.arriving[phase.barrier.name]
        if arriving and all(self.roles[i].arrivals[phase.name] > phase.flips for i in arriving):
            self._found(Fault.ARRIVAL_COUNT, role.name, f"everyone has arrived; {phase}")

    def _reason(self, role: _Role) -> str:
        op = role.next
        if isinstance(op, Wait):
            return f"{spell(op)} ({self._phase(role, op.barrier, op.at)})"
        if isinstance(op, _Blocked):
            at = self.named[op.barrier]
            return f"NamedSync({op.barrier}) ({at.threads} of {at.barrier.participants} threads)"
        return _text(op)

    def _exit(self) -> None:
        """Every role is done, every copy lands: is anything left over?"""
        while self.flights:
            self._step(self.random.choice([f for f in self.flights if self._ready(f)]))
        for role in self.roles:
            self._exit_role(role)
        for cell in (c for stages in self.cells.values() for parts in stages for c in parts):
            if cell.content is not None and not cell.readers:
                self._found(Fault.LEFTOVER, self.protocol.name, f"{cell.name} is written and nobody reads it")
            if cell.content is not None and not cell.readers <= cell.reads.keys():
                self._disagree(self.protocol.name, cell, cell.content, "was never read")
        for phase in (p for stages in self.phases.values() for p in stages):
            if phase.bytes or phase.pending != phase.barrier.count:
                self._found(Fault.LEFTOVER, self.protocol.name, f"at exit {phase}")
        for name, at in self.named.items():
            if at.threads:
                message = f"at exit {at.threads} threads have come to {name!r}"
                self._found(Fault.LEFTOVER, self.protocol.name, message)

    def _exit_role(self, role: _Role) -> None:
        fetches = any(isinstance(op, (FetchItem, TakeItem)) for op in self.operations[role.index])
        if fetches and role.visited != list(range(len(self.work))):
            message = f"saw work items {role.visited} of {len(self.work)}"
            self._found(Fault.SKIPPED_ITEM, role.name, message)
        if role.group or role.groups or role.stores:
            reads = [c.name for g in (*role.groups, *role.stores) for c in g.cells]
            self._found(Fault.LEFTOVER, role.name, f"ends with reads nobody waited for: {reads}")
        if role.registers != role.role.registers:
            message = f"ran with {role.registers} registers and needs {role.role.registers}"
            self._found(Fault.REGISTER_BUDGET, role.name, message)

    # ---- barriers ----

    def _phase(self, role: _Role, barrier: str, at: str) -> _Phase:
        return self.phases[barrier][role.pipelines[at][0]]

    def _wait_ready(self, role: _Role, op: Wait) -> bool:
        """The hardware compares one bit, the role means one phase: both must pass, or both must block."""
        phase = self._phase(role, op.barrier, op.at)
        parity = role.pipelines[op.at][1] ^ op.flip
        passes = phase.flips & 1 != parity
        meant = len(role.waits[phase.name]) - phase.barrier.free_at_start
        if passes != (phase.flips > meant):
            what = "passes before" if passes else "blocks after"
            message = f"{spell(op)} {what} phase {meant} is complete; {phase}"
            self._found(Fault.WRONG_PHASE, role.name, message)
        return passes

    def _wait(self, role: _Role, op: Wait) -> None:
        phase = self._phase(role, op.barrier, op.at)
        role.waits[phase.name].append(role.now)
        _join(role.clock, phase.completed)

    def _arrive(self, role: _Role, op: Arrive) -> None:
        count = role.role.warps if op.count is None else op.count
        self._arrivals(role, self._phase(role, op.barrier, op.at), count, 0)

    def _expect(self, role: _Role, op: ExpectBytes) -> None:
        self._arrivals(role, self._phase(role, op.barrier, op.at), 1, op.bytes)

    def _arrivals(self, role: _Role, phase: _Phase, count: int, bytes_: int) -> None:
        meant = role.arrivals[phase.name]
        if meant > phase.flips:
            self._found(Fault.BARRIER_REUSE, role.name, f"arrives twice in one phase; {phase}")
        if meant < phase.flips or count > phase.pending:
            self._found(Fault.ARRIVAL_COUNT, role.name, f"brings {count} more for phase {meant}; {phase}")
        role.arrivals[phase.name] += 1
        phase.pending -= count
        phase.bytes += bytes_
        role.release(phase.clock)
        self._complete(phase, role.name)

    def _complete(self, phase: _Phase, who: str) -> None:
        if phase.pending == 0 and phase.bytes < 0:
            self._found(Fault.BYTE_COUNT, who, f"more bytes than expected; {phase}")
        if phase.pending == 0 and phase.bytes == 0:
            self._observed(phase)
            phase.flips += 1
            phase.pending = phase.barrier.count
            phase.completed, phase.clock = phase.clock, self._zero()

    def _observed(self, phase: _Phase) -> None:
        """Once this phase completes, a wait for the one before would block: every such wait must be over."""
        needed = phase.flips + phase.barrier.free_at_start
        for index in self.waiting[phase.barrier.name]:
            waits = self.roles[index].waits[phase.name]
            if needed and (len(waits) < needed or phase.clock[index] < waits[needed - 1][1]):
                message = f"phase {phase.flips} may complete before its wait for the one before; {phase}"
                self._found(Fault.WRONG_PHASE, self.roles[index].name, message)

    def _round_of(self, role: _Role, barrier: str) -> int:
        """The round the role has just arrived in: complete already if it was the last to come."""
        at = self.named[barrier]
        return len(at.rounds) - (role.index not in at.present)

    def _named_arrive(self, role: _Role, op: NamedSync | NamedArrive) -> None:
        at = self.named[op.barrier]
        participants = op.participants or at.barrier.participants
        if role.index in at.present or (at.rounds and not _covers(role.clock, at.rounds[-1])):
            message = f"may come to {op.barrier!r} again before its last round there is over"
            self._found(Fault.BARRIER_REUSE, role.name, message)
        if at.present and at.participants != participants:
            message = f"waits at {op.barrier!r} for {participants} threads, others for {at.participants}"
            self._found(Fault.PARTICIPANTS, role.name, message)
        at.participants = participants
        at.present.append(role.index)
        at.threads += role.role.threads
        role.release(at.clock)
        if at.threads > participants:
            self._found(Fault.PARTICIPANTS, role.name, f"{at.threads} threads at {op.barrier!r}")
        if at.threads == participants:
            at.rounds.append(at.clock)
            at.clock, at.threads, at.present = self._zero(), 0, []

    def _blocked_ready(self, role: _Role, op: _Blocked) -> bool:
        return len(self.named[op.barrier].rounds) > op.round

    def _unblock(self, role: _Role, op: _Blocked) -> None:
        _join(role.clock, self.named[op.barrier].rounds[op.round])

    # ---- shared memory ----

    def _stage(self, role: _Role, buffer: str, at: At, part: int | None = None) -> list[_Cell]:
        cells = self.cells[buffer][at if isinstance(at, int) else role.pipelines[at][0]]
        return cells if part is None else [cells[part]]

    def _tag(self, role: _Role, tile: int | None) -> Tag:
        """What the role is about to write, or means to read."""
        if role.item is None:
            raise ValueError(f"{role.name}: an access to a tile before a work item was fetched or taken")
        if tile is None:
            return role.item, ""
        tiles, index = self._tiles(role), role.tile + tile
        if not 0 <= index < len(tiles):
            raise ValueError(f"{role.name}: tile {index} of {len(tiles)}: an access outside its loop")
        head, run, k = tiles[index]
        return role.item, f"{run} tile {k}" + (f" of head {head}" if head else "")

    def _copy(self, role: _Role, op: CopyIn) -> None:
        cells, tag = self._stage(role, op.buffer, op.at), self._tag(role, op.tile)
        for cell in cells:
            self._overwrite(role, cell)
            cell.replace(None)
            cell.copying = True
        phase = self._phase(role, op.barrier, op.at)
        engine = self.engines[op.buffer, cells[0].stage]
        clock = self._zero()
        role.release(clock)
        self.flights.append(_Copy(cells, tag, phase, phase.flips, clock, engine))

    def _land(self, copy: _Copy) -> None:
        phase = copy.phase
        for cell in copy.cells:
            cell.content, cell.copying, cell.generic = copy.tag, False, False
            cell.written = copy.engine, copy.clock[copy.engine] + 1
        copy.clock[copy.engine] += 1
        if phase.flips != copy.round:
            message = f"lands after the phase it was issued in; {phase}"
            self._found(Fault.BYTE_COUNT, copy.cells[0].name, message)
        _join(phase.clock, copy.clock)
        phase.bytes -= copy.cells[0].buffer.bytes
        self._complete(phase, copy.cells[0].name)

    def _write(self, role: _Role, op: Write) -> None:
        cell = self._stage(role, op.buffer, op.at, op.part)[0]
        self._store_generic(role, cell, self._tag(role, op.tile))

    def _store_generic(self, role: _Role, cell: _Cell, tag: Tag) -> None:
        self._overwrite(role, cell)
        cell.replace(tag)
        cell.written, cell.generic, cell.fenced = role.now, True, None
        role.unfenced.append(cell)

    def _fence(self, role: _Role, op: ProxyFence) -> None:
        for cell in role.unfenced:
            cell.fenced = role.now
        role.unfenced.clear()

    def _overwrite(self, role: _Role, cell: _Cell) -> None:
        """The role is about to replace what the cell's bytes hold."""
        for old in (cell, *cell.overlaps):
            fault = Fault.REFILL_BEFORE_READ if old is cell else Fault.ALIAS
            what = f"overwrites {old.name}" + ("" if old is cell else f" through {cell.name}")
            if old.copying:
                self._found(fault, role.name, f"{what} while a copy into it is in flight")
            if open_ := [self.roles[i].name for i, count in old.open.items() if count]:
                self._found(fault, role.name, f"{what} while {', '.join(open_)} may still read it")
            if old.content is None:
                continue
            if missing := sorted(old.readers - old.reads.keys()):
                names = ", ".join(self.roles[i].name for i in missing)
                self._found(fault, role.name, f"{what} before {names} read it ({_tag_text(old.content)})")
            if late := [self.roles[i].name for i, end in old.reads.items() if not role.knows(end)]:
                self._found(fault, role.name, f"{what}; nothing orders this after the read by {late[0]}")
            if not role.knows(old.written):
                self._found(fault, role.name, f"{what}; nothing orders this after the write before it")

    def _read(self, role: _Role, op: Read) -> None:
        cells = self._stage(role, op.buffer, op.at, op.part)
        self._check_read(role, cells, self._tag(role, op.tile), op.asynchronous)
        if not op.asynchronous:
            for cell in cells:
                cell.reads[role.index] = role.now
            return
        role.group = role.group or _Group(role, bulk=False)
        role.group.registers.update(op.registers)
        self._open(role.group, cells)

    def _store(self, role: _Role, op: StoreOut) -> None:
        cells = self._stage(role, op.buffer, op.at, op.part)
        self._check_read(role, cells, self._tag(role, op.tile), True)
        group = _Group(role, bulk=True)
        self._open(group, cells)
        role.stores.append(group)
        self.flights.append(group)

    def _open(self, group: _Group, cells: list[_Cell]) -> None:
        for cell in cells:
            cell.open[group.role.index] += 1
            cell.reads[group.role.index] = group.role.now
            group.cells.append(cell)

    def _check_read(self, role: _Role, cells: list[_Cell], tag: Tag, asynchronous: bool) -> None:
        for cell in cells:
            if cell.content is None:
                self._absent(role, cell, tag)
            elif not role.knows(cell.written):
                message = f"reads {cell.name}; nothing orders this after its write"
                self._found(Fault.READ_BEFORE_WRITE, role.name, message)
            elif cell.content != tag:
                self._mismatch(role, cell, tag)
            elif asynchronous and cell.generic and (cell.fenced is None or not role.knows(cell.fenced)):
                message = f"reads {cell.name} through the async proxy; no fence after the stores into it"
                self._found(Fault.PROXY_FENCE, role.name, message)

    def _absent(self, role: _Role, cell: _Cell, tag: Tag) -> NoReturn:
        if cell.lost_to and cell.previous == tag:
            message = f"reads {cell.name}, whose memory {cell.lost_to} has overwritten"
            self._found(Fault.ALIAS, role.name, message)
        if cell.copying and cell.previous == tag:
            self._found(Fault.REFILL_BEFORE_READ, role.name, f"reads {cell.name}, which is being refilled")
        state = "its copy is in flight" if cell.copying else "it is empty"
        self._found(Fault.READ_BEFORE_WRITE, role.name, f"reads {cell.name}; {state}")

    def _mismatch(self, role: _Role, cell: _Cell, tag: Tag) -> NoReturn:
        assert cell.content is not None
        wanted, held = _tag_text(tag), _tag_text(cell.content)
        message = f"reads {cell.name} for {wanted}, finds {held}"
        if cell.previous == tag:
            self._found(Fault.REFILL_BEFORE_READ, role.name, message)
        if role.index in cell.reads:
            self._found(Fault.READ_BEFORE_WRITE, role.name, message)
        self._disagree(role.name, cell, cell.content, f"is read for {wanted}")

    def _disagree(self, role: str, cell: _Cell, held: Tag, what: str) -> NoReturn:
        """Two roles differ about what runs through a buffer: about an empty work item, or about tiles."""
        item = self.work[held[0]] if held[0] < len(self.work) else WorkItem(1)
        empty = not (item.partial + item.full) * item.heads
        fault = Fault.SKIPPED_ITEM if empty else Fault.TILE_COUNT
        self._found(fault, role, f"{cell.name} with {_tag_text(held)} {what}")

    # ---- asynchronous groups ----

    def _commit(self, role: _Role, op: CommitGroup) -> None:
        group = role.group or _Group(role, bulk=False)
        role.group = None
        role.groups.append(group)
        self.flights.append(group)

    def _group_ready(self, role: _Role, op: WaitGroup) -> bool:
        return all(g.finished for g in role.groups[: max(len(role.groups) - op.pending, 0)])

    def _store_ready(self, role: _Role, op: WaitStoreRead) -> bool:
        return all(g.finished for g in role.stores[: max(len(role.stores) - op.pending, 0)])

    def _wait_group(self, role: _Role, op: WaitGroup) -> None:
        role.groups = self._close(role.groups, op.pending)

    def _wait_store(self, role: _Role, op: WaitStoreRead) -> None:
        role.stores = self._close(role.stores, op.pending)

    def _close(self, groups: list[_Group], pending: int) -> list[_Group]:
        """End the reads of all but the latest groups; a group may be done earlier, but nobody knows."""
        done = max(len(groups) - pending, 0)
        for group in groups[:done]:
            for cell in group.cells:
                cell.open[group.role.index] -= 1
                cell.reads[group.role.index] = group.role.now
        return groups[done:]

    def _touch(self, role: _Role, op: Touch) -> None:
        flying = [*role.groups, *([role.group] if role.group else [])]
        busy = {name for group in flying for name in group.registers} & set(op.registers)
        if busy:
            message = f"touches {', '.join(sorted(busy))} while the tensor core uses them"
            self._found(Fault.REGISTERS_IN_FLIGHT, role.name, message)

    # ---- registers, work items, pipelines ----

    def _registers_ready(self, role: _Role, op: SetRegisters) -> bool:
        return (op.registers - role.registers) * role.role.threads <= self.pool

    def _set_registers(self, role: _Role, op: SetRegisters) -> None:
        self.pool -= (op.registers - role.registers) * role.role.threads
        role.registers = op.registers

    def _start(self, role: _Role, item: int | None) -> None:
        role.item, role.tile, role.range = item, 0, None
        if item is not None:
            role.visited.append(item)

    def _fetch(self, role: _Role, op: FetchItem) -> None:
        self._start(role, role.fetched if role.fetched < len(self.work) else None)
        role.fetched += 1

    def _publish(self, role: _Role, op: PublishItem) -> None:
        item = len(self.work) if role.item is None else role.item
        self._store_generic(role, self._stage(role, op.buffer, op.at)[0], (item, "handed on"))

    def _take(self, role: _Role, op: TakeItem) -> None:
        """Items are handed on in order; the one past the last says that there are no more."""
        cell, item = self._stage(role, op.buffer, op.at)[0], len(role.visited)
        self._check_read(role, [cell], (item, "handed on"), asynchronous=False)
        cell.reads[role.index] = role.now
        self._start(role, item if item < len(self.work) else None)

    def _advance(self, role: _Role, op: AdvancePipeline) -> None:
        stages = next(p.stages for p in self.protocol.pipelines if p.name == op.pipeline)
        stage, phase = role.pipelines[op.pipeline]
        wraps = stage + 1 == stages
        role.pipelines[op.pipeline] = (0, phase ^ 1) if wraps else (stage + 1, phase)

    def _reset(self, role: _Role, op: ResetPipeline) -> None:
        role.pipelines[op.pipeline] = (0, 0)


def _text(op: _Step | str | None) -> str:
    if isinstance(op, _Blocked):
        return f"leaves NamedSync({op.barrier})"
    return op if isinstance(op, str) else "end" if op is None else spell(op)


def _line(step: int, who: str, op: _Step | str, item: int | None, state: tuple[int, int] | None) -> str:
    place = "" if item is None else f"item {item}"
    at = f"   stage {state[0]} phase {state[1]}" if state else ""
    return f"{step:6}  {who:12} {place:8} {_text(op)}{at}"


def _tag_text(tag: Tag) -> str:
    return f"work item {tag[0]}" + (f", {tag[1]}" if tag[1] else "")
