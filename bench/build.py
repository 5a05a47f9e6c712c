# SPDX-License-Identifier: Apache-2.0
"""What building for GPUs costs: ``python -m bench.build --out FILE [--rounds N] [--patience SECONDS]``.

Seconds of time and of processors for one variant (forward and backward, one architecture): the first build
of a machine, with an empty cache; the next, with the host objects there; and `afc.load` of what is built, in
a process of its own. Needs a CUDA compiler, no GPU. `others` are the seconds of processors that the rest of
the machine took meanwhile: a round counts as quiet below a tenth of a processor, and medians are of those.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from bench import machine
from bench.sampler import NoSampler

PROGRAM = machine.REPOSITORY / "examples" / "llama.attn"
HERTZ = os.sysconf("SC_CLK_TCK")
VARIANT = ("--backend", "cuda", "--arch", "sm_90", "-D", "D=64")
LOAD = """
import sys, time
{before}
start = time.perf_counter()
import afc
afc.load(sys.argv[1], D=64, dtype="bfloat16", backend="cuda", arch="sm_90")
print(time.perf_counter() - start)
"""


def main() -> int:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine")
    given = parser.parse_args()
    rounds = [one_round(given.patience) for _ in range(given.rounds)]
    quiet = {name: [r[name] for r in rounds if is_quiet(r[name])] for name in rounds[0]}
    result = {
        "schema": "afc-build-1",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source": machine.source(None, None),
        "machine": machine.machine(torch.device("cpu"), NoSampler("a compiler")),
        "processors": len(os.sched_getaffinity(0)),
        "versions": machine.versions(),
        "median of quiet rounds": {
            name: {
                "rounds": len(found),
                **{key: statistics.median(r[key] for r in found) for key in found[0]},
            }
            for name, found in quiet.items()
            if found
        },
        "rounds": rounds,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["median of quiet rounds"], indent=1))
    return 0


def one_round(patience: float) -> dict[str, dict[str, float]]:
    """The first build in an empty cache, the next one, and loading what is there."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "AFC_CACHE_DIR": f"{folder}/cache"}

        def build(dtype: str) -> None:
            command = [sys.executable, "-m", "afc", "compile", str(PROGRAM), *VARIANT, "--dtype", dtype]
            run([*command, "-o", f"{folder}/{dtype}.so"], environ)

        def load(before: str) -> float:
            return float(run([sys.executable, "-c", LOAD.format(before=before), str(PROGRAM)], environ))

        found = {
            "first build": timed(lambda: build("bf16"), patience),
            "next build": timed(lambda: build("fp16"), patience),
        }
        load("")  # makes the module of the cache and the record of the call
        wait(patience)
        found["warm load"] = {"wall": load(""), "wall beside torch": load("import torch")}
        return found


def is_quiet(measured: dict[str, float]) -> bool:
    """Whether others left the processors alone."""
    return measured.get("others", 0.0) < 0.1 * measured["wall"]


def run(command: Sequence[str], environ: dict[str, str]) -> str:
    """Output of a command."""
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environ, cwd=machine.REPOSITORY
    )
    return done.stdout


def timed(call: Callable[[], Any], patience: float) -> dict[str, float]:
    """Seconds that a call takes, and seconds of processors of the processes that it starts."""
    wait(patience)
    start, before, clock = time.perf_counter(), children(), ticks()
    call()
    wall, used = time.perf_counter() - start, children() - before
    idle, total = (b - a for a, b in zip(clock, ticks(), strict=True))
    return {"wall": wall, "processors": used, "others": max(0.0, (total - idle) / HERTZ - used)}


def children() -> float:
    """Seconds of processors that finished children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait(patience: float) -> None:
    """Waits for others to leave the processors alone."""
    end = time.monotonic() + patience
    while True:
        before = ticks()
        time.sleep(1.0)
        idle, total = (b - a for a, b in zip(before, ticks(), strict=True))
        busy = (os.cpu_count() or 1) * (1 - idle / max(total, 1))
        if busy < 0.1 or time.monotonic() > end:
            return


def ticks() -> tuple[int, int]:
    """Idle time of all processors and all time, as Linux counts them."""
    values = [int(v) for v in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return values[3] + values[4], sum(values)


if __name__ == "__main__":
    sys.exit(main())
