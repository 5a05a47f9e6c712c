# SPDX-License-Identifier: Apache-2.0
"""A module for several architectures: a form of each kernel for each class of GPUs, chosen by the device."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from afc import api, cli, paths
from afc.build import Arch, Cache, Image, ModuleContent, ModuleSpec, Toolchain, compile_cpp, link_module
from afc.errors import ToolchainError
from afc.frontend import check_file
from afc.options import DEFAULT_ARCHS, Options
from afc.schedule.targets import sm80
from tests.golden.test_golden import ROOT
from tests.unit.test_artifact import DRIVER_TEXT, run_python
from tests.unit.test_gate import SPILLS

LLAMA, CAUSAL, BIGBIRD = (ROOT / "examples" / f"{name}.attn" for name in ("llama", "causal", "bigbird"))


def options(*archs: str, head: int = 64, backward: bool = True) -> Options:
    return Options(("cuda",), ((head, head),), ("bfloat16",), archs, backward=backward)


def spec(*archs: str) -> ModuleSpec:
    return api.module_spec(check_file(LLAMA), options(*archs))


def test_class_of_an_architecture() -> None:
    found = {c: sm80.name_for(c) for c in (80, 86, 87, 89, 90, 100, 103, 110, 120, 121, None)}
    assert [c for c, name in found.items() if name == "sm86"] == [86, 89, 120, 121, None]
    assert set(found.values()) == set(sm80.NAMES)
    assert sm80.NAMES[sm80.SMALLEST].shared_bytes == min(t.shared_bytes for t in sm80.NAMES.values())
    asked = [tiles.shared_bytes for tiles in sm80.NAMES.values()]
    assert asked == sorted(asked, reverse=True)  # the order in which a module tries them


def test_an_entry_has_a_variant_for_each_class() -> None:
    module = spec("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120", "compute_80")
    (entry,) = module.entries
    assert entry.forward == "llama_cuda_bfloat16_64_64_forward"  # the name that C programs call
    assert [v.forward for v in entry.variants] == [
        "llama_cuda_bfloat16_64_64_sm80_forward",
        "llama_cuda_bfloat16_64_64_sm86_forward",
    ]
    classes = {"sm80": ["sm_80", "sm_90a"], "sm86": ["sm_86", "sm_89", "sm_120", "compute_80"]}
    assert json.loads(entry.description)["classes"] == classes
    assert {symbol: [str(u.arch) for u in group] for symbol, group in module.cuda.items()} == {
        v.images: archs for v, archs in zip(entry.variants, classes.values(), strict=True)
    }
    texts = [{unit.text for unit in group} for group in module.cuda.values()]
    assert all(len(text) == 1 for text in texts) and texts[0] != texts[1] and len(module.cpp) == 2


@pytest.mark.parametrize("archs", [("sm_80", "sm_90"), ("sm_86", "sm_120", "compute_80"), ("compute_90",)])
def test_one_class_is_one_variant(archs: tuple[str, ...]) -> None:
    module = spec(*archs)
    assert len(module.entries[0].variants) == len(module.cuda) == len(module.cpp) == 1


def test_the_tiles_do_not_depend_on_what_else_is_built() -> None:
    """So the code of each class is found in the cache, whatever the list."""
    units = {u.plan.target: u for u in api.units(check_file(LLAMA), options(*DEFAULT_ARCHS))}
    for arch, target in (("sm_90", "sm80"), ("sm_86", "sm86")):
        (alone,) = api.units(check_file(LLAMA), options(arch))
        assert alone.device_text == units[target].device_text
        assert alone.host_text == units[target].host_text


def test_every_stage_says_which_class(capsys: pytest.CaptureFixture[str]) -> None:
    for stage in ("plan", "tiled", "cu", "launch"):
        text = api.emit(LLAMA, stage, options("sm_90", "sm_86"))
        first = text.index("target sm80")
        assert first < text.index("target sm86")
    assert api.emit(LLAMA, "program", options("sm_90", "sm_86")).count("program llama") == 1
    assert cli.main(["explain", str(LLAMA), "--backend", "cuda", "--arch", "sm_80,sm_86"]) == 0
    shown = capsys.readouterr().out
    assert "on sm80 (sm_80: GPUs with at least 163 KB" in shown and "on sm86 (sm_86: " in shown


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver that knows devices, and runs nothing."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER_TEXT)
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-I", str(paths.runtime()), "driver.cpp"]
    subprocess.run([*command, "-o", "libcuda.so.1"], cwd=folder, check=True)
    return folder


WORKSPACE = """
import os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.modules["afc"] = None
import lm
for device in map(int, sys.argv[2:]):
    try:
        print("bytes", lm._afc_workspace(0, False, device, (1, 1, 1, 130, 130), 0, 0, 1, ()))
    except Exception as error:
        print("failed", error)
