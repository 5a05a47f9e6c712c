# SPDX-License-Identifier: Apache-2.0
"""NVRTC as a program: compiles one CUDA text through the library, in a process of its own.

    python nvrtc_worker.py LIBRARY                                  # prints what the library is and knows
    python nvrtc_worker.py LIBRARY OPTIONS... SOURCE -o OUTPUT      # like a compiler

A process of its own can be ended at a time limit, and a fault of the library ends only it. The file is run by
path and imports nothing of afc, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

_SUCCESS = 0


class NvrtcLibrary:
    """libnvrtc at a path. Raises OSError if it cannot be loaded or a call fails."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.library = ctypes.CDLL(path)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self.library, name)(*arguments)
        if result != _SUCCESS:
            raise OSError(f"{name}: {self.library.nvrtcGetErrorString(result).decode()}")

    def version(self) -> str:
        """Version of CUDA that the library is part of, such as 13.0."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def archs(self) -> list[str]:
        """Architectures that it can make machine code for: sm_80, ..."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        values = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", values)
        return [f"sm_{value}" for value in values]

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def compile(self, name: str, text: bytes, options: Sequence[str], ptx: bool) -> tuple[int, str, bytes]:
        """(result, log, output) of compiling a text: a cubin, or PTX. The output is empty after a failure."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, name.encode(), 0, None, None)
        try:
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            result = self.library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if result != _SUCCESS:
                return result, f"{log}\n{self.library.nvrtcGetErrorString(result).decode()}\n", b""
            # PTX is a C string; its end is not part of a text file
            output = self._text(program, "PTX").rstrip(b"\0") if ptx else self._text(program, "CUBIN")
            return result, log, output
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))


def main(arguments: Sequence[str]) -> int:
    """Runs one of the two forms above; the exit status is 0 if it went well."""
    try:
        library = NvrtcLibrary(arguments[0])
        if len(arguments) == 1:
            print(f"NVRTC {library.version()}, {Path(arguments[0]).resolve().stat().st_size} bytes")
            print(" ".join(library.archs()))
            return 0
        *options, source, _, destination = arguments[1:]
        text = Path(source).read_bytes()
        result, log, output = library.compile(source, text, options, destination.endswith(".ptx"))
    except (OSError, AttributeError) as error:  # AttributeError: the library lacks a function
        print(error, file=sys.stderr)
        return 2
    sys.stdout.write(log)
    if result == _SUCCESS:
        Path(destination).write_bytes(output)
    return int(result != _SUCCESS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
