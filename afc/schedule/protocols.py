# SPDX-License-Identifier: Apache-2.0
"""Protocols of the Hopper kernels: who loads, who multiplies, who stores, and what each waits for.

Both kernels have one producer warpgroup, one warp of which copies (and another of which may store), and two
or three consumer warpgroups. All roles work through the same work items; all their loops come from one
TileRange.

    forward      producer            consumer                         store
                 K 0, Q              S = Q K'(0), softmax
                 K n, V n-1          S'= Q K'(n), O += P V(n-1)
                 V last              O += P V(last)
                 next item's K 0, Q  O -> shared memory, over V  ───> O -> global memory
                 ...its V 0  <────────────────────────────────────── "O has been read"

    backward     Q 0, K, V, dO 0     per m: S' = K Q', dP' = V dO', dS -> shared memory, consumers meet,
                 Q m, dO m           dV += P'dO, dQ = dS K, dK += dS'Q; dQ added in memory
                                     dK, dV -> shared memory, over K and V ───> store
    pipelined                        S' of the next m is issued before dQ of this one

A work item without a tile touches no shared memory and no barrier but the scheduler's: consumers write zeros
to global memory from registers. Were its zeros stored like any other result, nothing would hold consumers and
store warp back while the producer is late, "O has been read" could complete twice, and with one bit of phase
the producer would take the second completion for none. The simulator finds this; see the planted faults of
`tests/unit/test_protocol.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from afc.ir.protocol import (
    CURRENT,
    PREVIOUS,
    WARP,
    WARPGROUP,
    AdvancePipeline,
    Arrive,
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
    Pipeline,
    Protocol,
    ProxyFence,
    PublishItem,
    Read,
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
    Write,
)

Scheduler = Literal["one item", "static", "dynamic"]

WARPGROUP_ROWS = 64  # rows of a wgmma accumulator
HALF, FLOAT = 2, 4  # bytes of a stored and of an accumulated value
ITEM_BYTES = 16
REGISTERS = {2: (24, 240), 3: (32, 160)}  # consumers -> per thread of the producer warpgroup, of a consumer


@dataclass(frozen=True)
class ForwardShape:
    """Choices of the forward kernel. Rows of the query tile: 64 per consumer.

    `scheduler`: one work item per block, or persistent blocks that compute their items themselves (static) or
    are handed all but the first by the producer, which takes them from a counter in global memory (dynamic).
    `overlap`: S of the next tile runs beside O of this one. `store`: O goes to global memory straight from
    registers, or through shared memory by the first consumer or by a warp of its own.
    """

    consumers: int = 2
    stages: int = 2
    ping_pong: bool = True
    scheduler: Scheduler = "dynamic"
    store: Literal["registers", "consumer", "warp"] = "warp"
    overlap: bool = True
    work_slots: int = 1
    keys: int = 128
    head_qk: int = 128
    head_v: int = 128

    def __post_init__(self) -> None:
        _verify(self.consumers, self.stages)


@dataclass(frozen=True)
class BackwardShape:
    """Choices of the backward kernel. Rows of the key tile: 64 per consumer.

    `ds_stages`: two let one meeting per step do, one needs a second. `meet`: over dS at a named barrier,
    where all wait for all at once, or at an mbarrier, where a consumer may do other work between arriving and
    waiting. `dq`: added in global memory straight from registers (red.v4), or through shared memory by bulk
    reductions, of each consumer's part by itself or of the tile by the store warp. `store`: of dK and dV,
    likewise. `pipelined`: see above; needs two stages of everything, and each consumer to add its dQ itself.
    """

    consumers: int = 2
    stages: int = 2
    ds_stages: int = 2
    meet: Literal["named", "mbarrier"] = "named"
    dq: Literal["red", "bulk", "warp"] = "red"
    store: Literal["consumers", "warp"] = "warp"
    pipelined: bool = False
    scheduler: Scheduler = "one item"
    queries: int = 64
    head_qk: int = 128
    head_v: int = 128

    def __post_init__(self) -> None:
        _verify(self.consumers, self.stages)
        if self.ds_stages not in (1, 2):
            raise ValueError(f"ds_stages: expected 1 or 2, got {self.ds_stages}")
        if self.dq == "warp" and self.store != "warp":
            raise ValueError(f"store: expected 'warp', the one that adds dQ, got {self.store!r}")
        if self.pipelined and (self.stages < 2 or self.ds_stages < 2 or self.dq == "warp"):
            raise ValueError("pipelined: expected two stages of Q, dO and dS, and dq 'red' or 'bulk'")


def _verify(consumers: int, stages: int) -> None:
    if consumers not in REGISTERS:
        raise ValueError(f"consumers: expected one of {sorted(REGISTERS)}, got {consumers}")
    if stages < 1:
        raise ValueError(f"stages: expected at least 1, got {stages}")


# ---- parts of both kernels -------------------------------------------------------------------------------


def _load(barrier: str, pipeline: str, *buffers: Buffer, tile: int | None = None) -> Script:
    """Copies that one barrier counts together, into the next free stage."""
    return (
        ExpectBytes(barrier, pipeline, sum(b.bytes for b in buffers)),
        *(CopyIn(b.name, pipeline, barrier, tile) for b in buffers),
        AdvancePipeline(pipeline),
    )


def _refill(name: str, *buffers: Buffer, tile: int | None = None) -> Script:
    """`_load` once all readers of the stage have left it."""
    return (Wait(f"{name}_empty", name, flip=True), *_load(f"{name}_full", name, *buffers, tile=tile))


def _release(name: str, place: str = "") -> Script:
    """Leave the stage at `place`, by default the pipeline of the ring's own name."""
    return Arrive(f"{name}_empty", place or name), AdvancePipeline(place or name)


