# SPDX-License-Identifier: Apache-2.0
"""A short list of calls for ``compute-sanitizer --tool memcheck python -m tests.gpu.sanitizer``.

Together they use every kernel and every way in which shared memory changes hands: rotation, row and output
blocks, stored masks, biases with gradients, weights, grouped heads, ragged tiles, both orders of sums.
"""

from __future__ import annotations

import os
import sys

import torch

import afc
from tests.support.checks import EXAMPLES
from tests.support.published import PUBLISHED, Shape

NAMES = ("llama", "packed", "t5_decoder", "qwen3", "headwise_norm", "dropkey", "learned_sink")
SHAPE = Shape(b=1, h=4, hk=2, m=70, n=70, d=64)


def main() -> int:
    """Forward and backward of each, at a length that fills no tile."""
    arch = os.environ.get("AFC_TEST_ARCH")
    for name in NAMES:
        options = {} if arch is None else {"arch": arch}
        module = afc.load(
            EXAMPLES / f"{name}.attn", D=SHAPE.d, dtype=torch.bfloat16, backend="cuda", **options
        )
        variant = PUBLISHED.get(name)
        call = getattr(module, name if variant is None else variant.attention)
        given = {} if variant is None else variant.arguments(SHAPE)
        arguments = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in given.items()}
        for deterministic in (False, True):
            q, k, v = (
                torch.randn(
                    SHAPE.b, h, rows, SHAPE.d, device="cuda", dtype=torch.bfloat16, requires_grad=True
                )
                for h, rows in ((SHAPE.h, SHAPE.m), (SHAPE.hk, SHAPE.n), (SHAPE.hk, SHAPE.n))
            )
            learned = [arguments[t.name] for t in call.info.tensors if t.grad]
            leaves = [x.requires_grad_() for x in (q, k, v, *learned)]
            o = call(q, k, v, deterministic=deterministic, **arguments)
            torch.autograd.grad(o.float().sum(), leaves, allow_unused=True)
        torch.cuda.synchronize()
        print(f"ran {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
