# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness on a CPU: what it times is real, only the rounds are fewer and shorter."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from afc import api  # noqa: E402
from afc.frontend import check_file  # noqa: E402
from afc.options import Options  # noqa: E402
from bench import cells, limits, machine, peers, report, run  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.check import WrongOutput, check, dense  # noqa: E402
from bench.inputs import assemble, draw, input_sets  # noqa: E402
from bench.protocol import (  # noqa: E402
    QUICK,
    CpuClock,
    Measurement,
    Protocol,
    Regime,
    Sample,
    measure,
    pair_ratios,
    within_tolerance,
)
from bench.sampler import NoSampler, open_sampler  # noqa: E402

CPU = torch.device("cpu")
SHORT = Protocol(
    burst_rounds=3, idle_ms=0.0, burst_ms=2.0, sustained_rounds=2, settle_ms=2.0, sustained_ms=4.0, quick=True
)
CELL = cells.Cell("test", "fwd", 2, 4, 2, 70, 16, "causal", "float32", cells.CAUSAL_PROGRAM)
ROPE_CELL = replace(CELL, program=cells.ROPE_PROGRAM, rope_base=500000.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def options(*systems: str, **changes: Any) -> run.Options:
    return replace(run.Options(list(systems), ["eager"], SHORT, CPU), **changes)


def run_cells(chosen: list[cells.Cell], opts: run.Options, remaining: Any = lambda: math.inf) -> report.Json:
    """What ``main`` writes, without the file."""
    published: list[tuple[list[report.Json], list[report.Json]]] = []
    run.run(
        chosen, opts, NoSampler("test"), remaining, lambda d, n: published.append((d, n)), lambda text: None
    )
    done, not_run = published[-1]
    return whole(done, not_run, opts.protocol)


def whole(done: list[report.Json], not_run: list[report.Json], protocol: Protocol) -> report.Json:
    return report.result(
        date="2000-01-01T00:00:00+00:00",
        source=machine.source("abc", False),
        machine=machine.machine(CPU, NoSampler("test")),
        versions=machine.versions(),
        protocol=protocol,
        clock="perf_counter",
        readings_from="none: test",
        cells=done,
        not_run=not_run,
    )


# ---- protocol ------------------------------------------------------------------------------------


def test_measure_times_two_matmuls_in_the_right_order() -> None:
    small, large = torch.randn(64, 64), torch.randn(512, 512)
    calls = {"small": lambda: small @ small, "large": lambda: large @ large}
    result = measure(calls, SHORT, CpuClock(), lambda: {"sm_mhz": 1.0})
    for regime, rounds in (("burst", 3), ("sustained", 2)):
        got = result[regime]
        assert [sorted(order) for order in got.orders] == [["large", "small"]] * rounds
        assert all(len(got.times(name)) == rounds and min(got.times(name)) > 0 for name in calls)
        assert got.samples["large"][0].reading == {"sm_mhz": 1.0}
        # 512 times the arithmetic: also under load it is not the faster one.
        assert min(got.times("large")) > min(got.times("small"))
        assert got.calls["small"] > got.calls["large"] >= 1


def test_orders_are_random_and_repeatable() -> None:
    calls = {name: (lambda: None) for name in "abcdefgh"}
    protocol = replace(SHORT, burst_ms=0.01, sustained_ms=0.01, settle_ms=0.01)
    first, second = (measure(calls, protocol, CpuClock())["burst"].orders for _ in range(2))
    other = measure(calls, replace(protocol, seed=1), CpuClock())["burst"].orders
    assert first == second != other
    assert len({tuple(order) for order in first}) > 1


def test_burst_idles_before_every_block_and_sustained_settles() -> None:
    protocol = replace(SHORT, idle_ms=20.0, settle_ms=30.0)
    start = time.perf_counter()
    result = measure({"nap": lambda: time.sleep(0.001)}, protocol, CpuClock())
    assert time.perf_counter() - start >= (3 * 20 + 2 * 30) / 1e3
    assert all(ms >= 1.0 for regime in result.values() for ms in regime.times("nap"))


def test_a_call_longer_than_a_burst_is_one_block() -> None:
    result = measure({"nap": lambda: time.sleep(0.005)}, SHORT, CpuClock())
    assert result["burst"].calls == {"nap": 1}


def test_measure_rejects_no_systems_and_protocol_rejects_no_rounds() -> None:
    with pytest.raises(ValueError, match="systems"):
        measure({}, SHORT, CpuClock())
    with pytest.raises(ValueError, match="rounds"):
        Protocol(burst_rounds=0)


def test_the_defaults_are_the_whole_protocol() -> None:
    full = Protocol()
    assert full.shortfalls() == []
    assert (full.burst_rounds, full.idle_ms, full.burst_ms) == (15, 300, 20)
    assert (full.sustained_rounds, full.settle_ms, full.sustained_ms) == (11, 400, 150)
    assert "quick mode" in QUICK.shortfalls()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("burst_rounds", 14),
        ("sustained_rounds", 4),
        ("idle_ms", 299.0),
        ("burst_ms", 21.0),
        ("settle_ms", 399.0),
        ("sustained_ms", 149.0),
        ("tolerance", 0.02),
    ],
)
def test_anything_weaker_than_the_protocol_is_named(field: str, value: float) -> None:
    changes: dict[str, Any] = {field: value}
    assert len(replace(Protocol(), **changes).shortfalls()) == 1


