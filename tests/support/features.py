# SPDX-License-Identifier: Apache-2.0
"""What kernels must do beyond plain softmax attention, as checks that the emulator and GPUs share.

`call(q, k, v, **options)` is an attention; tensors are made on `device`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support.checks import (
    Outcome,
    compare,
    failures,
    inputs,
    on_the_cpu,
    poison,
    run,
    without_lse,
)
from tests.support.dense import VARIANTS, by_batch
from tests.support.normalizers import POINTWISE, TEXTS
from tests.support.normalizers import VARIANTS as NORMALIZERS

Tensor = torch.Tensor
Call = Callable[..., Any]

SHAPES = ((129, 129, {}), (17, 90, {"q_origin": 60}), (60, 50, {"k_origin": 20}))
LISTED = """
mask pairs(b, m, n; keep[B, M, N]: bool) = keep[b, m, n]
attention listed(q, k, v; keep[B, M, N]: bool) = softmax(pairs(scaled_dot_product(q, k); keep)) @ v
attention listed_sigmoid(q, k, v; keep[B, M, N]: bool) {
    return sigmoid_attention(pairs(scaled_dot_product(q, k); keep)) @ v
}
"""


def write(folder: Path, name: str, text: str) -> Path:
    """The program as a file."""
    path = folder / f"{name}.attn"
    path.write_text(text + "\n", encoding="utf-8")
    return path


def to(device: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options with their tensors on the device."""
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}


def check_normalizer(call: Call, name: str, d: int, dtype: torch.dtype, device: str) -> None:
    """A program of `tests.support.normalizers` against PyTorch, with rows that see nothing."""
    assert name in TEXTS
    variant, call = NORMALIZERS[name], without_lse(call) if name in POINTWISE else call
    if device == "cuda":
        variant = replace(variant, reference=on_the_cpu(variant.reference))
    for m, n, origins in SHAPES:
        q, k, v = inputs(2, 4, 2, m, n, d, d, dtype, device)
        extras = {**to(device, variant.extras(4, device)), **origins}
        bad = failures(compare(call, variant, q, k, v, extras, with_dlse=name not in POINTWISE))
        assert not bad, f"{name} D{d} M{m} N{n}: (error, allowed) {bad}"


def check_places(call: Call, name: str, d: int, device: str, **places: Any) -> None:
    """kv_len and origins, as ints or tensors, against each batch entry alone; B is 4, M 30, N 150."""
    q, k, v = inputs(4, 4, 2, 30, 150, d, d, torch.bfloat16, device)
    extras = {**to(device, VARIANTS[name].extras(4, device)), **to(device, places)}
    bad = failures(compare(call, by_batch(name), q, k, v, extras))
    assert not bad, f"{name} D{d} {places}: (error, allowed) {bad}"


def outcome(call: Call, tensors: list[Tensor], options: dict[str, Any], has_lse: bool = True) -> Outcome:
    """Results and gradients, in recycled memory that is full of NaN. `tensors`: q, k, v, dO."""
    poison(tensors[0].device.type, megabytes=4)
    call = call if has_lse else without_lse(call)
    return run(lambda *a, **x: call(*a, **x, return_lse=True), *tensors, None, options)  # type: ignore[arg-type]


FIELDS = ("o", "lse", "dq", "dk", "dv")


def check_unread(call: Call, name: str, d: int, device: str, deterministic: bool) -> None:
    """NaN beyond kv_len changes no bit of what has a fixed order, and gradients there are 0."""
    lengths = (100, 3, 0, 64)
    tensors = [*inputs(4, 4, 2, 40, 100, d, d, torch.float16, device)]
    tensors.append(torch.randn(4, 4, 40, d, device=device).half())
    options = {**to(device, VARIANTS[name].extras(4, device)), "kv_len": torch.tensor(lengths, device=device)}
    options |= {"deterministic": True} if deterministic else {}
    clean = outcome(call, tensors, options)
    for b, count in enumerate(lengths):
        tensors[1][b, :, count:], tensors[2][b, :, count:] = torch.nan, torch.nan
    dirty = outcome(call, tensors, options)
    for field in FIELDS:
        got, want = getattr(dirty, field), getattr(clean, field)
        assert torch.isfinite(got).all() or field == "lse", field
        if field != "dq" or deterministic:
            assert torch.equal(got, want), field
    for b, count in enumerate(lengths):
        assert not dirty.dk[b, :, count:].any() and not dirty.dv[b, :, count:].any()


