# SPDX-License-Identifier: Apache-2.0
"""The two oracles: formulas against finite differences and PyTorch, schedules against formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from afc import passes
from afc.errors import SourceError, UsageError
from afc.expr.evaluate import evaluate, evaluate_formula
from afc.expr.nodes import Type, variables
from afc.frontend import check_file, check_text
from afc.ir.masks import Run
from afc.ir.printer import print_plan, print_program
from afc.ir.program import DIMENSIONS, Program, Rotation, TensorParam
from afc.ir.protocol import WorkItem
from afc.ir.tiled import LaunchPlan, Load, Tile
from afc.masks import key_runs, query_runs
from afc.reference import Call, backward, forward, run_backward, run_forward, tiled
from afc.reference.protocol import explore
from afc.reference.protocol import inspect as inspect_protocol
from afc.reference.rounding import to_storage
from afc.schedule import ops
from afc.schedule.plan import schedule
from afc.schedule.targets.sm90 import FORWARD, SHARED_BYTES, ForwardTile

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples").glob("*.attn"))
D = 32


def lowered(path: Path, d: int = D) -> Program:
    return passes.run(check_file(path).programs[0], {"Dqk": d, "Dv": d})


def small(plan: LaunchPlan) -> LaunchPlan:
    """The plan with tiles that make many of them at test sizes."""

    def shrink(launches: Any) -> Any:
        return tuple(replace(x, kernel=replace(x.kernel, tile=Tile(12, 8))) for x in launches)

    return replace(
        plan,
        forward=shrink(plan.forward),
        backward=shrink(plan.backward),
        deterministic_backward=shrink(plan.deterministic_backward),
    )


def call(
    program: Program,
    m: int,
    n: int,
    heads: tuple[int, int] = (4, 2),
    origins: tuple[int, int] = (0, 0),
    d: int = D,
) -> Call:
    g = np.random.default_rng()
    h, hk = heads
    sizes = {"B": 2, "H": h, "Hk": hk, "M": m, "N": n, "Dqk": d, "Dv": d}
    scalars = {s.name: 11 for s in program.scalars}
    own = {x for t in program.tensors for e in t.shape for x in variables(e.size)} - {*sizes, *scalars}
    known = {**sizes, **scalars, **dict.fromkeys(sorted(own), 7)}
    return Call(
        g.standard_normal((2, h, m, d)),
        g.standard_normal((2, hk, n, d)),
        g.standard_normal((2, hk, n, d)),
        {t.name: captured(t, known, g) for t in program.tensors},
        {x: known[x] for x in (*scalars, *own)},
        *origins,
    )


def captured(tensor: TensorParam, sizes: dict[str, int], g: np.random.Generator) -> Any:
    """Random values: floats in [0.1, 1], few different integers, one bool in two true."""
    shape = tuple(int(evaluate(e.size, sizes)) for e in tensor.shape)
    if tensor.type is Type.FLOAT:
        return g.uniform(0.1, 1.0, shape)
    return g.integers(0, 2 if tensor.type is Type.BOOL else 5, shape).astype(tensor.type.value)


@pytest.mark.parametrize("target", ["cpu", "sm80", "sm90"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_schedule_equals_formula(path: Path, target: str) -> None:
    """In a storage type without rounding the schedule is the formula up to the order of sums."""
    program = lowered(path)
    plain = program.normalizer.has_sum and program.normalizer.extra is None
    plain = plain and all(isinstance(s, Rotation) for s in (*program.q_steps, *program.k_steps))
    plain = plain and not program.output_steps and not any(t.grad for t in program.tensors)
    if target == "sm90" and not plain:
        with pytest.raises(UsageError, match="E0411"):
            schedule(program, target, "bfloat16")
        return
    if target == "sm80" and any(
        isinstance(s, Rotation) and s.reads for s in (*program.q_steps, *program.k_steps)
    ):
        with pytest.raises(UsageError, match="E0411"):
            schedule(program, target, "bfloat16")
        return
    plan = small(schedule(program, target, "float64" if target == "cpu" else "bfloat16"))
    plan = replace(plan, semantics=replace(plan.semantics, storage="float64"))
    for m, n, origins in ((37, 53, (0, 0)), (40, 21, (9, 3)), (1, 30, (29, 0)), (24, 24, (0, 13))):
        arguments = call(program, m, n, origins=origins)
        want, got = forward(program, arguments), run_forward(plan, arguments)
        np.testing.assert_allclose(got.o, want.o, rtol=0, atol=1e-12)
        np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=1e-11)
        do, dlse = np.random.standard_normal(want.o.shape), np.random.standard_normal(want.lse.shape)
        expected, found = backward(program, arguments, do, dlse), run_backward(plan, arguments, got, do, dlse)
        forms = [found]
        if plan.deterministic_backward:
            forms.append(run_backward(plan, arguments, got, do, dlse, deterministic=True))
        for form in forms:
            for name in ("dq", "dk", "dv"):
                np.testing.assert_allclose(
                    getattr(form, name), getattr(expected, name), rtol=0, atol=1e-11, err_msg=name
                )
        assert set(found.captured) == set(expected.captured) == {t.name for t in program.tensors if t.grad}
        for name, gradient in expected.captured.items():
            np.testing.assert_allclose(found.captured[name], gradient, rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("target", ["cpu", "sm80"])
def test_stored_runs_are_what_is_executed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed documents: of the tiles below the diagonal only those of one document, and the mask is
    evaluated in the partial ones only."""
    mask = "causal(document(dot(q, k); qdoc, kdoc))"
    text = f"attention a(q, k, v; qdoc[B, M]: int, kdoc[B, N]: int) = softmax({mask}) @ v"
    program = passes.run(check_text(text).programs[0], {"Dqk": D, "Dv": D})
    plan = small(schedule(program, target, "float64" if target == "cpu" else "bfloat16"))
    plan = replace(plan, semantics=replace(plan.semantics, storage="float64"))
    ids = np.repeat(np.arange(6), [30, 5, 40, 25, 1, 19])[None].repeat(2, 0)
    arguments = replace(call(program, 120, 120), tensors={"qdoc": ids, "kdoc": ids})
    want = forward(program, arguments)
    evaluated = []
    monkeypatch.setattr(
        tiled, "_keep", lambda work, memory, keep=tiled._keep: evaluated.append(work) or keep(work, memory)
    )
    got = run_forward(plan, arguments)
    np.testing.assert_allclose(got.o, want.o, rtol=0, atol=1e-12)
    i, j = np.arange(120)[:, None], np.arange(120)[None]
    kept = (ids[0][:, None] == ids[0][None]) & (j <= i)
    tiles = [kept[r : r + 12, c : c + 8] for r in range(0, 120, 12) for c in range(0, 120, 8)]
    partial = sum(t.any() and not t.all() for t in tiles)
    assert len(evaluated) == 2 * 4 * partial < 2 * 4 * sum(t.any() for t in tiles)


