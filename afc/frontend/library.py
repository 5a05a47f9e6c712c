# SPDX-License-Identifier: Apache-2.0
"""Which declarations a file sees: the prelude, its imports, its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from afc import paths
from afc.errors import SourceError
from afc.frontend import ast
from afc.frontend.parser import parse
from afc.frontend.report import Report


@dataclass(frozen=True)
class Library:
    """Declarations by name, and the text of every file that contributed (for messages)."""

    declarations: dict[str, ast.Declaration]
    texts: dict[str, str]
    prelude: frozenset[str]


@lru_cache(maxsize=1)
def prelude_files() -> tuple[ast.File, ...]:
    """The parsed prelude, in file-name order. Paths in messages read `prelude/<file>`."""
    folder = paths.grammar() / "prelude"
    return tuple(
        parse(p.read_text(encoding="utf-8"), f"prelude/{p.name}") for p in sorted(folder.glob("*.attn"))
    )


def gather(file: ast.File, report: Report, root: Path | None = None) -> Library:
    """The library of a file. `root`: folder of the file, needed if it imports.

    A definition may shadow one of the prelude (a note); two in one file, or in two imports, are an error
    (E0108).
    """
    declarations: dict[str, ast.Declaration] = {}
    texts: dict[str, str] = {}
    for source in prelude_files():
        texts[source.path] = source.text
        declarations.update({d.name: d for d in source.declarations})
    prelude = frozenset(declarations)
    own: dict[str, ast.Declaration] = {}
    for source in (*_imported(file, root, (file.path,)), file):
        texts[source.path] = source.text
        for declaration in source.declarations:
            if declaration.name in own:
                report.error(
                    "E0108",
                    f"`{declaration.name}` is declared twice",
                    declaration.span,
                    notes=(f"first declared at {own[declaration.name].span}",),
                )
            elif declaration.name in prelude:
                report.note("E0109", f"`{declaration.name}` shadows the prelude's", declaration.span)
            own[declaration.name] = declaration
    declarations.update(own)
    return Library(declarations, texts, prelude)


def _imported(file: ast.File, root: Path | None, chain: tuple[str, ...]) -> list[ast.File]:
    found: list[ast.File] = []
    for item in file.imports:
        if root is None:
            raise SourceError.of("E0009", "text without a folder cannot import", item.span)
        path = root / item.path
        if Path(item.path).is_absolute() or ".." in Path(item.path).parts:
            raise SourceError.of(
                "E0010", f"an import is relative and stays below its file: {item.path!r}", item.span
            )
        if not path.is_file():
            raise SourceError.of("E0011", f"no file {item.path!r} beside {file.path}", item.span)
        name = str(Path(file.path).parent / item.path)
        if name in chain:
            raise SourceError.of("E0012", f"import cycle: {' -> '.join((*chain, name))}", item.span)
        source = parse(path.read_text(encoding="utf-8"), name)
        found += [*_imported(source, path.parent, (*chain, name)), source]
    return found
