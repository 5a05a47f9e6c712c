# SPDX-License-Identifier: Apache-2.0
"""Protocols of the Hopper kernels: who loads, who multiplies, who stores, and what each waits for.

Both kernels have one producer warpgroup, whose warps are the `producer` (copies), the `store` warp and two
idle ones, and two or three consumer warpgroups. All work through the same work items; all their loops come
from one TileRange.

    forward      producer            consumer                         store
                 K 0, Q              S = Q K'(0), softmax
                 K n, V n-1          S'= Q K'(n), O += P V(n-1)
                 V last              O += P V(last)
                 next item's K 0, Q  O -> shared memory, over V  ───> O -> global memory
                 ...its V 0  <────────────────────────────────────── "O has been read"

    backward     Q 0, K, V, dO 0     per m: S' = K Q', dP' = V dO', dS -> shared memory, all consumers meet,
                 Q m, dO m           dV += P'dO, dQ = dS K, dK += dS'Q; dQ added in memory
                                     dK, dV -> shared memory, over K and V ───> store

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
    are handed them by the producer, which takes them from a counter in global memory (dynamic).
    `store_warp`: a warp of its own stores O; otherwise the first consumer does and waits for it.
    """

    consumers: int = 2
    stages: int = 2
    ping_pong: bool = True
    scheduler: Scheduler = "dynamic"
    store_warp: bool = True
    keys: int = 128
    head_qk: int = 128
    head_v: int = 128

    def __post_init__(self) -> None:
        _verify(self.consumers, self.stages)


@dataclass(frozen=True)
class BackwardShape:
    """Choices of the backward kernel. Rows of the key tile: 64 per consumer.

    `ds_stages`: two let one meeting per step do, one needs a second. `dq`: added in global memory straight
    from registers (red.v4), or through shared memory by a bulk reduction of the store warp.
    """

    consumers: int = 2
    stages: int = 2
    ds_stages: int = 2
    dq: Literal["red", "bulk"] = "red"
    scheduler: Scheduler = "one item"
    queries: int = 64
    head_qk: int = 128
    head_v: int = 128

    def __post_init__(self) -> None:
        _verify(self.consumers, self.stages)
        if self.ds_stages not in (1, 2):
            raise ValueError(f"ds_stages: expected 1 or 2, got {self.ds_stages}")


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


def _release(name: str) -> Script:
    return Arrive(f"{name}_empty", name), AdvancePipeline(name)


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
        return FetchItem(), ForItems((*_hand_on(), *body, FetchItem())), *_hand_on()
    return _own_loop(scheduler, body)


def _other_loop(scheduler: Scheduler, body: Script) -> Script:
    """Loop of a role that is handed its items if the scheduler is dynamic."""
    if scheduler != "dynamic":
        return _own_loop(scheduler, body)
    take = Wait("work_full", "work"), TakeItem("work", "work"), *_release("work")
    return *take, ForItems((*body, *take))


def _own_loop(scheduler: Scheduler, body: Script) -> Script:
    if scheduler == "one item":
        return FetchItem(), *body
    return FetchItem(), ForItems((*body, FetchItem()))


def _work(scheduler: Scheduler, takers: int) -> tuple[tuple[Barrier, ...], tuple[Buffer, ...]]:
    """Barriers and buffer through which work items are handed on; `takers`: warps that read them."""
    if scheduler != "dynamic":
        return (), ()
    barriers = (Barrier("work_full", 1, 1), Barrier("work_empty", 1, takers, free_at_start=True))
    return barriers, (Buffer("work", 1, ITEM_BYTES),)


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
    """Store what all consumers wrote; only then may the memory under it be filled again."""
    return (
        NamedSync("out_written"),
        *(StoreOut(name, 0) for name in buffers),
        WaitStoreRead(),
        Arrive("out_drained", "out", 1),
        AdvancePipeline("out"),
    )


# ---- forward ---------------------------------------------------------------------------------------------


def hopper_forward(tiles: TileRange, shape: ForwardShape = ForwardShape()) -> Protocol:
    """Protocol of the sm_90a forward kernel that walks `tiles` of keys per query tile.

    S of the next tile is issued before O of this one; a K stage is free once S is ready, a V stage once O is.
    With `ping_pong`, a consumer issues its products when it is its turn, so that its softmax meets the
    other's products.
    """
    n, warps = shape.consumers, shape.consumers * WARPGROUP
    buffers = q, k, v, _ = _forward_buffers(shape)
    work_barriers, work_buffers = _work(shape.scheduler, warps + shape.store_warp)
    barriers = (
        *_ring("q", 1, warps),
        *_ring("k", shape.stages, warps),
        *_ring("v", shape.stages, warps),
        Barrier("out_drained", 1, 1, free_at_start=True),
    )
    pipelines = (
        *(Pipeline(name) for name in ("q", "out", "work")),
        *(Pipeline(name, shape.stages) for name in ("k", "v")),
    )
    store = _other_loop(shape.scheduler, (IfTiles(tiles, _store_out("O")),)) if shape.store_warp else ()
    consumers = tuple(_forward_consumer(tiles, shape, c) for c in range(n))
    return Protocol(
        f"forward, {n} consumers, {shape.stages} stages, {shape.scheduler}",
        pipelines,
        (*barriers, *work_barriers),
        _forward_named(shape),
        (*buffers, *work_buffers),
        _roles(n, _forward_producer(tiles, shape, q, k, v), consumers, store),
    )


