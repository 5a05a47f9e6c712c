# SPDX-License-Identifier: Apache-2.0
"""The result file: what is in it, when it proves nothing, and the table a person reads.

``SCHEMA`` describes the JSON. Keys of ``{"*": …}`` are free (system names), a list has one element schema, a
tuple lists the types a value may have. Times are milliseconds per call; TFLOP/s follow
``cells.attention_flop``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.cells import Cell
from bench.protocol import REGIMES, Measurement, Protocol, pair_ratios, within_tolerance

SCHEMA_VERSION = 1

Json = dict[str, Any]

_NUMBER = (int, float)
_STATISTICS = {"median": _NUMBER, "q1": _NUMBER, "q3": _NUMBER, "min": _NUMBER, "max": _NUMBER}
_REGIME = {
    "ms": _STATISTICS,
    "tflops": _STATISTICS,
    "calls_per_block": int,
    "rounds_ms": [_NUMBER],
    "readings": {"*": [_NUMBER]},
}
_CELL = {
    "name": str,
    "cell": {"*": (str, int, float, type(None))},
    "flop": _NUMBER,
    "input_sets": int,
    "pair": {"system": str, "twin": str, "ratio": {"burst": _NUMBER, "sustained": _NUMBER}, "steady": bool},
    "systems": {"*": {"burst": _REGIME, "sustained": _REGIME}},
    "checks": {"*": {"*": {"error": _NUMBER, "bound": _NUMBER}}},
    "orders": {"burst": [[str]], "sustained": [[str]]},
    "skipped": {"*": str},
    "seconds": {"setup": _NUMBER, "measure": _NUMBER},
}
SCHEMA: Json = {
    "schema_version": int,
    "date": str,
    "source": {"commit": str, "dirty": (bool, type(None))},
    "machine": {"*": (str, int, float, type(None))},
    "versions": {"*": str},
    "protocol": {"*": (str, int, float, bool)},
    "readings_from": str,
    "proves_nothing": bool,
    "proves_nothing_because": [str],
    "cells": [_CELL],
    "not_run": [{"cell": str, "reason": str}],
}


class SchemaError(Exception):
    """A result file that is not of this schema; the message has the path of the first fault."""


def validate(value: Any, schema: Any = SCHEMA, path: str = "result") -> None:
    """Raise SchemaError unless the value has exactly the schema's keys and types, and only finite numbers."""
    if isinstance(schema, dict):
        _validate_object(value, schema, path)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise SchemaError(f"{path}: expected a list, got {type(value).__name__}")
        for i, element in enumerate(value):
            validate(element, schema[0], f"{path}[{i}]")
    elif not isinstance(value, schema) or (isinstance(value, bool) and bool not in _types(schema)):
        names = " or ".join(t.__name__ for t in _types(schema))
        raise SchemaError(f"{path}: expected {names}, got {type(value).__name__}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(f"{path}: expected a finite number, got {value}")


def _types(schema: Any) -> tuple[type, ...]:
    return schema if isinstance(schema, tuple) else (schema,)


def _validate_object(value: Any, schema: Json, path: str) -> None:
    if not isinstance(value, dict):
        raise SchemaError(f"{path}: expected an object, got {type(value).__name__}")
    if set(schema) == {"*"}:
        for key, element in value.items():
            validate(element, schema["*"], f"{path}.{key}")
        return
    if value.keys() != schema.keys():
        missing, extra = sorted(schema.keys() - value.keys()), sorted(value.keys() - schema.keys())
        raise SchemaError(f"{path}: missing keys {missing}, unknown keys {extra}")
    for key, element in value.items():
        validate(element, schema[key], f"{path}.{key}")


# ---- building ------------------------------------------------------------------------------------


def statistics(times: list[float]) -> dict[str, float]:
    """Median, quartiles (linear between order statistics), smallest and largest."""
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    return {"median": median(times), "q1": low, "q3": high, "min": min(times), "max": max(times)}


def cell_result(
    cell: Cell,
    measurement: Measurement,
    pair: tuple[str, str],
    protocol: Protocol,
    *,
    checks: Mapping[str, Json],
    skipped: Mapping[str, str],
    input_sets: int,
    seconds: tuple[float, float],
) -> Json:
    """The JSON of one measured cell. ``pair``: two entries of one system; ``seconds``: set-up, measuring."""
    ratios = pair_ratios(measurement, *pair)
    return {
        "name": cell.name,
        "cell": asdict(cell),
        "flop": cell.flop,
        "input_sets": input_sets,
        "pair": {
            "system": pair[0],
            "twin": pair[1],
            "ratio": ratios,
            "steady": within_tolerance(ratios, protocol.tolerance),
        },
        "systems": {
            name: {regime: _regime_result(cell, measurement, regime, name) for regime in REGIMES}
            for name in measurement["burst"].samples
        },
        "checks": dict(checks),
        "orders": {regime: measurement[regime].orders for regime in REGIMES},
        "skipped": dict(skipped),
        "seconds": {"setup": seconds[0], "measure": seconds[1]},
    }


def _regime_result(cell: Cell, measurement: Measurement, regime: str, system: str) -> Json:
    result = measurement[regime]
    times = result.times(system)
    readings: dict[str, list[float]] = {}
    for sample in result.samples[system]:
        for key, value in sample.reading.items():
            readings.setdefault(key, []).append(value)
    return {
        "ms": statistics(times),
        "tflops": statistics([cell.flop / ms / 1e9 for ms in times]),
        "calls_per_block": result.calls[system],
        "rounds_ms": times,
        "readings": readings,
    }


def result(
    *,
    date: str,
    source: Json,
    machine: Json,
    versions: Json,
    protocol: Protocol,
    clock: str,
    readings_from: str,
    cells: list[Json],
    not_run: list[Json],
) -> Json:
    """The whole file. Raises SchemaError if a part does not fit."""
    reasons = protocol.shortfalls()
    reasons += [
        f"{cell['name']}: A/A ratio {ratio:.4f} ({regime})"
        for cell in cells
        for regime, ratio in cell["pair"]["ratio"].items()
        if not within_tolerance({regime: ratio}, protocol.tolerance)
    ]
    if not cells:
        reasons.append("no cell was measured")
    whole = {
        "schema_version": SCHEMA_VERSION,
        "date": date,
        "source": source,
        "machine": machine,
        "versions": versions,
        "protocol": {**protocol.to_json(), "clock": clock},
        "readings_from": readings_from,
        "proves_nothing": bool(reasons),
        "proves_nothing_because": reasons,
        "cells": cells,
        "not_run": not_run,
    }
    validate(whole)
    return whole


# ---- files ---------------------------------------------------------------------------------------


def write(path: Path, value: Json) -> None:
    """Validate and write; the file under ``path`` is always a whole one, also if the process is killed."""
    validate(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read(path: Path) -> Json:
    """A validated result file. Raises SchemaError for another version or a fault, and OSError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SchemaError(f"{path.name}: not JSON: {error}") from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise SchemaError(f"{path.name}: expected schema_version {SCHEMA_VERSION}, got {version!r}")
    validate(value)
    return dict(value)


# ---- the table -----------------------------------------------------------------------------------

SHOWN_REASONS = 4
HEADER = ("system", "burst ms", "TFLOP/s", "ours/it", "sust. ms", "TFLOP/s", "ours/it")


def table(value: Json) -> str:
    """Every cell with its systems, fastest first. ``ours/it``: how many times as fast as it afc is."""
    lines = []
    for cell in value["cells"]:
        ratio, steady = cell["pair"]["ratio"], "" if cell["pair"]["steady"] else "  NOT STEADY"
        ratios = f"{ratio['burst']:.4f} / {ratio['sustained']:.4f}"
        lines.append(f"{cell['name']}   A/A {cell['pair']['system']} {ratios}{steady}")
        lines += _columns([HEADER, *_rows(cell)])
        lines += [f"  skipped {name}: {_brief(reason)}" for name, reason in cell["skipped"].items()]
        lines.append("")
    lines += [f"not run: {entry['cell']}: {_brief(entry['reason'])}" for entry in value["not_run"]]
    if value["proves_nothing"]:
        reasons = value["proves_nothing_because"]
        more = f"; and {len(reasons) - SHOWN_REASONS} more" if len(reasons) > SHOWN_REASONS else ""
        lines.append("PROVES NOTHING: " + "; ".join(reasons[:SHOWN_REASONS]) + more)
    return "\n".join(lines).rstrip()


def _rows(cell: Json) -> list[tuple[str, ...]]:
    systems = dict(cell["systems"])
    systems.pop(cell["pair"]["twin"], None)
    ours = systems.get("ours")
    rows = []
    for name, regimes in sorted(
        systems.items(), key=lambda item: float(item[1]["sustained"]["ms"]["median"])
    ):
        row = [name]
        for regime in REGIMES:
            ms = regimes[regime]["ms"]["median"]
            tflops = regimes[regime]["tflops"]["median"]
            row += [f"{ms:.4f}", f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"]
            row.append(f"{ms / ours[regime]['ms']['median']:.3f}" if ours else "-")
        rows.append(tuple(row))
    return rows


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + row[0].ljust(widths[0])
        + "".join(f"  {x:>{w}}" for x, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _brief(reason: str, width: int = 160) -> str:
    first = reason.strip().splitlines()[0] if reason.strip() else ""
    return first if len(first) <= width else first[: width - 1] + "…"
