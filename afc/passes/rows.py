# SPDX-License-Identifier: Apache-2.0
"""Row and output blocks: the means over a row taken out of the formula, and the derivative of the whole.

With means R_k = mean_c g_k(x_c, R_1 .. R_(k-1)) and y_c = f(x_c, R_1 ..), an incoming gradient d gives, last
mean first, A_k = mean_c (d df/dR_k + sum_(j > k) A_j dg_j/dR_k), and then dx = d df/dx + sum_k A_k dg_k/dx.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from afc.errors import SourceError
from afc.expr.differentiate import NotDifferentiable, gradient
from afc.expr.nodes import Const, Expr, Formula, Load, Op, Type, Var, inline_lets, rewrite, substitute, walk
from afc.expr.operators import add
from afc.expr.simplify import share_calls, simplify
from afc.ir.program import Mean, Program, Rotation, RowBackward, RowRead, RowStep, Transform

D = Var("d_value", Type.FLOAT)
READ = "read_{}_value"


def rows(program: Program) -> Program:
    """Set `means`, `value` and `backward` of every row step and output step.

    Raises SourceError E0303 for an operator without a derivative, E0308 for columns outside the row.
    """
    wanted = {t.name for t in program.tensors if t.grad}

    def lowered(step: Transform) -> Transform:
        return step if isinstance(step, Rotation) else _lowered(step, wanted)

    return replace(
        program,
        q_steps=tuple(map(lowered, program.q_steps)),
        k_steps=tuple(map(lowered, program.k_steps)),
        output_steps=tuple(_lowered(step, wanted) for step in program.output_steps),
    )


def _lowered(step: RowStep, wanted: Collection[str]) -> RowStep:
    first, width = step.first, step.width
    if not isinstance(first, Const) or not isinstance(width, Const):
        raise SourceError.of("E0309", "the columns of a row block must be known at compile time", step.span)
    if width.value <= 0 or first.value < 0:
        raise SourceError.of(
            "E0308",
            f"a row block needs at least one column, not {width.value} (from column {first.value})",
            step.span,
        )
    means, value = _means(inline_lets(step.formula)[0])
    try:
        backward = _backward(means, value, wanted)
    except NotDifferentiable as missing:
        raise SourceError.of(
            "E0303", f"`{step.block}` has no derivative through `{missing.operator}`", step.span
        ) from None
    return replace(step, means=means, value=share_calls(Formula((value,))), backward=backward)


def _means(value: Expr) -> tuple[tuple[Mean, ...], Expr]:
    """Name the means in the order in which they can be computed."""
    found: list[Mean] = []
    while True:
        means = [e for e in walk(value) if isinstance(e, Op) and e.name == "row_mean"]
        if not means:
            return tuple(found), value
        inner = next(
            m for m in means if not any(isinstance(e, Op) and e.name == "row_mean" for e in walk(m.args[0]))
        )
        name = "mean_value" if not found else f"mean_value_{len(found) + 1}"
        found.append(Mean(name, Formula((inner.args[0],))))
        value = simplify(rewrite(value, lambda e, m=inner, n=name: Var(n, Type.FLOAT) if e == m else e))  # type: ignore[misc]


def _backward(means: tuple[Mean, ...], value: Expr, wanted: Collection[str]) -> RowBackward:
    """Derivatives of the value and of each mean, with their seeds, added up by what they reach."""
    parts = [(value, D), *((m.formula.result, Var(f"d_{m.name}", Type.FLOAT)) for m in means)]
    loads = list(
        dict.fromkeys(
            e for part, _ in parts for e in walk(part) if isinstance(e, Load) and e.tensor in wanted
        )
    )
    names = {load: Var(READ.format(n + 1), Type.FLOAT) for n, load in enumerate(loads)}
    back = {v.name: load for load, v in names.items()}
    reach = ("x", *(m.name for m in means), *back)
    totals: dict[str, Expr] = dict.fromkeys(reach, Const(0.0, Type.FLOAT))
    for part, seed in parts:
        formula = Formula((rewrite(part, lambda e: names.get(e, e) if isinstance(e, Load) else e),))
        derived = inline_lets(gradient(formula, reach, (seed,)))
        for name, term in zip(reach, derived, strict=True):
            totals[name] = simplify(add(totals[name], substitute(term, back)))
    shared = {name: share_calls(Formula((total,))) for name, total in totals.items()}
    return RowBackward(
        tuple((f"d_{m.name}", shared[m.name]) for m in reversed(means)),
        shared["x"],
        tuple(RowRead(load, shared[v.name]) for load, v in names.items()),
    )
