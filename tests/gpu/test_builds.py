# SPDX-License-Identifier: Apache-2.0
"""Modules built in other ways than for this GPU alone: PTX for the driver, NVRTC, several architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from afc import api  # noqa: E402
from afc.build import find_nvrtc  # noqa: E402
from afc.errors import ToolchainError  # noqa: E402
from afc.options import Options  # noqa: E402
from afc.runtime.loading import import_module  # noqa: E402
from tests.support.checks import EXAMPLES, inputs  # noqa: E402


def capability() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def results(folder: Path, archs: tuple[str, ...], **build: Any) -> list[Any]:
    """Output and gradients of a call of a module built for `archs`."""
    stem = "built_" + "_".join(archs).replace(":", "_") + "_".join(build.values())
    api.compile_file(
        EXAMPLES / "llama.attn",
        folder / f"{stem}.so",
        Options(("cuda",), ((64, 64),), ("bfloat16",), archs),
        **build,
    )
    kernel = import_module(folder / f"{stem}.so")
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in inputs(2, 4, 2, 100, 130, 64, 64, torch.bfloat16, "cuda"))
    o = kernel.llama(q, k, v)
    return [o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))]


def assert_close(got: list[Any], want: list[Any]) -> None:
    """Equal but for the order of additions into dQ: a rounding of bfloat16 of the largest element."""
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 2**-8 * b.abs().max()


def test_ptx_is_compiled_by_the_driver(tmp_path: Path) -> None:
    assert_close(results(tmp_path, ("compute_80",)), results(tmp_path, (capability(),)))


def test_a_module_of_several_architectures(tmp_path: Path) -> None:
    archs = ("sm_80", "sm_86", "sm_90", "sm_120", "compute_80")
    assert_close(results(tmp_path, archs), results(tmp_path, (capability(),)))


def forward_bytes(folder: Path, *archs: str) -> int:
    """Workspace of a forward call on the current device, of an attention where that depends on the tiles."""
    stem = "workspace_" + "_".join(archs).replace(":", "_")
    options = Options(("cuda",), ((128, 128),), ("bfloat16",), archs, backward=False)
    api.compile_file(EXAMPLES / "bigbird.attn", folder / f"{stem}.so", options)
    module: Any = import_module(folder / f"{stem}.so")
    size = module._afc_workspace(0, False, torch.cuda.current_device(), (1, 1, 1, 130, 130), 0, 0, 1, ())
    return int(size)


def test_the_class_of_this_gpu_runs_whatever_the_list(tmp_path: Path) -> None:
    """Code for a GPU of 99 KB beside it changes nothing; PTX has the tiles of that class."""
    small = torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 163 * 1024
    of_class = {"sm86": forward_bytes(tmp_path, "sm_86"), "sm80": forward_bytes(tmp_path, "sm_80")}
    assert of_class["sm86"] != of_class["sm80"]
    several = forward_bytes(tmp_path, "sm_80", "sm_86", "sm_90", "sm_120")
    assert several == of_class["sm86" if small else "sm80"]
    assert forward_bytes(tmp_path, "compute_80") == of_class["sm86"]
    assert forward_bytes(tmp_path, capability(), "compute_80") == several


def test_classes_compute_the_same(tmp_path: Path) -> None:
    several = results(tmp_path, ("sm_80", "sm_86", "sm_90", "sm_120"))
    assert_close(several, results(tmp_path, (capability(),)))
    assert_close(several, results(tmp_path, ("compute_80",)))


def test_nvrtc_builds_the_same_kernels(tmp_path: Path) -> None:
    try:
        find_nvrtc()
    except ToolchainError:
        pytest.skip("no libnvrtc here")
    got = results(tmp_path, (capability(),), cuda_compiler="nvrtc")
    assert_close(got, results(tmp_path, (capability(),), cuda_compiler="nvcc"))
