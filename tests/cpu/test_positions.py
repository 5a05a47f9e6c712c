# SPDX-License-Identifier: Apache-2.0
"""Origins and numbers of keys as ints and tensors: static caches, left padding, lengths by batch."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import afc
from afc import passes
from afc.frontend import check_file
from afc.reference import Call, backward, forward, run_backward, run_forward
from afc.schedule.plan import schedule
from tests.support.checks import EXAMPLES, Outcome, compare, failures, inputs, poison, run
from tests.support.dense import VARIANTS, by_batch

Tensor = torch.Tensor
PLACES = ("q_origin", "k_origin", "kv_len")


def kernel(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return getattr(
        afc.load(EXAMPLES / f"{name}.attn", D=64, dtype=dtype, backend="cpu"), VARIANTS[name].attention
    )


def check(name: str, dtype: torch.dtype, shape: tuple[int, ...], **places: Any) -> None:
    b, h, hk, m, n = shape
    q, k, v = inputs(b, h, hk, m, n, 64, 64, dtype)
    extras = {**VARIANTS[name].extras(h, "cpu"), **places}
    bad = failures(compare(kernel(name, dtype), by_batch(name), q, k, v, extras))
    assert not bad, f"{name} {dtype} {shape} {places}: (error, allowed) {bad}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["full", "llama", "mistral", "alibi", "gemma2"])
def test_number_of_keys_of_each_batch(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, (4, 4, 2, 30, 150), kv_len=torch.tensor([150, 1, 0, 97]))


@pytest.mark.parametrize("kv_len", [0, 29, 150, torch.tensor(33, dtype=torch.int32)])
@pytest.mark.parametrize("name", ["full", "mistral"])
def test_one_number_of_keys(name: str, kv_len: Any) -> None:
    check(name, torch.float32, (2, 4, 1, 30, 150), kv_len=kv_len)


@pytest.mark.parametrize("name", ["mistral", "alibi", "gptj"])
def test_origins_of_each_batch(name: str) -> None:
    q_origin, k_origin = torch.tensor([0, 70, -9]), torch.tensor([5, 0, -40], dtype=torch.int32)
    for places in (
        {"q_origin": q_origin, "k_origin": k_origin},
        {"q_origin": q_origin},
        {"k_origin": k_origin, "q_origin": 25},
        {"k_origin": k_origin, "kv_len": torch.tensor([90, 41, 20])},
    ):
        check(name, torch.float32, (3, 4, 2, 60, 90), **places)


def test_decoding_with_a_static_cache_equals_the_whole_sequence() -> None:
    """Row by row with kv_len = t + 1 gives the rows of one causal call."""
    call, (q, k, v) = kernel("llama"), inputs(2, 4, 2, 20, 20, 64, 64, torch.float32)
    whole = call(q, k, v)
    cache = [torch.full((2, 2, 64, 64), torch.nan) for _ in range(2)]
    for t in range(20):
        for buffer, x in zip(cache, (k, v), strict=True):
            buffer[:, :, t] = x[:, :, t]
        row = call(q[:, :, t : t + 1], *cache, kv_len=torch.tensor(t + 1))
        torch.testing.assert_close(row, whole[:, :, t : t + 1], rtol=1e-5, atol=1e-6)


def _outcome(call: Any, tensors: list[Tensor], do: Tensor, places: dict[str, Any]) -> Outcome:
    poison(megabytes=4)
    return run(lambda *a, **x: call(*a, **x, return_lse=True), *tensors, do, None, places)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["full", "llama", "mistral", "gemma2"])
def test_rows_beyond_kv_len_are_never_read(name: str) -> None:
    """NaN there changes no bit, and the gradient there is 0."""
    call, lengths = kernel(name), [100, 3, 0, 64]
    q, k, v = inputs(4, 4, 2, 40, 100, 64, 64, torch.float32)
    do, places = (
        torch.randn(4, 4, 40, 64),
        {**VARIANTS[name].extras(4, "cpu"), "kv_len": torch.tensor(lengths)},
    )
    clean = _outcome(call, [q, k, v], do, places)
    for b, count in enumerate(lengths):
        k[b, :, count:], v[b, :, count:] = torch.nan, torch.nan
    dirty = _outcome(call, [q, k, v], do, places)
    for field in ("o", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(clean, field), getattr(dirty, field)), field
    for b, count in enumerate(lengths):
        assert not dirty.dk[b, :, count:].any() and not dirty.dv[b, :, count:].any()


def test_masks_without_bounds_stop_at_kv_len(tmp_path: Path) -> None:
    """A mask that tests elements, captured tensors of size N, and a normalizer without a sum."""
    file = tmp_path / "documents.attn"
    file.write_text(
        "attention documents(q, k, v; qdoc[B, M]: int, kdoc[B, N]: int) {\n"
        "    return softmax(document(causal(scaled_dot_product(q, k)); qdoc, kdoc)) @ v\n}\n",
        encoding="utf-8",
    )
    call = afc.load(file, D=64, dtype="float32", backend="cpu").documents
    q, k, v = inputs(2, 2, 2, 50, 50, 64, 64, torch.float32)
    kdoc = torch.zeros(2, 50, dtype=torch.int64)
    k[0, :, 20:], v[0, :, 20:] = torch.nan, torch.nan
    o = call(q, k, v, qdoc=kdoc, kdoc=kdoc, kv_len=torch.tensor([20, 50]), q_origin=0)
    want = call(q[:1, :, :], k[:1, :, :20].contiguous(), v[:1, :, :20], qdoc=kdoc[:1], kdoc=kdoc[:1, :20])
    torch.testing.assert_close(o[:1], want, rtol=1e-6, atol=1e-6)
    pointwise = afc.load(EXAMPLES / "sigmoid.attn", D=64, dtype="float32", backend="cpu").sigmoid_lm
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = pointwise(q, k, v, kv_len=torch.tensor([20, 50]))
    dk, dv = torch.autograd.grad(o.sum(), (k, v))
    assert all(torch.isfinite(x).all() for x in (o, dk, dv)) and not dk[0, :, 20:].any()


def test_gradcheck_with_places_of_each_batch() -> None:
    call = kernel("llama", torch.float64)
    tensors = [x.requires_grad_() for x in inputs(3, 4, 2, 7, 9, 64, 64, torch.float64)]
    places = {"kv_len": torch.tensor([9, 0, 4]), "k_origin": torch.tensor([0, 3, 1])}
    assert torch.autograd.gradcheck(lambda *a: call(*a, **places)[0], tensors, fast_mode=True)


def test_places_that_change_are_not_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """An int and a tensor of each kind: one graph for all values."""
    call = kernel("llama")
    monkeypatch.setattr(subprocess, "Popen", None)
    for make in (int, torch.tensor, lambda x: torch.tensor([x, 1])):
        graphs: list[Any] = []

        def backend(graph: Any, arguments: Any, seen: list[Any] = graphs) -> Any:
            seen.append(graph)
            return graph.forward

        torch._dynamo.reset()
        step = torch.compile(
            lambda q, k, v, n: call(q, k, v, kv_len=n), fullgraph=True, dynamic=True, backend=backend
        )
        q, k, v = inputs(2, 4, 4, 5, 40, 64, 64, torch.float32)
        for count in (9, 20, 33):
            assert torch.equal(step(q, k, v, make(count)), call(q, k, v, kv_len=make(count)))
        assert len(graphs) == 1


def test_opcheck_with_places() -> None:
    glue = kernel("llama").glue
    q, k, v = inputs(2, 4, 2, 17, 23, 64, 64, torch.float32)
    numbers = ([], [3, 0, -1], [None, torch.tensor([1, 2]), torch.tensor([20, 9])], [])
    torch.library.opcheck(glue.forward_op, (q, k, v, [], *numbers))
    o, lse = glue.forward_op(q, k, v, [], *numbers)
    torch.library.opcheck(
        glue.backward_op, (torch.randn_like(o), None, q, k, v, o, lse, [], *numbers, False, [])
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "packed"])
def test_interpreters_and_kernel_agree_on_places(name: str) -> None:
    """The formulas, the schedules of all targets and the compiled code, in float64."""
    (program,) = check_file(EXAMPLES / f"{name}.attn").programs
    lowered = passes.run(program, {"Dqk": 64, "Dv": 64})
    q, k, v, do = (
        x.numpy() for x in (*inputs(3, 2, 1, 50, 90, 64, 64, torch.float64), torch.randn(3, 2, 50, 64))
    )
    places = {
        "q_origin": np.array([60, 5, 0]),
        "k_origin": np.array([0, -20, 7]),
        "kv_len": np.array([90, 41, 0]),
    }
    rows = {"qdoc": 50, "kdoc": 90, "qpos": 50, "kpos": 90}
    tensors = {t.name: np.random.default_rng(0).integers(0, 2, (3, rows[t.name])) for t in lowered.tensors}
    call = Call(q, k, v, tensors, {"w": 30} if name == "mistral" else {}, **places)
    want, gradients = forward(lowered, call), backward(lowered, call, do)
    module = afc.load(EXAMPLES / f"{name}.attn", D=64, dtype="float64", backend="cpu")
    arguments = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    options = {n: torch.from_numpy(x) for n, x in {**tensors, **places}.items()}
    o, lse = getattr(module, program.name)(*arguments, **options, **call.scalars, return_lse=True)
    ours = torch.autograd.grad(o, arguments, torch.from_numpy(do).to(o.dtype))
    found = [
        (o, want.o),
        (lse, want.lse),
        *zip(ours, (gradients.dq, gradients.dk, gradients.dv), strict=True),
    ]
    for x, y in found:
        np.testing.assert_allclose(x.detach().numpy(), y, rtol=1e-9, atol=1e-11)
    for target, storage in (("cpu", "float64"), ("sm80", "float16")):
        plan = schedule(lowered, target, storage)
        plan = replace(plan, semantics=replace(plan.semantics, storage="float64"))
        result = run_forward(plan, call)
        got = run_backward(plan, call, result, do)
        for x, y in (
            (result.o, want.o),
            (result.lse, want.lse),
            (got.dq, gradients.dq),
            (got.dk, gradients.dk),
        ):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-10)
