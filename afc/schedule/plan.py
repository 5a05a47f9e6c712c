# SPDX-License-Identifier: Apache-2.0
"""Program to LaunchPlan: which kernels, in which order, over which workspace."""

from __future__ import annotations

from dataclasses import replace

from afc.errors import UsageError
from afc.expr.interval import Interval, interval
from afc.expr.nodes import Const, Expr, Op, Type, Var, const, inline_lets
from afc.expr.operators import add, mul
from afc.ir.program import Program, Rotation
from afc.ir.rotation import distinct_entries
from afc.ir.tiled import Binding, Buffer, Launch, LaunchPlan, Pass, Semantics, Tile, TiledKernel
from afc.masks import derive
from afc.schedule import ops
from afc.schedule.targets import cpu, sm80

# Raw scores beyond this overflow float32 in any implementation.
SCORE_RANGE = Interval(-1e30, 1e30)
FLOAT32_MAX = 3.4e38

TARGETS = ("cpu", "sm80")


def schedule(program: Program, target: str, storage: str) -> LaunchPlan:
    """The plan of a program that the passes have been run on.

    Raises UsageError: E0405 dtype, E0406 head dimension, E0407 no tile fits.
    """
    if target == "cpu":
        return _cpu(program, storage)
    if target == "sm80":
        return _sm80(program, storage)
    raise UsageError.of("E0408", f"unknown target `{target}`", hint=f"targets: {', '.join(TARGETS)}")


def semantics(program: Program, storage: str, compute: str) -> Semantics:
    """The scalar parts that all kernels of a plan share."""
    gradient = program.score_gradient
    assert gradient is not None
    return Semantics(
        storage,
        compute,
        int(_constant(program, "Dqk")),
        int(_constant(program, "Dv")),
        program.q_steps,
        program.k_steps,
        program.scores,
        gradient.steps,
        _finite(program),
        program.normalizer.factor,
        gradient.constant,
        derive(s.formula for s in program.masks),
    )


def _constant(program: Program, name: str) -> int:
    value = program.constant(name)
    assert isinstance(value, int), name
    return value


def _finite(program: Program) -> bool:
    """Whether every score is finite for finite q.k, by interval analysis."""
    bounds = SCORE_RANGE
    for step in program.scores:
        bounds = interval(inline_lets(step.formula)[0], {"s": bounds})
    return bounds.within(-FLOAT32_MAX, FLOAT32_MAX)


def check_heads(program: Program, name: str, multiple: int, largest: int) -> None:
    """Raises UsageError E0406 for a head dimension the target cannot run."""
    for dimension in ("Dqk", "Dv"):
        value = _constant(program, dimension)
        if not (0 < value <= largest and value % multiple == 0):
            raise UsageError.of(
                "E0406",
                f"{dimension} = {value}: target `{name}` needs a multiple of {multiple} up to {largest}",
            )
    for step in (*program.q_steps, *program.k_steps):
        end = int(_value(step.first)) + int(_value(step.width))
        if end > _constant(program, "Dqk"):
            raise UsageError.of(
                "E0409",
                f"`{step.call}` rotates columns up to {end}, but q and k have {_constant(program, 'Dqk')}",
            )


def _value(expr: Expr) -> int:
    assert isinstance(expr, Const)
    return int(expr.value)


def check_storage(name: str, storage: str, storages: tuple[str, ...]) -> None:
    """Raises UsageError E0405 for a storage type the target cannot run."""
    if storage not in storages:
        raise UsageError.of("E0405", f"dtype `{storage}`: target `{name}` takes {', '.join(storages)}")


def _size(*factors: str | int) -> Expr:
    """Product of dimensions and constants, as an expression."""
    product: Expr | None = None
    for item in factors:
        expr = const(item) if isinstance(item, int) else Var(item, Type.INT)
        product = expr if product is None else mul(product, expr)
    assert product is not None
    return product


def coefficient_count(rotation: Rotation) -> int:
    """Distinct matrix entries (up to sign) stored per position and pair."""
    assert rotation.matrix is not None
    return len(distinct_entries(rotation.matrix.results)[0])


