# SPDX-License-Identifier: Apache-2.0
"""What of a C++ or CUDA text reaches the machine code: the text without comments, and its headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

# Order matters: a comment mark inside a string, or a quote inside a number (1'000) or a comment, is none.
_TOKEN = re.compile(
    r"""
      (?P<keep> (?:u8|[LuU])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"   # raw string
              | "(?:\\.|[^"\\\n])*"                                         # string
              | \.?\d(?:'?\w|[eEpP][+-]|\.)*                                # number
              | [A-Za-z_]\w*                                                # name, prefix of a character
              | '(?:\\.|[^'\\\n])*' )                                       # character
    | (?P<comment> //(?:\\\n|[^\n])* | /\*.*?\*/ )
    """,
    re.VERBOSE | re.DOTALL,
)
_LINE_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*line\b[^\n]*$", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def canonical(text: str) -> str:
    """The text without comments, `#line` directives, empty lines and white space at line ends.

    Two texts with one canonical form compile to the same code. A text with a raw string stays as it is.
    """
    if any(match.group("mark") is not None for match in _TOKEN.finditer(text)):
        return text  # white space and line starts mean something within a raw string
    bare = _TOKEN.sub(lambda match: " " if match.group("comment") else match.group(), text)
    lines = (line.rstrip() for line in _LINE_DIRECTIVE.sub("", bare).splitlines())
    return "\n".join(line for line in lines if line)


def _resolve(name: str, folders: Sequence[Path]) -> Path | None:
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def included_headers(text: str, include_dirs: Sequence[Path]) -> list[tuple[str, str]]:
    """(name, text) of every header that `text` includes by quotes, directly or not, each once, in order of
    inclusion.

    Names that lie in none of `include_dirs` (nor beside the including header) belong to the compiler's own
    version and are left out.
    """
    seen: set[Path] = set()

    def walk(part: str, beside: Sequence[Path]) -> Iterator[tuple[str, str]]:
        for name in _INCLUDE.findall(part):
            path = _resolve(name, [*beside, *include_dirs])
            if path is None or path in seen:
                continue
            seen.add(path)
            header = path.read_text(encoding="utf-8")
            yield name, header
            yield from walk(header, [path.parent])

    return list(walk(text, []))
