# SPDX-License-Identifier: Apache-2.0
"""The gate on machine code: every example, head size and architecture builds without spills, stack or
warnings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from afc.api import module_spec
from afc.build import Cache, CubinResult, Toolchain, compile_units, ptxas_faults
from afc.errors import ToolchainError
from afc.frontend import check_file
from afc.options import Options
from afc.schedule.targets.sm80 import SHARED_BYTES

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
MATRIX = (
    ("llama", (64, 128), ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "compute_86:sm_90"), ("bfloat16",)),
    ("llama", (32, 96, 192, 256), ("sm_86", "sm_90"), ("bfloat16",)),
    ("gemma2", (64, 128), ("sm_80", "sm_86", "sm_90", "sm_120"), ("float16",)),
    ("alibi", (64, 128), ("sm_86", "sm_90"), ("float16",)),
    ("mistral", (64, 128), ("sm_86", "sm_90"), ("bfloat16",)),
    ("gptj", (64, 128), ("sm_86", "sm_90"), ("bfloat16",)),
    ("full", (64, 128), ("sm_86", "sm_90"), ("float16",)),
    ("streaming", (64, 128), ("sm_86", "sm_90"), ("bfloat16",)),
    ("longformer", (64, 128), ("sm_86", "sm_90"), ("bfloat16",)),
    ("llama4_local", (128,), ("sm_86", "sm_90"), ("bfloat16",)),
    ("qwen2_vl", (64, 128), ("sm_80", "sm_86"), ("bfloat16",)),
    ("axial_vit", (64, 128), ("sm_80", "sm_86"), ("bfloat16",)),
    ("llama_tables", (128,), ("sm_80", "sm_86"), ("bfloat16",)),
    ("speculative", (64,), ("sm_80", "sm_86"), ("float16",)),
    ("causal", (40, 96, 128, 136, 192, 256), ("sm_86", "compute_86:sm_90"), ("bfloat16",)),
    ("softmax1", (64, 128, 256), ("sm_80", "sm_86", "compute_86:sm_90"), ("bfloat16",)),
    ("sigmoid", (64, 96, 128, 192, 256), ("sm_80", "sm_86", "compute_86:sm_90"), ("float16",)),
    ("relu_vit", (64, 128), ("sm_86", "compute_86:sm_90"), ("bfloat16",)),
    # Gradients of captured tensors in every form, row blocks, output blocks.
    ("swin", (64, 128), ("sm_80", "sm_86", "compute_86:sm_90"), ("bfloat16",)),
    ("t5_decoder", (64, 128, 256), ("sm_80", "sm_86", "compute_86:sm_90"), ("bfloat16",)),
    ("forgetting", (64, 128), ("sm_86", "compute_86:sm_90"), ("float16",)),
    ("deberta", (128,), ("sm_80", "sm_86", "compute_86:sm_90"), ("bfloat16",)),
    ("qwen3", (128,), ("sm_80", "sm_86", "compute_86:sm_90"), ("bfloat16",)),
    ("qwen3_next", (64, 256), ("sm_80", "sm_86", "compute_86:sm_90"), ("bfloat16",)),
    ("headwise_norm", (64, 128), ("sm_80", "sm_86", "compute_86:sm_90"), ("bfloat16",)),
)
SUMMING = ("captured", "output", "postprocess")


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    try:
        return Toolchain.find(cuda=True)
    except ToolchainError:
        pytest.skip("no nvcc here")


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("name", "heads", "archs", "dtypes"), MATRIX, ids=lambda x: x if isinstance(x, str) else None
)
def test_no_spill_no_stack(
    toolchain: Toolchain, name: str, heads: tuple[int, ...], archs: tuple[str, ...], dtypes: tuple[str, ...]
) -> None:
    options = Options(("cuda",), tuple((d, d) for d in heads), dtypes, archs)
    spec = module_spec(check_file(EXAMPLES / f"{name}.attn"), options)
    cubins = [
        c
        for c in compile_units([u for group in spec.cuda.values() for u in group], toolchain, Cache())
        if isinstance(c, CubinResult)
    ]
    faults = [f"{c.name} for {c.arch}: {fault}" for c in cubins for fault in ptxas_faults(c)]
    assert len(cubins) == len(heads) * len(archs) * len(dtypes)
    assert not faults, "\n".join(faults)


def test_shared_memory_fits_the_smallest_gpu_of_the_family() -> None:
    from afc.api import units

    for name in ("llama", "causal", "gptj", "deberta", "qwen3_next", "headwise_norm", "swin"):
        for d in (16, 32, 64, 96, 128, 160, 192, 256):
            for unit in units(
                check_file(EXAMPLES / f"{name}.attn"),
                Options(("cuda",), ((d, d),)) if d >= 32 or name != "gptj" else Options(("cuda",)),
            ):
                for launch in unit.plan.launches:
                    own = (
                        1536 if launch.kernel.kind in SUMMING else 0
                    )  # more static shared memory than others
                    bytes_ = launch.kernel.binding.shared_bytes + own
                    assert bytes_ <= SHARED_BYTES, (name, d, launch.kernel.name)
