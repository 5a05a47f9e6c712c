# SPDX-License-Identifier: Apache-2.0
"""What the schedules of all targets share: the scalar parts, limits, sizes, and the buffers of rotations."""

from __future__ import annotations

from afc.errors import UsageError
from afc.expr.interval import Interval, interval
from afc.expr.nodes import Const, Expr, Op, Type, Var, const, inline_lets
from afc.expr.operators import add, mul
from afc.expr.simplify import logarithm
from afc.ir.program import Program, Rotation, RowStep
from afc.ir.rotation import dependence, distinct_entries
from afc.ir.tiled import Buffer, Pass, Semantics
from afc.masks import derive

# Raw scores beyond this overflow float32 in any implementation.
SCORE_RANGE = Interval(-1e30, 1e30)
FLOAT32_MAX = 3.4e38


def semantics(program: Program, storage: str, compute: str) -> Semantics:
    """The scalar parts that all kernels of a plan share."""
    gradient = program.score_gradient
    assert gradient is not None
    return Semantics(
        storage,
        compute,
        int(constant(program, "Dqk")),
        int(constant(program, "Dv")),
        program.q_steps,
        program.k_steps,
        program.scores,
        gradient.steps,
        _finite(program),
        program.normalizer.factor,
        gradient.constant,
        derive(s.formula for s in program.masks),
        program.normalizer.has_sum,
        None if program.normalizer.extra is None else logarithm(program.normalizer.extra),
        program.captured_reads,
        program.output_steps,
        program.weight_steps,
    )


def check_features(program: Program, name: str) -> None:
    """Raises UsageError E0411 for what the target does not compute: row and output blocks, gradients of
    captured tensors.
    """
    _check_steps(program, name)
    _check_captured(program, name)


def check_softmax(program: Program, name: str) -> None:
    """Raises UsageError E0411 for a normalizer that the target cannot run: it has the plain softmax only."""
    normalizer = program.normalizer
    if not normalizer.has_sum or normalizer.extra is not None:
        raise UsageError.of(
            "E0411",
            f"normalizer `{normalizer.call}` of `{program.name}`: target `{name}` compiles "
            "exp(s) / sum(exp(s)) only",
            hint="build for the CPU with `--backend cpu`, or use `softmax`",
        )


def _check_steps(program: Program, name: str) -> None:
    """Raises UsageError E0411 for a row or output block, which the target does not compute."""
    for step in (*program.q_steps, *program.k_steps):
        if isinstance(step, RowStep):
            raise UsageError.of(
                "E0411",
                f"row block `{step.call}` of `{program.name}`: target `{name}` rotates rows only",
                hint="build for the CPU with `--backend cpu`, or normalise q and k in PyTorch",
            )
    for step in program.output_steps:
        raise UsageError.of(
            "E0411",
            f"output block `{step.call}` of `{program.name}`: target `{name}` stores the output as it is",
            hint="build for the CPU with `--backend cpu`, or apply it to the output in PyTorch",
        )


def _check_captured(program: Program, name: str) -> None:
    """Raises UsageError E0411 for a gradient of a captured tensor, which the target does not compute."""
    wanted = [t.name for t in program.tensors if t.grad]
    if wanted:
        raise UsageError.of(
            "E0411",
            f"gradient of `{wanted[0]}` of `{program.name}`: target `{name}` computes only those of q, k, v",
            hint="build for the CPU with `--backend cpu`, or drop `grad`",
        )


def constant(program: Program, name: str) -> int:
    """An integer that the passes have bound, such as Dqk."""
    bound = program.constant(name)
    assert isinstance(bound, int), name
    return bound


def _finite(program: Program) -> bool:
    """Whether every score is finite for finite q.k, by interval analysis."""
    bounds = SCORE_RANGE
    for step in program.scores:
        bounds = interval(inline_lets(step.formula)[0], {"s": bounds})
    return bounds.within(-FLOAT32_MAX, FLOAT32_MAX)


def check_heads(program: Program, name: str, multiple: int, largest: int) -> None:
    """Raises UsageError E0406 for a head dimension the target cannot run."""
    for dimension in ("Dqk", "Dv"):
        given = constant(program, dimension)
        if not (0 < given <= largest and given % multiple == 0):
            raise UsageError.of(
                "E0406",
                f"{dimension} = {given}: target `{name}` needs a multiple of {multiple} up to {largest}",
            )
    for step in (*program.q_steps, *program.k_steps):
        end = int(value(step.first)) + int(value(step.width))
        if end > constant(program, "Dqk"):
            raise UsageError.of(
                "E0409",
                f"`{step.call}` rotates columns up to {end}, but q and k have {constant(program, 'Dqk')}",
            )


def value(expr: Expr) -> int:
    """The int of a literal."""
    assert isinstance(expr, Const)
    return int(expr.value)


def check_storage(name: str, storage: str, storages: tuple[str, ...]) -> None:
    """Raises UsageError E0405 for a storage type the target cannot run."""
    if storage not in storages:
        raise UsageError.of("E0405", f"dtype `{storage}`: target `{name}` takes {', '.join(storages)}")


def size(*factors: str | int) -> Expr:
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


def rotation_buffers(
    meaning: Semantics,
    q_rows: tuple[Pass, ...],
    k_rows: tuple[Pass, ...],
    q_table: tuple[Pass, ...],
    k_table: tuple[Pass, ...],
) -> list[Buffer]:
    """Rotated rows and coefficient tables, in the passes that need them.

    A table is [rows, width], and there is one for each batch entry or head that the coefficients depend on.
    """
    buffers: list[Buffer] = []
    operands = (
        ("q", "H", "M", meaning.q_steps, meaning.q_rotations, q_rows, q_table),
        ("k", "Hk", "N", meaning.k_steps, meaning.k_rotations, k_rows, k_table),
    )
    for name, heads, rows, steps, rotations, rotated_in, table_in in operands:
        if steps:
            buffers.append(
                Buffer(
                    f"{name}_rotated", meaning.storage, size("B", heads, rows, meaning.head_qk), rotated_in
                )
            )
        if rotations:
            reads = dependence(rotations)
            tables = ("B",) * reads.batch + (heads,) * reads.head
            count = size(*tables, rows, table_width(rotations))
            buffers.append(Buffer(f"{name}_table", meaning.compute, count, table_in))
    return buffers


def table_width(rotations: tuple[Rotation, ...]) -> int:
    """Values of a row of an operand's coefficient table."""
    return sum(map(table_part, rotations))


def table_part(rotation: Rotation) -> int:
    """Values of a rotation in a row of the table: even, so that pairs of values can be read at once."""
    return (coefficient_count(rotation) * (value(rotation.width) // 2) + 1) // 2 * 2


def tiles(rows: str, tile: int) -> Expr:
    """ceil(rows / tile), as an expression of a dimension."""
    padded = add(Var(rows, Type.INT), const(tile - 1)) if tile > 1 else Var(rows, Type.INT)
    return Op("floordiv", (padded, const(tile)), Type.INT)


def items(*factors: Expr | str) -> Expr:
    """Number of work items: a product of dimensions and tile counts."""
    parts = [Var(f, Type.INT) if isinstance(f, str) else f for f in factors]
    product = parts[0]
    for part in parts[1:]:
        product = mul(product, part)
    return product
