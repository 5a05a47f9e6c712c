# SPDX-License-Identifier: Apache-2.0
"""Front end: `.attn` text to checked Programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from afc.errors import Diagnostic, SourceError, Span, UsageError
from afc.frontend import normalizers
from afc.frontend.attention import AttentionChecker
from afc.frontend.blocks import Blocks
from afc.frontend.examples import ExampleRunner, Outcome
from afc.frontend.library import gather
from afc.frontend.parser import parse
from afc.frontend.report import Report
from afc.ir.program import Program


@dataclass(frozen=True)
class Checked:
    """A checked file: its attentions, the outcome of its examples, and findings that are no errors."""

    path: str
    text: str
    programs: tuple[Program, ...]
    outcomes: tuple[Outcome, ...]
    notes: tuple[Diagnostic, ...]
    texts: dict[str, str]


def check_text(text: str, path: str = "<text>", root: Path | None = None) -> Checked:
    """Parse and check a program text; run its examples.

    `path` is the name used in messages and in emitted text; `root` is the folder that imports start from.
    Raises SourceError with every mistake found.
    """
    try:
        return _check(text, path, root)
    except RecursionError:
        raise SourceError.of("E0005", "an expression is nested too deeply", Span(path, 1, 1, 1, 1)) from None


def _check(text: str, path: str, root: Path | None) -> Checked:
    file = parse(text, path)
    report = Report()
    library = gather(file, report, root)
    blocks = Blocks(library.declarations, report)
    for declaration in (library.declarations[d.name] for d in file.declarations):
        if declaration.kind == "normalizer":
            normalizers.check_alone(declaration, blocks)
        else:
            blocks.check_alone(declaration)
        blocks.runtime_bounds.clear()
    source = Path(path).name
    programs = [
        AttentionChecker(d, blocks, source).program() for d in file.declarations if d.kind == "attention"
    ]
    runner = ExampleRunner(blocks)
    outcomes = tuple(runner.run(e) for e in file.examples) if not report.errors else ()
    if report.errors:
        raise SourceError(report.found, texts=library.texts)
    return Checked(
        path, text, tuple(p for p in programs if p is not None), outcomes, tuple(report.found), library.texts
    )


def check_file(path: str | Path) -> Checked:
    """Check a file. Raises SourceError; UsageError (E0620) if it cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError.of("E0620", f"cannot read {path}: {error}") from None
    return check_text(text, str(path), path.parent)
