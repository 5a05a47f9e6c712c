# SPDX-License-Identifier: Apache-2.0
"""The language: what parses, what is checked, and how mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from afc import paths
from afc.errors import SourceError, render
from afc.expr.evaluate import evaluate_formula
from afc.frontend import check_file, check_text
from afc.frontend.parser import parse
from afc.ir.printer import print_program

ROOT = Path(__file__).parent.parent.parent


def codes(text: str) -> list[str]:
    with pytest.raises(SourceError) as caught:
        check_text(text)
    return [d.code for d in caught.value.diagnostics if d.level == "error"]


def lm(body: str, parameters: str = "") -> str:
    return f"attention lm(q, k, v{'; ' + parameters if parameters else ''}) {{\n{body}\n}}\n"


@pytest.mark.parametrize("path", sorted((paths.grammar() / "prelude").glob("*.attn")), ids=lambda p: p.stem)
def test_prelude_examples_hold_and_every_block_has_one(path: Path) -> None:
    checked = check_file(path)
    assert all(o.passed for o in checked.outcomes)
    file = parse(path.read_text(), path.name)
    shown = {e.call.function for e in file.examples}  # type: ignore[union-attr]
    assert {d.name for d in file.declarations} == shown
    assert all(d.doc for d in file.declarations)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.attn")), ids=lambda p: p.stem)
def test_examples_are_short_and_documented(path: Path) -> None:
    checked = check_file(path)
    assert len(path.read_text().splitlines()) <= 12 and all(p.doc for p in checked.programs)


ERRORS = {
    "E0001": "mask f(i, j) = i $ j",
    "E0002": "mask f(i, j) = = j",
    "E0003": "mask f(i, j",
    "E0004": "edition 7\nmask f(i, j) = true",
    "E0006": "score f(s, b; t[2|B]) = s * t[b]",
    "E0007": "example causal(1, 1) <= true",
    "E0008": "score f(s) = s * 1e999",
    "E0009": 'import "other.attn"',
    "E0101": "score f(s) = s * t",
    "E0102": "score f(s, h; t[H]) = s * t[h, h]",
    "E0103": "mask f(i, j) = i - j",
    "E0104": "score f(s, h) = s * h[s]",
    "E0105": lm("return softmax(kausal(dot(q, k))) @ v"),
    "E0106": "score f(s) = tanh(s, s)",
    "E0107": "score f(s) {\n s = s * 2.0\n return s\n}",
    "E0108": "mask f(i, j) = true\nmask f(i, j) = true",
    "E0110": "score f(s, h; t[H]) = s * t[h:]",
    "E0112": "score f(s) = s @ s",
    "E0113": "mask f(i, j) = i % 0 == 0",
    "E0114": "score f(s) {\n a, b = s\n return s\n}",
    "E0115": "mask f(q, k) = q >= k",
    "E0116": "rotate f(x0, x1, p, c) over half = x0",
    "E0117": "fn f(x: float): float = f(x)\nscore g(s) = f(s)",
    "E0118": lm("return softmax(causal(dot(q, k); w = 3)) @ v"),
    "E0119": lm("return softmax(sliding_window(dot(q, k); w = 3, w = 4)) @ v"),
    "E0120": lm("return softmax(sliding_window(dot(q, k))) @ v"),
    "E0121": lm("return softmax(alibi(dot(q, k); slope = 2.0)) @ v"),
    "E0123": "rotate f(x0, x1, p, c) = (x0, x1)\n" + lm("q, k = f(q, k)\nreturn softmax(dot(q, k)) @ v"),
    "E0130": "attention lm(a, b, c) = softmax(dot(a, b)) @ c",
    "E0131": lm("return dot(q, k)"),
    "E0132": lm("return softmax(dot(q, k)) @ v", "M: int"),
    "E0133": lm("return softmax(dot(q, k)) @ v", "w: int = 2.5"),
    "E0135": lm("q, k = causal(dot(q, k))\nreturn softmax(dot(q, k)) @ v"),
    "E0136": lm("q = dot(q, k)\nreturn softmax(q) @ v"),
    "E0137": lm("q, k = rope(q)\nreturn softmax(dot(q, k)) @ v"),
    "E0138": lm("q[:8], k[:8] = rope(q[:4], k[:4])\nreturn softmax(dot(q, k)) @ v"),
    "E0139": lm("v = rope(v)\nreturn softmax(dot(q, k)) @ v"),
    "E0140": lm("s = softmax(dot(q, k)) - softmax(dot(q, k))\nreturn s @ v"),
    "E0142": lm("return dot(q, k) @ v"),
    "E0143": lm("return softmax(dot(q, k)) @ k"),
    "E0144": lm("return softmax(rope(q)) @ v"),
    "E0145": lm("return softmax(dot(k, q)) @ v"),
    "E0146": lm("return softmax(causal(softmax(dot(q, k)))) @ v"),
    "E0201": lm("return softmax(alibi(dot(q, k); slope = t)) @ v", "t[H, 2]"),
    "E0202": lm("return softmax(dot(q, k)) @ v", "t[1.5]"),
    "E0203": lm("return softmax(dot(q, k)) @ v", "t[B, H, M, N, 2]"),
    "E0301": lm("return softmax(sliding_window(dot(q, k); w = 0)) @ v"),
    "E0302": lm("return softmax(sliding_window(dot(q, k); w = a - e)) @ v", "a: int, e: int"),
    "E0304": "normalizer f(s) = sum(s) / exp(s)",
    "E0305": "normalizer f(s) = exp(s) / sum(exp(s + 1.0))\n" + lm("return f(dot(q, k)) @ v"),
    "E0306": "normalizer f(s) = exp(s) / (s + sum(exp(s)))\n" + lm("return f(dot(q, k)) @ v"),
    "E0310": "example softcap(50.0; cap = 50.0) == 38.07",
    "E0312": "example max(1.0, 2.0) == 2.0",
    "E0313": "example rope(1.0, 0.0, 1, 0) == (0.5, 0.8)",
    "E0402": lm("return softmax(lengths(dot(q, k); len)) @ v", "len[B]: int grad"),
    "E0404": "normalizer f(s) = max(s, 0.0) / sum(max(s, 0.0))\n" + lm("return f(dot(q, k)) @ v"),
}


@pytest.mark.parametrize("code", ERRORS)
def test_each_mistake_has_its_code(code: str) -> None:
    assert code in codes(ERRORS[code])


def test_several_mistakes_in_one_run_each_once() -> None:
    text = "score f(s) = s * aa\nscore g(s) = s * bb\nattention lm(q, k, v) = softmax(f(g(dot(q, k)))) @ v\n"
    assert codes(text) == ["E0101", "E0101"]


def test_a_message_points_and_hints() -> None:
    line = "    return softmax(sliding_window(dot(q, k); w = windo)) @ v"
    text = f"attention lm(q, k, v; window: int) {{\n{line}\n}}\n"
    with pytest.raises(SourceError) as caught:
        check_text(text, "lm.attn")
    shown = render(caught.value.diagnostics[0], text)
    assert shown == (
        "lm.attn:2:50: error[E0101]: unknown name `windo`\n"
        " 2 |     return softmax(sliding_window(dot(q, k); w = windo)) @ v\n"
        "   |                                                  ^^^^^\n"
        "hint: did you mean `window`?"
    )


def test_masks_and_scores_commute() -> None:
    a = check_text(lm("return softmax(causal(softcap(dot(q, k); cap = 2.0))) @ v")).programs[0]
    b = check_text(lm("return softmax(softcap(causal(dot(q, k)); cap = 2.0)) @ v")).programs[0]
    assert [s.formula for s in (*a.scores, *a.masks)] == [s.formula for s in (*b.scores, *b.masks)]


def test_masks_are_functions_of_masks() -> None:
    text = "mask streaming(i, j; w: int) = causal(i, j) and (j < 4 or sliding_window(i, j; w))\n"
    program = check_text(text + lm("return softmax(streaming(dot(q, k); w = 9)) @ v")).programs[0]
    assert "j <= i and (j < 4 or abs(i - j) < 9)" in print_program(program)


def test_functions_are_inlined_with_their_names() -> None:
    text = (
        "fn squash(x: float; k: float = 2.0): float {\n    y = x * k\n    return y / (1.0 + abs(y))\n}\n"
        "score f(s) = squash(s) + squash(s * 2.0)\n"
    )
    program = check_text(text + lm("return softmax(f(dot(q, k))) @ v")).programs[0]
    assert [let.name for let in program.scores[0].formula.lets] == ["squash_y", "squash2_y"]


def test_own_definitions_shadow_the_prelude_with_a_note() -> None:
    checked = check_text("mask causal(i, j) = j < i\n" + lm("return softmax(causal(dot(q, k))) @ v"))
    assert [n.code for n in checked.notes] == ["E0109"]
    assert "j < i" in print_program(checked.programs[0])


def test_imports_are_relative_and_acyclic(tmp_path: Path) -> None:
    (tmp_path / "blocks.attn").write_text("mask near(i, j) = abs(i - j) < 3\n")
    (tmp_path / "main.attn").write_text('import "blocks.attn"\n' + lm("return softmax(near(dot(q, k))) @ v"))
    assert check_file(tmp_path / "main.attn").programs[0].masks[0].block == "near"
    (tmp_path / "loop.attn").write_text('import "loop.attn"\n')
    for text, code in (('import "../x.attn"', "E0010"), ('import "missing.attn"', "E0011")):
        (tmp_path / "bad.attn").write_text(text + "\n")
        with pytest.raises(SourceError, match=code):
            check_file(tmp_path / "bad.attn")
    with pytest.raises(SourceError, match="E0012"):
        check_file(tmp_path / "loop.attn")


def test_run_time_bounds_reach_the_signature() -> None:
    program = check_text(lm("return softmax(sliding_window(dot(q, k); w = win)) @ v", "win: int")).programs[0]
    assert program.scalars[0].positive


def test_every_block_argument_and_statement_reaches_the_program() -> None:
    """Mutating a literal, an argument or a statement changes the printed program or is an error."""
    base = lm(
        "q, k = rope(q, k; base = 500000.0)\ns = scaled_dot_product(q, k; scale = 0.25)\n"
        "s = softcap(s; cap = 50.0)\n"
        "s = sliding_window(causal(s); w = 9)\nreturn softmax(s) @ v"
    )
    mutations = (
        ("500000.0", "10000.0"),
        ("0.25", "0.5"),
        ("50.0", "30.0"),
        ("w = 9", "w = 8"),
        ("causal(s)", "full(s)"),
        ("s = softcap(s; cap = 50.0)\n", ""),
        ("q, k = rope(q, k", "q = rope(q"),
        ("rope(", "rope_interleaved("),
        ("softcap(s; cap = 50.0)", "scale(s; by = 50.0)"),
    )
    printed = {print_program(check_text(base).programs[0])}
    for old, new in mutations:
        assert old in base
        printed.add(print_program(check_text(base.replace(old, new)).programs[0]))
    assert len(printed) == len(mutations) + 1


PARSED = [
    "row rms_norm(x, c; w[D]: grad, eps: float = 0.000001) = x * rsqrt(mean(x * x) + eps) * w[c]",
    "output gate(o, b, h, m, c; g[B, H, M, Dv]: grad) = o * sigmoid(g[b, h, m, c])",
    "weight dropout(p, b, h, m, n; rate: float, seed: int) = "
    "if random(seed, b, h, m, n) < rate then 0.0 else p / (1 - rate)",
    "normalizer softmax_sink(s, h; sink[H]: grad) = exp(s) / (exp(sink[h]) + sum(exp(s)))",
    "mask block_sparse(b, h, m, n; on[1|B, 1|H, MB, NB]: bool, block: int) = "
    "on[b, h, m // block, n // block]",
]


@pytest.mark.parametrize("text", PARSED)
def test_reserved_slots_parse_and_check_alone(text: str) -> None:
    assert check_text(text).programs == ()


def test_nesting_too_deep_is_an_error_not_a_crash() -> None:
    for deep in ("-" * 5000 + "s", "s" + " + s" * 5000, "tanh(" * 5000 + "s" + ")" * 5000):
        assert codes(f"score f(s) = {deep}") == ["E0005"]


@pytest.mark.parametrize(
    "name", ["b", "h", "i", "j", "m", "n", "s", "r", "p", "c", "x0", "x1", "d_w", "exp_value"]
)
def test_a_number_may_not_be_named_as_what_formulas_read(name: str) -> None:
    """`h` would be the query head in every formula that it is given to."""
    text = f"attention a(q, k, v; {name}: float) = softmax(f(dot(q, k); x = {name})) @ v\n"
    text = "score f(s; x: float) = s + x\n" + text
    assert codes(text) == ["E0132"]


@pytest.mark.parametrize(
    "block",
    [
        "score f(s, j; x: float) {\n w = j * 2.0\n return s * w + x\n}",
        "fn g(t: float): float {\n w = t * 2.0\n return w\n}\nscore f(s, j; x: float) = s * g(j) + x",
        "fn w(t: float): float = t * 2.0\nscore f(s, j; x: float) = s * w(j) + x",
    ],
)
def test_intermediate_values_never_meet_parameters(block: str) -> None:
    """A block's own `w` or `g_w` is not the number that the attention calls so."""
    for name in ("w", "g_w"):
        text = f"{block}\nattention a(q, k, v; {name}: float) = softmax(f(dot(q, k); x = {name})) @ v\n"
        (step,) = check_text(text).programs[0].scores
        assert evaluate_formula(step.formula, {"s": 3.0, "j": 5, name: 7.0}) == (37.0,)


def test_a_function_with_intermediate_values_in_an_option() -> None:
    text = (
        "fn g(t: float): float {\n y = t * 2.0\n return y + y * y\n}\nscore f(s; x: float) = s + x\n"
        "attention a(q, k, v; e: float) = softmax(f(dot(q, k); x = g(e))) @ v\n"
    )
    (step,) = check_text(text).programs[0].scores
    assert evaluate_formula(step.formula, {"s": 3.0, "e": 1.5}) == (15.0,)


def test_a_size_that_nothing_says() -> None:
    """A name that appears only inside the expression of a size."""
    text = (
        "score rel(s, h, i, j; t[H, W]) = s + t[h, clamp(i - j, 0, 3)]\n"
        "attention a(q, k, v; t[H, 2*R + 1]{more}) = softmax(rel(scaled_dot_product(q, k); t)) @ v\n"
    )
    with pytest.raises(SourceError, match="what `R` is in the size of `t`") as caught:
        check_text(text.format(more=""))
    [found] = caught.value.diagnostics
    assert found.code == "E0202" and found.hint is not None and "R: int" in found.hint
    for more in (", R: int > 0", ", other[R]"):
        check_text(text.format(more=more))