def check_masked_rows(call: Call, d: int, device: str, has_lse: bool, deterministic: bool) -> None:
    """Rows that a mask hides may hold anything: keys that no query sees, queries that see no key, beside live
    rows of the same tiles. A key that some queries see reaches those, and no others.
    """
    close = {"rtol": 2**-6, "atol": 2**-8}
    options: dict[str, Any] = {"deterministic": True} if deterministic else {}
    for poisoned in (math.nan, math.inf):
        q, k, v = inputs(2, 4, 2, 70, 100, d, d, torch.float16, device)
        do, keep = torch.randn(2, 4, 70, d, device=device).half(), torch.rand(2, 70, 100, device=device) < 0.5
        keep[:, 60:], keep[0, :, 45:], keep[1, :, 3:20] = False, False, False
        options["keep"] = keep
        clean = outcome(call, [q, k, v, do], options, has_lse)
        for x in (k, v):
            x[0, :, 45:], x[1, :, 3:20] = poisoned, poisoned
        for x in (q, do):
            x[:, :, 60:] = poisoned
        dirty = outcome(call, [q, k, v, do], options, has_lse)
        for field in FIELDS:
            torch.testing.assert_close(getattr(dirty, field), getattr(clean, field), **close)
        hidden = ~keep[0, :, 7]
        v[0, :, 7] = poisoned
        o = call(q, k, v, keep=keep)[0].isfinite().all(-1)
        assert torch.equal(o, hidden.expand(4, 70))
        v[0, :, 7] = 0.0
        do[0, :, 5, 3] = poisoned  # reaches the keys that query 5 sees, and its own dQ
        found = outcome(call, [q, k, v, do], options, has_lse)
        seen = keep[0, 5]
        finite = found.dv[0].isfinite().all(-1)
        assert not finite[:, seen].any() and finite[:, ~seen].all()
        assert found.dk[0, :, ~seen].isfinite().all()
        assert found.dq[0, :, 6:].isfinite().all() and found.dq[0, :, :5].isfinite().all()


def check_hidden_future(call: Call, d: int, device: str, deterministic: bool) -> None:
    """Under a causal mask, NaN in keys and queries from a row on leaves what lies before untouched."""
    options = {"deterministic": True} if deterministic else {}
    q, k, v = inputs(1, 2, 1, 150, 150, d, d, torch.float16, device)
    do = torch.randn(1, 2, 150, d, device=device).half()
    clean = outcome(call, [q, k, v, do], options)
    for first in (149, 77, 64):
        tensors = [x.clone() for x in (q, k, v, do)]
        for x in tensors[:3]:
            x[:, :, first:] = torch.nan
        tensors[3][:, :, first:] = 0.0  # their gradient is not asked for
        dirty = outcome(call, tensors, options)
        before = slice(0, first)
        assert torch.equal(dirty.o[:, :, before], clean.o[:, :, before])
        assert torch.equal(dirty.lse[:, :, before], clean.lse[:, :, before])
        torch.testing.assert_close(dirty.dq[:, :, before], clean.dq[:, :, before], rtol=2**-8, atol=2**-10)
        assert dirty.o[:, :, first:].isnan().all()


def check_deterministic(
    call: Call, d: int, heads: tuple[int, int], rows: tuple[int, int], device: str, **options: Any
) -> None:
    """The same bits again, dQ as near to the truth as without, and dK and dV the same as without."""
    q, k, v = inputs(2, *heads, *rows, d, d, torch.bfloat16, device)
    do = torch.randn(2, heads[0], rows[0], d, device=device).bfloat16()
    once, again = (outcome(call, [q, k, v, do], {**options, "deterministic": True}) for _ in range(2))
    free = outcome(call, [q, k, v, do], options)
    for field in FIELDS:
        assert torch.equal(getattr(once, field), getattr(again, field)), field
    assert torch.equal(once.dk, free.dk) and torch.equal(once.dv, free.dv)
    torch.testing.assert_close(once.dq, free.dq, rtol=2**-6, atol=2**-8)