def test_planned_seconds_counts_rounds_of_every_system() -> None:
    assert Protocol().planned_seconds(2) == pytest.approx(2 * (15 * 0.32 + 11 * 0.55))


# ---- the A/A pair --------------------------------------------------------------------------------


def fixed(**times: list[float]) -> Measurement:
    """A measurement with these times in both regimes."""

    def regime() -> Regime:
        samples = {name: [Sample(ms) for ms in values] for name, values in times.items()}
        return Regime([list(times)] * len(next(iter(times.values()))), dict.fromkeys(times, 1), samples)

    return {"burst": regime(), "sustained": regime()}


@pytest.mark.parametrize(
    ("twin", "steady"), [(1.0, True), (1.009, True), (0.992, True), (1.02, False), (0.98, False)]
)
def test_the_pair_must_agree_within_one_percent(twin: float, steady: bool) -> None:
    ratios = pair_ratios(fixed(a=[1.0, 1.0, 9.0], b=[twin, twin, 0.1]), "a", "b")
    assert within_tolerance(ratios, 0.01) is steady


def test_a_ratio_that_is_not_a_number_is_not_steady() -> None:
    assert not within_tolerance({"burst": math.nan}, 0.01)


@pytest.mark.parametrize(("twin", "proves_nothing"), [(1.0, False), (1.05, True)])
def test_an_unsteady_pair_voids_the_file(twin: float, proves_nothing: bool) -> None:
    protocol = Protocol()
    result = report.cell_result(
        CELL,
        fixed(**{"ours": [1.0] * 15, "ours#2": [twin] * 15}),
        ("ours", "ours#2"),
        protocol,
        checks={},
        skipped={},
        input_sets=1,
        seconds=(0.0, 0.0),
    )
    value = whole([result], [], protocol)
    assert value["proves_nothing"] is proves_nothing
    assert len(value["proves_nothing_because"]) == (2 if proves_nothing else 0)
    assert ("NOT STEADY" in report.table(value)) is proves_nothing
    assert ("PROVES NOTHING" in report.table(value)) is proves_nothing


def test_a_quick_file_says_so() -> None:
    value = whole([], [], QUICK)
    assert value["proves_nothing"] and value["protocol"]["quick"]


# ---- cells ---------------------------------------------------------------------------------------


def test_flop_convention() -> None:
    assert cells.attention_flop("fwd", 2, 4, 8, 16, 32, 32, False) == 4 * 2 * 4 * 8 * 16 * 32
    assert cells.attention_flop("fwd", 2, 4, 8, 16, 32, 64, True) == 2 * 4 * 8 * 16 * (32 + 64)
    assert cells.attention_flop("bwd", 1, 1, 8, 8, 32, 32, False) == 2.5 * 4 * 8 * 8 * 32


def test_groups_have_unique_names_and_existing_programs_of_their_own() -> None:
    every = [cell for group in cells.GROUPS.values() for cell in group]
    assert len({cell.name for cell in every}) == len(every)
    plain = {(c.D, c.Hq, c.B, c.N, c.pass_) for c in cells.GROUPS["plain"]}
    shapes = [(128, 16, 8, 2048), (128, 16, 2, 8192), (64, 32, 8, 2048), (64, 32, 2, 8192)]
    assert plain == {(*shape, pass_) for shape in shapes for pass_ in ("fwd", "bwd")}
    for cell in every:
        path, _, name = cell.program.partition(":")
        if path.startswith("bench/"):
            text = (machine.REPOSITORY / path).read_text(encoding="utf-8")
            assert f"attention {name}(q, k, v" in text


