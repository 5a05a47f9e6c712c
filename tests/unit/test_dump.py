# SPDX-License-Identifier: Apache-2.0
"""`--emit ast`: the whole syntax tree as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from afc.api import emit
from afc.frontend.dump import dump
from afc.frontend.parser import parse
from afc.options import Options

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples").glob("*.attn"))
TEXT = """
## Halves.
score half(s, i; by: float > 0 = 2.0, t[1|B, M]: grad) = if i == 0 then s else -s / by + t[0, i]
example half(4.0, 0; t = [[0.0]]) == 4.0
attention a(q, k, v; t[B, M]: grad) {
    q[:8] = rope(q[:8])
    return softmax(half(dot(q, k); t)) @ v
}
"""


def test_a_tree_has_every_part() -> None:
    text = dump(parse(TEXT, "a.attn"))
    assert text.startswith("File edition 1\n  Declaration  [3:7]\n    kind: 'score'\n    name: 'half'\n")
    for line in (
        "doc: 'Halves.'",
        "type: 'float'",
        "bound: Literal  [3:30]",
        "default: Literal  [3:34]",
        "broadcast: True",
        "grad: True",
        "condition: Compare  [3:61]",
        "ops: ==",
        "otherwise: Binary  [3:80]",
        "left: Unary",
        "Example  [4:1]",
        "lo: none",
        "op: '@'",
    ):
        assert re.search(rf"^ +{re.escape(line)}", text, re.M), line


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_name_and_number_of_an_example_is_in_its_tree(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    text = emit(path, "ast", Options(("cpu",), ((64, 64),)))
    assert str(path.parent) not in text
    code = "\n".join(line.partition("#")[0] for line in source.splitlines())
    keywords = {"score", "mask", "rotate", "row", "over", "attention", "return", "fn", "grad", "if", "then"}
    for word in set(re.findall(r"[A-Za-z_]\w*|\d+(?:\.\d+)?", code)) - keywords - {"else", "example"}:
        assert re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", text), word


def test_an_edit_shows() -> None:
    assert dump(parse(TEXT, "a.attn")) != dump(parse(TEXT.replace("== 4.0", "== 4.00"), "a.attn"))
    assert dump(parse(TEXT, "a.attn")) != dump(parse(TEXT.replace(": grad)", ")"), "a.attn"))
