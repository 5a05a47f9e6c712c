# SPDX-License-Identifier: Apache-2.0
"""The cache: many processes at once, killed at any point, damaged entries, folders that cannot be written."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afc.build.cache import META_NAME, Cache, cache_key, default_root
from afc.errors import ToolchainError

KEY = "ab" + "0" * 62
CONTENT = {"kernel.so": bytes(range(256)) * 400, "kernel.cpp": b"int x;\n"}


def write_content(folder: Path) -> None:
    for name, data in CONTENT.items():
        (folder / name).write_bytes(data)


def refuse(folder: Path) -> None:
    raise AssertionError("built again")


def check(cache: Cache) -> None:
    """A reader gets the right bytes, whatever happened before."""
    entry = cache.get_or_build(KEY, "kernel", write_content)
    assert {name: entry.read(name) for name in entry.digests} == CONTENT


def test_entry_is_built_once_and_found_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.lookup(KEY) is None and not cache.root.exists()
    first = cache.get_or_build(KEY, "kernel", write_content)
    second = Cache(cache.root).get_or_build(KEY, "kernel", refuse)
    assert not first.hit and second.hit and first.folder == second.folder
    assert second.path("kernel.so").read_bytes() == CONTENT["kernel.so"]
    check(cache)


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        raise ToolchainError.of("E0512", "no")

    with pytest.raises(ToolchainError, match="E0512"):
        cache.get_or_build(KEY, "kernel", fail)
    assert cache.lookup(KEY) is None and list((tmp_path / "staging").iterdir()) == []
    check(cache)


# ---- processes ----

_fork = multiprocessing.get_context("fork")


def _slow_build(folder: Path) -> None:
    with open(folder.parents[1] / "builds", "a", encoding="utf-8") as log:
        log.write("built\n")
    time.sleep(0.3)
    write_content(folder)


def _read_all(root: Path, start: threading.Barrier) -> None:
    start.wait()
    entry = Cache(root).get_or_build(KEY, "kernel", _slow_build)
    assert entry.read("kernel.so") == CONTENT["kernel.so"]


def test_eight_processes_build_once(tmp_path: Path) -> None:
    start = _fork.Barrier(8)
    processes = [_fork.Process(target=_read_all, args=(tmp_path, start)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    assert (tmp_path / "builds").read_text().splitlines() == ["built"]


def test_eight_threads_build_once(tmp_path: Path) -> None:
    built: list[int] = []

    def build(folder: Path) -> None:
        built.append(1)
        time.sleep(0.05)
        write_content(folder)

    threads = [
        threading.Thread(target=Cache(tmp_path).get_or_build, args=(KEY, "k", build)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert built == [1]


def _build_for_ever(root: Path) -> None:
    """Makes entries as fast as it can, removing them again, so that a kill falls anywhere."""
    while True:
        Cache(root).get_or_build(KEY, "kernel", write_content)
        shutil.rmtree(root / KEY[:2] / KEY)


@pytest.mark.parametrize("seed", range(12))
def test_killed_process_leaves_a_usable_cache(tmp_path: Path, seed: int) -> None:
    process = _fork.Process(target=_build_for_ever, args=(tmp_path,))
    process.start()
    time.sleep(random.Random(seed).uniform(0.005, 0.15))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    check(Cache(tmp_path, lock_seconds=2.0))


def _hold_the_lock(root: Path, ready: threading.Event) -> None:
    def build(folder: Path) -> None:
        ready.set()
        time.sleep(60)

    Cache(root).get_or_build(KEY, "kernel", build)


def test_waiting_has_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ready = _fork.Event()
    process = _fork.Process(target=_hold_the_lock, args=(tmp_path, ready))
    process.start()
    assert ready.wait(10)
    start = time.monotonic()
    check(Cache(tmp_path, lock_seconds=0.2))
    assert time.monotonic() - start < 10 and "gave up waiting" in caplog.text
    process.kill()
    process.join()


def test_entry_of_a_faster_process_is_taken(tmp_path: Path) -> None:
    def overtaken(folder: Path) -> None:
        other = Cache(tmp_path, lock_seconds=0.0)  # goes on without the lock, as after a time-out
        other.get_or_build(KEY, "kernel", write_content)
        (folder / "kernel.so").write_bytes(b"slower")

    entry = Cache(tmp_path).get_or_build(KEY, "kernel", overtaken)
    assert entry.read("kernel.so") == CONTENT["kernel.so"]


# ---- damage ----


def _truncate(folder: Path) -> None:
    (folder / "kernel.so").write_bytes(CONTENT["kernel.so"][:-1])


def _flip(folder: Path) -> None:
    data = bytearray(CONTENT["kernel.so"])
    data[1000] ^= 1
    (folder / "kernel.so").write_bytes(bytes(data))


DAMAGES: list[Callable[[Path], object]] = [
    _truncate,
    _flip,
    lambda folder: (folder / "kernel.cpp").unlink(),
    lambda folder: (folder / META_NAME).unlink(),
    lambda folder: (folder / META_NAME).write_text("{"),
    lambda folder: (folder / META_NAME).write_text("[]"),
    lambda folder: (folder / META_NAME).write_text('{"schema": 1, "key": "other", "files": {}}'),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_moved_aside_and_built_again(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    check(cache)
    damage(tmp_path / KEY[:2] / KEY)
    assert cache.lookup(KEY) is None
    check(cache)
    assert len(list((tmp_path / "quarantine").iterdir())) == 1 and "damaged" in caplog.text
    cache.get_or_build(KEY, "kernel", refuse)


def test_damage_after_verification_is_an_error(tmp_path: Path) -> None:
    entry = Cache(tmp_path).get_or_build(KEY, "kernel", write_content)
    _flip(entry.folder)
    with pytest.raises(ToolchainError, match="E0602"):
        entry.read("kernel.so")


# ---- folders that cannot be written ----


@pytest.fixture
def read_only_root() -> Iterator[Path]:
    """A folder without write permission, seen by a user who is not root."""
    root = Path(tempfile.mkdtemp())
    check(Cache(root))
    root.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield root
    finally:
        os.seteuid(user)
        root.chmod(0o755)
        shutil.rmtree(root)


def test_read_only_folder_is_read_and_not_written(read_only_root: Path) -> None:
    other = "cd" + "0" * 62
    cache = Cache(read_only_root)
    cache.get_or_build(KEY, "kernel", refuse)
    with pytest.warns(RuntimeWarning, match=r"cannot be written .*AFC_CACHE_DIR"):
        entry = cache.get_or_build(other, "kernel", write_content)
    assert entry.read("kernel.so") == CONTENT["kernel.so"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        cache.get_or_build("ef" + "0" * 62, "kernel", write_content)
        assert cache.get_or_build(other, "kernel", refuse).hit
    assert not (read_only_root / other[:2]).exists()


def test_root_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        check(Cache(tmp_path / "file" / "cache"))


# ---- location, keys, listings ----


def test_location() -> None:
    assert default_root({"AFC_CACHE_DIR": "/a b", "XDG_CACHE_HOME": "/x"}) == Path("/a b")
    assert default_root({"AFC_CACHE_DIR": "rel"}) == Path.cwd() / "rel"
    assert default_root({"AFC_CACHE_DIR": "", "XDG_CACHE_HOME": "/x"}) == Path("/x/afc")
    assert default_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "afc"


def test_key_depends_on_all_its_parts() -> None:
    def key(
        texts: tuple[str, ...] = ("a;", "b;"), flags: tuple[str, ...] = ("-O3",), arch: str = "sm_80"
    ) -> str:
        return cache_key(texts, flags=flags, compiler="c 1", arch=arch, abi_version=1)

    keys = [
        key(),
        key(("a; b;",)),
        key(("b;", "a;")),
        key(flags=("-O", "3")),
        key(arch="sm_86"),
        cache_key(("a;", "b;"), flags=("-O3",), compiler="c 2", arch="sm_80", abi_version=1),
        cache_key(("a;", "b;"), flags=("-O3",), compiler="c 1", arch="sm_80", abi_version=2),
        cache_key(("a;", "b;"), flags=("-O3",), compiler="c 1", arch="sm_80", abi_version=1, salt="x"),
    ]
    assert len(set(keys)) == len(keys)
    assert key(("a;// d", '#line 1 "x"\nb; /* c */\n')) == key()


def test_listing_size_and_cleaning(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    check(cache)
    kept = cache.keep_failure("bad", {"bad.cu": "x"})
    assert (kept / "bad.cu").read_text() == "x"
    (info,) = cache.entries()
    assert (info.key, info.label) == (KEY, "kernel")
    assert info.bytes >= sum(map(len, CONTENT.values())) and cache.size() > info.bytes
    assert cache.clean(older_than_seconds=3600) > 0 and len(cache.entries()) == 1 and not kept.exists()
    assert cache.clean() >= info.bytes and cache.entries() == []
    check(cache)


def test_stale_staging_is_swept(tmp_path: Path) -> None:
    old, new = tmp_path / "staging" / "1-old", tmp_path / "staging" / "2-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    check(Cache(tmp_path))
    assert not old.exists() and new.exists()