def test_select() -> None:
    found = cells.select(["plain"], ["fwd"], "D128 N2048")
    assert [cell.name for cell in found] == ["plain fwd causal D128 N2048 B8 H16/16 bfloat16"]
    assert cells.select(["smoke"], ["bwd"], dtype="float64")[0].dtype == "float64"
    with pytest.raises(ValueError, match="group"):
        cells.select(["nope"], ["fwd"])
    with pytest.raises(ValueError, match="no cell"):
        cells.select(["plain"], ["fwd"], "D12")


@pytest.mark.parametrize(
    ("field", "value"),
    [("pass_", "both"), ("mask", "windowed"), ("dtype", "int8"), ("N", 0), ("Hq", 3)],
)
def test_a_cell_names_the_bad_field(field: str, value: object) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field):
        replace(CELL, **changes)


# ---- inputs and the check ------------------------------------------------------------------------


def test_input_sets_leave_the_cache() -> None:
    forward = CELL.B * CELL.N * CELL.D * (2 * CELL.Hq + 2 * CELL.Hk) * 4
    assert input_sets(CELL, 0) == 1
    assert input_sets(CELL, forward) == 1
    assert input_sets(CELL, forward + 1) == 3
    assert input_sets(CELL, 10 * forward) == 11
    assert input_sets(replace(CELL, pass_="bwd"), 10 * forward) == 6


def test_a_system_rotates_its_sets() -> None:
    seen = []

    def attend(q: Any, k: Any, v: Any) -> Any:
        seen.append(q.data_ptr())
        return q

    system = assemble("spy", CELL, draw(CELL, CPU, 3, 0), attend)
    for _ in range(6):
        system.call()
    assert seen[:3] == seen[3:] and len(set(seen)) == 3


@pytest.mark.parametrize("cell", [CELL, ROPE_CELL], ids=["plain", "rope"])
def test_dense_gradients_are_those_of_its_forward(cell: cells.Cell) -> None:
    tensors = draw(cell, CPU, 1, 1)[0]
    q, k, v, do = (
        x.double() for x in (tensors.q[0, :2], tensors.k[0, 0], tensors.v[0, 0], tensors.do[0, :2])
    )
    got = dense(q, k, v, do, cell=cell, dtype=torch.float64)
    cos, sin = peers.rope_tables(cell.N, cell.D, cell.rope_base or 1.0, torch.float64, CPU)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rotated = peers.rotate_half_split(leaves[0], leaves[1], cos, sin) if cell.rope_base else leaves[:2]
    o = torch.nn.functional.scaled_dot_product_attention(rotated[0], rotated[1], v, is_causal=True)
    grads = torch.autograd.grad(o, leaves, do)
    for name, expected in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True):
        torch.testing.assert_close(got[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_sdpa_passes_the_check_in_either_layout(dtype: str, pass_: str, layout: str) -> None:
    cell = replace(CELL, dtype=dtype, pass_=pass_)
    sets = draw(cell, CPU, 1, 2)

    def attend(q: Any, k: Any, v: Any) -> Any:
        x = (t.transpose(1, 2) if layout == "bnhd" else t for t in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2) if layout == "bnhd" else o

    found = check(assemble("sdpa", cell, sets, attend, layout).outputs(), sets[0], cell)
    assert set(found) == ({"o"} if pass_ == "fwd" else {"dq", "dk", "dv"})
    assert all(0 < entry["error"] <= entry["bound"] for entry in found.values())


def test_the_check_finds_a_wrong_mask_scale_and_hole() -> None:
    sets = draw(CELL, CPU, 1, 3)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def wrong(attend: Any) -> None:
        with pytest.raises(WrongOutput):
            check(assemble("wrong", CELL, sets, attend).outputs(), sets[0], CELL)

    wrong(lambda q, k, v: sdpa(q, k, v, enable_gqa=True))
    wrong(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True, scale=1.01 * CELL.D**-0.5))
    wrong(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True)[:, :, 1:])
    wrong(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True) * torch.nan)


# ---- peers ---------------------------------------------------------------------------------------


def test_peers_without_a_gpu_or_a_backward_say_why() -> None:
    sets = draw(CELL, CPU, 1, 0)
    with pytest.raises(peers.Unavailable, match="CUDA"):
        peers.build("fa2", CELL, sets)
    with pytest.raises(ValueError, match="systems"):
        peers.build("fa9", CELL, sets)


def test_a_peer_never_computes_another_cell() -> None:
    with pytest.raises(ValueError, match="rotation"):
        peers.build("sdpa", ROPE_CELL, draw(ROPE_CELL, CPU, 1, 0))
    with pytest.raises(ValueError, match="rotation"):
        peers.build("sdpa+rope_eager", CELL, draw(CELL, CPU, 1, 0))