def _ring(name: str, stages: int, arrivals: int) -> tuple[Barrier, Barrier]:
    """Full and empty barrier of a ring; every warp that reads a stage says so when it leaves it."""
    return (
        Barrier(f"{name}_full", stages, 1, counts_bytes=True),
        Barrier(f"{name}_empty", stages, arrivals, free_at_start=True),
    )


def _hand_on() -> Script:
    """The producer tells the other roles its work item, or that there is none."""
    return (
        Wait("work_empty", "work", flip=True),
        PublishItem("work", "work"),
        Arrive("work_full", "work"),
        AdvancePipeline("work"),
    )


def _producer_loop(scheduler: Scheduler, body: Script) -> Script:
    if scheduler == "dynamic":
        return FetchItem(), ForItems((*body, FetchItem(), *_hand_on()))
    return _own_loop(scheduler, body)


def _other_loop(scheduler: Scheduler, body: Script) -> Script:
    """Loop of a role that is handed its items, but for the first, if the scheduler is dynamic."""
    if scheduler != "dynamic":
        return _own_loop(scheduler, body)
    take = Wait("work_full", "work"), TakeItem("work", "work"), *_release("work")
    return FetchItem(), ForItems((*body, *take))


def _own_loop(scheduler: Scheduler, body: Script) -> Script:
    if scheduler == "one item":
        return FetchItem(), *body
    return FetchItem(), ForItems((*body, FetchItem()))


def _work(
    scheduler: Scheduler, takers: int, slots: int = 1
) -> tuple[tuple[Pipeline, ...], tuple[Barrier, ...], tuple[Buffer, ...]]:
    """What hands work items on; `takers`: warps that read them."""
    if scheduler != "dynamic":
        return (), (), ()
    barriers = Barrier("work_full", slots, 1), Barrier("work_empty", slots, takers, free_at_start=True)
    return (Pipeline("work", slots),), barriers, (Buffer("work", slots, ITEM_BYTES),)


