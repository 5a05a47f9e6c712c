# SPDX-License-Identifier: Apache-2.0
"""Random and systematic mutations of the examples and the prelude: no text crashes the checker, and no edit
of a program is lost on the way to the emitted code.
"""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from afc import passes
from afc.errors import AfcError
from afc.expr.printer import attn
from afc.frontend import check_text
from afc.render.cpu import render_cpu
from afc.schedule.plan import schedule

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.attn"))
CORPUS = [
    p.read_text(encoding="utf-8") for p in [*EXAMPLES, *sorted((ROOT / "grammar/prelude").glob("*.attn"))]
]
TOKEN = re.compile(r"\s+|#[^\n]*|[A-Za-z_]\w*|\d+(?:\.\d+)?(?:e-?\d+)?|\*\*|//|<=|>=|==|!=|.", re.DOTALL)
ODD = ["1e400", "0", "-", "**", "99999999999999999999", "\0", "é", "\t", "fn", "example", "import", "inf"]
SECONDS = 8.0


def tokens_of(text: str) -> list[str]:
    return TOKEN.findall(text)


def mutated(generator: random.Random, text: str, pool: list[str]) -> str:
    """The text with one to six edits of its tokens."""
    tokens = tokens_of(text)
    for _ in range(generator.choice((1, 1, 1, 2, 3, 6))):
        at, other = generator.randrange(len(tokens)), generator.randrange(len(tokens))
        match generator.randrange(6):
            case 0:
                del tokens[at : at + generator.choice((1, 1, 2, 5))]
            case 1:
                tokens.insert(at, generator.choice(pool))
            case 2:
                tokens[at] = generator.choice(pool)
            case 3:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 4:
                tokens.insert(at, tokens[at] * generator.choice((1, 2, 50)))
            case _:
                tokens[other:other] = tokens[at : at + generator.randrange(1, 12)]
        tokens = tokens or [" "]
    return "".join(tokens)


def test_no_text_gives_a_traceback() -> None:
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    pool = sorted({t for text in CORPUS for t in tokens_of(text) if t.strip() and t[0] != "#"}) + ODD
    end, cases = time.monotonic() + SECONDS, 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while time.monotonic() < end:
            text = mutated(generator, generator.choice(CORPUS), pool)
            cases += 1
            try:
                for program in check_text(text, "fuzz.attn").programs:
                    schedule(passes.run(program, {"Dqk": 32, "Dv": 32}), "cpu", "float32")
            except AfcError:
                pass
            except BaseException as crash:
                raise AssertionError(f"case {cases} of seed {seed}: {crash!r} for\n{text}") from crash
    assert cases > 200


def code(text: str) -> str:
    """Emitted C++ without its comments, and what its signature checks; or an error's codes."""
    try:
        units = []
        for program in check_text(text, "a.attn").programs:
            lowered = passes.run(program, {"Dqk": 128, "Dv": 128})
            units += [f"{s.name} = {s.default}" for s in program.scalars]
            units += [f"{x.name}[{', '.join(attn(e.size) for e in x.shape)}]" for x in program.tensors]
            units.append(render_cpu(lowered, schedule(lowered, "cpu", "float32"), program.name))
    except AfcError as error:
        return "error " + " ".join(d.code for d in error.diagnostics)
    return re.sub(r"//[^\n]*", "", "\n".join(units))


def edits(text: str) -> Iterator[tuple[str, str]]:
    """(what was edited, edited text): every number, and every statement of a body."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        body = line.partition("#")[0]
        if body.strip().startswith("example"):
            continue  # checks numbers, and is not emitted
        for found in re.finditer(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", body):
            value = found.group()
            changed = str(float(value) * 1.25 + 0.5) if "." in value else str(int(value) + 2)
            edited = line[: found.start()] + changed + line[found.end() :]
            yield (
                f"line {number + 1}: {value} -> {changed}",
                "".join([*lines[:number], edited, *lines[number + 1 :]]),
            )
        if line[:1].isspace() and body.strip() not in ("", "}"):
            yield f"line {number + 1} deleted", "".join([*lines[:number], *lines[number + 1 :]])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_edit_shows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    before = code(text)
    assert not before.startswith("error")
    silent = [what for what, edited in edits(text) if code(edited) == before]
    assert not silent, f"edits without effect: {silent}"