def _rotation_buffers(
    meaning: Semantics,
    q_rows: tuple[Pass, ...],
    k_rows: tuple[Pass, ...],
    q_table: tuple[Pass, ...],
    k_table: tuple[Pass, ...],
) -> list[Buffer]:
    """Rotated rows and coefficient tables, in the passes that need them."""
    buffers: list[Buffer] = []
    operands = (
        ("q", "H", "M", meaning.q_rotations, q_rows, q_table),
        ("k", "Hk", "N", meaning.k_rotations, k_rows, k_table),
    )
    for name, heads, rows, rotations, rotated_in, table_in in operands:
        if rotations:
            buffers.append(
                Buffer(
                    f"{name}_rotated", meaning.storage, _size("B", heads, rows, meaning.head_qk), rotated_in
                )
            )
            buffers.append(
                Buffer(f"{name}_table", meaning.compute, _size(rows, table_width(rotations)), table_in)
            )
    return buffers


def table_width(rotations: tuple[Rotation, ...]) -> int:
    """Values of a row of an operand's coefficient table."""
    return sum(coefficient_count(r) * _value(r.width) // 2 for r in rotations)


def _cpu(program: Program, storage: str) -> LaunchPlan:
    check_storage("cpu", storage, cpu.STORAGES)
    check_heads(program, "cpu", cpu.HEAD_MULTIPLE, cpu.HEAD_MAX)
    meaning = semantics(program, storage, cpu.COMPUTE[storage])
    tiles = cpu.TILES[meaning.compute]
    binding = Binding("cpu", homes=(("Q", "panel"), ("K", "streamed"), ("S", "panel"), ("O", "panel")))
    prefix = program.name
    rotates = bool(meaning.q_rotations or meaning.k_rotations)
    scale = meaning.gradient_scale

    def launch(kernel: TiledKernel, *after: str) -> Launch:
        walk = None if kernel.walk is None else replace(kernel.walk, aligned=False)
        return Launch(replace(kernel, binding=binding, walk=walk), after)

    rotate = (launch(ops.rotate(f"{prefix}_rotate", tiles.rows)),) if rotates else ()
    first = (f"{prefix}_rotate",) if rotates else ()
    forward = (*rotate, launch(ops.forward(f"{prefix}_forward", tiles.rows), *first))
    backward = (
        *rotate,
        launch(ops.preprocess(f"{prefix}_preprocess", tiles.rows)),
        launch(
            ops.backward_queries(f"{prefix}_backward_queries", tiles.rows, scale),
            *first,
            f"{prefix}_preprocess",
        ),
        launch(
            ops.backward_keys(f"{prefix}_backward_keys", tiles.keys, scale, add_dq=False),
            *first,
            f"{prefix}_preprocess",
        ),
    )
    both: tuple[Pass, ...] = ("forward", "backward")
    buffers = _rotation_buffers(meaning, both, both, both, both)
    buffers.append(Buffer("delta", meaning.compute, _size("B", "H", "M"), ("backward",)))
    return LaunchPlan(program.name, "cpu", meaning, forward, backward, tuple(buffers))


def _disjoint(rotations: tuple[Rotation, ...]) -> None:
    """Raises UsageError E0410 where two rotations of one operand share columns, which the GPU kernels cannot
    run.
    """
    taken: set[int] = set()
    for step in rotations:
        columns = set(range(_value(step.first), _value(step.first) + _value(step.width)))
        if columns & taken:
            raise UsageError.of(
                "E0410",
                f"`{step.call}` rotates columns that another rotation has rotated already; "
                "the GPU kernels rotate a column once",
                hint="use the CPU backend, or combine the rotations",
            )
        taken |= columns


def _sm80(program: Program, storage: str) -> LaunchPlan:
    check_storage("cuda", storage, sm80.STORAGES)
    check_heads(program, "cuda", sm80.HEAD_MULTIPLE, sm80.HEAD_MAX)
    meaning = semantics(program, storage, "float")
    _disjoint(meaning.q_rotations)
    _disjoint(meaning.k_rotations)
    head = max(meaning.head_qk, meaning.head_v)
    front = next(t for t in sm80.FORWARD if head <= t.head_max)
    back = next(t for t in sm80.BACKWARD if head <= t.head_max)
    scale, prefix = meaning.gradient_scale, program.name
    rotates = bool(meaning.q_rotations or meaning.k_rotations)
    rows = Tile(sm80.ROTATE_ROWS, sm80.ROTATE_ROWS)

    def rotate(name: str) -> tuple[Launch, ...]:
        return (
            (
                Launch(
                    replace(ops.rotate(name, rows), binding=Binding("sm80", warps=sm80.ROTATE_THREADS // 32))
                ),
            )
            if rotates
            else ()
        )

    q_home = "registers" if front.q_in_registers else "shared"
    forward_binding = Binding(
        "sm80",
        (
            ("Q", q_home),
            ("K", "shared"),
            ("V", "shared"),
            ("S", "registers"),
            ("P", "registers"),
            ("O", "registers"),
        ),
        warps=front.warps,
        stages=2,
        min_blocks=front.min_blocks,
        shared_bytes=front.shared_bytes(meaning.head_qk, meaning.head_v),
    )
    backward_binding = Binding(
        "sm80",
        (
            ("K", "shared"),
            ("V", "shared"),
            ("Q", "shared"),
            ("dO", "shared"),
            ("P", "registers"),
            ("dS", "registers, shared"),
            ("dK", "registers"),
            ("dV", "registers"),
        ),
        warps=back.warps,
        stages=back.q_stages,
        min_blocks=back.min_blocks,
        shared_bytes=back.shared_bytes(meaning.head_qk, meaning.head_v, float_rows(meaning, back)),
    )
    forward = replace(
        ops.forward(f"{prefix}_forward", Tile(front.queries, front.keys)), binding=forward_binding
    )
    backward = replace(
        ops.backward_keys(f"{prefix}_backward", Tile(back.queries, back.keys), scale, add_dq=True),
        binding=backward_binding,
    )
    pre = ops.preprocess(f"{prefix}_preprocess", Tile(sm80.PREPROCESS_ROWS, 0))
    post = ops.postprocess(f"{prefix}_postprocess", Tile(sm80.POSTPROCESS_ROWS, 0), scale)
    first = rotate(f"{prefix}_rotate_forward")
    again = rotate(f"{prefix}_rotate_backward")
    return LaunchPlan(
        program.name,
        "sm80",
        meaning,
        forward=(*first, Launch(forward, tuple(x.kernel.name for x in first))),
        backward=(
            *again,
            Launch(pre),
            Launch(backward, (*(x.kernel.name for x in again), pre.name)),
            Launch(post, (backward.name,)),
        ),
        buffers=_sm80_buffers(meaning),
    )


def _sm80_buffers(meaning: Semantics) -> tuple[Buffer, ...]:
    both: tuple[Pass, ...] = ("forward", "backward")
    late: tuple[Pass, ...] = ("backward",)
    buffers = _rotation_buffers(meaning, late, both, both, late)
    buffers.append(Buffer("row_terms", "float", _size("B", "H", "M", 2), late))
    padded = mul(
        _size("B", "H"),
        mul(
            Op("floordiv", (add(Var("M", Type.INT), const(15)), const(16)), Type.INT),
            const(16 * meaning.head_qk),
        ),
    )
    buffers.append(Buffer("dq_sum", "float", padded, late, zeroed=True))
    return tuple(buffers)


def in_registers(rotation: Rotation, column_warps: int) -> bool:
    """Whether an accumulator can be rotated back without shared memory: both members of a pair are in one
    thread.
    """
    first, width = _value(rotation.first), _value(rotation.width)
    if first % 8 or width % 8:
        return False
    return (
        rotation.pairing == "adjacent" or (width // 2) % (8 if column_warps == 1 else 16 * column_warps) == 0
    )


def float_rows(meaning: Semantics, tile: sm80.BackwardTile) -> bool:
    """Whether dK must pass through shared memory in float32 to be rotated back."""
    return any(not in_registers(r, tile.column_warps) for r in meaning.k_rotations)