def _roles(
    consumers: int, producer: Script, consumer_scripts: tuple[Script, ...], store: Script
) -> tuple[Role, ...]:
    """Roles with their registers set. Every warp of the producer's warpgroup gives its registers up."""
    few, many = REGISTERS[consumers]
    idle = WARPGROUP - 1 - bool(store)
    first = (
        Role("producer", 1, few, (SetRegisters(few), *producer)),
        *([Role("store", 1, few, (SetRegisters(few), *store))] if store else []),
        Role("idle", idle, few, (SetRegisters(few),)),
    )
    others = (
        Role(f"consumer {c}", WARPGROUP, many, (SetRegisters(many), *script))
        for c, script in enumerate(consumer_scripts)
    )
    return *first, *others


def _write_out(consumer: int, *buffers: str) -> Script:
    """A consumer's part of the results, over memory that every consumer has read for the last time.

    The results of the item before are stored by now: this item's copies waited for that, and the consumer for
    them.
    """
    return (
        NamedSync("all_read"),
        *(Write(name, 0, part=consumer) for name in buffers),
        ProxyFence(),
    )


def _store_out(*buffers: str) -> Script:
    """Store what all consumers wrote."""
    return (NamedSync("out_written"), *(StoreOut(name, 0) for name in buffers), *_drain())


def _drain() -> Script:
    """Only once the stores have read their source may it be filled again."""
    return WaitStoreRead(), Arrive("out_drained", "out", 1), AdvancePipeline("out")


# ---- forward ---------------------------------------------------------------------------------------------


def hopper_forward(tiles: TileRange, shape: ForwardShape = ForwardShape()) -> Protocol:
    """Protocol of the sm_90a forward kernel that walks `tiles` of keys per query tile.

    S of the next tile is issued before O of this one; a K stage is free once S is ready, a V stage once O is.
    With `ping_pong`, a consumer issues its products when it is its turn, so that its softmax meets the
    other's products.
    """
    n, warps = shape.consumers, shape.consumers * WARPGROUP
    buffers = q, k, v, *_ = _forward_buffers(shape)
    work = _work(shape.scheduler, warps + (shape.store == "warp"), shape.work_slots)
    barriers = (
        *_ring("q", 1, warps),
        *_ring("k", shape.stages, warps),
        *_ring("v", shape.stages, warps),
        *([] if shape.store == "registers" else [Barrier("out_drained", 1, 1, free_at_start=True)]),
    )
    pipelines = *(Pipeline(name, shape.stages) for name in ("k", "v")), Pipeline("q"), Pipeline("out")
    storing: Script = (IfTiles(tiles, _store_out("O")),)
    return Protocol(
        f"forward, {n} consumers, {shape.stages} stages, {shape.scheduler}",
        (*pipelines, *work[0]),
        (*barriers, *work[1]),
        _forward_named(shape),
        (*buffers, *work[2]),
        _roles(
            n,
            _forward_producer(tiles, shape, q, k, v),
            tuple(_forward_consumer(tiles, shape, c) for c in range(n)),
            _other_loop(shape.scheduler, storing) if shape.store == "warp" else (),
        ),
    )


def _forward_buffers(shape: ForwardShape) -> tuple[Buffer, ...]:
    rows = WARPGROUP_ROWS * shape.consumers
    loaded = (
        Buffer("Q", 1, rows * shape.head_qk * HALF),
        Buffer("K", shape.stages, shape.keys * shape.head_qk * HALF),
        Buffer("V", shape.stages, shape.keys * shape.head_v * HALF),
    )
    if shape.store == "registers":
        return loaded
    return *loaded, Buffer("O", 1, rows * shape.head_v * HALF, parts=shape.consumers, alias="V")


def _forward_named(shape: ForwardShape) -> tuple[NamedBarrier, ...]:
    consumers = shape.consumers * WARPGROUP * WARP
    storing = (
        NamedBarrier("all_read", 1, consumers),
        NamedBarrier("out_written", 2, consumers + WARP * (shape.store == "warp")),
    )
    turns = range(shape.consumers if shape.ping_pong else 0)
    return (
        *(() if shape.store == "registers" else storing),
        *(NamedBarrier(f"turn {c}", 3 + c, 2 * WARPGROUP * WARP) for c in turns),
    )


