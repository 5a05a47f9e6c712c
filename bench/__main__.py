# SPDX-License-Identifier: Apache-2.0
"""``python -m bench --group plain --systems ours,fa2,cudnn --out FILE [--quick] [--deadline SECONDS]``.

Exit codes: 0 measured, 1 nothing was measured, 2 usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

from bench import cells, limits, machine, peers, report
from bench.protocol import QUICK, Protocol
from bench.run import Options, clock_of, names, planned_seconds, run
from bench.sampler import open_sampler

RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    start = time.monotonic()
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        if given.show:
            print(report.table(report.read(given.show)))
            return 0
        chosen = cells.select(given.group, given.passes, given.cells, given.dtype)
        options = _options(given)
        origin = machine.source(given.commit, given.dirty)
    except (OSError, RuntimeError, ValueError, report.SchemaError) as error:
        parser.error(str(error))
    plan = _print_plan(chosen, options)
    if given.plan:
        return 0
    if plan > given.deadline:
        print(f"the deadline of {given.deadline:.0f} s is shorter: the last cells may not run")
    return _measure(given, chosen, options, origin, start)


def _measure(
    given: argparse.Namespace, chosen: list[cells.Cell], options: Options, origin: report.Json, start: float
) -> int:
    out = given.out or RESULTS / f"{'-'.join(given.group)}.json"
    sampler = open_sampler(machine.gpu_uuid(options.device))
    whole = partial(
        report.result,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        source=origin,
        machine={
            **machine.machine(options.device, sampler),
            "arch": options.arch,
            "limits": options.limits,
            "triton_override_arch": os.environ.get("TRITON_OVERRIDE_ARCH"),
        },
        versions=machine.versions(),
        protocol=options.protocol,
        clock=clock_of(options.device).name,
        readings_from=sampler.source,
    )

    def publish(done: list[report.Json], not_run: list[report.Json]) -> None:
        report.write(out, whole(cells=done, not_run=not_run))

    def remaining() -> float:
        return float(given.deadline) - (time.monotonic() - start)

    run(chosen, options, sampler, remaining, publish, partial(print, flush=True))
    final = report.read(out)
    print(f"\n{out}\n\n{report.table(final)}")
    return 0 if final["cells"] else 1


def _print_plan(chosen: list[cells.Cell], options: Options) -> float:
    total = 0.0
    for cell in chosen:
        seconds = planned_seconds(cell, options)
        total += seconds
        print(f"plan: {cell.name}: {', '.join(names(cell, options))}: about {seconds:.0f} s")
    print(f"plan: {len(chosen)} cells, about {total:.0f} s", flush=True)
    return total


def _options(given: argparse.Namespace) -> Options:
    protocol = QUICK if given.quick else Protocol()
    changes = {
        "burst_rounds": given.burst_rounds,
        "sustained_rounds": given.sustained_rounds,
        "seed": given.seed,
    }
    protocol = replace(protocol, **{name: value for name, value in changes.items() if value is not None})
    _require_known(given.systems, ["ours", *peers.PEERS])
    _require_known(given.rope, list(peers.ROPE_STYLES))
    device = torch.device(given.device)
    clock_of(device)
    return Options(given.systems, given.rope, protocol, device, given.pair, given.arch, given.limits)


def _require_known(values: list[str], known: list[str]) -> None:
    for value in values:
        if value.split("+")[0] not in known:
            raise ValueError(f"expected some of {', '.join(known)}, got {value!r}")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Time afc's kernels beside other systems."
    )
    add = parser.add_argument
    add("--group", type=_words, default=["plain"], help=f"some of {','.join(cells.GROUPS)}")
    add("--systems", type=_words, default=["ours", "fa2"], help=f"some of ours,{','.join(peers.PEERS)}")
    add("--rope", type=_words, default=["compiled"], help="how peers rotate in RoPE cells: compiled,eager")
    add("--passes", type=_words, default=list(cells.PASSES), help="fwd,bwd")
    add("--cells", default="", help="only cells whose name has all these words, such as 'D128 N2048'")
    add("--dtype", choices=cells.DTYPES, help="instead of the cells' own")
    add("--pair", help="system to enter twice for the A/A ratio (default: the first that runs)")
    add("--arch", help="target for afc, such as sm_80 (default: this machine's)")
    add("--limits", choices=limits.KNOWN, help="blocks on an SM as on this GPU, for afc's kernels")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    add("--out", type=Path, help="result file (default: bench/results/<group>.json)")
    add("--quick", action="store_true", help="few rounds; the file says that it proves nothing")
    add("--deadline", type=float, default=float("inf"), help="seconds; no cell starts that would not fit")
    add("--burst-rounds", type=int, help="default 15")
    add("--sustained-rounds", type=int, help="default 5")
    add("--seed", type=int, help="of the inputs and of the order of systems")
    add("--commit", help="of the code that is timed (else AFC_BENCH_COMMIT, else git)")
    add("--dirty", action=argparse.BooleanOptionalAction, help="whether the code differs from the commit")
    add("--plan", action="store_true", help="print what would run and how long it takes, and stop")
    add("--show", type=Path, metavar="FILE", help="print the table of a result file, and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
