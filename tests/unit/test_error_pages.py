# SPDX-License-Identifier: Apache-2.0
"""Every error code has a section in docs/errors.md, and the programs shown there do what it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from afc import api
from afc.errors import AfcError
from afc.frontend import check_text
from afc.options import Options

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (E\d{4}) (.*?)(?=^## |\Z)", PAGE, re.M | re.S))
CODE = re.compile(r"E\d{4}|error\[(E\d{4})\].*", re.S)
# A right side that is no number also fails the comparison.
CONSEQUENCES = {"E0311": {"E0310"}}
IMPORTED = {"masks.attn": "mask older(i, j) = j < i\n", "page.attn": "mask newer(i, j) = j > i\n"}


def raised() -> dict[str, set[str]]:
    """Modules that raise each code: where it stands as a literal."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "afc").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = CODE.fullmatch(node.value)
                if match is not None:
                    code = match[1] or match[0]
                    found.setdefault(code, set()).add(path.relative_to(ROOT / "afc").as_posix())
    return found


def snippets(code: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[code], re.M | re.S)


def codes(text: str, folder: Path | None) -> set[str]:
    """Errors (and notes) of checking a text and, where that finds none, of lowering it for the CPU."""
    path = "page.attn" if folder is None else str(folder / "page.attn")
    try:
        checked = check_text(text, path, folder)
        if checked.programs:
            api.module_spec(checked, Options(heads=((64, 64),)))
    except AfcError as error:
        return {d.code for d in error.diagnostics if d.level == "error"}
    return {d.code for d in checked.notes}


def test_the_codes_and_the_sections_are_the_same() -> None:
    codes_in_use, described = set(raised()), list(SECTIONS)
    assert codes_in_use - set(described) == set(), "write a section in docs/errors.md"
    assert set(described) - codes_in_use == set(), "remove the section: no module raises the code"
    assert described == sorted(described)


def test_a_code_that_several_modules_raise_says_for_what() -> None:
    silent = [
        f"{code}: {module}"
        for code, modules in raised().items()
        for module in sorted(modules)
        if len(modules) > 1 and f"`{module}`" not in SECTIONS[code]
    ]
    assert not silent, silent


def test_every_section_shows_the_wrong_and_the_right() -> None:
    for code, section in SECTIONS.items():
        prose = section.partition("\n\n")[2].partition("```")[0].strip()
        assert prose.endswith((".", ".)")) and len(section.splitlines()[0]) < 60, code
        shown = snippets(code, "attn wrong") or "# wrong" in section or "```text" in section
        assert shown and section.count("```") % 2 == 0, code


@pytest.mark.parametrize("code", [c for c in SECTIONS if snippets(c, "attn wrong")])
def test_the_programs_of_a_section(code: str, tmp_path: Path) -> None:
    for name, text in IMPORTED.items():
        (tmp_path / name).write_text(text)
    (wrong,), (right,) = snippets(code, "attn wrong"), snippets(code, "attn")
    assert codes(wrong, None if code == "E0009" else tmp_path) - CONSEQUENCES.get(code, set()) == {code}
    assert codes(right, tmp_path) == set()


def test_source_errors_are_shown_by_programs() -> None:
    """A code of a source error has a program, unless what it needs cannot be printed."""
    commands = {"E0005", "E0303", "E0405", "E0406", "E0408", "E0409", "E0410", "E0411"}
    missing = {c for c in SECTIONS if c < "E0500" and not snippets(c, "attn wrong")}
    assert missing == commands & set(SECTIONS)