@pytest.mark.parametrize("growth", [1.0, 30.0, 400.0])
@pytest.mark.parametrize("form", ["stale", "watched"])
def test_forms_of_the_softmax_agree(form: Literal["stale", "watched"], growth: float) -> None:
    """Without the maximum on its path the softmax is the same, also where scores grow along the walk."""
    program = lowered(EXAMPLES[0].parent / "causal.attn")
    plan = schedule(program, "cpu", "float64")
    kernel = ops.forward("forward", Tile(16, 8), form)
    plan = replace(plan, forward=(replace(plan.forward[-1], kernel=kernel),))
    arguments = call(program, 70, 70)
    k = arguments.k * np.linspace(1.0, growth, 70)[None, None, :, None]
    arguments = replace(arguments, k=k)
    want, got = forward(program, arguments), run_forward(plan, arguments)
    np.testing.assert_allclose(got.o, want.o, rtol=0, atol=1e-9)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-12, atol=1e-9)


def test_hopper_plans_synchronise() -> None:
    """The protocols in the plan's bindings, run on the work items that the plan's own mask gives."""
    program = lowered(EXAMPLES[0].parent / "causal.attn", 128)
    plan = schedule(program, "sm90", "bfloat16")
    for launch, axis in ((plan.forward[-1], "queries"), (plan.backward[-2], "keys")):
        kernel = launch.kernel
        protocol = kernel.binding.protocol
        assert protocol is not None and inspect_protocol(protocol) == []
        assert protocol.shared_bytes == kernel.binding.shared_bytes <= SHARED_BYTES
        sizes = {"M": 500, "N": 900, "q_origin": 0, "k_origin": 0}
        tile = kernel.tile
        own, other, length, runs = (
            (tile.queries, tile.keys, 500, key_runs)
            if axis == "queries"
            else (tile.keys, tile.queries, 900, query_runs)
        )
        items = []
        for first in range(0, length, own):
            found = runs(plan.semantics.mask, first, min(first + own, length) - 1, sizes)
            items.append(WorkItem.of(found[0] if found else Run(0, 0, 0, 0), other, 1))
        assert any(i.partial + i.full == 0 for i in items) == (axis == "keys")  # keys that no query sees
        assert [explore(protocol, [item], range(3)) for item in items] == [None] * len(items)


