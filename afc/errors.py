# SPDX-License-Identifier: Apache-2.0
"""Diagnostics and the exceptions that carry them.

A diagnostic is data (code, level, message, place, notes, hint); `render` prints it for people, `to_json` for
tools. Codes are written `E0123`; the two digits after the `E` name the part of the compiler:

    E00xx lex and parse     E01xx names and types     E02xx shapes      E03xx mask and score semantics E04xx
    schedule, resources, unsupported            E05xx toolchain   E06xx cache and run time     E09xx internal

Lines and columns count from 1; a span ends before `end_column`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

Level = Literal["error", "warning", "note"]

JSON_SCHEMA_VERSION = 1
LOG_TAIL_LINES = 20

_CODE = re.compile(r"E\d{4}")


@dataclass(frozen=True)
class Span:
    """A stretch of source text: from (line, column) up to, not including, (end_line, end_column)."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `message` says what is wrong and stands alone; `hint` says what to do about it."""

    code: str
    level: Level
    message: str
    span: Span | None = None
    notes: tuple[str, ...] = ()
    hint: str | None = None

    def __post_init__(self) -> None:
        assert _CODE.fullmatch(self.code), f"diagnostic code {self.code!r} is not of the form E0123"
        object.__setattr__(self, "notes", tuple(self.notes))

    def headline(self) -> str:
        """`file:line:col: error[E0123]: message`, without the place if there is none."""
        place = f"{self.span}: " if self.span else ""
        return f"{place}{self.level}[{self.code}]: {self.message}"


def _cells(character: str) -> int:
    """Terminal cells that a character takes."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _blank(text: str) -> str:
    """White space as wide as `text`; tabs stay, so that carets line up whatever the tab width."""
    return "".join("\t" if c == "\t" else " " * _cells(c) for c in text)


def _excerpt(span: Span, source_text: str) -> list[str]:
    """The source line of a span and a caret line under it; nothing if the span lies outside the text."""
    lines = source_text.split("\n")
    if not 1 <= span.line <= len(lines):
        return []
    line = lines[span.line - 1].rstrip("\r")
    start = min(max(span.column - 1, 0), len(line))
    end = span.end_column - 1 if span.end_line == span.line else len(line)
    marked = line[start : min(end, len(line))].rstrip()
    carets = max(1, sum(_cells(c) for c in marked))
    number = str(span.line)
    return [f" {number} | {line}", f" {' ' * len(number)} | {_blank(line[:start])}{'^' * carets}"]


def render(diagnostic: Diagnostic, source_text: str | None = None) -> str:
    """Plain text of a diagnostic: headline, source line with carets, notes, hint; no trailing newline."""
    parts = [diagnostic.headline()]
    if diagnostic.span is not None and source_text is not None:
        parts += _excerpt(diagnostic.span, source_text)
    parts += [f"note: {note}" for note in diagnostic.notes]
    if diagnostic.hint:
        parts.append(f"hint: {diagnostic.hint}")
    return "\n".join(parts)


def to_json(diagnostic: Diagnostic) -> dict[str, Any]:
    """The diagnostic as JSON data."""
    span = diagnostic.span
    place = None
    if span is not None:
        place = {
            "file": span.file,
            "line": span.line,
            "column": span.column,
            "end_line": span.end_line,
            "end_column": span.end_column,
        }
    return {
        "code": diagnostic.code,
        "level": diagnostic.level,
        "message": diagnostic.message,
        "span": place,
        "notes": list(diagnostic.notes),
        "hint": diagnostic.hint,
    }


_Self = TypeVar("_Self", bound="AfcError")


class AfcError(Exception):
    """Base of all errors that afc raises on purpose. Holds one or more diagnostics.

    Raised as itself only for internal faults (E09xx). `exit_code` is the exit status of the command line.
    """

    exit_code: ClassVar[int] = 70

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        found = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        assert found, "an error needs at least one diagnostic"
        super().__init__(found)
        self.diagnostics: tuple[Diagnostic, ...] = found

    @classmethod
    def of(
        cls: type[_Self],
        code: str,
        message: str,
        span: Span | None = None,
        *,
        notes: Sequence[str] = (),
        hint: str | None = None,
    ) -> _Self:
        """An error with a single diagnostic of level `error`."""
        return cls(Diagnostic(code, "error", message, span, tuple(notes), hint))

    def __str__(self) -> str:
        return "\n".join(render(d) for d in self.diagnostics)

    def to_json(self) -> dict[str, Any]:
        """The error as JSON data: schema version, kind, exit code, diagnostics."""
        return {
            "schema": JSON_SCHEMA_VERSION,
            "kind": type(self).__name__,
            "exit_code": self.exit_code,
            "diagnostics": [to_json(d) for d in self.diagnostics],
        }


class SourceError(AfcError):
    """The `.attn` text is wrong. `texts`: the text of each file that a span may point into, by name."""

    exit_code = 1

    def __init__(
        self, diagnostics: Diagnostic | Iterable[Diagnostic], *, texts: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(diagnostics)
        self.texts: dict[str, str] = dict(texts or {})


class UsageError(AfcError):
    """afc was asked for something that it cannot be asked for: a bad option, name or argument."""

    exit_code = 2


class ToolchainError(AfcError):
    """A compiler or linker is missing or failed.

    `command` is the argument list that failed, `log` its output (`log_tail` the end of it), `searched` every
    place where a missing tool was looked for.
    """

    exit_code = 3

    def __init__(
        self,
        diagnostics: Diagnostic | Iterable[Diagnostic],
        *,
        command: Sequence[str] = (),
        log: str = "",
        searched: Sequence[str] = (),
    ) -> None:
        super().__init__(diagnostics)
        self.command: tuple[str, ...] = tuple(command)
        self.log = log
        self.searched: tuple[str, ...] = tuple(searched)

    @property
    def log_tail(self) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.rstrip().splitlines()[-LOG_TAIL_LINES:])

    def __str__(self) -> str:
        parts = [super().__str__()]
        parts += [f"searched: {place}" for place in self.searched]
        if self.command:
            parts.append(f"command: {' '.join(self.command)}")
        if self.log_tail:
            parts.append(self.log_tail)
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """As for any error, with the command, the end of its log and the places searched."""
        extra = {"command": list(self.command), "log_tail": self.log_tail, "searched": list(self.searched)}
        return {**super().to_json(), **extra}
