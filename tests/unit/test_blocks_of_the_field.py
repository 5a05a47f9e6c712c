# SPDX-License-Identifier: Apache-2.0
"""The language on the blocks that the field uses: what they need of it, and what it refuses by name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from afc.api import emit
from afc.errors import SourceError
from afc.expr.evaluate import evaluate
from afc.expr.nodes import Type, Var, const
from afc.expr.operators import div, to_float
from afc.expr.printer import attn
from afc.expr.simplify import simplify
from afc.frontend import check_text
from afc.frontend.library import prelude_files
from afc.ir.printer import print_program
from afc.options import Options
from tests.support.checks import EXAMPLES

S, ROW = Var("s", Type.FLOAT), to_float(Var("i", Type.INT))


def codes(text: str) -> list[str]:
    with pytest.raises(SourceError) as caught:
        check_text(text)
    return [d.code for d in caught.value.diagnostics if d.level == "error"]


def lm(scores: str, parameters: str = "", before: str = "") -> str:
    options = f"; {parameters}" if parameters else ""
    return f"{before}\nattention lm(q, k, v{options}) = softmax({scores}) @ v\n"


def attention(parameters: str, *lines: str) -> str:
    options = f"; {parameters}" if parameters else ""
    return f"attention lm(q, k, v{options}) {{\n" + "\n".join(lines) + "\n}\n"


# ---- captured tensors of any rank -------------------------------------------------------------------------

PICK = "mask pick(m, n; on[M, T]: bool) = n < N - T or on[m, n - (N - T)]\n"


def test_examples_take_nested_lists_and_bind_sizes_by_them() -> None:
    checked = check_text(PICK + "example pick(1, 5; on = [[true, false], [false, true]], N = 6) == true\n")
    assert all(o.passed for o in checked.outcomes)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("on = [[true, false], [true]]", "E0315"),
        ("on = [true, false]", "E0201"),
        ("on = [[1, 0], [0, 1]]", "E0201"),
        ("on = true", "E0201"),
        ("N = 3", "E0120"),
    ],
)
def test_a_tensor_of_the_wrong_kind_in_an_example(given: str, code: str) -> None:
    assert codes(PICK + f"example pick(1, 5; {given}) == true\n") == [code]


def test_sizes_take_the_names_of_the_attention() -> None:
    program = check_text(lm("pick(dot(q, k); on = drafts)", "drafts[M, Drafts]: bool", PICK)).programs[0]
    assert "n < N - Drafts or drafts[m, n - (N - Drafts)]" in print_program(program)


@pytest.mark.parametrize(
    ("scores", "parameters"),
    [
        ("additive_bias(dot(q, k); bias)", "bias[B, H, N, M]"),
        ("additive_bias(dot(q, k); bias)", "bias[1, H, M, N]"),
        ("alibi(dot(q, k); slope = t)", "t[Hk]"),
        ("t5_bias(dot(q, k); table)", "table[H, 32]"),
    ],
)
def test_sizes_that_contradict_the_block(scores: str, parameters: str) -> None:
    assert {*codes(lm(scores, parameters))} == {"E0201"}


@pytest.mark.parametrize(
    ("scores", "parameters"),
    [
        ("additive_bias(dot(q, k); bias)", "bias[1|B, H, M, N]"),
        ("additive_bias(dot(q, k); bias)", "bias[B, 1|H, M, N]"),
        ("relative_bias(dot(q, k); table, R)", "table[H, 2*R + 1], R: int"),
        ("relative_bias(dot(q, k); table, R = 8)", "table[H, 17]"),
    ],
)
def test_sizes_that_agree_with_the_block(scores: str, parameters: str) -> None:
    assert len(check_text(lm(scores, parameters)).programs) == 1


def test_sizes_reach_the_emitted_text() -> None:
    text = emit(EXAMPLES / "tree.attn", "cpp", Options(("cpu",), ((64, 64),), ("float32",)))
    assert "int(args.captured[0].size[2])" in text


def test_integers_of_two_widths_meet_as_one_type(tmp_path: Path) -> None:
    """`max(int64_t, int)` names no function on a GPU; a run-time R makes i - j + R leave 32 bits."""
    source = tmp_path / "deberta.attn"
    source.write_text((EXAMPLES / "deberta.attn").read_text(encoding="utf-8").replace(": grad", ""))
    text = emit(source, "cu", Options(("cuda",), ((64, 64),), ("bfloat16",)))
    assert "afc::max(int64_t(int64_t(i - j) + R), int64_t(0))" in text


def test_integers_of_tensors_keep_64_bits() -> None:
    for target, stage in (("cpu", "cpp"), ("cuda", "cu")):
        text = emit(EXAMPLES / "ragged.attn", stage, Options((target,), ((64, 64),), ("bfloat16",)))
        assert "int64_t len_b;" in text


ROTATED = "return softmax(causal(scaled_dot_product(q, k))) @ v"
STRETCH = "rotate stretch(x0, x1, b, h, r; t[B, Heads, L]) over half = (x0 * t[b, h, r], x1)\n"


@pytest.mark.parametrize(
    ("parameters", "lines"),
    [
        ("pos[B, N]: int", "q = rope_position(q; pos)"),
        ("pos[B, M]: int", "q, k = rope_position(q, k; pos)"),
        ("pos[3, B, M]: int", "k = mrope(k; pos)"),
        ("t[B, Dqk // 2, M]", "q = rope_table(q; co = t, si = t)"),
        ("t[B, M, Dqk]", "q = rope_table(q; co = t, si = t)"),
        ("t[B, M, Dqk // 2]", "q[8:] = rope_table(q[8:]; co = t, si = t)"),
    ],
)
def test_sizes_of_another_operand_contradict_a_rotation(parameters: str, lines: str) -> None:
    """L is the length and D the width of what is rotated."""
    assert {*codes(attention(parameters, lines, ROTATED))} == {"E0201"}


@pytest.mark.parametrize(
    ("parameters", "lines"),
    [
        ("pos[1|B, T]: int", "q, k = rope_position(q, k; pos)"),
        ("pos[B, M]: int", "q = rope_position(q; pos)"),
        ("t[1|B, N, Dqk // 4]", "k[:D // 2] = rope_table(k[:D // 2]; co = t, si = t)"),
        ("t[B, N, (Dqk - 8) // 2]", "k[8:] = rope_table(k[8:]; co = t, si = t)"),
        ("t[B, N, 32]", "k[:64] = rope_table(k[:64]; co = t, si = t)"),
        ("t[B, Hk, N]", "k = stretch(k; t)"),
        ("cols: int, up: bool", "q, k = axial(q, k; cols, vertical = up)"),
    ],
)
def test_what_a_rotation_may_read(parameters: str, lines: str) -> None:
    assert len(check_text(STRETCH + attention(parameters, lines, ROTATED)).programs) == 1


def test_numbers_that_divide_in_a_rotation_are_checked_at_every_call() -> None:
    program = check_text(attention("cols: int", "q = axial(q; cols, vertical = true)", ROTATED)).programs[0]
    assert program.scalars[0].positive


# ---- divisors ---------------------------------------------------------------------------------------------


def divided(mask: str, options: str = "", parameters: str = "") -> str:
    return lm(f"f(dot(q, k){options})", parameters, f"mask f(i, j{mask}")


@pytest.mark.parametrize(
    "text",
    [
        divided("; w: int) = i // w == 0", "; w = u", "u: int"),
        divided("; w: int) = i % (w * 2) == 0", "; w = u", "u: int"),
        divided("; w: int) {\n x = w + 1\n return i // x == 0\n}", "; w = u", "u: int"),
    ],
)
def test_a_parameter_that_divides_is_checked_at_every_call(text: str) -> None:
    assert check_text(text).programs[0].scalars[0].positive


@pytest.mark.parametrize(
    "text",
    [
        divided("; w: int) = i // w == 0", "; w = u - 1", "u: int"),
        divided(") = i // j == 0"),
        divided(") = i // (N // 2) == 0"),
        lm("f(dot(q, k); t)", "t[B]: int", "mask f(i, j, b; t[B]: int) = i // t[b] == 0"),
        lm("softcap(dot(q, k); cap = u + 0.5)", "u: float"),
    ],
)
def test_what_cannot_be_checked_is_refused(text: str) -> None:
    assert codes(text) == ["E0302"]


@pytest.mark.parametrize("divisor", ["N", "N + 3", "max(w, 1)", "clamp(w, 2, 9)"])
def test_what_is_positive_for_certain_may_divide(divisor: str) -> None:
    text = divided(f"; w: int) = i % ({divisor}) == 0", "; w = u", "u: int")
    assert not check_text(text).programs[0].scalars[0].positive


def test_division_by_a_constant_moves_no_step() -> None:
    """The reciprocal of 3 is rounded, that of 8 is not; a floor may cut positions into steps, not scores."""
    assert attn(simplify(div(ROW, const(3.0)))) == "i / 3.0"
    assert attn(simplify(div(ROW, const(8.0)))) == "0.125 * i"
    assert attn(simplify(div(S, const(3.0)))).endswith(" * s")


def test_t5_buckets_change_exactly_at_powers() -> None:
    """8, 16, 32, 64 and 128 begin a bucket of the encoder; a logarithm rounded down would delay one."""
    program = check_text(lm("t5_bias(dot(q, k); table, both = true)", "table[32, H]")).programs[0]
    table = np.arange(32.0)[:, None]
    j = np.array([7, 8, 15, 16, 31, 32, 63, 64, 127, 128])
    formula = program.scores[0].formula
    env = {"s": 0.0, "h": 0, "i": 200, "j": 200 - j}
    for let in formula.lets:
        env[let.name] = evaluate(let.value, env)
    got = evaluate(formula.result, env, {"table": table})
    assert got.tolist() == [7, 8, 9, 10, 11, 12, 13, 14, 15, 15]


# ---- columns ----------------------------------------------------------------------------------------------


def test_d_is_the_width_in_a_slice() -> None:
    text = (
        "attention lm(q, k, v) {{\n q[:{0}], k[:{0}] = rope(q[:{0}], k[:{0}])\n"
        " return softmax(dot(q, k)) @ v\n}}"
    )
    a, b = (print_program(check_text(text.format(x)).programs[0]) for x in ("D // 2", "Dqk // 2"))
    assert a == b


# ---- the prelude ------------------------------------------------------------------------------------------


def test_the_standard_blocks_name_a_source() -> None:
    """Everything beyond plain masks and scale says where it comes from."""
    plain = {"scale", "full", "causal", "sliding_window", "chunked", "lengths", "softmax"}
    for file in prelude_files():
        for declaration in file.declarations:
            if declaration.name not in plain:
                assert re.search(r"arXiv:\d|Llama 4|\b20\d\d\b", declaration.doc), declaration.name


def test_no_name_is_declared_twice_in_the_prelude() -> None:
    names = [d.name for file in prelude_files() for d in file.declarations]
    assert len(names) == len({*names})


def test_the_reference_lists_every_standard_block() -> None:
    text = (EXAMPLES.parent / "docs" / "language.md").read_text(encoding="utf-8")
    listed = {
        *re.findall(r"`(\w+)`", text[text.index("## Standard blocks") : text.index("## What numbers mean")])
    }
    assert {d.name for file in prelude_files() for d in file.declarations} == listed