def test_register_rule_of_hopper_tiles() -> None:
    for tile in FORWARD:
        assert tile.fits(min(tile.head_max, 128) if tile.head_max == 192 else tile.head_max)
    assert not ForwardTile(128, 3, 96).fits(128) and not ForwardTile(64, 3, 144).fits(64)  # both spill


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_formula_gradients_match_differences(path: Path) -> None:
    program = lowered(path)
    arguments = call(program, 9, 11, origins=(3, 0))
    do, dlse = np.random.standard_normal((2, 4, 9, D)), np.random.standard_normal((2, 4, 9))

    def loss(c: Call) -> float:
        result = forward(program, c)
        return float((result.o * do).sum() + np.where(np.isfinite(result.lse), result.lse * dlse, 0).sum())

    gradients = backward(program, arguments, do, dlse)
    for name in ("q", "k", "v"):
        direction = np.random.standard_normal(getattr(arguments, name).shape)
        step = 1e-5
        high, low = (
            replace(arguments, **{name: getattr(arguments, name) + s * direction}) for s in (step, -step)
        )
        difference = (loss(high) - loss(low)) / (2 * step)
        assert (getattr(gradients, f"d{name}") * direction).sum() == pytest.approx(
            difference, rel=1e-5, abs=1e-6
        )


