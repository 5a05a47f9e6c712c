# SPDX-License-Identifier: Apache-2.0
"""The cache with real compilers: eight processes at once, processes killed anywhere, damaged files."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afc.build import Cache
from afc.build.cache import META_NAME

PROGRAM = "attention lm(q, k, v) = softmax(causal(scaled_dot_product(q, k; scale = {scale}))) @ v\n"

# Loads a program, runs it on numbers whose result is known, and prints where the module lies.
USER = """
import sys, afc, numpy as np
kernel = afc.load(sys.argv[1], D=16, backend="cpu", backward=False)
q = np.zeros((1, 1, 3, 16), np.float32)
v = np.arange(48, dtype=np.float32).reshape(q.shape)
mean = v.cumsum(2) / np.arange(1, 4, dtype=np.float32)[:, None]
assert np.allclose(kernel.lm(q, q, v), mean, rtol=1e-6)
print(kernel.__file__)
"""


def start(program: Path, root: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "AFC_CACHE_DIR": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(program)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> Path:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return Path(out.strip())


def whole(root: Path) -> int:
    """Number of entries; each must be whole."""
    cache = Cache(root)
    entries = cache.entries()
    assert all(cache.lookup(info.key) is not None for info in entries)
    assert len(entries) == len([p for p in root.glob("??/*") if len(p.name) == 64])  # nothing half made
    return len(entries)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A program, and a cache that eight processes filled at once."""
    folder = tmp_path_factory.mktemp("processes")
    program, root = folder / "first.attn", folder / "cache"
    program.write_text(PROGRAM.format(scale="0.5"))
    processes = [start(program, root) for _ in range(8)]
    assert len({finish(process) for process in processes}) == 1
    return program, root


def test_eight_processes_fill_an_empty_cache(shared: tuple[Path, Path]) -> None:
    """All load one module; what it is made of was made once, and nothing else is left."""
    _, root = shared
    assert whole(root) == 4  # the attention's code, two host sources, the module
    assert list((root / "staging").iterdir()) == [] and not (root / "quarantine").exists()


def test_killed_processes_leave_nothing_broken(shared: tuple[Path, Path], tmp_path: Path) -> None:
    """Pairs of processes build one program and are killed at random points, some with the compilers that they
    started, some without: these go on writing. Whoever comes later gets whole entries and right numbers.
    """
    _, root = shared
    generator, stop, killed, programs = random.Random(), time.monotonic() + 7, 0, []
    while time.monotonic() < stop or killed < 4:
        program = tmp_path / f"lm{len(programs)}.attn"
        program.write_text(PROGRAM.format(scale=generator.random()))
        pair = [start(program, root) for _ in range(2)]
        for process in pair:
            time.sleep(generator.uniform(0.2, 1.0))
            if process.poll() is None:
                killed += 1
                (os.killpg if generator.random() < 0.5 else os.kill)(process.pid, signal.SIGKILL)
            else:
                finish(process)
        for process in pair:
            process.communicate(timeout=60)
        whole(root)
        programs.append(program)
    users = [start(program, root) for program in programs[-2:]]
    assert [finish(user).stem for user in users] == [program.stem for program in programs[-2:]]
    whole(root)


def test_damaged_files_are_found_and_made_again(shared: tuple[Path, Path]) -> None:
    """One byte of every file of the program's entries, the module that would be imported among them."""
    program, root = shared
    made = [info for info in Cache(root).entries() if info.label.startswith(("lm_", "module first"))]
    assert len(made) >= 2
    for info in made:
        for file in info.folder.iterdir():
            if file.name != META_NAME and file.stat().st_size:
                data = bytearray(file.read_bytes())
                data[random.randrange(len(data))] ^= 0x10
                file.write_bytes(bytes(data))
    damaged = [info for info in made if Cache(root).lookup(info.key) is None]
    assert len(damaged) == len(made)
    assert finish(start(program, root)).stem == "first"
    aside = {path.name.partition("-")[0] for path in (root / "quarantine").iterdir()}
    module, code = (next(i for i in made if i.label.startswith(x)) for x in ("module first", "lm_"))
    assert Cache(root).lookup(module.key) and Cache(root).lookup(code.key) and {module.key, code.key} <= aside