def _forward_buffers(shape: ForwardShape) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    rows = WARPGROUP_ROWS * shape.consumers
    return (
        Buffer("Q", 1, rows * shape.head_qk * HALF),
        Buffer("K", shape.stages, shape.keys * shape.head_qk * HALF),
        Buffer("V", shape.stages, shape.keys * shape.head_v * HALF),
        Buffer("O", 1, rows * shape.head_v * HALF, parts=shape.consumers, alias="V"),
    )


def _forward_named(shape: ForwardShape) -> tuple[NamedBarrier, ...]:
    consumers = shape.consumers * WARPGROUP * WARP
    two = 2 * WARPGROUP * WARP
    turns = range(shape.consumers if shape.ping_pong else 0)
    return (
        NamedBarrier("all_read", 1, consumers),
        NamedBarrier("out_written", 2, consumers + WARP * shape.store_warp),
        *(NamedBarrier(f"turn {c}", 3 + c, two) for c in turns),
    )


def _forward_producer(tiles: TileRange, shape: ForwardShape, q: Buffer, k: Buffer, v: Buffer) -> Script:
    """K 0 and Q need not wait until O of the item before is stored; V, whose memory O takes, does."""
    body: Script = (
        *_refill("k", k, tile=CURRENT),
        *_refill("q", q),
        Wait("out_drained", "out", flip=True),
        AdvancePipeline("out"),
        ForTiles(tiles, (*_refill("k", k, tile=CURRENT), *_refill("v", v, tile=PREVIOUS)), first=1),
        *_refill("v", v, tile=CURRENT),
    )
    return _producer_loop(shape.scheduler, (IfTiles(tiles, body),))


def _forward_consumer(tiles: TileRange, shape: ForwardShape, c: int) -> Script:
    before, after = _turns(shape, c)
    first: Script = (
        Wait("q_full", "q"),
        Wait("k_full", "k"),
        *before,
        *_scores(),
        *after,
        WaitGroup(0),
        *_release("k"),
        Touch(("S", "P")),  # softmax
    )
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
    last: Script = (
        *_release("q"),
        Wait("v_full", "v"),
        *_output(CURRENT),
        WaitGroup(0),
        *_release("v"),
    )
    body: Script = (*first, ForTiles(tiles, step, first=1), *last, *_forward_epilogue(shape, c))
    loop = _other_loop(shape.scheduler, (IfTiles(tiles, body),))
    return *_first_turn(shape, c), *loop, *_last_turn(shape, c)


def _scores() -> Script:
    """S = Q K'."""
    return Read("Q", 0), Read("K", "k", CURRENT, registers=("S",)), CommitGroup()


def _output(tile: int) -> Script:
    """O += P V, with P in registers."""
    return Read("V", "v", tile, registers=("O", "P")), CommitGroup()


def _forward_epilogue(shape: ForwardShape, c: int) -> Script:
    write: Script = (Touch(("O",)), *_write_out(c, "O"))
    if shape.store_warp or c > 0:
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
    work_barriers, work_buffers = _work(shape.scheduler, warps + 1)
    barriers = (
        Barrier("kv_full", 1, 1, counts_bytes=True),
        *_ring("q", shape.stages, warps),
        *_ring("do", shape.stages, warps),
        Barrier("out_drained", 1, 1, free_at_start=True),
    )
    pipelines = (
        *(Pipeline(name) for name in ("kv", "out", "work")),
        *(Pipeline(name, shape.stages) for name in ("q", "do")),
        Pipeline("ds", shape.ds_stages),
    )
    buffers = _backward_buffers(shape)
    consumers = tuple(_backward_consumer(tiles, shape, c) for c in range(n))
    return Protocol(
        f"backward, {n} consumers, {shape.stages} stages, dQ by {shape.dq}, {shape.scheduler}",
        pipelines,
        (*barriers, *work_barriers),
        _backward_named(shape),
        (*buffers, *work_buffers),
        _roles(n, _backward_producer(tiles, shape, buffers), consumers, _backward_store(tiles, shape)),
    )


def _backward_buffers(shape: BackwardShape) -> tuple[Buffer, ...]:
    n, m = WARPGROUP_ROWS * shape.consumers, shape.queries
    return (
        Buffer("K", 1, n * shape.head_qk * HALF),
        Buffer("V", 1, n * shape.head_v * HALF),
        Buffer("Q", shape.stages, m * shape.head_qk * HALF),
        Buffer("LSE", shape.stages, m * FLOAT),
        Buffer("dO", shape.stages, m * shape.head_v * HALF),
        Buffer("delta", shape.stages, m * FLOAT),
        Buffer("dS", shape.ds_stages, m * n * HALF, parts=shape.consumers),
        Buffer("dK", 1, n * shape.head_qk * HALF, parts=shape.consumers, alias="K"),
        Buffer("dV", 1, n * shape.head_v * HALF, parts=shape.consumers, alias="V"),
        *([Buffer("dQ", 1, m * shape.head_qk * FLOAT, parts=shape.consumers)] if shape.dq == "bulk" else []),
    )


