# SPDX-License-Identifier: Apache-2.0
"""When each system runs, and for how long. Knows callables and clocks, nothing about attention.

A power-limited card remembers: the clock falls in two steps within 0.1 s of full load, and the draw of one
system colours the time of the next for as long. So a ratio counts only between systems of one process on one
card, in random order, and in two regimes:

burst      idle first, then one short block of calls: what a short run sees
sustained  the system alone until the card has settled, then one long block: what training sees

One system is entered twice, built twice (the A/A pair). If its ratio is not 1 within the tolerance, the card
or the machine was not steady, and the file says that it proves nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any
from typing import Protocol as Interface

Call = Callable[[], object]
Probe = Callable[[], dict[str, float]]

REGIMES = ("burst", "sustained")
MINIMUM_ROUNDS = {"burst": 15, "sustained": 5}
SETTLE_BLOCK_MS = 30.0


@dataclass(frozen=True)
class Protocol:
    """Lengths in milliseconds where named so. The defaults are the protocol; weaker is a shortfall."""

    burst_rounds: int = 15
    idle_ms: float = 300.0
    burst_ms: float = 20.0
    sustained_rounds: int = 11
    settle_ms: float = 400.0
    sustained_ms: float = 150.0
    tolerance: float = 0.01
    seed: int = 0
    quick: bool = False

    def __post_init__(self) -> None:
        if self.burst_rounds < 1 or self.sustained_rounds < 1:
            raise ValueError(
                "rounds: expected at least 1 in each regime, "
                f"got {self.burst_rounds} and {self.sustained_rounds}"
            )

    def shortfalls(self) -> list[str]:
        """What this run does less strictly than the protocol; with any of it, the numbers prove nothing."""
        full = Protocol()
        checks = (
            (self.quick, "quick mode"),
            (self.burst_rounds < MINIMUM_ROUNDS["burst"], f"{self.burst_rounds} burst rounds, fewer than 15"),
            (
                self.sustained_rounds < MINIMUM_ROUNDS["sustained"],
                f"{self.sustained_rounds} sustained rounds, fewer than 5",
            ),
            (self.idle_ms < full.idle_ms, f"{self.idle_ms:g} ms idle before a burst, less than 300"),
            (self.burst_ms > full.burst_ms, f"bursts of {self.burst_ms:g} ms, longer than 20"),
            (self.settle_ms < full.settle_ms, f"{self.settle_ms:g} ms to settle, less than 400"),
            (
                self.sustained_ms < full.sustained_ms,
                f"sustained blocks of {self.sustained_ms:g} ms, less than 150",
            ),
            (self.tolerance > full.tolerance, f"A/A tolerance {self.tolerance:g}, wider than 0.01"),
        )
        return [text for fails, text in checks if fails]

    def planned_seconds(self, systems: int) -> float:
        """Wall time that measuring this many systems (the A/A twin included) takes, set-up excluded."""
        burst = self.burst_rounds * (self.idle_ms + self.burst_ms)
        sustained = self.sustained_rounds * (self.settle_ms + self.sustained_ms)
        return systems * (burst + sustained) / 1e3

    def to_json(self) -> dict[str, Any]:
        """All fields, by name."""
        return asdict(self)


QUICK = Protocol(burst_rounds=5, sustained_rounds=2, quick=True)


class Clock(Interface):
    """Times a block of calls on one device."""

    name: str

    def block(self, call: Call, calls: int, probe: Probe | None = None) -> tuple[float, dict[str, float]]:
        """Milliseconds per call over ``calls`` calls in a row, and what the probe read while they ran."""

    def synchronize(self) -> None:
        """Return when the device is idle."""


class CpuClock:
    """Wall clock, for systems that return when they are done. The probe reads after the block."""

    name = "perf_counter"

    def block(self, call: Call, calls: int, probe: Probe | None = None) -> tuple[float, dict[str, float]]:
        """See ``Clock.block``."""
        start = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - start
        return elapsed * 1e3 / calls, probe() if probe else {}

    def synchronize(self) -> None:
        """Nothing is asynchronous here."""


class CudaClock:
    """CUDA events on the current stream. The host runs ahead, so the probe reads while the device works."""

    name = "cuda_events"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("device: expected a CUDA device, and PyTorch sees none")
        self._cuda: Any = torch.cuda

    def block(self, call: Call, calls: int, probe: Probe | None = None) -> tuple[float, dict[str, float]]:
        """See ``Clock.block``."""
        start = self._cuda.Event(enable_timing=True)
        end = self._cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        reading = probe() if probe else {}
        end.synchronize()
        return float(start.elapsed_time(end)) / calls, reading

    def synchronize(self) -> None:
        """See ``Clock.synchronize``."""
        self._cuda.synchronize()


@dataclass(frozen=True)
class Sample:
    """One block of one system: milliseconds per call, and what the probe read."""

    ms: float
    reading: dict[str, float] = field(default_factory=dict)


@dataclass
class Regime:
    """All rounds of one regime: the order of the systems in each, calls per block, samples per system."""

    orders: list[list[str]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def times(self, system: str) -> list[float]:
        """Milliseconds per call of each round."""
        return [sample.ms for sample in self.samples[system]]


Measurement = dict[str, Regime]


def calibrate(call: Call, clock: Clock) -> float:
    """Milliseconds per call, roughly, after one call that pays for whatever happens only once."""
    call()
    clock.synchronize()
    return clock.block(call, 3)[0]


def measure(
    systems: Mapping[str, Call], protocol: Protocol, clock: Clock, probe: Probe | None = None
) -> Measurement:
    """Time every system in both regimes. Raises ValueError without systems, and what a system raises."""
    if not systems:
        raise ValueError("systems: expected at least one, got none")
    rough = {name: calibrate(call, clock) for name, call in systems.items()}
    shuffle = random.Random(protocol.seed)

    def idle(name: str) -> None:
        clock.synchronize()
        time.sleep(protocol.idle_ms / 1e3)
        systems[name]()

    def settle(name: str) -> None:
        _settle(systems[name], rough[name], protocol.settle_ms, clock)

    def regime(block_ms: float, waking: int, rounds: int, prepare: Callable[[str], None]) -> Regime:
        calls = {name: max(1, int(block_ms / ms) - waking) for name, ms in rough.items()}
        result = Regime(calls=calls, samples={name: [] for name in systems})
        for _ in range(rounds):
            result.orders.append(shuffle.sample(list(systems), len(systems)))
            for name in result.orders[-1]:
                prepare(name)
                result.samples[name].append(Sample(*clock.block(systems[name], calls[name], probe)))
        return result

    return {  # one call of the burst wakes the device and is not counted, so one fewer is
        "burst": regime(protocol.burst_ms, 1, protocol.burst_rounds, idle),
        "sustained": regime(protocol.sustained_ms, 0, protocol.sustained_rounds, settle),
    }


def _settle(call: Call, ms: float, settle_ms: float, clock: Clock) -> None:
    """Keep the device busy with this system, in blocks, so that the host does not queue past the time."""
    calls = max(1, int(SETTLE_BLOCK_MS / ms))
    start = time.perf_counter()
    while (time.perf_counter() - start) * 1e3 < settle_ms:
        clock.block(call, calls)


def pair_ratios(measurement: Measurement, system: str, twin: str) -> dict[str, float]:
    """Median time of a system over that of its twin, per regime: 1 on a steady machine."""
    return {
        regime: median(result.times(system)) / median(result.times(twin))
        for regime, result in measurement.items()
    }


def within_tolerance(ratios: Mapping[str, float], tolerance: float) -> bool:
    """Whether every ratio is 1 to within the tolerance, in either direction (a NaN is not)."""
    return all(abs(ratio - 1.0) <= tolerance for ratio in ratios.values())
