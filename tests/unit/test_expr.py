# SPDX-License-Identifier: Apache-2.0
"""Every row of the operator table: derivative against differences, range against samples, text against
Python.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from afc.expr.differentiate import gradient
from afc.expr.evaluate import evaluate
from afc.expr.exact import exact
from afc.expr.interval import EVERYTHING, Interval, interval
from afc.expr.nodes import Const, Expr, Formula, Let, Load, Op, Type, Var, const
from afc.expr.operators import OPERATORS, ROWS, call, select
from afc.expr.printer import Cpp, attn
from afc.expr.simplify import share_calls, simplify, simplify_formula
from afc.frontend import check_text

X, Y = Var("x", Type.FLOAT), Var("y", Type.FLOAT)
ROW, COLUMN = Var("i", Type.INT), Var("j", Type.INT)

# Points at which the operators are smooth.
SMOOTH = {"x": 0.7361, "y": 1.3179}


def differentiable() -> list[str]:
    return [r.name for r in ROWS if r.partials is not None and r.name not in ("select", "to_float")]


@pytest.mark.parametrize("name", differentiable())
def test_derivative_matches_a_difference(name: str) -> None:
    args = (X, Y)[: OPERATORS[name].arity]
    expr = call(name, *args)
    names = [a.name for a in args]
    derived = gradient(Formula((expr,)), names)
    for variable, result in zip(names, derived.results, strict=True):
        step = 1e-6
        high, low = ({**SMOOTH, variable: SMOOTH[variable] + s} for s in (step, -step))
        difference = (evaluate(expr, high) - evaluate(expr, low)) / (2 * step)
        assert evaluate(result, SMOOTH) == pytest.approx(difference, rel=1e-7, abs=1e-8), (
            f"d {name} / d {variable}"
        )


def test_derivative_through_intermediate_values_and_branches() -> None:
    t = Var("t", Type.FLOAT)
    formula = Formula(
        (select(call("gt", X, const(0.5)), call("mul", t, t), call("log", X)),), (Let("t", call("exp", X)),)
    )
    (result,) = gradient(formula, ["x"]).results
    env = {"x": 0.8, "t": math.exp(0.8)}
    lets = gradient(formula, ["x"]).lets
    for let in lets:
        env[let.name] = evaluate(let.value, env)
    assert evaluate(result, env) == pytest.approx(2 * math.exp(1.6))
    untaken = {"x": -1.0, "t": math.exp(-1.0)}
    for let in lets[1:]:
        untaken[let.name] = evaluate(let.value, untaken)
    assert not math.isnan(evaluate(result, {**untaken, "x": 0.4}))


def test_a_branch_not_taken_cannot_inject_nan() -> None:
    formula = Formula((select(call("gt", X, const(0.0)), call("sqrt", X), const(0.0)),))
    assert evaluate(gradient(formula, ["x"]).result, {"x": -1.0}) == 0.0


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.types != "any" and r.name != "select"], ids=lambda r: r.name
)
def test_range_holds_every_value(row: object) -> None:
    generator = random.Random(0)
    name, arity, types = row.name, row.arity, row.types  # type: ignore[attr-defined]
    integer = types == "int"
    names = ("i", "j") if integer else ("x", "y")
    kind = Type.INT if integer else Type.FLOAT
    for _ in range(200):
        bounds = {}
        for n in names:
            a, b = sorted(generator.uniform(-6, 6) for _ in range(2))
            if name in ("log", "sqrt", "rsqrt", "pow") or (name in ("floordiv", "mod", "ipow") and n == "j"):
                a, b = abs(a) + 1, abs(a) + abs(b) + 2
            bounds[n] = Interval(math.ceil(a), math.ceil(b)) if integer else Interval(a, b)
        expr = Op(name, tuple(Var(n, kind) for n in names[:arity]), kind)
        found = interval(expr, bounds)
        for _ in range(20):
            env = {
                n: generator.randint(int(v.lo), int(v.hi)) if integer else generator.uniform(v.lo, v.hi)
                for n, v in bounds.items()
            }
            value = float(np.asarray(OPERATORS[name].numpy(*(env[n] for n in names[:arity]))))
            assert found.lo - 1e-9 <= value <= found.hi + 1e-9, (name, env, found)


def test_unknown_range_is_everything() -> None:
    assert interval(X, {}) == EVERYTHING
    assert interval(Load("t", (ROW,), Type.FLOAT), {}) == EVERYTHING


def test_floor_division_and_modulus_floor() -> None:
    for a in range(-7, 8):
        assert evaluate(call("floordiv", ROW, const(3)), {"i": a}) == math.floor(a / 3)
        assert evaluate(call("mod", ROW, const(3)), {"i": a}) == a - 3 * math.floor(a / 3)


def test_reads_outside_a_tensor_see_no_neighbour() -> None:
    t = np.array([1.0, 2.0, 3.0])
    read = Load("t", (ROW,), Type.FLOAT)
    values = evaluate(read, {"i": np.array([-1, 0, 2, 3])}, {"t": t})
    assert np.array_equal(np.isnan(values), [True, False, False, True])
    flag = Load("f", (ROW,), Type.BOOL)
    assert not evaluate(flag, {"i": 5}, {"f": np.array([True])[[0, 0]]})
    broadcast = Load("t", (ROW,), Type.FLOAT)
    assert evaluate(broadcast, {"i": 9}, {"t": np.array([7.0])}) == 7.0


def parsed(text: str) -> Expr:
    checked = check_text(f"score f(s, i, j, h) = {text}\nattention a(q, k, v) = softmax(f(dot(q, k))) @ v\n")
    return checked.programs[0].scores[0].formula.result


TEXTS = [
    "s * 2.0 + 1.0",
    "(s + 1.0) * 2.0",
    "s - (1.0 - s)",
    "-(s * s)",
    "-s ** 2",
    "(-s) ** 2",
    "2.0 ** -s",
    "s ** 2 ** 0.5",
    "if i < j and not (i == j or h > 2) then s else -s",
    "min(max(s, 0.0), 1.0)",
    "s / (1.0 + s / 2.0)",
    "(i - j) // 3 % 2 + s",
    "clamp(s, -1.0, 1.0)",
    "(s + 1.0) / (s - 3.0)",
    "s * (i - (j - 1))",
    "if i < j <= h then 1.0 else s",
    "abs(i - j) * s",
]


@pytest.mark.parametrize("text", TEXTS)
def test_printing_and_parsing_again_gives_the_same_expression(text: str) -> None:
    expr = parsed(text)
    assert parsed(attn(expr)) == expr


@pytest.mark.parametrize("text", TEXTS)
def test_simplifying_keeps_the_value(text: str) -> None:
    expr = parsed(text)
    generator = np.random.default_rng()
    for _ in range(20):
        env = {"s": generator.normal(), **{n: int(generator.integers(0, 9)) for n in "ijh"}}
        assert evaluate(simplify(expr), env) == pytest.approx(evaluate(expr, env), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("text", TEXTS)
def test_cpp_text_has_the_value(text: str) -> None:
    """The C++ spelling, read by Python with the operators that both share."""
    expr = parsed(text)
    if any(word in attn(expr) for word in ("if ", "**", "%", "//")):
        pytest.skip("spelled with calls or ?:")
    printed = Cpp(ranges={n: Interval(0, 9) for n in "ijh"}).text(expr)

    class Names:
        abs, max, min = staticmethod(abs), staticmethod(max), staticmethod(min)

    source = printed.replace("afc::", "afc.").replace("&&", " and ").replace("||", " or ")
    env = {"s": 0.7, "i": 5, "j": 2, "h": 1}
    got = eval(source, {"afc": Names, "Real": float, **env})
    assert got == pytest.approx(evaluate(expr, env))


def test_integers_are_wide_unless_proven_small() -> None:
    product = call("mul", ROW, COLUMN)
    assert Cpp(ranges={"i": Interval(0, 9), "j": Interval(0, 9)}).text(product) == "i * j"
    assert Cpp(ranges={"i": Interval(0, 2**20), "j": Interval(0, 2**20)}).text(product) == "int64_t(i) * j"


def test_cpp_keeps_the_order_of_operations() -> None:
    """Neither integer division nor floating-point addition is associative."""
    a, b, c = (Var(n, Type.FLOAT) for n in "abc")
    assert Cpp().text(call("add", a, call("add", b, c))) == "a + (b + c)"
    assert Cpp().text(call("add", call("add", a, b), c)) == "a + b + c"
    assert Cpp().text(call("mul", a, call("div", b, c))) == "a * (b / c)"
    assert Cpp().text(call("sub", a, call("add", b, c))) == "a - (b + c)"
    from afc.render.text import size_text

    tiles = call("floordiv", call("add", Var("M", Type.INT), const(15)), const(16))
    assert (
        size_text(call("mul", Var("B", Type.INT), call("mul", tiles, const(8))))
        == "args.B * ((args.M + 15) / 16 * 8)"
    )


def test_constants_have_the_same_digits_everywhere() -> None:
    frequency = call(
        "pow",
        const(500000.0),
        call("div", call("to_float", call("mul", const(-2), Var("c", Type.INT))), const(128.0)),
    )
    assert exact(frequency, {"c": 1}) == 0.8146172338565447
    assert exact(call("pow", const(128.0), const(-0.5))) == 0.08838834764831845
    assert exact(call("tanh", const(1.0))) == pytest.approx(math.tanh(1.0))


def test_repeated_calls_are_named_once() -> None:
    tanh = call("tanh", X)
    shared = share_calls(Formula((call("sub", const(1.0), call("mul", tanh, tanh)),)))
    assert [let.name for let in shared.lets] == ["tanh_value"]
    assert attn(shared.result) == "1.0 - tanh_value * tanh_value"


def test_constant_intermediate_values_disappear() -> None:
    formula = Formula(
        (call("mul", Var("k", Type.FLOAT), X),), (Let("k", call("add", const(1.0), const(2.0))),)
    )
    assert simplify_formula(formula) == Formula((call("mul", Const(3.0, Type.FLOAT), X),))
