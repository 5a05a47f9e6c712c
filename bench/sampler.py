# SPDX-License-Identifier: Apache-2.0
"""Reads the card's SM clock, power and temperature by NVML or nvidia-smi. It only reads; it sets nothing."""

from __future__ import annotations

import importlib
import subprocess
from typing import Any

QUERY = ("clocks.sm", "power.draw.instant", "temperature.gpu")
FIELDS = ("sm_mhz", "watts", "celsius")


class NvmlSampler:
    """One reading costs well under a millisecond, so it can be taken while a block runs."""

    source = "nvml"

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def read(self) -> dict[str, float]:
        """SM clock in MHz, power in W, temperature in °C."""
        nvml = self._nvml
        clock = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
        heat = nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)
        return {"sm_mhz": float(clock), "watts": self._milliwatts() / 1e3, "celsius": float(heat)}

    def _milliwatts(self) -> float:
        """Power now; the classic counter averages over a second on recent cards, longer than a block."""
        nvml = self._nvml
        try:
            field = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
        except nvml.NVMLError:
            return float(nvml.nvmlDeviceGetPowerUsage(self._handle))
        if field.nvmlReturn == nvml.NVML_SUCCESS:
            return float(field.value.uiVal)
        return float(nvml.nvmlDeviceGetPowerUsage(self._handle))

    def driver(self) -> str:
        """Driver version."""
        version = self._nvml.nvmlSystemGetDriverVersion()
        return str(version.decode() if isinstance(version, bytes) else version)


class SmiSampler:
    """The same through a process per reading: slower, but needs no package."""

    source = "nvidia-smi"

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def read(self) -> dict[str, float]:
        """SM clock in MHz, power in W, temperature in °C."""
        return dict(zip(FIELDS, map(float, self._query(QUERY)), strict=True))

    def driver(self) -> str:
        """Driver version."""
        return self._query(("driver_version",))[0]

    def _query(self, names: tuple[str, ...]) -> list[str]:
        query = [f"--id={self._uuid}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=True)
        return [word.strip() for word in done.stdout.strip().split(",")]


class NoSampler:
    """Where nothing can be read; ``source`` says why, and the file's readings are empty."""

    def __init__(self, reason: str) -> None:
        self.source = f"none: {reason}"

    def read(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def driver(self) -> str:
        """Unknown here."""
        return "unknown"


Sampler = NvmlSampler | SmiSampler | NoSampler


def open_sampler(uuid: str | None) -> Sampler:
    """The best reader that works for the card with this UUID (``GPU-…``); None: no card."""
    if uuid is None:
        return NoSampler("not a GPU run")
    reasons = []
    for kind in (NvmlSampler, SmiSampler):
        try:
            sampler = kind(uuid)
            sampler.read()
        except Exception as error:  # NVML's own error classes exist only where it could be imported
            reasons.append(f"{kind.source}: {type(error).__name__}: {error}")
        else:
            return sampler
    return NoSampler("; ".join(reasons))
