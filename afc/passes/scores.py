# SPDX-License-Identifier: Apache-2.0
"""Score steps: merge linear ones, move the last positive factor into the exponential, differentiate."""

from __future__ import annotations

from dataclasses import replace

from afc.errors import SourceError
from afc.expr.differentiate import NotDifferentiable, gradient
from afc.expr.nodes import Const, Expr, Formula, Op, Type, Var, const, map_formula, substitute, variables
from afc.expr.operators import call, mul
from afc.expr.simplify import share_calls, simplify, simplify_formula
from afc.ir.program import Program, ScoreGradient, Step

S = Var("s", Type.FLOAT)
ELEMENT = frozenset({"s", "m", "n", "i", "j"})  # what differs between the scores of a head


def weigh(program: Program) -> Program:
    """Without a sum over the keys the weight is one more formula on the score: the last score step."""
    normalizer = program.normalizer
    if normalizer.has_sum or normalizer.weight.result == S:
        return program
    n = normalizer
    step = Step(n.block, n.weight, n.call, n.doc, n.span, n.origin)
    return replace(
        program, scores=(*program.scores, step), normalizer=replace(normalizer, weight=Formula((S,)))
    )


def merge_linear(program: Program) -> Program:
    """Substitute a step `k * s` (k constant) into the step that follows it, where the constants then fold."""
    steps: list[Step] = []
    for step in program.scores:
        factor_of_last = _linear_factor(steps[-1].formula) if steps else None
        if factor_of_last is not None:
            previous = steps.pop()
            scaled = mul(const(factor_of_last), S)
            formula = simplify_formula(map_formula(step.formula, lambda e, v=scaled: substitute(e, {"s": v})))  # type: ignore[misc]
            step = replace(step, formula=formula, call=f"{previous.call}, {step.call}")
        steps.append(step)
    return replace(program, scores=tuple(steps))


def factor(program: Program) -> Program:
    """Move the last step's constant positive factor into `normalizer.factor`; a step that is then `s` goes
    away.

    exp(f x - max(f x)) = exp2(f log2(e) (x - max x)) needs f > 0; folding it saves a multiplication per
    score. So it does in f s + a b, which is f (s + (a / f) b), where a / f is the same for all scores of a
    head (ALiBi).
    """
    if not program.scores or not program.normalizer.exponential:
        return program
    last = program.scores[-1]
    constant, rest = _constant_factor(last.formula.result)
    if constant == 1:
        constant, rest = _factor_of_s(rest)
    if constant <= 0:
        return program
    scores = program.scores[:-1]
    if rest != S:
        scores = (*scores, replace(last, formula=simplify_formula(Formula((rest,), last.formula.lets))))
    return replace(program, scores=scores, normalizer=replace(program.normalizer, factor=constant))


def differentiate(program: Program) -> Program:
    """Derivative of each score step with respect to s; constant derivatives become one number.

    Raises SourceError E0303 for a step without a derivative.
    """
    constant = program.normalizer.factor
    steps: list[Formula | None] = []
    for step in program.scores:
        number, rest = split_derivative(step)
        constant *= number
        steps.append(rest)
    return replace(program, score_gradient=ScoreGradient(tuple(steps), constant))


def split_derivative(step: Step) -> tuple[float, Formula | None]:
    """d step / d s as a number times what varies; None where nothing varies.

    Raises SourceError E0303 for a step without a derivative.
    """
    try:
        derivative = gradient(step.formula, ("s",))
    except NotDifferentiable as missing:
        raise SourceError.of(
            "E0303", f"`{step.block}` has no derivative through `{missing.operator}`", step.span
        ) from None
    number, rest = _constant_factor(derivative.result)
    if rest == const(1.0):
        return number, None
    return number, share_calls(simplify_formula(Formula((rest,), derivative.lets)))


def _linear_factor(formula: Formula) -> float | None:
    """k of the formula `k * s`."""
    match formula:
        case Formula(results=(Op(name="mul", args=(Const(value=k), Var(name="s"))),), lets=()):
            return float(k)
        case _:
            return None


def _factor_of_s(expr: Expr) -> tuple[float, Expr]:
    """(k, s + (a / k) b) for k * s + a * b with k > 0 and an `a` that neither row nor column changes; else
    (1, expr).
    """
    match expr:
        case Op(
            name="add" | "sub" as name, args=(Op(name="mul", args=(Const(value=k), Var(name="s"))), other)
        ):
            if k > 0 and isinstance(other, Op) and other.name == "mul":
                a, b = other.args
                if not variables(a) & ELEMENT and "s" not in variables(b):
                    return float(k), call(name, S, mul(mul(a, const(1.0 / float(k))), b))
    return 1.0, expr


def _constant_factor(expr: Expr) -> tuple[float, Expr]:
    """(k, e) with expr = k * e; k is 1 where no constant can be taken out."""
    match expr:
        case Const(value=value) if value != 0:
            return float(value), const(1.0)
        case Op(name="mul", args=(Const(value=k), rest)) if k != 0:
            inner, rest = _constant_factor(rest)
            return float(k) * inner, rest
        case Op(name="mul", args=(left, right)):
            k, rest = _constant_factor(right)
            return (k, simplify(mul(left, rest))) if k != 1 else (1.0, expr)
        case _:
            return 1.0, expr
