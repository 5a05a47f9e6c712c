# SPDX-License-Identifier: Apache-2.0
"""Checks a Program after each pass; a failure is a fault of the pass, and names it."""

from __future__ import annotations

from afc.errors import AfcError
from afc.expr.nodes import Formula, Load, Op, Type, formula_exprs, formula_variables, variables
from afc.expr.operators import OPERATORS, result_type
from afc.ir.program import DIMENSIONS, INDEX_NAMES, Program, RowStep


def verify(program: Program, after: str) -> None:
    """Raises AfcError E0901 if a formula is ill-typed or reads a name that its slot does not offer."""
    known = {*DIMENSIONS, *(p.name for p in program.scalars)} | _extent_names(program)
    indices = {*INDEX_NAMES, "s"}
    tensors = {t.name: len(t.shape) for t in program.tensors}
    groups: list[tuple[str, Formula, set[str]]] = []
    for rotation in (*program.q_steps, *program.k_steps):
        if isinstance(rotation, RowStep):
            groups += [(rotation.block, f, known | names) for f, names in _row_formulas(rotation, {"r"})]
            continue
        groups.append((rotation.block, rotation.formula, known | {"x0", "x1", "p", "c", "b", "h", "r"}))
        if rotation.matrix is not None:
            groups.append((rotation.block, rotation.matrix, known | {"p", "c", "b", "h", "r"}))
        pair = {"x0", "x1", "d0_value", "d1_value", "p", "c", "b", "h", "r"}
        groups += [(rotation.block, read.term, known | pair) for read in rotation.reads]
    for step in program.output_steps:
        groups += [(step.block, f, known | names) for f, names in _row_formulas(step, {"m", "i"})]
    groups += [(s.block, s.formula, known | indices) for s in (*program.scores, *program.masks)]
    for weight in program.weight_steps:
        groups.append((weight.block, weight.formula, known | {*INDEX_NAMES, "p"}))
        if weight.factor is not None:
            groups.append((weight.block, weight.factor, known | {*INDEX_NAMES}))
    normalizer = program.normalizer
    groups.append((normalizer.block, normalizer.weight, known | indices))
    if normalizer.extra is not None:
        groups.append((normalizer.block, normalizer.extra, known | (indices - {"s", "n", "j"})))
    if program.score_gradient is not None:
        groups += [
            ("score gradient", f, known | indices) for f in program.score_gradient.steps if f is not None
        ]
    for read in program.captured_reads:
        offered = known | (
            indices if read.score else indices - {"s"} if read.weight else indices - {"s", "n", "j"}
        )
        groups += [("captured gradient", f, offered) for f in (read.coefficient, Formula((read.load,)))]
    for block, formula, names in groups:
        _formula(block, formula, names, tensors, after)


def _row_formulas(step: RowStep, rows: set[str]) -> list[tuple[Formula, set[str]]]:
    """The formulas of a row step, with the names of its slot and those defined before each; `rows`: its
    names of the row.
    """
    names = {"x", "c", "b", "h", *rows}
    found = [(step.formula, set(names))]
    for mean in step.means:
        found.append((mean.formula, set(names)))
        names.add(mean.name)
    if step.value is not None:
        found.append((step.value, set(names)))
    if step.backward is not None:
        names.add("d_value")
        for name, term in step.backward.means:
            found.append((term, set(names)))
            names.add(name)
        found += [(step.backward.x, set(names)), *((r.term, set(names)) for r in step.backward.reads)]
    return found


def _extent_names(program: Program) -> set[str]:
    return {n for t in program.tensors for e in t.shape for n in variables(e.size)}


def _formula(block: str, formula: Formula, names: set[str], tensors: dict[str, int], after: str) -> None:
    unknown = formula_variables(formula) - names
    if unknown:
        _fail(after, f"`{block}` reads unknown {sorted(unknown)}")
    for expr in formula_exprs(formula):
        match expr:
            case Op(name=name, args=args, type=kind):
                if (
                    len(args) != OPERATORS[name].arity
                    or result_type(name, tuple(a.type for a in args)) is not kind
                ):
                    _fail(after, f"`{block}` holds an ill-typed `{name}`")
            case Load(tensor=tensor, indices=indices):
                if tensors.get(tensor) != len(indices) or any(i.type is not Type.INT for i in indices):
                    _fail(after, f"`{block}` reads `{tensor}` with {len(indices)} indices")
            case _:
                continue


def _fail(after: str, what: str) -> None:
    raise AfcError.of(
        "E0901",
        f"internal error after pass `{after}`: {what}",
        hint="please report this with the program text",
    )
