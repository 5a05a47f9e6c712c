# SPDX-License-Identifier: Apache-2.0
"""Normalizers, places of batch entries, hidden NaN and fixed order on a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import afc  # noqa: E402
from tests.support import features  # noqa: E402
from tests.support.checks import EXAMPLES, inputs  # noqa: E402
from tests.support.dense import VARIANTS  # noqa: E402
from tests.support.normalizers import TEXTS  # noqa: E402

ARCH = os.environ.get("AFC_TEST_ARCH")


def load(path: Path, d: int, dtype: str) -> Any:
    return afc.load(path, D=d, dtype=dtype, backend="cuda", arch=ARCH)


def example(name: str, d: int = 64, dtype: str = "bfloat16") -> Any:
    return getattr(load(EXAMPLES / f"{name}.attn", d, dtype), VARIANTS[name].attention)


@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", TEXTS)
def test_normalizers(tmp_path: Path, name: str, dtype: str, d: int) -> None:
    call = load(features.write(tmp_path, name, TEXTS[name]), d, dtype).a
    features.check_normalizer(call, name, d, getattr(torch, dtype), "cuda")


COUNTS, ORIGINS = torch.tensor([150, 1, 0, 97]), torch.tensor([0, 70, -9, 140])


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["full", "llama", "mistral", "alibi", "gemma2", "gptj"])
def test_places(name: str, d: int) -> None:
    call = example(name, d)
    for places in (
        {"kv_len": COUNTS},
        {"kv_len": 29},
        {"kv_len": torch.tensor(33, dtype=torch.int32)},
        {"q_origin": ORIGINS, "k_origin": torch.tensor([5, 0, -40, 1], dtype=torch.int32)},
        {"k_origin": ORIGINS, "q_origin": 25},
        {"k_origin": ORIGINS, "kv_len": torch.tensor([90, 41, 20, 150])},
    ):
        features.check_places(call, name, d, "cuda", **places)


def test_places_are_not_read_by_the_host() -> None:
    """A captured graph follows the number of keys that the tensor holds when it is replayed."""
    call, (q, k, v) = example("llama"), inputs(2, 4, 2, 1, 300, 64, 64, torch.bfloat16, "cuda")
    count = torch.tensor(10, device="cuda")
    call(q, k, v, kv_len=count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(q, k, v, kv_len=count)
    for length in (10, 177, 300):
        count.fill_(length)
        graph.replay()
        assert torch.equal(o, call(q, k[:, :, :length], v[:, :, :length], q_origin=length - 1))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_rows_beyond_kv_len_are_never_read(d: int, deterministic: bool) -> None:
    for name in ("full", "llama", "mistral"):
        features.check_unread(example(name, d, "float16"), name, d, "cuda", deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [40, 64, 96, 128, 192, 256])
def test_masked_rows_may_hold_anything(tmp_path: Path, d: int, deterministic: bool) -> None:
    module = load(features.write(tmp_path, "listed", features.LISTED), d, "float16")
    features.check_masked_rows(module.listed, d, "cuda", True, deterministic)
    features.check_masked_rows(module.listed_sigmoid, d, "cuda", False, deterministic)
    features.check_hidden_future(example("causal", d, "float16"), d, "cuda", deterministic)


@pytest.mark.parametrize("d", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["full", "llama", "gemma2"])
def test_deterministic(name: str, d: int) -> None:
    features.check_deterministic(example(name, d), d, (8, 2), (1030, 900), "cuda")
