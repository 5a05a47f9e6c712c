# SPDX-License-Identifier: Apache-2.0
"""Masks that a plan kernel decides, over many tiles, and captured tensors by row and by column, on a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import afc  # noqa: E402
from tests.support.checks import compare, failures, inputs  # noqa: E402
from tests.support.masked import MASKED, PROGRAM, variant  # noqa: E402

ARCH = os.environ.get("AFC_TEST_ARCH")
SHAPES = [(2, 4, 2, 300, 330), (1, 2, 2, 1500, 1500), (1, 8, 1, 64, 4100), (2, 2, 1, 2100, 100)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    found: Path = tmp_path_factory.mktemp("masked") / "masked.attn"
    found.write_text(PROGRAM)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MASKED)
def test_against_dense(name: str, dtype: str, d: int, shape: tuple[int, ...], path: Path) -> None:
    b, h, hk, m, n = shape
    call = getattr(afc.load(path, D=d, dtype=dtype, backend="cuda", arch=ARCH), name)
    q, k, v = inputs(b, h, hk, m, n, d, d, getattr(torch, dtype), "cuda")
    extras = {key: x.cuda() for key, x in MASKED[name][1](b, h, m, n).items()}
    bad = failures(compare(call, variant(name), q, k, v, extras))
    assert not bad, f"{name} {dtype} D{d} {shape}: (error, allowed) {bad}"


def test_long_documents_in_a_graph(path: Path) -> None:
    """Runs are found anew at each replay: the documents of a captured call may change."""
    call = afc.load(path, D=64, dtype="bfloat16", backend="cuda", arch=ARCH).packed
    q, k, v = inputs(1, 2, 2, 2048, 2048, 64, 64, torch.bfloat16, "cuda")
    ids = torch.zeros(1, 2048, dtype=torch.int64, device="cuda")
    call(q, k, v, qdoc=ids, kdoc=ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(q, k, v, qdoc=ids, kdoc=ids)
    for length in (2048, 512, 100):
        ids.copy_(torch.arange(2048, device="cuda")[None] // length)
        graph.replay()
        torch.testing.assert_close(out, call(q, k, v, qdoc=ids, kdoc=ids), rtol=0, atol=0)