def test_names_expand_by_rope_style() -> None:
    styles = ["compiled", "eager"]
    assert peers.expand("flex", ROPE_CELL, styles) == ["flex+rope_compiled", "flex+rope_eager"]
    assert peers.expand("flex", CELL, styles) == ["flex"]
    assert peers.expand("ours", ROPE_CELL, styles) == ["ours"]
    assert peers.expand("fa3+rope_eager", ROPE_CELL, styles) == ["fa3+rope_eager"]


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run_measures_skips_with_reasons_and_survives_a_round_trip(tmp_path: Path) -> None:
    chosen = [CELL, replace(CELL, pass_="bwd"), ROPE_CELL]
    value = run_cells(chosen, options("fa2", "sdpa", "math"))
    assert [cell["name"] for cell in value["cells"]] == [cell.name for cell in chosen]
    first, rope = value["cells"][0], value["cells"][2]
    assert set(first["systems"]) == {"sdpa", "math", "sdpa#2"}
    assert set(rope["systems"]) == {"sdpa+rope_eager", "math+rope_eager", "sdpa+rope_eager#2"}
    assert "CUDA" in first["skipped"]["fa2"]
    burst = first["systems"]["sdpa"]["burst"]
    assert len(burst["rounds_ms"]) == SHORT.burst_rounds
    assert burst["ms"]["min"] <= burst["ms"]["q1"] <= burst["ms"]["median"] <= burst["ms"]["max"]
    assert burst["tflops"]["max"] == pytest.approx(CELL.flop / burst["ms"]["min"] / 1e9)
    path = tmp_path / "deep" / "result.json"
    report.write(path, value)
    assert report.read(path) == value
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


def test_the_named_pair_is_entered_twice() -> None:
    value = run_cells([CELL], options("sdpa", "math", pair="math"))
    assert value["cells"][0]["pair"]["twin"] == "math#2"


def test_a_cell_without_a_system_is_reported_and_the_next_one_runs() -> None:
    value = run_cells([replace(CELL, group="a"), CELL], options("fa2"))
    assert value["cells"] == [] and value["proves_nothing"]
    assert [entry["cell"] for entry in value["not_run"]] == [replace(CELL, group="a").name, CELL.name]
    assert all("no system runs" in entry["reason"] for entry in value["not_run"])


def test_the_deadline_stops_between_cells_and_keeps_what_was_measured() -> None:
    left = iter([1e9, 1e9, 0.0])
    chosen = [replace(CELL, group=group) for group in "abc"]
    value = run_cells(chosen, options("sdpa"), lambda: next(left))
    assert [cell["cell"]["group"] for cell in value["cells"]] == ["a"]
    assert [entry["cell"].split()[0] for entry in value["not_run"]] == ["b", "c"]
    assert all("deadline" in entry["reason"] for entry in value["not_run"])
    assert "not run: b" in report.table(value)


def test_a_deadline_that_set_up_used_up_stops_too() -> None:
    left = iter([1e9, 0.0])
    value = run_cells([CELL], options("sdpa"), lambda: next(left))
    assert value["cells"] == [] and "after set-up" in value["not_run"][0]["reason"]


# ---- files and the table -------------------------------------------------------------------------


@pytest.fixture
def sample() -> report.Json:
    measurement = fixed(**{"ours": [2.0, 2.0], "fa2": [3.0, 3.0], "fa2#2": [3.0, 3.0]})
    result = report.cell_result(
        replace(CELL, N=2048),
        measurement,
        ("fa2", "fa2#2"),
        Protocol(),
        checks={"ours": {"o": {"error": 1e-7, "bound": 2e-7}}},
        skipped={"fa3": "Unavailable: import fa3_fwd_interface\nsecond line"},
        input_sets=1,
        seconds=(1.0, 2.0),
    )
    return whole([result], [{"cell": "x", "reason": "deadline"}], Protocol())


def test_the_table_has_ratios_in_both_regimes_and_no_twin(sample: report.Json) -> None:
    lines = report.table(sample).splitlines()
    assert "A/A fa2 1.0000 / 1.0000" in lines[0]
    ours, fa2 = lines[2].split(), lines[3].split()
    assert (ours[0], ours[3], ours[6]) == ("ours", "1.000", "1.000")
    assert (fa2[0], fa2[1], fa2[3], fa2[6]) == ("fa2", "3.0000", "1.500", "1.500")
    assert lines[4] == "  skipped fa3: Unavailable: import fa3_fwd_interface"
    assert not any("#2" in line for line in lines)


