# SPDX-License-Identifier: Apache-2.0
"""Documentation is executed: programs in it are checked, commands in it are the ones that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from afc.frontend import check_text

ROOT = Path(__file__).parent.parent.parent


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.S)


def programs() -> list[tuple[str, str]]:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, text in enumerate(blocks(path, "attn") + blocks(path, "")):
            if re.search(r"^(score|mask|attention|rotate|fn)\s+\w+\(", text, re.M):
                found.append((f"{path.name}-{number}", text))
    return found


@pytest.mark.parametrize("text", [t for _, t in programs()], ids=[n for n, _ in programs()])
def test_programs_in_the_documentation_check(text: str) -> None:
    checked = check_text(text)
    assert all(o.passed for o in checked.outcomes)


def test_ci_runs_the_commands_of_the_readme() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in ("pip install torch==2.13.0", "pip install -e '.[dev]'", "python -m pytest"):
        assert command in readme
        assert command.replace("pip install ", "pip install -q ") in ci or command in ci


def test_files_that_the_readme_names_exist() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"
