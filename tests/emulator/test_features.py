# SPDX-License-Identifier: Apache-2.0
"""Normalizers, places of batch entries, hidden NaN, fixed order and head sizes of the emitted CUDA, run by
the emulator.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import emulator  # noqa: E402
from tests.support import features  # noqa: E402
from tests.support.checks import EXAMPLES, compare, failures, inputs  # noqa: E402
from tests.support.dense import VARIANTS  # noqa: E402
from tests.support.normalizers import TEXTS  # noqa: E402


def example(name: str, d: int = 64, dtype: str = "bfloat16", **options: Any) -> Any:
    module = emulator.load(EXAMPLES / f"{name}.attn", D=d, dtype=dtype, **options)
    return getattr(module, VARIANTS[name].attention)


@pytest.mark.parametrize(("d", "dtype"), [(64, "bfloat16"), (128, "float16")])
@pytest.mark.parametrize("name", TEXTS)
def test_normalizers(tmp_path: Path, name: str, d: int, dtype: str) -> None:
    call = emulator.load(features.write(tmp_path, name, TEXTS[name]), D=d, dtype=dtype).a
    features.check_normalizer(call, name, d, getattr(torch, dtype), "cpu")


@pytest.mark.parametrize("sink", [-200.0, 200.0, -torch.inf])
def test_a_sink_of_any_size(tmp_path: Path, sink: float) -> None:
    """exp(sink) is beyond float32 either way; its logarithm is what the kernel computes with."""
    call = emulator.load(features.write(tmp_path, "softmax_sink", TEXTS["softmax_sink"])).a
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 70, 70, 64, 64, torch.bfloat16))
    o, lse = call(q, k, v, sink=torch.full((2,), sink), return_lse=True)
    want, want_lse = VARIANTS["causal"].reference(q.double(), k.double(), v.double())
    if sink > 0:
        assert not o.any() and torch.equal(lse, torch.full_like(lse, sink))
    else:
        torch.testing.assert_close(o.double(), want, rtol=2**-7, atol=2**-8)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum() + lse.sum(), (q, k, v)))


COUNTS, ORIGINS = torch.tensor([150, 1, 0, 97]), torch.tensor([0, 70, -9, 140])


@pytest.mark.parametrize("name", ["full", "llama", "mistral", "alibi", "gemma2"])
def test_number_of_keys_of_each_batch(name: str) -> None:
    features.check_places(example(name), name, 64, "cpu", kv_len=COUNTS)


@pytest.mark.parametrize("kv_len", [0, 29, 150, torch.tensor(33, dtype=torch.int32)])
@pytest.mark.parametrize("name", ["full", "mistral"])
def test_one_number_of_keys(name: str, kv_len: Any) -> None:
    features.check_places(example(name), name, 64, "cpu", kv_len=kv_len)


@pytest.mark.parametrize("name", ["mistral", "alibi", "gptj", "llama"])
def test_origins_of_each_batch(name: str) -> None:
    for places in (
        {"q_origin": ORIGINS, "k_origin": torch.tensor([5, 0, -40, 1], dtype=torch.int32)},
        {"k_origin": ORIGINS, "q_origin": 25},
        {"k_origin": ORIGINS, "kv_len": torch.tensor([90, 41, 20, 150])},
    ):
        features.check_places(example(name), name, 64, "cpu", **places)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["full", "llama", "mistral"])
def test_rows_beyond_kv_len_are_never_read(name: str, deterministic: bool) -> None:
    features.check_unread(example(name, 64, "float16"), name, 64, "cpu", deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128, 40])
def test_masked_rows_may_hold_anything(tmp_path: Path, d: int, deterministic: bool) -> None:
    module = emulator.load(features.write(tmp_path, "listed", features.LISTED), D=d, dtype="float16")
    features.check_masked_rows(module.listed, d, "cpu", True, deterministic)
    features.check_masked_rows(module.listed_sigmoid, d, "cpu", False, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_nan_in_the_future_is_hidden(deterministic: bool) -> None:
    features.check_hidden_future(example("causal", 64, "float16"), 64, "cpu", deterministic)
    features.check_hidden_future(example("causal", 128, "float16"), 128, "cpu", deterministic)


@pytest.mark.parametrize("name", ["llama", "gemma2", "streaming"])
@pytest.mark.parametrize("d", [64, 128])
def test_deterministic(name: str, d: int) -> None:
    module = emulator.load(EXAMPLES / f"{name}.attn", D=d)
    call = next(x for n, x in vars(module).items() if n.startswith(name))
    options = {"w": 40} if name == "streaming" else {}
    features.check_deterministic(call, d, (4, 2), (130, 100), "cpu", **options)


@pytest.mark.parametrize("d", [40, 72, 88, 104, 120, 136, 200, 256])
def test_deterministic_gradients_are_right(d: int) -> None:
    call = partial(example("llama", d), deterministic=True)
    q, k, v = inputs(1, 2, 1, 70, 130, d, d, torch.bfloat16)
    bad = failures(compare(call, VARIANTS["llama"], q, k, v, {}))
    assert not bad, f"D{d}: (error, allowed) {bad}"


def test_torch_asks_for_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    call, modes = example("causal"), []
    glue = type(call.glue)  # torch's operators belong to the first module of equal ones that was loaded
    q, k, v = (x.requires_grad_() for x in inputs(1, 1, 1, 20, 20, 64, 64, torch.bfloat16))
    run = glue._run
    monkeypatch.setattr(glue, "_run", lambda *a: (modes.append(a[-1]), run(*a))[1])
    try:
        for asked in (False, True):
            torch.use_deterministic_algorithms(asked)
            call(q, k, v).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes == [False, False, False, True]  # forward and backward, twice


@pytest.mark.parametrize("d", [8, 24, 40, 72, 88, 104, 120, 136, 152, 176, 208, 248])
@pytest.mark.parametrize("name", ["causal", "llama"])
def test_head_sizes(name: str, d: int) -> None:
    q, k, v = inputs(1, 4, 2, 70, 90, d, d, torch.float16)
    bad = failures(compare(example(name, d, "float16"), VARIANTS[name], q, k, v, {}))
    assert not bad, f"{name} D{d}: (error, allowed) {bad}"


@pytest.mark.parametrize("heads", [(40, 72), (120, 88), (136, 24), (64, 136)])
def test_head_sizes_differ(heads: tuple[int, int]) -> None:
    module = emulator.load(EXAMPLES / "llama.attn", Dqk=heads[0], Dv=heads[1])
    q, k, v = inputs(2, 4, 2, 67, 100, *heads, torch.bfloat16)
    bad = failures(compare(module.llama, VARIANTS["llama"], q, k, v, {}))
    assert not bad, f"{heads}: (error, allowed) {bad}"