def _forward_producer(tiles: TileRange, shape: ForwardShape, q: Buffer, k: Buffer, v: Buffer) -> Script:
    """K 0 and Q need not wait until O of the item before is stored; V, whose memory O takes, does."""
    drained: Script = (Wait("out_drained", "out", flip=True), AdvancePipeline("out"))
    body: Script = (
        *_refill("k", k, tile=CURRENT),
        *_refill("q", q),
        *(() if shape.store == "registers" else drained),
        ForTiles(tiles, (*_refill("k", k, tile=CURRENT), *_refill("v", v, tile=PREVIOUS)), first=1),
        *_refill("v", v, tile=CURRENT),
    )
    return _producer_loop(shape.scheduler, (IfTiles(tiles, body),))


def _forward_consumer(tiles: TileRange, shape: ForwardShape, c: int) -> Script:
    body: Script = (
        Wait("q_full", "q"),
        *(_forward_overlapped if shape.overlap else _forward_plain)(tiles, shape, c),
        *_forward_epilogue(shape, c),
    )
    loop = _other_loop(shape.scheduler, (IfTiles(tiles, body),))
    return *_first_turn(shape, c), *loop, *_last_turn(shape, c)


def _forward_overlapped(tiles: TileRange, shape: ForwardShape, c: int) -> Script:
    """Two groups at a time: S of tile n, and O of the tile before."""
    before, after = _turns(shape, c)
    step: Script = (
        Wait("k_full", "k"),
        *before,
        *_scores(),
        Wait("v_full", "v"),
        *_output(PREVIOUS),
        *after,
        WaitGroup(1),
        *_release("k"),
        Touch(("S",)),  # mask, score steps, softmax, while the tensor core is at O
        WaitGroup(0),
        *_release("v"),
        Touch(("O", "P")),  # P = S in half precision, O rescaled
    )
    return (
        *(Wait("k_full", "k"), *_scores(), WaitGroup(0), *_release("k"), Touch(("S", "P"))),
        ForTiles(tiles, step, first=1),
        *_release("q"),
        *(Wait("v_full", "v"), *_output(CURRENT), WaitGroup(0), *_release("v")),
    )


def _forward_plain(tiles: TileRange, shape: ForwardShape, c: int) -> Script:
    """One group at a time."""
    before, after = _turns(shape, c)
    step: Script = (
        *(Wait("k_full", "k"), *before, *_scores(), *after, WaitGroup(0), *_release("k")),
        Touch(("S", "P", "O")),
        *(Wait("v_full", "v"), *_output(CURRENT), WaitGroup(0), *_release("v")),
    )
    return ForTiles(tiles, step), *_release("q")


def _scores() -> Script:
    """S = Q K'."""
    return Read("Q", 0), Read("K", "k", CURRENT, registers=("S",)), CommitGroup()


def _output(tile: int) -> Script:
    """O += P V, with P in registers."""
    return Read("V", "v", tile, registers=("O", "P")), CommitGroup()


def _forward_epilogue(shape: ForwardShape, c: int) -> Script:
    if shape.store == "registers":
        return (Touch(("O",)),)
    write: Script = (Touch(("O",)), *_write_out(c, "O"))
    if shape.store == "warp" or c > 0:
        return *write, NamedArrive("out_written")
    return *write, *_store_out("O")


def _turns(shape: ForwardShape, c: int) -> tuple[Script, Script]:
    """Ping-pong: wait for the turn to issue products, and pass it on."""
    if not shape.ping_pong:
        return (), ()
    return (NamedSync(f"turn {c}"),), (NamedArrive(f"turn {(c + 1) % shape.consumers}"),)


