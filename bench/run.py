# SPDX-License-Identifier: Apache-2.0
"""One cell after the other: build, check, time, write. Stops between cells when the deadline is near."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import ours, peers, report
from bench.cells import Cell
from bench.check import check
from bench.inputs import System, Tensors, assemble, draw, input_sets
from bench.protocol import Clock, CpuClock, CudaClock, Protocol, measure
from bench.sampler import Sampler

TWIN = "#2"
# Typical seconds to build and check one system of a cell, mostly compiling; planning only.
SETUP_SECONDS = {"ours": 8.0, "flex": 15.0, "flex_a100": 15.0, "flex_flash": 25.0, "fa4": 20.0}
SETUP_SECONDS_OTHER = 2.0


class DeadlineNear(Exception):
    """What is left of the deadline is too short for the rest of a cell."""


@dataclass(frozen=True)
class Options:
    """``systems`` as on the command line; ``pair`` is entered twice (None: the first that runs).

    ``arch`` and ``limits`` (of ``bench.limits``) are those of afc's kernels.
    """

    systems: list[str]
    rope_styles: list[str]
    protocol: Protocol
    device: torch.device
    pair: str | None = None
    arch: str | None = None
    limits: str | None = None


@dataclass
class Ready:
    """One cell's systems that are built and right, the others with the reason, and the A/A pair."""

    sets: list[Tensors]
    systems: dict[str, System] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    pair: tuple[str, str] = ("", "")


def names(cell: Cell, options: Options) -> list[str]:
    """The systems to try in this cell."""
    expanded = [name for given in options.systems for name in peers.expand(given, cell, options.rope_styles)]
    return list(dict.fromkeys(expanded))


def planned_seconds(cell: Cell, options: Options, missing: Collection[str] = ()) -> float:
    """Set-up and measuring of one cell, if every system runs except those that are known to be missing."""
    wanted = [name for name in names(cell, options) if name not in missing]
    setup = sum(SETUP_SECONDS.get(name.split("+")[0], SETUP_SECONDS_OTHER) for name in wanted)
    return setup + options.protocol.planned_seconds(len(wanted) + 1)


def clock_of(device: torch.device) -> Clock:
    """CUDA events on a GPU, the wall clock elsewhere."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def run(
    cells: list[Cell],
    options: Options,
    sampler: Sampler,
    remaining: Callable[[], float],
    publish: Callable[[list[report.Json], list[report.Json]], None],
    say: Callable[[str], None] = print,
) -> None:
    """Measure the cells in order and ``publish(measured, not run)`` after each.

    ``remaining()`` is the number of seconds left. A cell that fails is reported and the next one starts; a
    cell that does not fit is not begun, nor is any after it, so that what was measured does not depend on
    luck.
    """
    done: list[report.Json] = []
    not_run: list[report.Json] = []
    for i, cell in enumerate(cells):
        try:
            missing = set(done[-1]["skipped"]) if done else set()
            _require(remaining, planned_seconds(cell, options, missing), "for the cell, set-up included")
            done.append(_run_cell(cell, options, sampler, remaining, say))
        except DeadlineNear as error:
            not_run += [{"cell": later.name, "reason": str(error)} for later in cells[i:]]
            publish(done, not_run)
            return
        except Exception as error:  # one broken system or cell must not lose the others' results
            not_run.append({"cell": cell.name, "reason": _reason(error)})
        publish(done, not_run)
        _free(options.device)


def _require(remaining: Callable[[], float], needed: float, when: str) -> None:
    left = remaining()
    if left < needed:
        raise DeadlineNear(f"deadline: {left:.0f} s left, {needed:.0f} s needed ({when})")


def _run_cell(
    cell: Cell, options: Options, sampler: Sampler, remaining: Callable[[], float], say: Callable[[str], None]
) -> report.Json:
    start = time.perf_counter()
    ready = prepare(cell, options)
    for name, reason in ready.skipped.items():
        say(f"  {cell.name}: skipped {name}: {reason.splitlines()[0][:200]}")
    if not ready.systems:
        raise RuntimeError("no system runs: " + "; ".join(f"{n}: {r}" for n, r in ready.skipped.items()))
    measured_from = time.perf_counter()
    _require(remaining, options.protocol.planned_seconds(len(ready.systems)), "to measure, after set-up")
    calls = {name: system.call for name, system in ready.systems.items()}
    measurement = measure(calls, options.protocol, clock_of(options.device), sampler.read)
    seconds = (measured_from - start, time.perf_counter() - measured_from)
    say(f"  {cell.name}: {len(calls)} systems, set-up {seconds[0]:.0f} s, measured in {seconds[1]:.0f} s")
    return report.cell_result(
        cell,
        measurement,
        ready.pair,
        options.protocol,
        checks=ready.checks,
        skipped=ready.skipped,
        input_sets=len(ready.sets),
        seconds=seconds,
    )


def prepare(cell: Cell, options: Options) -> Ready:
    """Build and check every system; the A/A twin is built anew, on tensors of its own."""
    sets = draw(cell, options.device, input_sets(cell, l2_bytes(options.device)), options.protocol.seed)
    ready = Ready(sets)
    for name in names(cell, options):
        _add(ready, name, name, cell, options)
    if ready.systems:
        first = options.pair if options.pair in ready.systems else next(iter(ready.systems))
        ready.pair = (first, first + TWIN)
        _add(ready, first, ready.pair[1], cell, options)
        if ready.pair[1] not in ready.systems:
            raise RuntimeError(f"{first} ran once and not twice: {ready.skipped[ready.pair[1]]}")
    return ready


def _add(ready: Ready, name: str, entry: str, cell: Cell, options: Options) -> None:
    try:
        system = _build(name, cell, ready.sets, options)
        ready.checks[entry] = check(system.outputs(), ready.sets[0], cell)
        ready.systems[entry] = system
    except Exception as error:  # third-party code: any failure is a reason to go into the file, not to stop
        ready.skipped[entry] = _reason(error)


def _build(name: str, cell: Cell, sets: list[Tensors], options: Options) -> System:
    if name == "ours":
        return assemble(name, cell, sets, ours.attend(cell, options.device, options.arch, options.limits))
    return peers.build(name, cell, sets)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def l2_bytes(device: torch.device) -> int:
    """Size of the GPU's L2 cache, 0 where there is none to speak of."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
