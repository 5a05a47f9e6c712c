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


def test_nvrtc_builds_the_same_kernels(tmp_path: Path) -> None:
    try:
        find_nvrtc()
    except ToolchainError:
        pytest.skip("no libnvrtc here")
    got = results(tmp_path, (capability(),), cuda_compiler="nvrtc")
    assert_close(got, results(tmp_path, (capability(),), cuda_compiler="nvcc"))
