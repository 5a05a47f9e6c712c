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
from tests.support.dense import Variant, softmax_attention  # noqa: E402
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


def test_places_of_each_batch(modules: Any) -> None:
    """Runs are those of each batch entry's origin, up to its last key; also in the deterministic form."""
    b, h, m, n = 2, 2, 150, 190
    counts, origins = torch.tensor([170, 75]), torch.tensor([30, 90])
    q, k, v = inputs(b, h, 1, m, n, 64, 64, torch.bfloat16, "cpu")
    extras = MASKED["packed"][1](b, h, m, n)
    i = torch.arange(m)[:, None] + origins[:, None, None]
    j = torch.arange(n)[None]
    kept = (extras["qdoc"][:, :, None] == extras["kdoc"][:, None]) & (extras["kdoc"] >= 0)[:, None]
    kept = (kept & (j <= i) & (j < counts[:, None, None]))[:, None]

    def dense(q: Any, k: Any, v: Any) -> Any:
        return softmax_attention(q, k, v, lambda s: s * 0.125, kept)

    for deterministic in (False, True):

        def call(q: Any, k: Any, v: Any, on: bool = deterministic, **more: Any) -> Any:
            places = {"q_origin": origins, "kv_len": counts, "deterministic": on}
            return modules[64].packed(q, k, v, **extras, **places, **more)

        bad = failures(compare(call, Variant("packed", "packed", dense), q, k, v, {}))
        assert not bad, f"deterministic {deterministic}: (error, allowed) {bad}"