"""


def linked(folder: Path, *archs: str) -> Path:
    """A module whose images are empty, of an attention whose workspace depends on its tiles."""
    module = api.module_spec(check_file(BIGBIRD), options(*archs, head=128))
    toolchain, cache = Toolchain.find(cuda=False), Cache()
    objects = tuple(compile_cpp(unit, toolchain, cache).data for unit in module.cpp)
    images = {
        symbol: tuple(Image(unit.arch, b"-") for unit in group) for symbol, group in module.cuda.items()
    }
    content = ModuleContent(module.entries, module.metadata, objects, images)
    place = folder / "_".join(archs) / "lm.so"
    place.parent.mkdir()
    place.write_bytes(link_module("lm", content, toolchain, cache))
    return place


def test_the_plan_follows_the_device(tmp_path: Path, driver: Path) -> None:
    """Sizes of the workspace are those of the class that the device of the call belongs to."""
    environ = {"LD_LIBRARY_PATH": str(driver), "AFC_FAKE_ARCHS": "90,89,80,75"}
    several, large, small = (
        linked(tmp_path, *archs) for archs in (("sm_80", "sm_86", "sm_90"), ("sm_80",), ("sm_86",))
    )
    (wide,) = run_python(WORKSPACE, large, "-1").splitlines()  # with one class no device is looked at
    (narrow,) = run_python(WORKSPACE, small, "-1").splitlines()
    assert wide != narrow and wide.startswith("bytes ") and narrow.startswith("bytes ")
    lines = run_python(WORKSPACE, several, *"0123", environ=environ).splitlines()
    found = [line for line in lines if line.startswith(("bytes", "failed"))]
    assert found[:3] == [wide, narrow, wide]
    assert "Fake 3 is sm_75, the module holds sm_80, sm_90, sm_86;" in found[3]


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    try:
        return Toolchain.find(cuda=True)
    except ToolchainError:
        pytest.skip("no CUDA compiler here")


@pytest.mark.nvcc
def test_each_class_is_built_and_passes_the_gate_by_itself(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tiles of one class spill and are replaced; those of the other stay. Both are in the module."""
    tiles = sm80.NAMES["sm86"]
    monkeypatch.setitem(sm80.NAMES, "sm86", replace(tiles, forward=(SPILLS, *tiles.forward[1:])))
    wanted = options("sm_80", "sm_86", "compute_80", backward=False)
    report = api.compile_file(CAUSAL, tmp_path / "lm.so", wanted)
    (note,) = report.notes
    assert note.level == "note" and "for sm_86" in note.message
    assert [str(cubin.arch) for cubin in report.cubins] == ["sm_80", "sm_86", "compute_80"]
    data = (tmp_path / "lm.so").read_bytes()
    assert all(cubin.cubin in data for cubin in report.cubins)
    assert [cubin.name.rpartition("_")[2] for cubin in report.cubins] == ["sm80", "sm86", "sm86"]
    lines = api.kernel_figures(check_file(CAUSAL), wanted)
    assert [line for line in lines if line.startswith("  tiles of ")] == [
        "  tiles of sm80 (sm_80: GPUs with at least 163 KB of shared memory a block):",
        "  tiles of sm86 (sm_86, compute_80: GPUs with at least 99 KB of shared memory a block):",
    ]


@pytest.mark.nvcc
@pytest.mark.parametrize(("arch", "target"), [("sm_90", "sm80"), ("sm_89", "sm86")])
def test_bare_code_says_which_class(
    toolchain: Toolchain, arch: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "lm.cubin"
    command = ["compile", str(CAUSAL), "--emit", "cubin", "-D", "D=64", "--no-backward", "--arch", arch]
    assert cli.main([*command, "--dtype", "bf16", "-o", str(place)]) == 0
    assert capsys.readouterr().err == f"{place}: tiles of {target} ({arch}: {sm80.class_text(target)})\n"


def test_the_architectures_of_a_class_are_parsed() -> None:
    assert [str(Arch.parse(a)) for a in DEFAULT_ARCHS] == list(DEFAULT_ARCHS)
    targets = {sm80.name_for(None if a.ptx else a.virtual_capability) for a in map(Arch.parse, DEFAULT_ARCHS)}
    assert targets == set(sm80.NAMES)