def test_formula_equals_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from tests.support import dense

    for name, variant in dense.VARIANTS.items():
        program = lowered(EXAMPLES[0].parent / f"{name}.attn", 64)
        arguments = call(program, 30, 40, origins=(10, 0), d=64)
        extras = {n: torch.from_numpy(t) for n, t in arguments.tensors.items()} | dict(arguments.scalars)
        q, k, v = (torch.from_numpy(x) for x in (arguments.q, arguments.k, arguments.v))
        o, lse = variant.reference(q, k, v, **extras, q_origin=10)
        got = forward(program, arguments)
        np.testing.assert_allclose(got.o, o.numpy(), rtol=0, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(got.lse, lse.numpy(), rtol=0, atol=1e-12, err_msg=name)


def test_formula_equals_the_published_variants() -> None:
    torch = pytest.importorskip("torch")
    from tests.support.checks import inputs
    from tests.support.published import PUBLISHED

    torch.manual_seed(0)
    for name, variant in PUBLISHED.items():
        shape = variant.shape
        q, k, v = inputs(shape.b, shape.h, shape.hk, shape.m, shape.n, D, D, torch.float64)
        extras = {
            n: x.double() if getattr(x, "is_floating_point", bool)() else x
            for n, x in variant.arguments(shape).items()
        }
        o, lse = variant.reference(q, k, v, **extras)
        program = lowered(EXAMPLES[0].parent / f"{name}.attn")
        arrays = {n: x.numpy() for n, x in extras.items() if isinstance(x, torch.Tensor)}
        numbers = {n: x for n, x in extras.items() if n not in arrays}
        origins = {n: numbers.pop(n, 0) for n in ("q_origin", "k_origin")}
        for tensor in program.tensors:
            for extent, size in zip(tensor.shape, arrays[tensor.name].shape, strict=True):
                numbers |= {x: size for x in variables(extent.size) - {*DIMENSIONS, *numbers}}
        got = forward(program, Call(q.numpy(), k.numpy(), v.numpy(), arrays, numbers, **origins))
        np.testing.assert_allclose(got.o, o.numpy(), rtol=0, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(got.lse, lse.numpy(), rtol=0, atol=1e-12, err_msg=name)


def test_roundings_are_where_the_schedule_says() -> None:
    """Removing one Round from the schedule changes the result in a 16-bit storage type, and nothing else."""
    program = lowered(EXAMPLES[0].parent / "causal.attn")
    plan = small(schedule(program, "sm80", "bfloat16"))
    arguments = call(program, 40, 40)
    with_rounding = run_forward(plan, arguments)
    kernel = plan.forward[-1].kernel
    body = tuple(op for op in kernel.body if type(op).__name__ != "Round")
    without = replace(
        plan, forward=(*plan.forward[:-1], replace(plan.forward[-1], kernel=replace(kernel, body=body)))
    )
    difference = np.abs(with_rounding.o - run_forward(without, arguments).o).max()
    assert 0 < difference <= 2.0**-7 * np.abs(with_rounding.o).max()  # one step of bfloat16


def test_masked_rows_of_garbage_do_not_matter() -> None:
    program = lowered(EXAMPLES[0].parent / "causal.attn")
    plan = small(schedule(program, "cpu", "float64"))
    arguments = call(program, 20, 30)
    v = arguments.v.copy()
    v[:, :, 25:] = 1e300
    np.testing.assert_array_equal(
        run_forward(plan, replace(arguments, v=v)).o, run_forward(plan, arguments).o
    )


def test_bfloat16_rounding() -> None:
    values = np.array([1.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -np.inf, np.nan, 3.4e38, 1e-40])
    got = to_storage(values, "bfloat16")
    assert (
        got[0] == 1.0
        and got[1] == 1.0
        and got[2] == 1.0 + 2.0**-6
        and got[3] == -np.inf
        and np.isnan(got[4])
        and np.isinf(got[5])
    )


# ---- passes ----------------------------------------------------------------------------------------------


def attention(body: str, parameters: str = "") -> Program:
    return check_text(
        f"attention a(q, k, v{'; ' + parameters if parameters else ''}) {{\n{body}\n}}\n"
    ).programs[0]


def test_scale_goes_into_the_exponential() -> None:
    program = passes.run(
        attention("return softmax(causal(scaled_dot_product(q, k))) @ v"), {"Dqk": 64, "Dv": 64}
    )
    assert program.scores == () and program.normalizer.factor == 0.125
    assert program.score_gradient is not None and program.score_gradient.constant == 0.125


def test_negative_and_unknown_scales_do_not() -> None:
    negative = passes.run(
        attention("return softmax(scaled_dot_product(q, k; scale = -0.5)) @ v"), {"Dqk": 64, "Dv": 64}
    )
    assert negative.normalizer.factor == 1.0 and len(negative.scores) == 1
    runtime = passes.run(
        attention("return softmax(scaled_dot_product(q, k; scale = t)) @ v", "t: float"),
        {"Dqk": 64, "Dv": 64},
    )
    assert runtime.normalizer.factor == 1.0 and len(runtime.scores) == 1


def test_softcap_keeps_its_cap_as_the_factor() -> None:
    program = passes.run(
        attention("return softmax(softcap(scaled_dot_product(q, k); cap = 50.0)) @ v"), {"Dqk": 64, "Dv": 64}
    )
    assert program.normalizer.factor == 50.0
    assert "tanh(0.0025 * s)" in print_program(program)
    assert program.score_gradient is not None and program.score_gradient.constant == pytest.approx(0.125)


def rotated(block: str) -> Program:
    text = f"{block}\nattention a(q, k, v) {{\n q = f(q)\n return softmax(dot(q, k)) @ v\n}}\n"
    return passes.run(check_text(text).programs[0], {"Dqk": 64, "Dv": 64})


@pytest.mark.parametrize(
    "pair",
    [
        "x0 * x1, x1",
        "x0 + 1.0, x1",
        "x0 + p, x1",
        "x0, 3.0",
        "abs(x0), x1",
        "1.0 / x0, x1",
        "if x0 > 0.0 then x0 else x1, x1",
        "if p > 3 then x0 else 1.0, x1",
        "max(x0, x1), x1",
    ],
)
def test_a_rotation_that_is_not_linear_is_refused(pair: str) -> None:
    """A constant term has no derivative: it must not vanish either."""
    with pytest.raises(SourceError, match="E0307"):
        rotated(f"rotate f(x0, x1, p, c) over half = ({pair})")


def test_intermediate_values_may_read_the_pair() -> None:
    """Both results go through `y`; each has its own derivative by it."""
    matrix = (
        rotated(
            "rotate f(x0, x1, p, c) over half {\n"
            " y = (x0 - x1) / 2.0\n z = if p > 3 then y else 0.0\n return (y * cos(p) + x1, -z * p)\n}"
        )
        .q_steps[0]
        .matrix
    )
    assert matrix is not None
    for p, want in (
        (2, [0.5 * np.cos(2), 1 - 0.5 * np.cos(2), 0, 0]),
        (5, [0.5 * np.cos(5), 1 - 0.5 * np.cos(5), -2.5, 2.5]),
    ):
        np.testing.assert_allclose([float(x) for x in evaluate_formula(matrix, {"p": p})], want, atol=1e-15)


@pytest.mark.parametrize(
    ("constants", "code"),
    [({"w": 2.5}, "E0622"), ({"w": 0}, "E0622"), ({"w": True}, "E0622"), ({"v": 3}, "E0621")],
)
def test_bad_constants(constants: dict[str, Any], code: str) -> None:
    program = attention("return softmax(sliding_window(dot(q, k); w)) @ v", "w: int")
    with pytest.raises(UsageError, match=code):
        passes.run(program, {"Dqk": 64, "Dv": 64, **constants})


@pytest.mark.parametrize(
    ("target", "storage", "d", "code"),
    [
        ("cpu", "int8", 64, "E0405"),
        ("sm80", "float32", 64, "E0405"),
        ("sm80", "bfloat16", 76, "E0406"),
        ("sm80", "bfloat16", 512, "E0406"),
        ("tpu", "bfloat16", 64, "E0408"),
    ],
)
def test_what_a_target_cannot_run_is_refused(target: str, storage: str, d: int, code: str) -> None:
    program = passes.run(attention("return softmax(dot(q, k)) @ v"), {"Dqk": d, "Dv": d})
    with pytest.raises(UsageError, match=code):
        schedule(program, target, storage)


def test_rotated_columns_must_exist_and_meet_once_on_a_gpu() -> None:
    wide = passes.run(
        attention("q[:128], k[:128] = rope(q[:128], k[:128])\nreturn softmax(dot(q, k)) @ v"),
        {"Dqk": 64, "Dv": 64},
    )
    with pytest.raises(UsageError, match="E0409"):
        schedule(wide, "cpu", "float32")
    twice = passes.run(
        attention("q, k = rope(q, k)\nq, k = rope(q, k)\nreturn softmax(dot(q, k)) @ v"),
        {"Dqk": 64, "Dv": 64},
    )
    with pytest.raises(UsageError, match="E0410"):
        schedule(twice, "sm80", "bfloat16")
    assert len(schedule(twice, "cpu", "float32").semantics.q_rotations) == 2


def test_plans_print_every_operation() -> None:
    plan = schedule(lowered(EXAMPLES[0].parent / "llama.attn"), "sm80", "bfloat16")
    text = print_plan(plan, "tiled")
    usual, form = text.split("  backward, deterministic:\n")
    assert usual.count("Round(") == form.count("Round(") == 7
    assert "Store(x=dQ, target=dq_sum, add=True)" in usual and "add=True" not in form
    assert not plan.ordered and schedule(lowered(EXAMPLES[0]), "cpu", "float32").ordered
    assert Load("K", "k") in plan.forward[-1].kernel.body


def test_the_deterministic_form_adds_nothing_across_work_items() -> None:
    plan = schedule(lowered(EXAMPLES[0].parent / "llama.attn"), "sm80", "bfloat16")
    assert plan.deterministic and not plan.ordered
    assert replace(plan, backward=plan.deterministic_backward).ordered
