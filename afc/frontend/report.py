# SPDX-License-Identifier: Apache-2.0
"""Collects diagnostics so that one run reports several mistakes, each once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from afc.errors import Diagnostic, Span


class Report:
    """Diagnostics of one run, in the order found; duplicates are dropped."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []

    def error(
        self, code: str, message: str, span: Span, *, notes: Iterable[str] = (), hint: str | None = None
    ) -> None:
        """Add an error."""
        self._add(Diagnostic(code, "error", message, span, tuple(notes), hint))

    def note(self, code: str, message: str, span: Span) -> None:
        """Add a note: something worth knowing that is no mistake."""
        self._add(Diagnostic(code, "note", message, span))

    def _add(self, diagnostic: Diagnostic) -> None:
        if diagnostic not in self.found:
            self.found.append(diagnostic)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """Errors only."""
        return tuple(d for d in self.found if d.level == "error")


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """A hint with the closest candidate, if one is close."""
    close = difflib.get_close_matches(name, sorted(set(candidates)), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None
