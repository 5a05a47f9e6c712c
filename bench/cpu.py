# SPDX-License-Identifier: Apache-2.0
"""The CPU target: ``python -m bench.cpu --out FILE [--rounds N]``.

Speed beside compiled FlexAttention and PyTorch (medians over rounds in random order, one run), what
a window saves, peak memory of a long sequence, and what compiling and loading cost. Seconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
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

import afc
from bench import machine
from bench.sampler import NoSampler

EXAMPLES = machine.REPOSITORY / "examples"
Run = Callable[[], object]
Tensor = torch.Tensor
sdpa: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention


def main() -> int:
    """Measure everything and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-probe", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_probe:
        print(json.dumps(memory_probe()))
        return 0
    result = {
        "schema": "afc-cpu-1",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source": machine.source(None, None),
        "machine": {**machine.machine(torch.device("cpu"), NoSampler("a CPU")), "model": cpu_model()},
        "versions": machine.versions(),
        "rounds": given.rounds,
        "speed": speed(given.rounds),
        "window": window(given.rounds),
        "documents": documents(given.rounds),
        "memory": memory(),
        "build": build(),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: result[k] for k in ("speed", "window", "documents", "memory", "build")}, indent=1))
    return 0


def cpu_model() -> str:
    """The processor as the kernel names it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "unknown")


def medians(runs: dict[str, Run], rounds: int) -> dict[str, Any]:
    """Median seconds of each run over rounds in random order, after one call to warm up, and all samples."""
    for run in runs.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            start = time.perf_counter()
            runs[name]()
            samples[name].append(time.perf_counter() - start)
    return {name: {"median": statistics.median(s), "samples": s} for name, s in samples.items()}


def tensors(heads: int, length: int, head: int, grad: bool = False) -> list[Tensor]:
    """q, k, v in float32, batch 1."""
    return [torch.randn(1, heads, length, head, requires_grad=grad) for _ in range(3)]


def kernel(name: str, attention: str) -> Any:
    """One of the examples at head size 64 in float32."""
    return getattr(afc.load(EXAMPLES / f"{name}.attn", D=64, dtype=torch.float32, backend="cpu"), attention)


def speed(rounds: int) -> dict[str, Any]:
    """Causal B1 H8 N4096 D64 float32: forward of three systems, backward of ours and PyTorch's."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = tensors(8, 4096, 64)
    ours = kernel("causal", "causal_lm")
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 4096, 4096, device="cpu")
    flex: Any = torch.compile(flex_attention)
    with torch.no_grad():
        exact = sdpa(*(x.double() for x in (q, k, v)), is_causal=True)
        for name, o in (("ours", ours(q, k, v)), ("flex", flex(q, k, v, block_mask=block_mask))):
            error = float((o - exact).norm() / exact.norm())
            if not error < 1e-5:
                raise SystemExit(f"{name} is wrong: relative error {error:.2e}")
        forward = medians(
            {
                "ours": lambda: ours(q, k, v),
                "ours again": lambda: ours(q, k, v),
                "flex_attention": lambda: flex(q, k, v, block_mask=block_mask),
                "sdpa": lambda: sdpa(q, k, v, is_causal=True),
            },
            rounds,
        )
    inputs = tensors(8, 4096, 64, grad=True)
    do = torch.randn(1, 8, 4096, 64)
    outputs = {"ours": ours(*inputs), "sdpa": sdpa(*inputs, is_causal=True)}

    def differentiate(o: Tensor) -> Run:
        return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)

    backward = medians({name: differentiate(o) for name, o in outputs.items()}, rounds)
    return {"cell": "causal B1 H8 N4096 D64 float32", "forward": forward, "backward": backward}


def window(rounds: int) -> dict[str, Any]:
    """Sliding window of 256 beside causal, B1 H2 N16384 D64 float32, both ours."""
    q, k, v = tensors(2, 16384, 64)
    path = "attention windowed(q, k, v) = softmax(sliding_window(scaled_dot_product(q, k); w = 256)) @ v\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "windowed.attn"
        file.write_text(path, encoding="utf-8")
        windowed = afc.load(file, D=64, dtype=torch.float32, backend="cpu").windowed
    causal = kernel("causal", "causal_lm")
    with torch.no_grad():
        found = medians({"causal": lambda: causal(q, k, v), "window": lambda: windowed(q, k, v)}, rounds)
    ratio = found["causal"]["median"] / found["window"]["median"]
    return {"cell": "B1 H2 N16384 D64 float32, window 256", "forward": found, "causal over window": ratio}


