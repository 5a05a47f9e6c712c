# SPDX-License-Identifier: Apache-2.0
"""What all targets share when rendering: the template environment, literals, and the provenance header."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jinja2

from afc import paths
from afc.expr.nodes import Expr, Op, Type, rewrite
from afc.expr.printer import Cpp, attn, number
from afc.ir.program import Program, TensorParam
from afc.ir.tiled import LaunchPlan
from afc.render.launch_context import ScalarCheck
from afc.schedule.targets import sm80

LOG2_E = math.log2(math.e)

SIZE_NAMES = {"M": "args.M", "N": "args.N", "B": "args.B", "H": "args.Hq", "Hk": "args.Hk"}


@cache
def environment(folder: str) -> jinja2.Environment:
    """The Jinja environment of `templates/<folder>`: an undefined name is an error, blocks leave no blank
    lines.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.templates() / folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(folder: str, template: str, **context: Any) -> str:
    """Render one template of a target."""
    return environment(folder).get_template(template).render(**context)


def size_text(expr: Expr) -> str:
    """A size as a C++ expression in int64. Sizes are not negative, so C++'s division is the floor."""
    expr = rewrite(
        expr, lambda e: Op("div", e.args, e.type) if isinstance(e, Op) and e.name == "floordiv" else e
    )
    printer = Cpp("double", "", SIZE_NAMES, native64=True, mixes=True)
    return printer.text(expr).replace("afc::max(", "larger(")


def provenance(program: Program, plan: LaunchPlan, schedule: str) -> tuple[str, ...]:
    """Header lines: what this text is, where it comes from, how to make it again.

    No date, no path, no machine.
    """
    s = plan.semantics
    cuda = plan.target != "cpu"
    gpus = f", {sm80.class_text(plan.target)}" if cuda else ""
    lines = [
        f"afc: attention `{program.name}` for target {plan.target}{gpus}",
        f"source    {program.source}:{program.span.line}",
        f"blocks    {' > '.join(_blocks(program))}",
        f"tensors   q[B, H, M, {s.head_qk}], k[B, Hk, N, {s.head_qk}], v[B, Hk, N, {s.head_v}], "
        f"o[B, H, M, {s.head_v}] {s.storage}",
    ]
    params = [_param(p) for p in program.params]
    if params:
        lines.append(f"options   {', '.join(params)}")
    fixed = [f"{n} = {number(v)}" for n, v in program.constants if n not in ("Dqk", "Dv")]
    if fixed:
        lines.append(f"fixed     {', '.join(fixed)}")
    lines.append(f"schedule  {schedule}")
    lines.append(f"rebuild   afc compile {program.source} --emit {'cu' if cuda else 'cpp'}")
    lines.append(f"edit      templates/{'sm80' if cuda else 'cpu'}, grammar/prelude")
    return tuple(lines)


def _blocks(program: Program) -> list[str]:
    rows = [s.call for s in program.q_steps]
    rows += [f"{s.call} on k" for s in program.k_steps if s.call not in rows]
    scores = [s.call for s in program.scores]
    normalizer = program.normalizer.call
    if not program.normalizer.has_sum and scores[-1:] == [normalizer]:
        scores.pop()  # the weight is the last score step
    weights = [s.call for s in program.weight_steps]
    return [*rows, *scores, *(s.call for s in program.masks), normalizer, *weights]


def _param(param: object) -> str:
    if isinstance(param, TensorParam):
        extents = ", ".join(("1|" if e.broadcast else "") + attn(e.size) for e in param.shape)
        return f"{param.name}[{extents}] {param.type.value}"
    name, kind = param.name, param.type  # type: ignore[attr-defined]
    return f"{name}: {kind.value}" + (" > 0" if param.positive else "")  # type: ignore[attr-defined]


def real_literal(value: float, real: str) -> str:
    """A literal of the compute type."""
    return f"{value!r}f" if real == "float" else repr(value)


def scalar_checks(program: Program) -> tuple[ScalarCheck, ...]:
    """Conditions that a call's scalars must meet: 32-bit range of ints, declared sign."""
    checks = []
    for slot, scalar in enumerate(program.scalars):
        if scalar.type is Type.INT:
            low = 0 if scalar.positive else -(2**30)
            checks.append(
                ScalarCheck(
                    scalar.name,
                    f"args.scalar[{slot}].i > {low} && args.scalar[{slot}].i < {2**30}",
                    f"an int above {low} and below {2**30}",
                )
            )
        elif scalar.positive:
            checks.append(ScalarCheck(scalar.name, f"args.scalar[{slot}].f > 0", "a number above 0"))
    return tuple(checks)