def _backward_named(shape: BackwardShape) -> tuple[NamedBarrier, ...]:
    consumers = shape.consumers * WARPGROUP * WARP
    named = [
        NamedBarrier("all_read", 1, consumers),
        NamedBarrier("out_written", 2, consumers + WARP),
        NamedBarrier("ds_written", 3, consumers),
    ]
    if shape.ds_stages == 1:
        named.append(NamedBarrier("ds_read", 4, consumers))
    if shape.dq == "bulk":
        named += [
            NamedBarrier("dq_free", 5, consumers + WARP),
            NamedBarrier("dq_written", 6, consumers + WARP),
        ]
    return tuple(named)


def _backward_producer(tiles: TileRange, shape: BackwardShape, buffers: tuple[Buffer, ...]) -> Script:
    """Q of an item need not wait until dK and dV of the item before are stored; K and V do."""
    k, v, q, lse, do, delta = buffers[:6]
    load_q = _refill("q", q, lse, tile=CURRENT)
    load_do = _refill("do", do, delta, tile=CURRENT)
    body: Script = (
        *load_q,
        Wait("out_drained", "out", flip=True),
        AdvancePipeline("out"),
        *_load("kv_full", "kv", k, v),
        *load_do,
        ForTiles(tiles, (*load_q, *load_do), first=1),
    )
    return _producer_loop(shape.scheduler, (IfTiles(tiles, body),))


def _backward_consumer(tiles: TileRange, shape: BackwardShape, c: int) -> Script:
    body: Script = (
        *(Wait("kv_full", "kv"), AdvancePipeline("kv")),
        ForTiles(tiles, _backward_step(shape, c)),
        Touch(("dK", "dV")),
        *_write_out(c, "dK", "dV"),
        NamedArrive("out_written"),
    )
    return _other_loop(shape.scheduler, (IfTiles(tiles, body),))


def _backward_step(shape: BackwardShape, c: int) -> Script:
    """One query tile. Two groups run at a time; each wait names the older of them."""
    return (
        Wait("q_full", "q"),
        *(Read("K", 0), Read("Q", "q", CURRENT, registers=("S",)), CommitGroup()),  # S' = K Q'
        Wait("do_full", "do"),
        *(Read("V", 0), Read("dO", "do", CURRENT, registers=("dP",)), CommitGroup()),  # dP' = V dO'
        Read("LSE", "q", CURRENT, asynchronous=False),
        Read("delta", "do", CURRENT, asynchronous=False),
        WaitGroup(1),
        Touch(("S", "P")),  # P' = exp(S' - LSE)
        WaitGroup(0),
        Touch(("dP", "dS")),  # dS' = P' (dP' - delta)
        *_share_ds(shape, c),
        *(Read("dS", "ds", CURRENT), Read("K", 0, registers=("dQ",)), CommitGroup()),  # dQ = dS K
        WaitGroup(1),
        *_release("do"),
        *(Read("Q", "q", CURRENT, registers=("dK", "dS")), CommitGroup()),  # dK += dS' Q
        WaitGroup(1),
        AdvancePipeline("ds"),
        Touch(("dQ",)),
        *_add_dq(shape, c),
        WaitGroup(0),
        *_release("q"),
    )


def _share_ds(shape: BackwardShape, c: int) -> Script:
    """Each consumer writes its rows of dS, all meet, each reads all rows.

    With two stages, who writes a stage again has met everyone since they read it. With one, they meet before
    too.
    """
    return (
        *([NamedSync("ds_read")] if shape.ds_stages == 1 else []),
        Write("dS", "ds", part=c, tile=CURRENT),
        *(Read("dO", "do", CURRENT, registers=("dV", "P")), CommitGroup()),  # dV += P' dO
        ProxyFence(),
        NamedSync("ds_written"),
    )


def _add_dq(shape: BackwardShape, c: int) -> Script:
    """Nothing to share if registers are added to global memory; else the store warp adds a tile."""
    if shape.dq == "red":
        return ()
    return (
        NamedSync("dq_free"),
        Write("dQ", 0, part=c, tile=CURRENT),
        ProxyFence(),
        NamedArrive("dq_written"),
    )


def _backward_store(tiles: TileRange, shape: BackwardShape) -> Script:
    reduce: Script = (
        NamedArrive("dq_free"),
        NamedSync("dq_written"),
        StoreOut("dQ", 0, CURRENT),
        WaitStoreRead(),
    )
    loop = (ForTiles(tiles, reduce),) if shape.dq == "bulk" else ()
    return _other_loop(shape.scheduler, (IfTiles(tiles, (*loop, *_store_out("dK", "dV"))),))
