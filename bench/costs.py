# SPDX-License-Identifier: Apache-2.0
"""What a GPU module costs beside time on the GPU: ``python -m bench.costs --out FILE``.

Peak device memory of forward and backward of a long sequence beside PyTorch's flash backend, host time of a
call, seconds to compile and to load. Seconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import afc
from bench import machine
from bench.peers import rope_tables, rotate_half_split
from bench.sampler import open_sampler

EXAMPLES = machine.REPOSITORY / "examples"
Tensor = torch.Tensor
LONG = {"B": 1, "Hq": 32, "Hk": 8, "N": 65536, "D": 128}
CALLS = 2000


def main() -> int:
    """Measure everything and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", default="compute_80:sm_90")
    parser.add_argument("--commit")
    given = parser.parse_args()
    device = torch.device("cuda")
    found = {"memory": memory(given.arch), "host": host(given.arch), "build": build(given.arch)}
    result = {
        "schema": "afc-costs-1",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source": machine.source(given.commit, None),
        "machine": machine.machine(device, open_sampler(machine.gpu_uuid(device))),
        "versions": machine.versions(),
        "arch": given.arch,
        **found,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


def example(name: str, attention: str, arch: str, D: int) -> Callable[..., Tensor]:
    """One of the examples in bfloat16."""
    module = afc.load(EXAMPLES / f"{name}.attn", D=D, dtype=torch.bfloat16, backend="cuda", arch=arch)
    return getattr(module, attention)  # type: ignore[no-any-return]


# ---- memory --------------------------------------------------------------------------------------


def memory(arch: str) -> dict[str, Any]:
    """Peak bytes of forward and backward, inputs and gradients included: Llama's attention, and causal
    attention of the flash backend without rotation and behind one in PyTorch, each run once before.
    """
    llama = example("llama", "llama", arch, LONG["D"])
    tables = rope_tables(LONG["N"], LONG["D"], 500000.0, torch.bfloat16, torch.device("cuda"))
    rotate: Callable[..., tuple[Tensor, Tensor]] = torch.compile(rotate_half_split)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(*rotate(q, k, *tables), v)

    systems = {"ours, RoPE included": llama, "fa2": flash, "fa2 behind RoPE": rotated}
    peaks = {name: peak(call) for name, call in systems.items()}
    return {"cell": LONG, "bytes": peaks, "ours over fa2": peaks["ours, RoPE included"] / peaks["fa2"]}


def peak(call: Callable[..., Tensor]) -> int:
    """Peak bytes of the second of two runs of forward and backward."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        q, k, v = (
            torch.randn(
                LONG["B"], h, LONG["N"], LONG["D"], device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for h in (LONG["Hq"], LONG["Hk"], LONG["Hk"])
        )
        o = call(q, k, v)
        gradients = torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        del q, k, v, o, gradients
    return most


# ---- host time -----------------------------------------------------------------------------------


def host(arch: str) -> dict[str, Any]:
    """Microseconds of the host for a call without gradients, by the number of kernels that it launches:
    medians of 20 blocks of calls, each short enough that the launch queue never fills.
    """
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = torch.zeros(1, 64, device="cuda", dtype=torch.int32)
    causal, llama = example("causal", "causal_lm", arch, 64), example("llama", "llama", arch, 64)
    packed = example("packed", "packed", arch, 64)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[[], object]] = {
        "causal, 1 kernel": lambda: causal(q, k, v),
        "llama": lambda: llama(q, k, v),
        "packed documents": lambda: packed(q, k, v, qdoc=ids, kdoc=ids, qpos=ids, kpos=ids),
        "scaled_dot_product_attention": lambda: sdpa(q, k, v, is_causal=True),
    }
    found = {}
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for name, call in calls.items():
            found[name] = {"kernels": launches(call), "microseconds": microseconds(call)}
    return found


def launches(call: Callable[[], object]) -> int:
    """Kernels of one call, as the profiler counts them."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(e.device_type.name == "CUDA" for e in profile.events() or ())


def microseconds(call: Callable[[], object], block: int = 100) -> float:
    """Median host time of a call."""
    times = []
    for _ in range(CALLS // block):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(block):
            call()
        times.append((time.perf_counter() - start) / block)
        torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


# ---- compiling and loading -----------------------------------------------------------------------


def build(arch: str) -> dict[str, Any]:
    """Seconds of `afc compile` on two cores with the host object made before, and of a warm `afc.load`."""
    path = EXAMPLES / "llama.attn"
    afc_command = ["taskset", "-c", "0,1", sys.executable, "-m", "afc", "compile", str(path)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "AFC_CACHE_DIR": f"{folder}/cache"}

        def compile_to(head: int) -> float:
            output = Path(folder) / f"cold{head}.so"
            options = ["-o", str(output), "--backend", "cuda", "--arch", arch, "-D", f"D={head}"]
            start = time.perf_counter()
            subprocess.run([*afc_command, *options], check=True, capture_output=True, env=environment)
            return time.perf_counter() - start

        first = compile_to(32)
        cold = {head: compile_to(head) for head in (64, 96, 128)}
    example("llama", "llama", arch, 64)
    warm = []
    for _ in range(5):
        start = time.perf_counter()
        example("llama", "llama", arch, 64)
        warm.append(time.perf_counter() - start)
    return {
        "first compile": first,
        "compile with host object, by head size": cold,
        "warm load": statistics.median(warm),
        "cores": 2,
    }


if __name__ == "__main__":
    sys.exit(main())
