# SPDX-License-Identifier: Apache-2.0
"""Masks that a plan kernel decides, over many tiles, and captured tensors by row and by column: the emitted
CUDA against dense attention of PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import emulator  # noqa: E402
from tests.support.checks import compare, failures, inputs  # noqa: E402
from tests.support.masked import MASKED, PROGRAM, variant  # noqa: E402

SHAPES = {"packed": (2, 2, 1, 300, 330), "by_head": (1, 4, 2, 200, 200), "thirds_of": (1, 1, 1, 40, 700)}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: Any) -> Any:
    path: Path = tmp_path_factory.mktemp("masked") / "masked.attn"
    path.write_text(PROGRAM)
    return {d: emulator.load(path, D=d) for d in (64, 128)}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", MASKED)
def test_against_dense(name: str, d: int, modules: Any) -> None:
    b, h, hk, m, n = SHAPES.get(name, (2, 2, 1, 150, 190))
    q, k, v = inputs(b, h, hk, m, n, d, d, torch.bfloat16, "cpu")
    extras = MASKED[name][1](b, h, m, n)
    bad = failures(compare(getattr(modules[d], name), variant(name), q, k, v, extras))
    assert not bad, f"{name} D{d}: (error, allowed) {bad}"


def test_rows_that_no_tile_keeps(modules: Any) -> None:
    """Queries of a document without keys: output and gradients 0, LSE -inf, whatever v holds."""
    q, k, v = inputs(2, 2, 1, 70, 90, 64, 64, torch.bfloat16, "cpu")
    v = torch.full_like(v, torch.nan)
    ids = {"qdoc": torch.zeros(2, 70, dtype=torch.int64), "kdoc": torch.ones(2, 90, dtype=torch.int64)}
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = modules[64].packed(q, k, v, **ids, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (gradient == 0).all()
