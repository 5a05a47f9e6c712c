# SPDX-License-Identifier: Apache-2.0
"""Which entry of the cache a call of `afc.load` got: the next equal call need not read the language again.

A record is found by all that decides what is built: the text and name of the file, the options, afc's own
files (by size and date), the environment. It names the module's entry, and what else must be as it was: the
files that were imported, and the compilers. Where anything differs, the call goes the long way, which knows.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from afc import paths
from afc.build.cache import LOADS, Cache

_SCHEMA = 1
_VARIABLES = ("AFC_CUDA_COMPILER", "AFC_NVCC", "AFC_NVRTC", "CUDA_HOME", "CUDA_PATH", "CXX", "PATH")
_SUFFIXES = (".py", ".j2", ".attn", ".lark", ".h", ".hpp", ".cuh", ".cpp")

_Stamp = tuple[str, int, int]  # path, bytes, date in nanoseconds


def _stamp(path: str) -> _Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, found.st_size, found.st_mtime_ns


def _stamps(folder: str) -> Iterator[_Stamp]:
    """Of every source below a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _stamps(entry.path)
            elif entry.name.endswith(_SUFFIXES):
                found = entry.stat()
                yield entry.path, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=1)  # what this process runs does not change with the files
def _afc_itself() -> str:
    folders = (paths.package(), paths.grammar(), paths.templates(), paths.runtime())
    return _digest(json.dumps(sorted(stamp for folder in folders for stamp in _stamps(str(folder)))))


def _packages() -> list[_Stamp | None]:
    """Folders of installed packages, which may bring another compiler or another pybind11."""
    return [_stamp(name) for name in sys.path if os.path.basename(name) in ("site-packages", "dist-packages")]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _place(cache: Cache, path: Path, text: str, options: str) -> Path:
    """Where the record of a call lies, for a file of this text."""
    environment = [os.environ.get(name) for name in _VARIABLES]
    parts = [_SCHEMA, path.name, _digest(text), options, environment, _packages(), sys.version, _afc_itself()]
    return cache.root / LOADS / f"{_digest(json.dumps(parts))}.json"


def recall(cache: Cache, path: Path, options: str) -> Path | None:
    """The module that the last equal call got, if it is there and nothing has changed. Never writes."""
    try:
        text = path.read_text(encoding="utf-8")
        record = json.loads(_place(cache, path, text, options).read_bytes())
        for name, digest in record["imports"].items():
            if _digest((path.parent / name).read_text(encoding="utf-8")) != digest:
                return None
        if any(_stamp(item[0]) != tuple(item) for item in record["compilers"]):
            return None
        entry = cache.lookup(record["entry"])
        if entry is None or record["module"] not in entry.digests:
            return None
        return entry.path(record["module"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(
    cache: Cache, path: Path, options: str, texts: Mapping[str, str], tools: Iterable[str], module: Path
) -> None:
    """Notes which `module` of the cache a call got; `texts` are those that were read, by the names of the
    files, and `tools` what the commands of the compilers name. Where the cache cannot be written, nothing is
    noted.
    """
    if not module.is_relative_to(cache.root):
        return
    place = _place(cache, path, texts[str(path)], options)  # that text, whatever the file holds by now
    imported = [name for name in texts if name != str(path) and os.path.isfile(name)]
    record = {
        "entry": module.parent.name,
        "module": module.name,
        "imports": {os.path.relpath(name, path.parent): _digest(texts[name]) for name in imported},
        "compilers": [_stamp(name) for name in tools if os.path.isfile(name)],
    }
    staging = place.with_name(f"{place.stem}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        place.parent.mkdir(exist_ok=True)
        staging.write_text(json.dumps(record), encoding="utf-8")
        os.replace(staging, place)
    except OSError:
        staging.unlink(missing_ok=True)
