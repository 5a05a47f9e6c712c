# SPDX-License-Identifier: Apache-2.0
"""The Hopper protocols are clean in random interleavings, and every planted fault is found under its name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from afc.ir.masks import Run
from afc.ir.protocol import (
    AdvancePipeline,
    Arrive,
    CommitGroup,
    CopyIn,
    ExpectBytes,
    FetchItem,
    ForItems,
    ForTiles,
    IfTiles,
    NamedArrive,
    NamedSync,
    Op,
    Pipeline,
    Protocol,
    ProxyFence,
    Read,
    ResetPipeline,
    Role,
    Script,
    SetRegisters,
    StoreOut,
    TileRange,
    Touch,
    Wait,
    WaitGroup,
    WaitStoreRead,
    WorkItem,
    Write,
    rewrite,
    text,
    walk,
)
from afc.reference.protocol import TRACE_TAIL, Fault, explore, inspect, simulate
from afc.schedule.protocols import BackwardShape, ForwardShape, hopper_backward, hopper_forward

KEYS, QUERIES = TileRange("keys"), TileRange("queries")
EMPTY = WorkItem()
# Long, empty, one tile, empty twice, partial tiles only, full tiles only.
WORK = [WorkItem(1, 3), EMPTY, WorkItem(1, 0), EMPTY, EMPTY, WorkItem(2, 0), WorkItem(0, 5), WorkItem(2, 4)]
SEEDS = range(5)

FORWARD = hopper_forward(KEYS)
BACKWARD = hopper_backward(QUERIES, BackwardShape(scheduler="static"))


# ---- clean protocols -------------------------------------------------------------------------------------


def random_work(rng: random.Random, scheduler: str, heads: tuple[int, ...] = (1,)) -> list[WorkItem]:
    """Work items of which many are empty, many have one tile, and a few are long."""
    count = 1 if scheduler == "one item" else rng.randint(0, 7)
    counts = (0, 0, 1, 1, 2, 3, 9)
    return [WorkItem(rng.choice((0, 0, 1, 2)), rng.choice(counts), rng.choice(heads)) for _ in range(count)]


@pytest.mark.parametrize("scheduler", ["one item", "static", "dynamic"])
@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize(
    ("consumers", "stages", "keys"), [(2, 1, 128), (2, 2, 128), (2, 3, 128), (3, 2, 128)]
)
def test_forward_is_clean(consumers: int, stages: int, keys: int, ping_pong: bool, scheduler: str) -> None:
    rng = random.Random(f"{consumers} {stages} {ping_pong} {scheduler}")
    stores = "registers", "consumer", "warp"
    for store, overlap, slots in (*((s, True, 1) for s in stores), ("registers", False, 2)):
        shape = ForwardShape(consumers, stages, ping_pong, scheduler, store, overlap, slots, keys)  # type: ignore[arg-type]
        protocol = hopper_forward(KEYS, shape)
        for seed in range(3):
            work = random_work(rng, scheduler)
            found = simulate(protocol, work, seed)
            assert found is None, f"{shape}\n{work}\n{found}"


@pytest.mark.parametrize("scheduler", ["one item", "static", "dynamic"])
@pytest.mark.parametrize("dq", ["red", "bulk", "warp"])
@pytest.mark.parametrize("meet", ["named", "mbarrier"])
def test_backward_is_clean(meet: str, dq: str, scheduler: str) -> None:
    rng = random.Random(f"{meet} {dq} {scheduler}")
    stores = ("warp",) if dq == "warp" else ("warp", "consumers")
    plain = [(stages, ds, False) for stages in (1, 2) for ds in (1, 2)]
    pipelined = [] if dq == "warp" else [(2, 2, True)]
    for store in stores:
        for stages, ds, pipeline in plain + pipelined:
            shape = BackwardShape(2, stages, ds, meet, dq, store, pipeline, scheduler)  # type: ignore[arg-type]
            protocol = hopper_backward(QUERIES, shape)
            for seed in range(2):
                work = random_work(rng, scheduler, heads=(1, 1, 2))
                found = simulate(protocol, work, seed)
                assert found is None, f"{shape}\n{work}\n{found}"


def test_three_backward_consumers_at_small_heads() -> None:
    shape = BackwardShape(3, head_qk=64, head_v=64, scheduler="dynamic")
    assert explore(hopper_backward(QUERIES, shape), WORK, range(12)) is None


def test_many_interleavings_of_one_list() -> None:
    assert explore(FORWARD, WORK, range(30)) is None
    assert explore(BACKWARD, WORK, range(25)) is None


def test_work_items_of_a_causal_mask() -> None:
    """Query tile t of 128 rows sees full tiles up to the diagonal; rows before the first key see none."""
    runs = [Run(0, 0, max(0, 128 * t), max(0, 128 * (t + 1))) for t in range(-2, 4)]
    work = [WorkItem.of(run, 128) for run in runs]
    assert work == [EMPTY, EMPTY, *(WorkItem(1, full) for full in range(4))]
    assert explore(FORWARD, work, range(20)) is None


# ---- planted faults --------------------------------------------------------------------------------------

Change = Callable[[Op], Script]


def plant(protocol: Protocol, role: str, change: Change) -> Protocol:
    """Change the scripts of the roles whose name starts with `role`; something has to change."""
    roles = tuple(
        replace(r, script=rewrite(r.script, change)) if r.name.startswith(role) else r for r in protocol.roles
    )
    assert roles != protocol.roles
    return replace(protocol, roles=roles)


def drop(*ops: Op) -> Change:
    return lambda op: () if op in ops else (op,)


def swap(old: Op, *new: Op) -> Change:
    return lambda op: new if op == old else (op,)


def drop_kind(kind: type[Op]) -> Change:
    return lambda op: () if isinstance(op, kind) else (op,)


def with_count(protocol: Protocol, barrier: str, change: int) -> Protocol:
    changed = (replace(b, count=b.count + change) if b.name == barrier else b for b in protocol.barriers)
    return replace(protocol, barriers=tuple(changed))


def without_named(protocol: Protocol, name: str) -> Protocol:
    """Nobody meets at this barrier, and nobody declares it."""
    gone: Change = lambda op: () if getattr(op, "barrier", "") == name else (op,)  # noqa: E731
    roles = tuple(replace(r, script=rewrite(r.script, gone)) for r in protocol.roles)
    return replace(protocol, roles=roles, named=tuple(b for b in protocol.named if b.name != name))


def with_range(protocol: Protocol, role: str, tiles: TileRange) -> Protocol:
    return plant(
        protocol, role, lambda op: (replace(op, range=tiles) if isinstance(op, (ForTiles, IfTiles)) else op,)
    )


def reset_per_item(protocol: Protocol, role: str, pipeline: str) -> Protocol:
    def change(op: Op) -> Script:
        if isinstance(op, ForItems):
            return (replace(op, body=(ResetPipeline(pipeline), *op.body)),)
        return (op,)

    return plant(protocol, role, change)


def release_early(protocol: Protocol, buffer: str, name: str) -> Protocol:
    """Arrive right behind the first instruction that reads a stage instead of after its group."""
    arrive = Arrive(f"{name}_empty", name)

    def change(op: Op) -> Script:
        if op == arrive:
            return ()
        return (op, arrive) if isinstance(op, Read) and op.buffer == buffer else (op,)

    return plant(protocol, "consumer", change)


def release_q_early(protocol: Protocol) -> Protocol:
    """Release Q with dO, before dK is accumulated from it."""
    arrive = Arrive("q_empty", "q")
    without = plant(protocol, "consumer", drop(arrive))
    return plant(without, "consumer", swap(AdvancePipeline("do"), arrive, AdvancePipeline("do")))


def take_out(op: IfTiles, first: int, last: int, *before: Op) -> Script:
    """Operations `first` to `last` of the body run for every work item, those around them if it has tiles."""
    return (
        replace(op, body=op.body[:first]),
        *before,
        *op.body[first:last],
        replace(op, body=op.body[last:]),
    )


def load_q_always(protocol: Protocol) -> Protocol:
    """The producer loads Q for a work item without tiles too."""

    def change(op: Op) -> Script:
        if not isinstance(op, IfTiles):
            return (op,)
        at = op.body.index(Wait("q_empty", "q", flip=True))
        return take_out(op, at, at + 4)

    return plant(protocol, "producer", change)


def wait_for_v_always(protocol: Protocol) -> Protocol:
    """Consumers wait for V in a work item without tiles too; the producer loads it with the first tile."""

    def change(op: Op) -> Script:
        at = op.body.index(Wait("v_full", "v")) if isinstance(op, IfTiles) else 0
        return take_out(op, at, at + 2) if isinstance(op, IfTiles) else (op,)

    return plant(protocol, "consumer", change)


def zeros_like_results(protocol: Protocol) -> Protocol:
    """Work items without tiles go through the common epilogue, and every role waits for the one before.

    Looks right, and needs two empty items in a row and a late producer to fail.
    """
    drained = (Wait("out_drained", "out", flip=True), AdvancePipeline("out"))

    def producer(op: Op) -> Script:
        at = op.body.index(drained[0]) if isinstance(op, IfTiles) else 0
        return take_out(op, at, at + 2) if isinstance(op, IfTiles) else (op,)

    def consumer(op: Op) -> Script:
        at = op.body.index(Touch(("O",))) if isinstance(op, IfTiles) else 0
        return take_out(op, at, len(op.body), *drained) if isinstance(op, IfTiles) else (op,)

    protocol = plant(protocol, "producer", producer)
    protocol = plant(protocol, "consumer", consumer)
    return plant(protocol, "store", lambda op: op.body if isinstance(op, IfTiles) else (op,))


def change_script(protocol: Protocol, role: str, change: Callable[[Script], Script]) -> Protocol:
    roles = (replace(r, script=change(r.script)) if r.name == role else r for r in protocol.roles)
    return replace(protocol, roles=tuple(roles))


STATIC = hopper_forward(KEYS, ForwardShape(scheduler="static"))
PLAIN = hopper_forward(KEYS, ForwardShape(scheduler="static", ping_pong=False))
ONE_DS = hopper_backward(QUERIES, BackwardShape(ds_stages=1, scheduler="static"))
BULK = hopper_backward(QUERIES, BackwardShape(dq="warp", scheduler="static"))
PIPELINED = hopper_backward(
    QUERIES, BackwardShape(meet="mbarrier", dq="bulk", store="consumers", pipelined=True, scheduler="static")
)
K_FREE, K_FULL = Wait("k_empty", "k", flip=True), Wait("k_full", "k")
V_FREE, V_FULL = Wait("v_empty", "v", flip=True), Wait("v_full", "v")
Q_BYTES, K_BYTES = 128 * 128 * 2, 128 * 128 * 2

# name -> protocol with the fault, what it may be called
FAULTS: dict[str, tuple[Protocol, set[Fault]]] = {
    # waits
    "consumer does not wait for K": (
        plant(FORWARD, "consumer", drop(K_FULL)),
        {Fault.READ_BEFORE_WRITE},
    ),
    "one consumer does not wait for V": (
        plant(PLAIN, "consumer 1", drop(V_FULL)),
        {Fault.READ_BEFORE_WRITE},
    ),
    "producer does not wait for a free K stage": (
        plant(FORWARD, "producer", drop(K_FREE)),
        {Fault.REFILL_BEFORE_READ, Fault.BARRIER_REUSE},
    ),
    "no consumer waits for K and V": (
        plant(BACKWARD, "consumer", drop(Wait("k_full", "k"))),
        {Fault.READ_BEFORE_WRITE},
    ),
    # phases
    "producer starts with the consumer's parity": (
        plant(FORWARD, "producer", swap(K_FREE, replace(K_FREE, flip=False))),
        {Fault.WRONG_PHASE},
    ),
    "consumer starts with the producer's parity": (
        plant(FORWARD, "consumer", swap(V_FULL, replace(V_FULL, flip=True))),
        {Fault.WRONG_PHASE},
    ),
    "consumer resets its state per work item": (
        reset_per_item(FORWARD, "consumer", "k"),
        {Fault.WRONG_PHASE},
    ),
    "producer resets its state per work item": (
        reset_per_item(FORWARD, "producer", "v"),
        {Fault.WRONG_PHASE},
    ),
    "both sides reset their state per work item": (
        reset_per_item(reset_per_item(STATIC, "producer", "q"), "consumer", "q"),
        {Fault.WRONG_PHASE},
    ),
    "consumer advances V once too often": (
        plant(FORWARD, "consumer", swap(AdvancePipeline("v"), AdvancePipeline("v"), AdvancePipeline("v"))),
        {Fault.TILE_COUNT},
    ),
    # arrivals
    "one arrival too many is expected": (with_count(FORWARD, "v_empty", 1), {Fault.ARRIVAL_COUNT}),
    "one arrival too few is expected": (with_count(FORWARD, "v_empty", -1), {Fault.ARRIVAL_COUNT}),
    "arrivals of one consumer are expected": (
        with_count(FORWARD, "k_empty", -4),
        {Fault.ARRIVAL_COUNT, Fault.REFILL_BEFORE_READ},
    ),
    "one thread arrives instead of one per warp": (
        plant(FORWARD, "consumer", swap(Arrive("k_empty", "k"), Arrive("k_empty", "k", 1))),
        {Fault.ARRIVAL_COUNT},
    ),
    "nobody releases V": (plant(FORWARD, "consumer", drop(Arrive("v_empty", "v"))), {Fault.DEADLOCK}),
    "one consumer does not release V": (
        plant(FORWARD, "consumer 1", drop(Arrive("v_empty", "v"))),
        {Fault.ARRIVAL_COUNT},
    ),
    "results are never stored": (plant(STATIC, "store", drop(StoreOut("O", 0))), {Fault.LEFTOVER}),
    "consumers do not ask for their registers": (
        plant(STATIC, "consumer", drop_kind(SetRegisters)),
        {Fault.REGISTER_BUDGET},
    ),
    "K is released twice": (
        plant(
            FORWARD,
            "consumer 0",
            swap(Arrive("k_empty", "k"), Arrive("k_empty", "k"), Arrive("k_empty", "k")),
        ),
        {Fault.BARRIER_REUSE},
    ),
    # order of reads and refills
    "V is released before its group is waited for": (
        release_early(FORWARD, "V", "v"),
        {Fault.REFILL_BEFORE_READ},
    ),
    "K is released before its group is waited for": (
        release_early(FORWARD, "K", "k"),
        {Fault.REFILL_BEFORE_READ},
    ),
    "Q is released before its last product": (
        release_q_early(BACKWARD),
        {Fault.REFILL_BEFORE_READ},
    ),
    "dS has one stage and no second meeting": (without_named(ONE_DS, "ds_read"), {Fault.REFILL_BEFORE_READ}),
    "consumers do not meet over dS": (
        without_named(BACKWARD, "ds_written"),
        {Fault.READ_BEFORE_WRITE},
    ),
    "dQ is written while the last one is reduced": (
        without_named(BULK, "dq_free"),
        {Fault.REFILL_BEFORE_READ},
    ),
    "O is rescaled while the tensor core adds to it": (
        plant(FORWARD, "consumer", swap(Touch(("S",)), Touch(("S", "O")))),
        {Fault.REGISTERS_IN_FLIGHT},
    ),
    "scores are used before they are waited for": (
        plant(BACKWARD, "consumer", drop(WaitGroup(1))),
        {Fault.REGISTERS_IN_FLIGHT},
    ),
    # generic stores, async reads
    "no fence before O is stored": (plant(FORWARD, "consumer", drop_kind(ProxyFence)), {Fault.PROXY_FENCE}),
    "no fence before dS is multiplied": (
        plant(BACKWARD, "consumer", drop_kind(ProxyFence)),
        {Fault.PROXY_FENCE},
    ),
    "one consumer does not fence its dS": (
        plant(BACKWARD, "consumer 1", drop_kind(ProxyFence)),
        {Fault.PROXY_FENCE},
    ),
    "the fence comes after the meeting": (
        plant(
            plant(BACKWARD, "consumer", drop_kind(ProxyFence)),
            "consumer",
            swap(NamedSync("ds_written"), NamedSync("ds_written"), ProxyFence()),
        ),
        {Fault.PROXY_FENCE},
    ),
    "the reader fences instead of the writers": (
        plant(
            plant(FORWARD, "consumer", drop_kind(ProxyFence)),
            "store",
            swap(StoreOut("O", 0), ProxyFence(), StoreOut("O", 0)),
        ),
        {Fault.PROXY_FENCE},
    ),
    # O over V, dK over K
    "V is refilled before O is stored": (
        plant(FORWARD, "producer", drop(Wait("out_drained", "out", flip=True))),
        {Fault.ALIAS},
    ),
    "K is refilled before dK is stored": (
        plant(BACKWARD, "producer", drop(Wait("out_drained", "out", flip=True))),
        {Fault.ALIAS, Fault.REFILL_BEFORE_READ},
    ),
    "O is written while another consumer reads V": (without_named(FORWARD, "all_read"), {Fault.ALIAS}),
    "nobody waits until the store has read O": (
        plant(FORWARD, "store", drop_kind(WaitStoreRead)),
        {Fault.ALIAS},
    ),
    "the storing consumer does not wait until O is read": (
        plant(hopper_forward(KEYS, ForwardShape(store="consumer")), "consumer 0", drop_kind(WaitStoreRead)),
        {Fault.ALIAS},
    ),
    "nobody waits until the reduction has read dQ": (
        plant(BULK, "store", drop_kind(WaitStoreRead)),
        {Fault.REFILL_BEFORE_READ},
    ),
    "a consumer writes its next dQ while the last is reduced": (
        plant(PIPELINED, "consumer", drop_kind(WaitStoreRead)),
        {Fault.REFILL_BEFORE_READ},
    ),
    "dK is written while another consumer reads K": (without_named(PIPELINED, "all_read"), {Fault.ALIAS}),
    "Q is released at the place of the next tile": (
        plant(PIPELINED, "consumer", swap(Arrive("q_empty", "q_done"), Arrive("q_empty", "q"))),
        {Fault.DEADLOCK},
    ),
    "dS is multiplied before all rows are there": (
        plant(PIPELINED, "consumer", drop(Wait("ds_full", "ds"))),
        {Fault.READ_BEFORE_WRITE},
    ),
    # work items and tiles
    "consumers skip the Q of an empty work item": (load_q_always(FORWARD), {Fault.SKIPPED_ITEM}),
    "consumers wait for V in an empty work item": (wait_for_v_always(BACKWARD), {Fault.DEADLOCK}),
    "zeros are stored like results": (zeros_like_results(STATIC), {Fault.WRONG_PHASE}),
    "a consumer leaves out partial tiles": (
        with_range(FORWARD, "consumer 1", TileRange("keys", ("full",))),
        {Fault.TILE_COUNT},
    ),
    "consumers walk full tiles first": (
        with_range(FORWARD, "consumer", TileRange("keys", ("full", "partial"))),
        {Fault.TILE_COUNT},
    ),
    "the producer leaves out partial tiles": (
        with_range(BACKWARD, "producer", TileRange("queries", ("full",))),
        {Fault.TILE_COUNT},
    ),
    "a role takes every other work item": (
        plant(STATIC, "store", swap(FetchItem(), FetchItem(), FetchItem())),
        {Fault.TILE_COUNT},
    ),
    # bytes
    "more bytes are expected than come": (
        plant(
            FORWARD,
            "producer",
            swap(ExpectBytes("k_full", "k", K_BYTES), ExpectBytes("k_full", "k", K_BYTES + 16)),
        ),
        {Fault.BYTE_COUNT},
    ),
    "more bytes come than are expected": (
        plant(
            FORWARD,
            "producer",
            swap(ExpectBytes("q_full", "q", Q_BYTES), ExpectBytes("q_full", "q", Q_BYTES // 2)),
        ),
        {Fault.BYTE_COUNT},
    ),
    "the LSE row is not counted": (
        plant(
            BACKWARD,
            "producer",
            swap(ExpectBytes("q_full", "q", 64 * 128 * 2 + 256), ExpectBytes("q_full", "q", 64 * 128 * 2)),
        ),
        {Fault.BYTE_COUNT, Fault.READ_BEFORE_WRITE},
    ),
    "a copy is announced but not issued": (
        plant(BACKWARD, "producer", drop(CopyIn("delta", "do", "do_full", 0))),
        {Fault.BYTE_COUNT},
    ),
    # named barriers
    "a consumer does not meet the others": (
        plant(FORWARD, "consumer 1", drop(NamedSync("all_read"))),
        {Fault.PARTICIPANTS},
    ),
    "a consumer counts one warpgroup only": (
        plant(FORWARD, "consumer 1", swap(NamedSync("all_read"), NamedSync("all_read", 128))),
        {Fault.PARTICIPANTS},
    ),
    "nobody gives the first turn": (
        change_script(FORWARD, "consumer 1", lambda script: (script[0], *script[2:])),
        {Fault.DEADLOCK},
    ),
    "the last turn is not taken back": (
        change_script(FORWARD, "consumer 0", lambda script: script[:-1]),
        {Fault.LEFTOVER},
    ),
    "two named barriers share an id": (
        replace(FORWARD, named=tuple(replace(b, id=max(b.id, 2)) for b in FORWARD.named)),
        {Fault.BARRIER_REUSE},
    ),
    "consumers come twice to a barrier": (
        plant(FORWARD, "consumer 0", swap(NamedArrive("out_written"), *[NamedArrive("out_written")] * 2)),
        {Fault.BARRIER_REUSE},
    ),
    # budgets
    "consumers want more registers than there are": (
        replace(FORWARD, roles=tuple(replace(r, registers=max(r.registers, 32)) for r in FORWARD.roles)),
        {Fault.REGISTER_BUDGET},
    ),
    "idle warps keep their registers": (
        plant(FORWARD, "idle", drop_kind(SetRegisters)),
        {Fault.REGISTER_BUDGET},
    ),
    "tiles too large for shared memory": (
        hopper_forward(KEYS, ForwardShape(keys=256)),
        {Fault.SHARED_BUDGET},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    """In every interleaving, whether or not the race happens in it."""
    protocol, names = FAULTS[name]
    for seed in SEEDS:
        found = simulate(protocol, WORK, seed)
        assert found is not None, f"seed {seed}: nothing found"
        assert found.fault in names, f"seed {seed}: {found}"


def test_reads_nobody_waits_for_are_left_over() -> None:
    """With one work item no refill can meet the store that still reads; the block just ends too early."""
    broken = plant(FORWARD, "store", drop_kind(WaitStoreRead))
    found = simulate(broken, [WorkItem(1, 2)])
    assert found is not None and found.fault is Fault.LEFTOVER


# ---- every operation counts ------------------------------------------------------------------------------

SYNCHRONISES = (
    Wait,
    Arrive,
    ExpectBytes,
    CommitGroup,
    WaitGroup,
    ProxyFence,
    NamedSync,
    NamedArrive,
    WaitStoreRead,
    AdvancePipeline,
    SetRegisters,
)


def without(script: Script, number: int) -> tuple[Op, Script]:
    """The script without its synchronising operation of that number, and the operation."""
    seen: list[Op] = []

    def change(op: Op) -> Script:
        if not isinstance(op, SYNCHRONISES):
            return (op,)
        seen.append(op)
        return () if len(seen) == number + 1 else (op,)

    shorter = rewrite(script, change)
    return seen[number], shorter


def unnoticed(protocol: Protocol) -> list[tuple[str, Op]]:
    """Single operations that can be left out with nothing found, in the order of the scripts."""
    found = []
    for role in protocol.roles:
        for number in range(sum(isinstance(op, SYNCHRONISES) for op in walk(role.script))):
            op, script = without(role.script, number)
            broken = change_script(protocol, role.name, lambda _, script=script: script)  # type: ignore[misc]
            if explore(broken, WORK, range(2)) is None:
                found.append((role.name, op))
    return found


def test_forward_needs_every_operation() -> None:
    """Not the phase of a one-stage ring where a role only arrives."""
    assert unnoticed(STATIC) == [("store", AdvancePipeline("out"))]


def test_backward_needs_every_operation() -> None:
    """dO is released before Q, but the producer refills Q first: the early release only saves time.

    The latest K and V of one block are waited for, never released: storing dK and dV implies it.
    """
    assert unnoticed(BACKWARD) == [
        *(("producer", AdvancePipeline(name)) for name in ("k", "v")),
        ("store", AdvancePipeline("out")),
        *((f"consumer {c}", op) for c in range(2) for op in (CommitGroup(), WaitGroup(1))),
    ]


def test_pipelined_backward_needs_every_operation() -> None:
    """Early releases again, also of the last Q; and the warps of a role run in step and need not meet."""
    expected: list[tuple[str, Op]] = [("producer", AdvancePipeline(name)) for name in ("k", "v")]
    for c in range(2):
        early = WaitGroup(1), CommitGroup(), WaitGroup(1), WaitGroup(0)
        own = NamedSync(f"own {c}")
        expected += [(f"consumer {c}", op) for op in (*early, own, own, AdvancePipeline("out"))]
    assert unnoticed(PIPELINED) == expected


# ---- reports and well-formedness -------------------------------------------------------------------------


def test_a_finding_says_who_where_and_what_went_before() -> None:
    broken = plant(FORWARD, "consumer", drop(Arrive("v_empty", "v")))
    found = simulate(broken, WORK, seed=1)
    assert found is not None and found == simulate(broken, WORK, seed=1)
    blocked = "producer at Wait(v_empty, v, flip=True) (v_empty[0]: 0 phases done, 0 of 8 arrivals)"
    assert blocked in str(found)
    assert str(found).startswith("deadlock: ") and len(found.trace) == TRACE_TAIL
    assert any("Wait(k_full, k)   stage " in line for line in found.trace)


def test_text_shows_every_role_and_loop() -> None:
    shown = text(FORWARD)
    assert "protocol forward, 2 consumers, 2 stages, dynamic: 384 threads, " in shown
    for role in FORWARD.roles:
        assert f"{role.name} ({role.warps} warps, {role.registers} registers)" in shown
    assert (
        "            ForTiles(keys: partial then full, first=1)\n                Wait(k_full, k)\n" in shown
    )


def test_budgets_of_the_shipped_shapes() -> None:
    assert (FORWARD.threads, FORWARD.launch_registers) == (384, 168)
    three = hopper_forward(KEYS, ForwardShape(3))
    assert (three.threads, three.launch_registers) == (512, 128)
    assert FORWARD.shared_bytes == (32 + 64 + 64) * 1024 + 16
    assert not inspect(three) and not inspect(BULK)


def broken_pieces() -> dict[str, tuple[dict[str, object], str]]:
    """Fields of a protocol that do not fit the others -> what the error says."""
    pipelines, roles, buffers = FORWARD.pipelines, FORWARD.roles, FORWARD.buffers
    named_k = Role("x", 4, 24, (NamedSync("k_full"),))
    uncounted = tuple(replace(b, counts_bytes=False) for b in FORWARD.barriers)
    return {
        "unknown pipeline": ({"pipelines": pipelines[1:]}, "no pipeline 'k'"),
        "unknown buffer": ({"buffers": buffers[1:]}, "no buffer 'Q'"),
        "unknown barrier": ({"barriers": FORWARD.barriers[1:]}, "no barrier 'q_full'"),
        "twice": ({"buffers": (*buffers, buffers[0])}, "two declarations of buffer 'Q'"),
        "stages": ({"pipelines": (Pipeline("k", 3), *pipelines[1:])}, "has 2 stages, pipeline 'k' 3"),
        "warps": ({"roles": (*roles, Role("x", 1, 24, ()))}, "fill warpgroups"),
        "kind of barrier": ({"roles": (*roles, named_k)}, "not a named barrier"),
        "bytes": ({"barriers": uncounted}, "does not count bytes"),
        "part": ({"roles": (*roles, Role("x", 4, 24, (Write("O", 0, part=2),)))}, "has 2 parts"),
        "fixed stage": ({"roles": (*roles, Role("x", 4, 24, (Read("O", 1),)))}, "has 1 stages"),
    }


@pytest.mark.parametrize("name", broken_pieces())
def test_a_protocol_that_does_not_fit_together_is_refused(name: str) -> None:
    fields, message = broken_pieces()[name]
    with pytest.raises(ValueError, match=message):
        replace(FORWARD, **fields)  # type: ignore[arg-type]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="consumers: expected one of"):
        ForwardShape(consumers=4)
    with pytest.raises(ValueError, match="stages: expected at least 1"):
        BackwardShape(stages=0)
    with pytest.raises(ValueError, match="ds_stages: expected 1 or 2"):
        BackwardShape(ds_stages=3)
    with pytest.raises(ValueError, match="'O' does not fit into 'V'"):
        hopper_forward(KEYS, ForwardShape(consumers=3, stages=1))
