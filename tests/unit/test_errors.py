# SPDX-License-Identifier: Apache-2.0
"""Diagnostics as text and as data, and the exceptions around them."""

from __future__ import annotations

import json
import pickle

import pytest

from afc import paths
from afc.errors import AfcError, Diagnostic, SourceError, Span, ToolchainError, UsageError, render, to_json

SOURCE = "attention a(q, k, v) {\n\ts = dott(q, k)\n}\n"
UNKNOWN = Diagnostic(
    "E0101", "error", "'dott' is not defined", Span("a.attn", 2, 6, 2, 10), ("a note",), "did you mean 'dot'?"
)


def test_render() -> None:
    assert render(UNKNOWN, SOURCE) == (
        "a.attn:2:6: error[E0101]: 'dott' is not defined\n"
        " 2 | \ts = dott(q, k)\n"
        "   | \t    ^^^^\n"
        "note: a note\n"
        "hint: did you mean 'dot'?"
    )
    assert render(Diagnostic("E0501", "warning", "no nvcc")) == "warning[E0501]: no nvcc"
    assert render(UNKNOWN).splitlines()[1] == "note: a note"


@pytest.mark.parametrize(
    ("span", "carets"),
    [
        (Span("f", 1, 1, 2, 3), "^" * 22),  # several lines: the first is marked to its end
        (Span("f", 3, 2, 3, 2), " ^"),  # at the end of a line
        (Span("f", 3, 9, 3, 12), " ^"),  # beyond it
        (Span("f", 4, 1, 4, 1), "^"),  # after the last line
    ],
)
def test_carets(span: Span, carets: str) -> None:
    assert render(Diagnostic("E0001", "error", "m", span), SOURCE).splitlines()[-1].split(" | ")[1] == carets


def test_carets_under_wide_characters() -> None:
    text = render(Diagnostic("E0001", "error", "m", Span("f", 1, 4, 1, 6)), "s=注意é x")
    assert (
        text.splitlines()[-1] == "   |     ^^^"
    )  # two cells for the first character before and under the mark


def test_a_span_outside_the_text_shows_no_line() -> None:
    assert len(render(Diagnostic("E0001", "error", "m", Span("f", 99, 1, 99, 2)), SOURCE).splitlines()) == 1


def test_json() -> None:
    data = json.loads(json.dumps(SourceError([UNKNOWN]).to_json()))
    assert (data["schema"], data["kind"], data["exit_code"]) == (1, "SourceError", 1)
    assert data["diagnostics"] == [to_json(UNKNOWN)]
    assert data["diagnostics"][0]["span"] == {
        "file": "a.attn",
        "line": 2,
        "column": 6,
        "end_line": 2,
        "end_column": 10,
    }


def test_exit_codes() -> None:
    kinds = (AfcError, SourceError, UsageError, ToolchainError)
    assert [kind.exit_code for kind in kinds] == [70, 1, 2, 3]


def test_errors_survive_pickling() -> None:
    for error in (
        SourceError([UNKNOWN, UNKNOWN]),
        UsageError.of("E0520", "bad name", hint="h"),
        ToolchainError(UNKNOWN, command=("nvcc", "-v"), log="a\nb\n", searched=("PATH: nvcc",)),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error) and copy.to_json() == error.to_json()


def test_toolchain_error_shows_the_end_of_the_log() -> None:
    error = ToolchainError(UNKNOWN, command=("g++", "x.cpp"), log="\n".join(f"line {n}" for n in range(100)))
    lines = str(error).splitlines()
    assert lines[-20:] == [f"line {n}" for n in range(80, 100)] and "command: g++ x.cpp" in lines


def test_codes_are_checked() -> None:
    with pytest.raises(AssertionError, match="E0123"):
        Diagnostic("E12", "error", "m")


def test_data_folders_exist() -> None:
    assert (paths.runtime() / "abi" / "afc_abi.h").is_file()
    assert paths.grammar().is_dir() and paths.templates().is_dir()
