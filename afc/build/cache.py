# SPDX-License-Identifier: Apache-2.0
"""Files on disk that are expensive to make, found again by what they were made from.

An entry is a folder `<root>/<2 digits>/<key>` with the artefact, its sources, its log and `meta.json` (sha256
of each file). It is made in a staging folder of the same file system, synchronised, and renamed into place,
so that it is either whole or absent. Checksums are verified when an entry is read: a bad one is moved aside
and made again. A file lock lets several processes make one thing once; it saves work and is not needed for
correctness.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from afc.build.sources import canonical
from afc.errors import ToolchainError

META_NAME = "meta.json"
META_SCHEMA = 1

_LOCK_SECONDS = 600.0
_NOTICE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_STALE_STAGING_SECONDS = 86400.0
_STORE_ATTEMPTS = 5
_STAGING, _LOCKS, _QUARANTINE, _FAILED = "staging", "locks", "quarantine", "failed"
LOADS = "loads"  # records of `index`

_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}

_log = logging.getLogger("afc.build")


def cache_key(
    texts: Sequence[str], *, flags: Sequence[str], compiler: str, arch: str, abi_version: int, salt: str = ""
) -> str:
    """Key of what a compiler makes from `texts` (sources and headers), as 64 hexadecimal digits.

    Comments and `#line` do not count; `compiler` is all that the compiler prints about itself; `salt` stands
    for what else reaches the result.
    """
    parts = [[canonical(text) for text in texts], list(flags), compiler, arch, abi_version, salt]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def default_root(environ: Mapping[str, str] | None = None) -> Path | None:
    """AFC_CACHE_DIR, else $XDG_CACHE_HOME/afc, else ~/.cache/afc; None if there is no home folder."""
    variables = os.environ if environ is None else environ
    if variables.get("AFC_CACHE_DIR"):
        return Path(variables["AFC_CACHE_DIR"]).expanduser().absolute()
    if os.path.isabs(variables.get("XDG_CACHE_HOME", "")):  # the XDG standard has relative values ignored
        return Path(variables["XDG_CACHE_HOME"]) / "afc"
    try:
        return Path.home() / ".cache" / "afc"
    except RuntimeError:
        return None


# By process, since a forked child must not remove its parent's, and by user, since another may not write to
# it.
_private_roots: dict[tuple[int, int], Path] = {}


def _remove_private_root(process: int, folder: Path) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _private_root() -> Path:
    """A folder of this process, removed when it ends."""
    owner = (os.getpid(), os.geteuid())
    if owner not in _private_roots:
        folder = _private_roots.setdefault(owner, Path(tempfile.mkdtemp(prefix="afc-cache-")))
        atexit.register(_remove_private_root, owner[0], folder)
    return _private_roots[owner]


@cache
def _warn_unwritable(root: str, reason: str) -> None:
    warnings.warn(
        f"the cache folder {root} cannot be written ({reason}): kernels are kept for this process only; "
        "set AFC_CACHE_DIR to a writable folder",
        RuntimeWarning,
        stacklevel=2,
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot synchronise folders
            raise
    finally:
        os.close(descriptor)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A verified entry. `hit` tells whether it was there before."""

    key: str
    folder: Path
    digests: Mapping[str, str]  # file name -> sha256
    hit: bool = True

    def path(self, name: str) -> Path:
        """Where a file of the entry lies."""
        assert name in self.digests, f"the cache entry holds no {name}"
        return self.folder / name

    def read(self, name: str) -> bytes:
        """Content of a file of the entry. Raises ToolchainError E0602 if it changed since it was verified."""
        data = self.path(name).read_bytes()
        if _digest(data) != self.digests[name]:
            raise ToolchainError.of(
                "E0602", f"{self.folder / name} was damaged while in use", hint="run again"
            )
        return data


@dataclass(frozen=True)
class EntryInfo:
    """An entry for listings; nothing is verified. `modified` is in seconds since 1970."""

    key: str
    label: str
    folder: Path
    bytes: int
    modified: float


def _load(folder: Path, key: str, *, hit: bool = True) -> Entry | None:
    """The entry in `folder` if it is whole and every checksum holds."""
    try:
        meta = json.loads((folder / META_NAME).read_bytes())
        digests = dict(meta["files"])
        whole = meta["schema"] == META_SCHEMA and meta["key"] == key
        good = whole and all(_digest((folder / name).read_bytes()) == digests[name] for name in digests)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(key, folder, digests, hit) if good else None


def _seal(staging: Path, key: str, label: str) -> None:
    """Writes meta.json and synchronises the folder, so that a rename makes a whole entry."""
    names = sorted(path.name for path in staging.iterdir())
    digests = {name: _digest((staging / name).read_bytes()) for name in names}
    meta = {"schema": META_SCHEMA, "key": key, "label": label, "files": digests}
    (staging / META_NAME).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for name in (*names, META_NAME):
        _sync(staging / name)
    _sync(staging)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # removed by another process meanwhile
            continue
    return total


