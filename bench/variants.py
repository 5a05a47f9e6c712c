# SPDX-License-Identifier: Apache-2.0
"""What afc's variants cost beside its own plain causal attention: ``python -m bench.variants --out FILE``.

Two sets of programs, forward and backward, each in one run by the protocol of ``bench.protocol``: blocks that
work on every tile (rotation, ALiBi) and masks that leave most tiles out (a window, packed documents). Each
variant is compared with what the same tiles cost in the plain kernel.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import afc
from bench import machine
from bench.protocol import CudaClock, Measurement, Protocol, measure, pair_ratios, within_tolerance
from bench.report import statistics
from bench.sampler import open_sampler

Tensor = torch.Tensor
TWIN = "causal#2"
TEXT = """
attention causal_lm(q, k, v) = softmax(causal(scaled_dot_product(q, k))) @ v
attention rope_lm(q, k, v) {
    q, k = rope(q, k; base = 10000.0)
    return softmax(causal(scaled_dot_product(q, k))) @ v
}
attention alibi_lm(q, k, v; slope[H]) = softmax(causal(alibi(scaled_dot_product(q, k); slope))) @ v
attention window_lm(q, k, v) = softmax(sliding_window(causal(scaled_dot_product(q, k)); w = 1024)) @ v
attention packed_lm(q, k, v; qdoc[B, M]: int, kdoc[B, N]: int) {
    return softmax(document(causal(scaled_dot_product(q, k)); qdoc, kdoc)) @ v
}
"""
LONG, WINDOW = 16384, 1024
TILE = 64  # by which live tiles are counted


def main() -> int:
    """Measure everything and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--head", type=int, default=128)
    parser.add_argument("--arch", default="compute_80:sm_90")
    parser.add_argument("--commit")
    given = parser.parse_args()
    device = torch.device("cuda")
    sampler = open_sampler(machine.gpu_uuid(device))
    protocol = Protocol(sustained_rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "variants.attn"
        path.write_text(TEXT, encoding="utf-8")
        module = afc.load(path, D=given.head, dtype=torch.bfloat16, backend="cuda", arch=given.arch)
    sets = {"blocks": blocks(module, given.head), "masks": masks(module, given.head)}
    result: dict[str, Any] = {
        "schema": "afc-variants-1",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source": machine.source(given.commit, None),
        "machine": machine.machine(device, sampler),
        "versions": machine.versions(),
        "protocol": protocol.to_json(),
        "arch": given.arch,
        "head": given.head,
        "live_tiles_of_the_window": live_share(),
        "sets": {},
    }
    for name, calls in sets.items():
        alone = {n: torch.no_grad()(call) for n, call in calls.items()}
        for pass_, systems in (("forward", alone), ("backward", differentiated(calls))):
            measured = measure(systems, protocol, CudaClock(), sampler.read)
            result["sets"][f"{name} {pass_}"] = summary(measured, protocol)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, found in result["sets"].items():
        ratios = {s: [round(x, 4) for x in r["over causal"]] for s, r in found["systems"].items()}
        print(name, "steady" if found["steady"] else "NOT STEADY", json.dumps(ratios))
    return 0


def live_share() -> float:
    """Tiles that a window of 1024 leaves of those of a causal mask."""
    tiles, seen = LONG // TILE, WINDOW // TILE + 1
    return sum(min(t + 1, seen) for t in range(tiles)) / (tiles * (tiles + 1) / 2)


def fresh(b: int, h: int, n: int, d: int) -> Tensor:
    """A random tensor that wants a gradient."""
    return torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)


Output = Callable[[], Tensor]
Calls = dict[str, Output]


def bind(attention: Any, rows: list[Tensor], **options: Tensor) -> Output:
    """A call with its tensors, which the differentiated form finds again."""

    def call() -> Tensor:
        return attention(*rows, **options)  # type: ignore[no-any-return]

    call.rows = rows  # type: ignore[attr-defined]
    return call


def blocks(module: Any, d: int) -> Calls:
    """B2 H16 N8192: one kernel for each score, with a key head for each query head or for four."""
    rows = [fresh(2, 16, 8192, d) for _ in range(3)]
    grouped = [rows[0], *(fresh(2, 4, 8192, d) for _ in range(2))]
    slope = torch.rand(16, device="cuda")
    return {
        "causal": bind(module.causal_lm, rows),
        TWIN: bind(module.causal_lm, rows),
        "rope": bind(module.rope_lm, rows),
        "alibi": bind(module.alibi_lm, rows, slope=slope),
        "causal gqa 4": bind(module.causal_lm, grouped),
        "rope gqa 4": bind(module.rope_lm, grouped),
    }


def masks(module: Any, d: int) -> Calls:
    """B1 H16 N16384: a window of 1024, documents of 1024, and as many sequences of 1024 apart."""
    rows = [fresh(1, 16, LONG, d) for _ in range(3)]
    apart = [fresh(LONG // WINDOW, 16, WINDOW, d) for _ in range(3)]
    ids = (torch.arange(LONG, device="cuda") // WINDOW)[None].int()
    return {
        "causal": bind(module.causal_lm, rows),
        TWIN: bind(module.causal_lm, rows),
        "window": bind(module.window_lm, rows),
        "documents": bind(module.packed_lm, rows, qdoc=ids, kdoc=ids),
        "sequences apart": bind(module.causal_lm, apart),
    }


def differentiated(calls: Calls) -> dict[str, Callable[[], object]]:
    """The backward passes alone."""

    def one(call: Output) -> Callable[[], object]:
        o = call()
        gradient = torch.randn_like(o)
        rows = call.rows  # type: ignore[attr-defined]
        return lambda: torch.autograd.grad(o, rows, gradient, retain_graph=True)

    return {name: one(call) for name, call in calls.items()}


def summary(measured: Measurement, protocol: Protocol) -> dict[str, Any]:
    """Times of each system in both regimes, and their medians over that of causal attention."""
    ratios = pair_ratios(measured, "causal", TWIN)
    base = {regime: statistics(r.times("causal"))["median"] for regime, r in measured.items()}
    systems: dict[str, Any] = {}
    for name in measured["burst"].samples:
        times = {regime: statistics(r.times(name)) for regime, r in measured.items()}
        over = [times[regime]["median"] / base[regime] for regime in measured]
        systems[name] = {"ms": times, "over causal": over}
    return {"pair": ratios, "steady": within_tolerance(ratios, protocol.tolerance), "systems": systems}


if __name__ == "__main__":
    raise SystemExit(main())