def test_the_table_without_ours_has_no_ratio(sample: report.Json) -> None:
    del sample["cells"][0]["systems"]["ours"]
    assert report.table(sample).splitlines()[2].split()[3] == "-"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("date",), 3, "result.date: expected str, got int"),
        (("cells", 0, "flop"), "many", r"result.cells\[0\].flop: expected int or float, got str"),
        (("cells", 0, "input_sets"), True, "expected int, got bool"),
        (("cells", 0, "flop"), math.nan, "expected a finite number"),
        (("cells",), {}, "result.cells: expected a list"),
        (("source",), {"commit": "a"}, r"missing keys \['dirty'\]"),
        (("source", "extra"), 1, r"unknown keys \['extra'\]"),
    ],
)
def test_the_schema_names_the_fault(
    sample: report.Json, path: tuple[Any, ...], value: Any, message: str
) -> None:
    broken: Any = copy.deepcopy(sample)
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(report.SchemaError, match=message):
        report.validate(broken)


def test_read_refuses_other_versions_and_other_files(sample: report.Json, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**sample, "schema_version": 99}), encoding="utf-8")
    with pytest.raises(report.SchemaError, match="schema_version 1, got 99"):
        report.read(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(report.SchemaError, match="not JSON"):
        report.read(path)


def test_statistics_of_one_round() -> None:
    assert report.statistics([2.0]) == dict.fromkeys(("median", "q1", "q3", "min", "max"), 2.0)


# ---- the machine and the command line ------------------------------------------------------------


def test_source_prefers_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFC_BENCH_COMMIT", "fromenv")
    monkeypatch.setenv("AFC_BENCH_DIRTY", "1")
    assert machine.source(None, None) == {"commit": "fromenv", "dirty": True}
    assert machine.source("given", False) == {"commit": "given", "dirty": False}
    monkeypatch.setenv("AFC_BENCH_DIRTY", "maybe")
    with pytest.raises(ValueError, match="AFC_BENCH_DIRTY"):
        machine.source(None, None)


def test_no_sampler_says_why() -> None:
    assert open_sampler(None).read() == {}
    absent = open_sampler("GPU-00000000-0000-0000-0000-000000000000")
    assert isinstance(absent, NoSampler) and "nvidia-smi" in absent.source


def test_the_command_line_plans_runs_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "smoke.json"
    common = [
        "--group",
        "smoke",
        "--cells",
        "full fwd",
        "--systems",
        "fa2,math",
        "--device",
        "cpu",
        "--quick",
    ]
    assert main([*common, "--plan"]) == 0
    assert "1 cells, about" in capsys.readouterr().out and not out.exists()
    arguments = [
        *common,
        "--burst-rounds",
        "1",
        "--sustained-rounds",
        "1",
        "--dtype",
        "float32",
        "--out",
        str(out),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert main(["--show", str(out)]) == 0
    assert printed.endswith(capsys.readouterr().out)
    assert main([*arguments, "--deadline", "0"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--group", "nope"],
        ["--systems", "fa9"],
        ["--rope", "maybe"],
        ["--burst-rounds", "0"],
        ["--show", "does-not-exist.json"],
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--device", "cpu", *arguments])
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("threads", (128, 256))
@pytest.mark.parametrize("dynamic", (0, 16896, 34816, 49152, 65536, 81920, 98304, 100864))
def test_limits_leave_as_many_blocks_as_the_smaller_gpu_holds(dynamic: int, threads: int) -> None:
    small = limits.KNOWN["sm_86"]
    padded = small.padded(dynamic, threads)
    wanted = max(1, min(102400 // (dynamic + 1536), 1536 // threads))
    assert padded >= dynamic
    for static in (0, 512):  # what a kernel declares beside it
        assert 233472 // (padded + static + 1024) == wanted


def test_limits_change_what_is_launched_and_nothing_else() -> None:
    options = Options(backends=("cuda",), archs=("compute_86:sm_90",), heads=((64, 64),))
    checked = check_file(machine.REPOSITORY / "examples/causal.attn")
    plain = api.units(checked, options)[0]
    with limits.applied("sm_86"):
        padded = api.units(checked, options)[0]
    assert padded.device_text == plain.device_text and padded.host_text != plain.host_text
    with pytest.raises(ValueError, match="expected one of sm_86, got 'sm_75'"), limits.applied("sm_75"):
        pass