def documents(rounds: int) -> dict[str, Any]:
    """Packed documents of 1024 beside causal, B1 H2 N16384 D64 float32, both ours, forward and backward."""
    length = 16384
    text = (
        "attention packed(q, k, v; qdoc[B, M]: int, kdoc[B, N]: int) {\n"
        "    return softmax(causal(document(scaled_dot_product(q, k); qdoc, kdoc))) @ v\n}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "packed.attn"
        file.write_text(text, encoding="utf-8")
        packed = afc.load(file, D=64, dtype=torch.float32, backend="cpu").packed
    causal = kernel("causal", "causal_lm")
    ids = (torch.arange(length) // 1024)[None]
    inputs = tensors(2, length, 64, grad=True)
    do = torch.randn(1, 2, length, 64)

    calls: dict[str, Callable[[], Tensor]] = {
        "causal": lambda: causal(*inputs),
        "documents": lambda: packed(*inputs, qdoc=ids, kdoc=ids),
    }

    def differentiate(call: Callable[[], Tensor]) -> Run:
        return lambda: torch.autograd.grad(call(), inputs, do)

    forward = medians({name: torch.no_grad()(call) for name, call in calls.items()}, rounds)
    both = medians({name: differentiate(call) for name, call in calls.items()}, rounds)
    ratio = {
        f"causal over documents, {name}": found["causal"]["median"] / found["documents"]["median"]
        for name, found in (("forward", forward), ("both", both))
    }
    cell = "B1 H2 N16384 D64 float32, documents of 1024"
    return {"cell": cell, "forward": forward, "forward and backward": both, **ratio}


def memory() -> dict[str, Any]:
    """What `memory_probe` prints in a process of its own."""
    command = [sys.executable, "-m", "bench.cpu", "--out", os.devnull, "--memory-probe"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=machine.REPOSITORY)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def memory_probe() -> dict[str, Any]:
    """Growth of the peak resident size over forward and backward of a long sequence with a window, beside
    the bytes of inputs, outputs and gradients.
    """
    call = kernel("mistral", "mistral")
    small = tensors(8, 256, 64, grad=True)
    call(*small, w=16).sum().backward()  # code and threads are in memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    inputs = tensors(8, 65536, 64, grad=True)
    do = torch.randn(1, 8, 65536, 64)
    o = call(*inputs, w=1024)
    gradients = torch.autograd.grad(o, inputs, do)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    needed = sum(x.numel() * x.element_size() for x in (*inputs, do, o, *gradients))
    return {
        "cell": "RoPE, causal window 1024, B1 H8 N65536 D64 float32, forward and backward",
        "peak growth": peak - before,
        "inputs, outputs, gradients": needed,
        "ratio": (peak - before) / needed,
        "seconds": seconds,
    }


def build() -> dict[str, float]:
    """Seconds of `afc compile` for the CPU with the host object made before, and of a warm `afc.load`."""
    afc_command = [sys.executable, "-m", "afc", "compile", str(EXAMPLES / "llama.attn")]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "AFC_CACHE_DIR": f"{folder}/cache"}

        def compile_to(name: str, *options: str) -> float:
            start = time.perf_counter()
            command = [*afc_command, "-o", f"{folder}/{name}.so", "--backend", "cpu", *options]
            subprocess.run(command, check=True, capture_output=True, env=environment)
            return time.perf_counter() - start

        first = compile_to("first")
        cold = statistics.median(compile_to(f"cold{d}", "-D", f"D={d}") for d in (64, 96, 80))
    kernel("llama", "llama")
    warm = []
    for _ in range(5):
        start = time.perf_counter()
        kernel("llama", "llama")
        warm.append(time.perf_counter() - start)
    return {"first compile": first, "compile with host object": cold, "warm load": statistics.median(warm)}


if __name__ == "__main__":
    sys.exit(main())
