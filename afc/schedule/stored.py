# SPDX-License-Identifier: Apache-2.0
"""The plan pass: kernels that find the runs of a mask which bounds alone do not decide, and their buffers.

`extents` tabulates what the mask reads of captured tensors; a `plan` kernel for each (axis, tile) writes the
runs of every tile of a batch entry, once for all heads where the mask does not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from afc.expr.nodes import Expr, const, variables
from afc.expr.operators import add, call, mul
from afc.expr.simplify import simplify
from afc.ir.program import Program
from afc.ir.tiled import Binding, Buffer, Launch, Pass, Semantics, Tile, TiledKernel, Walk
from afc.masks.boxes import Read, reads
from afc.masks.stored import MOST_RUNS
from afc.schedule.common import items, size, tiles

# Of runtime/tile/mask_tables.cuh: elements of a chunk of extents, and how many extents it has.
CHUNK, CHUNK_EXTENTS = 8192, 256 + 16 + 1
TABLE_THREADS, PLAN_WARPS = 512, 4
RUN_ROW = MOST_RUNS + 1  # entries of a tile in runtime/tile/stored_walk.cuh: how many there are, and the runs


@dataclass(frozen=True)
class Tabled:
    """A read of a captured tensor along one axis, with the number of elements there and of choices of the
    other indices, as expressions of the dimensions of a call."""

    read: Read
    rows: Expr
    length: Expr

    @property
    def chunks(self) -> Expr:
        """Chunks of extents."""
        padded = add(self.length, const(CHUNK - 1))
        return simplify(mul(self.rows, call("floordiv", padded, const(CHUNK))))


def tabled(program: Program, meaning: Semantics) -> tuple[Tabled, ...]:
    """What of the mask's reads has a table. The workspace is laid out before a call, so only tensors whose
    sizes are dimensions of the call, and never along rows of a matrix of queries and keys; of others, small
    boxes are read."""
    assert meaning.mask.predicate is not None
    shapes = {t.name: [e.size for e in t.shape] for t in program.tensors}
    found = []
    for read in reads(meaning.mask.predicate):
        shape = shapes[read.tensor]
        if read.axis is None or not variables(shape[read.axis]) <= {"B", "H", "Hk", "M", "N"}:
            continue
        others = [e for axis, e in enumerate(shape) if axis != read.axis]
        if not frozenset().union(*map(variables, others)) <= {"B", "H", "Hk"}:
            continue
        rows: Expr = const(1)
        for extent in others:
            rows = mul(rows, extent)
        found.append(Tabled(read, simplify(rows), shape[read.axis]))
    return tuple(found)


def depends_on_head(meaning: Semantics) -> bool:
    """Whether heads have runs of their own. Batch entries always have: their places may differ."""
    assert meaning.mask.predicate is not None
    return "h" in variables(meaning.mask.predicate)


def _owners(meaning: Semantics) -> tuple[str, ...]:
    return ("B", "H") if depends_on_head(meaning) else ("B",)


def runs_name(kernel: TiledKernel) -> str:
    """Name of the buffer with the runs that a kernel walks over."""
    assert kernel.walk is not None
    own, other = (kernel.tile.queries, kernel.tile.keys)
    if kernel.walk.axis == "queries":
        own, other = other, own
    return f"{kernel.walk.axis}_of_{own}_by_{other}"


def with_plan(
    program: Program, meaning: Semantics, launches: Iterable[Launch], target: str
) -> tuple[Launch, ...]:
    """The kernels of a pass, behind those that find the runs they walk over where the mask needs it."""
    launches = tuple(launches)
    if not meaning.mask.residual:
        return launches
    walking = [x.kernel for x in launches if x.kernel.walk is not None]
    tables = tabled(program, meaning)
    first: list[Launch] = []
    if tables:
        x: Expr = const(0)
        for one in tables:
            x = simplify(add(x, one.chunks))
        kernel = TiledKernel(
            f"{program.name}_extents", "table", "keys", Tile(CHUNK, CHUNK), "any", (), None, (), ()
        )
        binding = Binding(target, warps=TABLE_THREADS // 32)
        first.append(Launch(replace(kernel, binding=binding), (), (x, const(1))))
    names = tuple(x.kernel.name for x in first)
    plans: dict[str, Launch] = {}
    for kernel in walking:
        assert kernel.walk is not None
        if runs_name(kernel) in plans:
            continue
        own, count = ("M", kernel.tile.queries) if kernel.walk.axis == "keys" else ("N", kernel.tile.keys)
        plan = TiledKernel(
            f"{program.name}_plan_{runs_name(kernel)}",
            "plan",
            kernel.stationary,
            kernel.tile,
            "any",
            (),
            Walk(kernel.walk.axis, stored=True),
            (),
            (),
            binding=Binding(target, warps=PLAN_WARPS),
        )
        work = add(items(tiles(own, count), *_owners(meaning)), const(PLAN_WARPS - 1))
        grid = (simplify(call("floordiv", work, const(PLAN_WARPS))), const(1))
        plans[runs_name(kernel)] = Launch(plan, names, grid)
    after = {name: x.kernel.name for name, x in plans.items()}
    rest = []
    for launch in launches:
        kernel = launch.kernel
        if kernel.walk is None:
            rest.append(launch)
            continue
        walk = replace(kernel.walk, stored=True)
        before = (*launch.after, after[runs_name(kernel)])
        rest.append(replace(launch, kernel=replace(kernel, walk=walk), after=before))
    return (*first, *plans.values(), *rest)


def buffers(
    program: Program, meaning: Semantics, in_passes: dict[Pass, tuple[Launch, ...]]
) -> tuple[Buffer, ...]:
    """The workspace of the plan pass: extents, and the runs of each plan kernel."""
    found: dict[str, Buffer] = {}
    for name, launches in in_passes.items():
        for launch in launches:
            kernel = launch.kernel
            if kernel.kind == "table":
                count: Expr = const(0)
                for one in tabled(program, meaning):
                    count = add(count, one.chunks)
                key, dtype = "extents", "extent"
                count = simplify(mul(count, const(CHUNK_EXTENTS)))
            elif kernel.kind == "plan":
                assert kernel.walk is not None
                keys = kernel.walk.axis == "keys"
                own = tiles("M", kernel.tile.queries) if keys else tiles("N", kernel.tile.keys)
                key, dtype = runs_name(kernel), "run"
                count = mul(mul(size(*_owners(meaning)), own), const(RUN_ROW))
            else:
                continue
            passes = dict.fromkeys((*(found[key].passes if key in found else ()), name))
            found[key] = Buffer(key, dtype, count, tuple(passes))
    return tuple(found.values())
