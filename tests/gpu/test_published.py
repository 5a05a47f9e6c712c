# SPDX-License-Identifier: Apache-2.0
"""Every published variant, forward and backward, against PyTorch from its paper.

The references run on the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import afc  # noqa: E402
from afc.errors import UsageError  # noqa: E402
from tests.support.checks import EXAMPLES, compare, failures, inputs, without_lse  # noqa: E402
from tests.support.published import PUBLISHED  # noqa: E402

ARCH = os.environ.get("AFC_TEST_ARCH")


REFUSED = ("rope_mixed",)  # gradients of tensors that rotations read


def on_gpu(kernel: Any) -> Any:
    """The kernel for arguments on the CPU; autograd follows the copies."""

    def call(*rows: Any, **options: Any) -> Any:
        moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        found = kernel(*(x.cuda() for x in rows), **moved)
        return found.cpu() if isinstance(found, torch.Tensor) else tuple(x.cpu() for x in found)

    return call


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str, d: int) -> None:
    variant = PUBLISHED[name]
    if name in REFUSED:
        with pytest.raises(UsageError, match="E0411"):
            afc.load(EXAMPLES / f"{name}.attn", D=d, dtype="bfloat16", backend="cuda", arch=ARCH)
        return
    module = afc.load(EXAMPLES / f"{name}.attn", D=d, dtype="bfloat16", backend="cuda", arch=ARCH)
    shape = variant.shape
    torch.manual_seed(sum(map(ord, name)))
    q, k, v = inputs(shape.b, shape.h, shape.hk, shape.m, shape.n, d, d, torch.bfloat16)
    arguments = variant.arguments(type(shape)(**{**vars(shape), "d": d}))
    attention = getattr(module, variant.attention)
    learned = [t.name for t in attention.info.tensors if t.grad]
    call = on_gpu(attention) if variant.lse else without_lse(on_gpu(attention))
    bad = failures(compare(call, variant, q, k, v, arguments, learned=learned))
    assert not bad, f"{name} D{d} {shape}: (error, allowed) {bad}"
