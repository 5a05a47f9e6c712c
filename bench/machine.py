# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on: card, versions, source."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.sampler import Sampler

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("afc", "torch", "triton", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-cu13")


def gpu_uuid(device: torch.device) -> str | None:
    """``GPU-…`` as nvidia-smi prints it, None on a CPU."""
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def machine(device: torch.device, sampler: Sampler) -> dict[str, Any]:
    """Device and host, by name; ``uuid`` tells one card from its sister."""
    facts: dict[str, Any] = {
        "device": device.type,
        "processor": platform.machine(),
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": card.name,
            "uuid": gpu_uuid(device),
            "driver": sampler.driver(),
            "sm_count": card.multi_processor_count,
            "l2_bytes": card.L2_cache_size,
            "memory_bytes": card.total_memory,
        }
    return facts


def versions() -> dict[str, str]:
    """Installed versions of what takes part, CUDA and cuDNN as PyTorch was built with."""
    cudnn: Any = torch.backends.cudnn
    found = {"cuda": str(torch.version.cuda), "cudnn": str(cudnn.version() if cudnn.is_available() else None)}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def source(commit: str | None, dirty: bool | None) -> dict[str, Any]:
    """Commit, and whether the tree differs: as given, else from AFC_BENCH_COMMIT and _DIRTY, else from git.

    ``dirty`` is None where nothing tells. Raises ValueError for an AFC_BENCH_DIRTY other than 0 or 1.
    """
    commit = commit or os.environ.get("AFC_BENCH_COMMIT")
    if commit is None:
        return {"commit": _git("rev-parse", "HEAD") or "unknown", "dirty": _tree_is_dirty()}
    if dirty is None and "AFC_BENCH_DIRTY" in os.environ:
        text = os.environ["AFC_BENCH_DIRTY"]
        if text not in ("0", "1"):
            raise ValueError(f"AFC_BENCH_DIRTY: expected 0 or 1, got {text!r}")
        dirty = text == "1"
    return {"commit": commit, "dirty": dirty}


def _tree_is_dirty() -> bool | None:
    # Result files change with every run and say nothing about the code that was timed.
    status = _git("status", "--porcelain", "--", ".", ":!bench/results")
    return None if status is None else bool(status)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