def _first_turn(shape: ForwardShape, c: int) -> Script:
    """The first consumer's first turn is given by the last one, as all later ones are."""
    return (NamedArrive("turn 0"),) if shape.ping_pong and c == shape.consumers - 1 else ()


def _last_turn(shape: ForwardShape, c: int) -> Script:
    """The turn that comes back after the last product is taken, so that no barrier is left half full."""
    return (NamedSync("turn 0"),) if shape.ping_pong and c == 0 else ()


# ---- backward --------------------------------------------------------------------------------------------


def hopper_backward(tiles: TileRange, shape: BackwardShape = BackwardShape()) -> Protocol:
    """Protocol of the sm_90a backward kernel that walks `tiles` of queries per key tile.

    K and V stay for a work item; Q with the LSE rows and dO with the delta rows stream. dS is the only
    product that passes through shared memory, because dQ sums over the keys of all consumers.
    """
    n, warps = shape.consumers, shape.consumers * WARPGROUP
    work = _work(shape.scheduler, warps + (shape.store == "warp"))
    barriers = (
        Barrier("k_full", 1, 1, counts_bytes=True),
        Barrier("v_full", 1, 1, counts_bytes=True),
        *_ring("q", shape.stages, warps),
        *_ring("do", shape.stages, warps),
        *([Barrier("ds_full", shape.ds_stages, warps)] if shape.meet == "mbarrier" else []),
        Barrier("out_drained", 1, 1 if shape.store == "warp" else n, free_at_start=True),
    )
    pipelines = (
        *(Pipeline(name) for name in ("k", "v", "out")),
        *(Pipeline(name, shape.stages) for name in ("q", "q_done", "do")),
        Pipeline("ds", shape.ds_stages),
    )
    buffers = _backward_buffers(shape)
    storing = _other_loop(shape.scheduler, _backward_store(tiles, shape)) if shape.store == "warp" else ()
    consumers = tuple(_backward_consumer(tiles, shape, c) for c in range(n))
    return Protocol(
        f"backward, {n} consumers, {shape.stages} stages, dQ by {shape.dq}, {shape.scheduler}",
        (*pipelines, *work[0]),
        (*barriers, *work[1]),
        _backward_named(shape),
        (*buffers, *work[2]),
        _roles(n, _backward_producer(tiles, shape, buffers), consumers, storing),
    )


def _backward_buffers(shape: BackwardShape) -> tuple[Buffer, ...]:
    parts, n, m = shape.consumers, WARPGROUP_ROWS * shape.consumers, shape.queries
    dq = Buffer("dQ", 1, m * shape.head_qk * FLOAT, parts)
    return (
        Buffer("K", 1, n * shape.head_qk * HALF, parts),
        Buffer("V", 1, n * shape.head_v * HALF, parts),
        Buffer("Q", shape.stages, m * shape.head_qk * HALF),
        Buffer("LSE", shape.stages, m * FLOAT),
        Buffer("dO", shape.stages, m * shape.head_v * HALF),
        Buffer("delta", shape.stages, m * FLOAT),
        Buffer("dS", shape.ds_stages, m * n * HALF, parts),
        Buffer("dK", 1, n * shape.head_qk * HALF, parts, alias="K"),
        Buffer("dV", 1, n * shape.head_v * HALF, parts, alias="V"),
        *([] if shape.dq == "red" else [dq]),
    )


def _backward_named(shape: BackwardShape) -> tuple[NamedBarrier, ...]:
    consumers = shape.consumers * WARPGROUP * WARP
    with_store = consumers + WARP
    wanted = {
        "all_read": (consumers, True),
        "ds_written": (consumers, shape.meet == "named"),
        "ds_read": (consumers, shape.ds_stages == 1),
        "out_written": (with_store, shape.store == "warp"),
        "dq_free": (with_store, shape.dq == "warp"),
        "dq_written": (with_store, shape.dq == "warp"),
    }
    wanted |= {f"own {c}": (WARPGROUP * WARP, shape.store == "consumers") for c in range(shape.consumers)}
    present = [(name, threads) for name, (threads, used) in wanted.items() if used]
    return tuple(NamedBarrier(name, 1 + i, threads) for i, (name, threads) in enumerate(present))