class Cache:
    """A cache folder. Any number of processes and threads may use one folder at once.

    `root` overrides `default_root(environ)`. Nothing is written before something is built. Where the folder
    cannot be written, existing entries are still read, one warning is given, and new entries live as long as
    the process.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        lock_seconds: float = _LOCK_SECONDS,
    ) -> None:
        self.root = root or default_root(environ) or _private_root()
        self._lock_seconds = lock_seconds
        self._uses_private_root = False

    # ---- reading and making entries ----

    def lookup(self, key: str) -> Entry | None:
        """The entry of `key` if it is there and whole. Never writes."""
        entry = _load(self._folder(self.root, key), key)
        if entry is None and self._uses_private_root:
            entry = _load(self._folder(_private_root(), key), key)
        return entry

    def get_or_build(self, key: str, label: str, build: Callable[[Path], None]) -> Entry:
        """The entry of `key`; if there is none, `build` fills an empty folder with its files.

        `label` names the thing in logs and listings. What `build` raises is passed on and leaves nothing
        behind; raises ToolchainError E0601 if no folder at all can be written.
        """
        entry = self.lookup(key)
        if entry is not None:
            return entry
        try:
            return self._build_in(self.root, key, label, build)
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            _warn_unwritable(str(self.root), error.strerror)
            self._uses_private_root = True
        try:
            return self._build_in(_private_root(), key, label, build)
        except OSError as error:
            raise ToolchainError.of(
                "E0601", f"no folder for built kernels can be written: {error}"
            ) from error

    @staticmethod
    def _folder(root: Path, key: str) -> Path:
        return root / key[:2] / key

    def _build_in(self, root: Path, key: str, label: str, build: Callable[[Path], None]) -> Entry:
        for name in (_STAGING, _LOCKS):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._sweep(root)
        with self._lock(root, key, label):
            folder = self._folder(root, key)
            entry = _load(folder, key)
            if entry is not None:
                return entry
            self._quarantine(root, folder)
            return self._make(root, key, label, build)

    def _make(self, root: Path, key: str, label: str, build: Callable[[Path], None]) -> Entry:
        staging = root / _STAGING / f"{os.getpid()}-{secrets.token_hex(8)}"
        staging.mkdir()
        try:
            build(staging)
            _seal(staging, key, label)
            return self._publish(root, staging, key)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _publish(self, root: Path, staging: Path, key: str) -> Entry:
        """Renames a sealed folder into place, or takes the entry of another process that was faster."""
        folder = self._folder(root, key)
        folder.parent.mkdir(exist_ok=True)
        for _ in range(_STORE_ATTEMPTS):
            try:
                os.rename(staging, folder)
                _sync(folder.parent)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            entry = _load(folder, key, hit=False)
            if entry is not None:
                return entry
            self._quarantine(root, folder)
        raise ToolchainError.of(
            "E0603", f"the cache entry {folder} is damaged again and again", hint="check the disk"
        )

    def _quarantine(self, root: Path, folder: Path) -> None:
        """Moves a bad entry aside, to be looked at."""
        place = root / _QUARANTINE / f"{folder.name}-{secrets.token_hex(4)}"
        if not folder.exists():
            return
        place.parent.mkdir(exist_ok=True)
        try:
            os.rename(folder, place)
        except FileNotFoundError:  # another process did it
            return
        _log.warning(
            "the cache entry %s was damaged; it was moved to %s and is built again", folder.name, place
        )

    @contextmanager
    def _lock(self, root: Path, key: str, label: str) -> Iterator[None]:
        """Holds the lock of a key, or goes on without it after the time limit; freed if the process dies."""
        descriptor = os.open(root / _LOCKS / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._acquire(descriptor, label)
            yield
        finally:
            os.close(descriptor)

    def _acquire(self, descriptor: int, label: str) -> None:
        start = time.monotonic()
        notice = start + _NOTICE_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                now = time.monotonic()
            except OSError as error:  # a file system without locks
                _log.info("no lock for %s: %s", label, error)
                return
            if now - start >= self._lock_seconds:
                _log.warning(
                    "gave up waiting for another process that builds %s; building it here too", label
                )
                return
            if now >= notice:
                _log.warning("waiting for another process that builds %s", label)
                notice = now + _NOTICE_SECONDS
            time.sleep(_POLL_SECONDS)

    def _sweep(self, root: Path) -> None:
        """Removes staging folders that killed processes left behind."""
        limit = time.time() - _STALE_STAGING_SECONDS
        for path in (root / _STAGING).iterdir():
            try:
                stale = path.stat().st_mtime < limit
            except FileNotFoundError:
                continue
            if stale:
                shutil.rmtree(path, ignore_errors=True)

    # ---- looking after the folder ----

    def entries(self) -> list[EntryInfo]:
        """All entries, oldest first."""
        found = []
        for meta in self.root.glob("[0-9a-f][0-9a-f]/*/" + META_NAME):
            try:
                data = json.loads(meta.read_bytes())
                modified = meta.stat().st_mtime
            except (OSError, ValueError):
                continue
            label = str(data.get("label", "")) if isinstance(data, dict) else ""
            found.append(EntryInfo(meta.parent.name, label, meta.parent, _tree_bytes(meta.parent), modified))
        return sorted(found, key=lambda info: (info.modified, info.key))

    def size(self) -> int:
        """Bytes of all files under the root, those left behind by failures included."""
        return _tree_bytes(self.root)

    def clean(self, older_than_seconds: float = 0.0) -> int:
        """Removes entries that are at least so old, and all that failures left; returns bytes removed."""
        before = self.size()
        limit = time.time() - older_than_seconds
        for info in self.entries():
            if info.modified <= limit:
                shutil.rmtree(info.folder, ignore_errors=True)
        for name in (_QUARANTINE, _FAILED, LOADS):
            shutil.rmtree(self.root / name, ignore_errors=True)
        return before - self.size()

    def keep_failure(self, name: str, files: Mapping[str, str]) -> Path:
        """Writes the files of a failed compilation where the user can look at them; returns the folder."""
        content = json.dumps(sorted(files.items())).encode()
        leaf = f"{name}-{_digest(content)[:12]}"
        for root in (self.root, _private_root()):
            folder = root / _FAILED / leaf
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for file_name, text in files.items():
                    (folder / file_name).write_text(text, encoding="utf-8")
                return folder
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise
        raise ToolchainError.of("E0601", "no folder for the files of a failed compilation can be written")
