# SPDX-License-Identifier: Apache-2.0
"""The shape of the code: imports go one way, sizes are reported, files start with their licence."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

# A package may import from itself and from the packages to its left. `frontend` lends its hints to `passes`.
ORDER = {
    "errors": (),
    "paths": ("errors",),
    "options": ("errors",),
    "expr": ("errors",),
    "ir": ("errors", "expr"),
    "frontend": ("errors", "paths", "expr", "ir"),
    "masks": ("errors", "expr", "ir"),
    "passes": ("errors", "expr", "ir", "frontend"),
    "schedule": ("errors", "expr", "ir", "masks"),
    "reference": ("errors", "expr", "ir", "masks"),
    "render": ("errors", "paths", "expr", "ir", "masks", "schedule"),
    "build": ("errors", "paths"),
    "runtime": (),
    "api": (
        "errors",
        "options",
        "paths",
        "expr",
        "ir",
        "frontend",
        "masks",
        "passes",
        "schedule",
        "reference",
        "render",
        "build",
        "runtime",
        "header",
    ),
    "loading": ("errors", "options", "build", "runtime", "api"),
    "explain": ("errors", "paths", "options", "expr", "ir", "frontend", "masks", "passes", "api"),
    "viz": ("options", "expr", "frontend", "api", "explain"),
    "header": ("build", "runtime"),
    "doctor": ("errors", "build"),
    "cli": ("errors", "options", "api", "frontend", "build", "explain", "viz", "doctor", "paths"),
}


def imported(path: Path) -> set[str]:
    """Top-level parts of afc that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"afc.{a.name}" for a in node.names] if node.module == "afc" else [node.module]
        found |= {n.split(".")[1] for n in names if n.startswith("afc.")}
    return found - {"__version__"}


def test_imports_go_one_way() -> None:
    wrong = []
    for path in sorted((ROOT / "afc").rglob("*.py")):
        part = path.relative_to(ROOT / "afc").parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        allowed = {part, *ORDER[part]}
        wrong += [f"{path.relative_to(ROOT)} imports afc.{name}" for name in sorted(imported(path) - allowed)]
    assert not wrong, "\n".join(wrong)


def test_every_part_has_its_place() -> None:
    parts = {
        p.stem if p.is_file() else p.name
        for p in (ROOT / "afc").iterdir()
        if p.suffix == ".py" or (p / "__init__.py").is_file()
    }
    assert parts - {"__init__", "__main__"} == set(ORDER)


def lines(folder: str, *suffixes: str) -> int:
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for p in files)


def test_size(capsys: object) -> None:
    """Reports the size; a reader's patience is the limit, and a reviewer sees the number move."""
    sizes = {
        "afc": lines("afc", ".py"),
        "templates": lines("templates", ".j2"),
        "runtime": lines("runtime", ".h", ".hpp", ".cuh", ".cpp"),
    }
    report = ", ".join(f"{name} {count}" for name, count in sizes.items())
    with capsys.disabled():  # type: ignore[attr-defined]
        print(f"\nlines: {report}, together {sum(sizes.values())}")
    assert all(sizes.values())


def test_every_source_names_its_licence() -> None:
    sources = [
        p
        for folder in ("afc", "runtime", "bench", "tests", "examples")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".h", ".hpp", ".cpp", ".cuh") and "golden" not in p.parent.parts
    ]
    missing = [
        str(p.relative_to(ROOT))
        for p in sources
        if p.stat().st_size and "SPDX-License-Identifier: Apache-2.0" not in p.read_text("utf-8")[:200]
    ]
    assert not missing, missing


MACHINE_PATH = re.compile("/(root|home|work)/")


def test_nothing_names_a_machine_path() -> None:
    """Absolute home or work paths never belong into a source."""
    suffixes = (".py", ".h", ".hpp", ".cpp", ".cuh", ".j2", ".attn", ".lark", ".md", ".toml")
    sources = [
        p
        for folder in ("afc", "runtime", "templates", "grammar", "bench", "examples", "docs")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in suffixes
    ]
    named = [
        str(p.relative_to(ROOT))
        for p in [*sources, *(p for p in [ROOT / "README.md"] if p.exists())]
        if MACHINE_PATH.search(p.read_text("utf-8"))
    ]
    assert not named, named