def _backward_producer(tiles: TileRange, shape: BackwardShape, buffers: tuple[Buffer, ...]) -> Script:
    """Q of an item need not wait until dK and dV of the item before are stored; K and V do."""
    k, v, q, lse, do, delta = buffers[:6]
    load_q = _refill("q", q, lse, tile=CURRENT)
    load_do = _refill("do", do, delta, tile=CURRENT)
    body: Script = (
        *load_q,
        *(Wait("out_drained", "out", flip=True), AdvancePipeline("out")),
        *_load("k_full", "k", k),
        *_load("v_full", "v", v),
        *load_do,
        ForTiles(tiles, (*load_q, *load_do), first=1),
    )
    return _producer_loop(shape.scheduler, (IfTiles(tiles, body),))


def _backward_consumer(tiles: TileRange, shape: BackwardShape, c: int) -> Script:
    body: Script = (
        *(Wait("k_full", "k"), AdvancePipeline("k"), Wait("v_full", "v"), AdvancePipeline("v")),
        *(_backward_pipelined(tiles, shape, c) if shape.pipelined else _backward_plain(tiles, shape, c)),
        Touch(("dK", "dV")),
        *_backward_epilogue(shape, c),
    )
    last = (WaitStoreRead(),) if shape.dq == "bulk" and shape.store == "warp" else ()
    return *_other_loop(shape.scheduler, (IfTiles(tiles, body),)), *last


def _backward_plain(tiles: TileRange, shape: BackwardShape, c: int) -> Script:
    """Everything of one query tile. Two groups run at a time; each wait names the older of them."""
    step: Script = (
        *(Wait("q_full", "q"), *_s(c), Wait("do_full", "do"), *_dp(c, CURRENT)),
        Read("LSE", "q", CURRENT, asynchronous=False),
        Read("delta", "do", CURRENT, asynchronous=False),
        *(WaitGroup(1), Touch(("S", "P"))),  # P' = exp(S' - LSE)
        *(WaitGroup(0), Touch(("dP", "dS"))),  # dS' = P' (dP' - delta)
        *_write_ds(shape, c, CURRENT),
        *_dv(CURRENT),
        *_meet(shape),
        *_dq(CURRENT),
        *(WaitGroup(1), *_release("do")),
        *(Read("Q", "q", CURRENT, registers=("dK", "dS")), CommitGroup()),  # dK += dS' Q
        *(WaitGroup(1), AdvancePipeline("ds"), *_add_dq(shape, c, CURRENT)),
        *(WaitGroup(0), *_release("q")),
    )
    return (ForTiles(tiles, step),)


def _backward_pipelined(tiles: TileRange, shape: BackwardShape, c: int) -> Script:
    """From P' of one query tile to P' of the next. Q has two places: `q` of the next, `q_done` of this."""
    weigh: Script = (Read("LSE", "q", CURRENT, asynchronous=False), Touch(("S", "P")), AdvancePipeline("q"))
    step: Script = (
        *_differentiate(shape, c, PREVIOUS),
        *(Wait("q_full", "q"), *_s(c)),
        *_meet(shape),
        WaitGroup(1),  # dK
        *_dq(PREVIOUS),
        *_release("q", "q_done"),
        *(WaitGroup(1), *weigh),
        *(WaitGroup(0), AdvancePipeline("ds"), *_add_dq(shape, c, PREVIOUS)),
    )
    last: Script = (
        *_differentiate(shape, c, CURRENT),
        *_meet(shape),
        WaitGroup(0),
        *_dq(CURRENT),
        *_release("q", "q_done"),
        *(WaitGroup(0), AdvancePipeline("ds"), *_add_dq(shape, c, CURRENT)),
    )
    first: Script = (Wait("q_full", "q"), *_s(c), WaitGroup(0), *weigh)
    return *first, ForTiles(tiles, step, first=1), *last


