# SPDX-License-Identifier: Apache-2.0
"""The emitted CUDA of the sm_80 family, executed by the emulator, against dense float64 PyTorch: what
`tests/gpu` shows on a GPU, on short lengths. And the emulator itself: faults that it must find.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from afc.api import module_spec  # noqa: E402
from afc.build import Cache, Toolchain, cached_module  # noqa: E402
from afc.frontend import check_file  # noqa: E402
from afc.options import Options  # noqa: E402
from afc.runtime.loading import import_module  # noqa: E402
from tests import emulator  # noqa: E402
from tests.support.checks import EXAMPLES, compare, failures, inputs  # noqa: E402
from tests.support.dense import VARIANTS  # noqa: E402
from tests.support.published import PUBLISHED, Shape  # noqa: E402


def check(
    name: str, dtype: str, d: int, b: int, h: int, hk: int, m: int, n: int, dv: int | None = None, **call: Any
) -> None:
    variant = VARIANTS[name]
    arch = call.pop("arch", "sm_86")
    module = emulator.load(EXAMPLES / f"{name}.attn", Dqk=d, Dv=dv or d, dtype=dtype, arch=arch)
    layout, scale = call.pop("layout", "contiguous"), call.pop("scale", 1.0)
    q, k, v = inputs(b, h, hk, m, n, d, dv or d, getattr(torch, dtype), "cpu", layout, scale)
    extras = {**variant.extras(h, "cpu"), **call}
    bad = failures(compare(getattr(module, variant.attention), variant, q, k, v, extras))
    assert not bad, f"{name} {dtype} D{d} {layout} B{b} H{h}/{hk} M{m} N{n}: (error, allowed) {bad}"


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    check(name, "bfloat16", 64, 2, 4, 2, 129, 129)
    check(name, "bfloat16", 64, 1, 2, 1, 70, 200)


@pytest.mark.parametrize("shape", [(1, 1), (17, 17), (127, 127), (5, 200), (200, 5), (64, 129), (1, 300)])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_lengths(name: str, shape: tuple[int, int]) -> None:
    check(name, "bfloat16", 64, 1, 2, 1, *shape)


@pytest.mark.parametrize("d", [32, 48, 96, 128, 192, 256])
def test_head_sizes(d: int) -> None:
    check("llama", "float16", d, 1, 2, 1, 70, 130)


@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_tiles_of_gpus_with_more_shared_memory(name: str, d: int) -> None:
    check(name, "bfloat16", d, 1, 2, 1, 150, 200, arch="sm_80")


def test_head_sizes_differ() -> None:
    check("causal", "bfloat16", 192, 1, 2, 2, 70, 70, dv=128)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_layouts(layout: str) -> None:
    check("llama", "bfloat16", 64, 2, 4, 2, 67, 67, layout=layout)


@pytest.mark.parametrize("name", ["bert", "dropkey"])
def test_random_numbers_are_those_of_the_reference(name: str) -> None:
    """In rows and keys beyond the tensor, in a group of heads, and with the smaller tile of wide heads."""
    for d, m, n in ((64, 70, 130), (128, 37, 70)):
        variant = PUBLISHED[name]
        module = emulator.load(EXAMPLES / f"{name}.attn", D=d, dtype="bfloat16")
        q, k, v = inputs(2, 4, 2, m, n, d, d, torch.bfloat16)
        extras = variant.arguments(Shape(m=m, n=n, d=d))
        bad = failures(compare(getattr(module, variant.attention), variant, q, k, v, extras))
        assert not bad, f"{name} D{d} M{m} N{n}: (error, allowed) {bad}"


# ---- what the emulator must find ---------------------------------------------------------------------------


def broken(old: str, new: str) -> Any:
    """`causal` at D64 with a piece of its CUDA text replaced, where it first occurs."""
    spec = module_spec(
        check_file(EXAMPLES / "causal.attn"), Options(("cuda",), ((64, 64),), archs=("sm_86",))
    )
    (symbol, (unit,)), *_ = spec.cuda.items()
    assert old in unit.text
    changed = replace(unit, text=unit.text.replace(old, new, 1))
    spec = emulator.emulated(replace(spec, cuda={symbol: (changed,)}))
    module = import_module(cached_module("broken", spec, Toolchain.find(cuda=False), Cache()))
    return emulator.for_cpu_tensors(module).causal_lm


def outcome(call: Any) -> str:
    """ "right", "wrong", or the error of a call."""
    q, k, v = inputs(1, 2, 2, 200, 200, 64, 64, torch.bfloat16)
    try:
        bad = failures(compare(call, VARIANTS["causal"], q, k, v, {}))
    except RuntimeError as error:
        return str(error)
    return "wrong" if bad else "right"


LOOP_BARRIER = "    __syncthreads();  // the copies of all threads are visible"
LAST_BARRIER = "  __syncthreads();\n  tile::round_to_tile"
STAGE = "const uint32_t stage = stages + (step & 1) * STAGE_BYTES;\n    const int first_key"
FAULTS = {
    "no barrier": (LOOP_BARRIER, "    //", "wrong"),
    "no wait": (f"    ptx::cp_async_wait<0>();\n{LOOP_BARRIER}", LOOP_BARRIER, "wrong"),
    "a barrier of some": (LAST_BARRIER, f"  if (threadIdx.x < 64)\n{LAST_BARRIER}", "wrong"),
    "a branch around a shuffle": (
        "const auto q_blocks",
        "if (threadIdx.x & 1) tile::warp_index(threadIdx.x);\n  const auto q_blocks",
        "different operations|wait for ever",
    ),
    "misaligned": (
        "= ptx::shared_address(shared_memory)",
        "= ptx::shared_address(shared_memory) + 8",
        "not aligned",
    ),
    "a stage too many": (STAGE, STAGE.replace("step & 1", "step % 3"), "beyond the"),
}


def test_what_is_not_broken_is_right() -> None:
    assert outcome(broken(LOOP_BARRIER, LOOP_BARRIER)) == "right"


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    old, new, expected = FAULTS[fault]
    assert re.search(expected, outcome(broken(old, new)))