def _differentiate(shape: BackwardShape, c: int, tile: int) -> Script:
    """dP', dV, dS' and dK of a tile whose P' is there; dK is under way at the end."""
    return (
        *(Wait("do_full", "do"), *_dp(c, tile), *_dv(tile)),
        *(WaitGroup(1), Read("delta", "do", tile, asynchronous=False), Touch(("dP", "S", "dS"))),
        *_write_ds(shape, c, tile),
        *(Read("Q", "q_done", tile, registers=("dK", "dS")), CommitGroup()),
        *(WaitGroup(1), *_release("do")),
    )


def _s(c: int) -> Script:
    """S' = K Q', a consumer's rows."""
    return Read("K", 0, part=c), Read("Q", "q", CURRENT, registers=("S",)), CommitGroup()


def _dp(c: int, tile: int) -> Script:
    """dP' = V dO', a consumer's rows."""
    return Read("V", 0, part=c), Read("dO", "do", tile, registers=("dP",)), CommitGroup()


def _dv(tile: int) -> Script:
    """dV += P' dO, with P' in registers."""
    return Read("dO", "do", tile, registers=("dV", "P")), CommitGroup()


def _dq(tile: int) -> Script:
    """dQ = dS K, over the keys of all consumers."""
    return Read("dS", "ds", tile), Read("K", 0, registers=("dQ",)), CommitGroup()


def _write_ds(shape: BackwardShape, c: int, tile: int) -> Script:
    """A consumer's rows of dS.

    With two stages, who writes a stage again has met everyone since they read it. With one, they meet before
    too.
    """
    return (
        *([NamedSync("ds_read")] if shape.ds_stages == 1 else []),
        Write("dS", "ds", part=c, tile=tile),
        ProxyFence(),
        *([Arrive("ds_full", "ds")] if shape.meet == "mbarrier" else []),
    )


def _meet(shape: BackwardShape) -> Script:
    """All rows of dS are there."""
    return (Wait("ds_full", "ds") if shape.meet == "mbarrier" else NamedSync("ds_written"),)


def _add_dq(shape: BackwardShape, c: int, tile: int) -> Script:
    """Nothing to share if registers are added to global memory; else a bulk reduction reads shared memory."""
    write: Script = (Write("dQ", 0, part=c, tile=tile), ProxyFence())
    if shape.dq == "red":
        return (Touch(("dQ",)),)
    if shape.dq == "bulk":
        return Touch(("dQ",)), WaitStoreRead(), *write, StoreOut("dQ", 0, tile, part=c)
    return Touch(("dQ",)), NamedSync("dq_free"), *write, NamedArrive("dq_written")


def _backward_epilogue(shape: BackwardShape, c: int) -> Script:
    """dV over V and dK over K. A consumer alone reads its rows of V, but K is an operand of everyone's dQ."""
    if shape.store == "warp":
        return *_write_out(c, "dK", "dV"), NamedArrive("out_written")
    own = NamedSync(f"own {c}")  # its four warps
    return (
        *(Write("dV", 0, part=c), ProxyFence(), own, StoreOut("dV", 0, part=c)),
        *(*_write_out(c, "dK"), own, StoreOut("dK", 0, part=c)),
        *_drain(),
    )


def _backward_store(tiles: TileRange, shape: BackwardShape) -> Script:
    reduce: Script = (
        NamedArrive("dq_free"),
        NamedSync("dq_written"),
        StoreOut("dQ", 0, CURRENT),
        WaitStoreRead(),
    )
    loop = (ForTiles(tiles, reduce),) if shape.dq == "warp" else ()
    return (IfTiles(tiles, (*loop, *_store_out("dK", "dV"))),)
