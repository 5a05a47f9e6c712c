# SPDX-License-Identifier: Apache-2.0
"""What other attention systems were reported to get wrong, as tests: empty rows, infinities, lengths,
corners, windows, documents, groups, offsets, keys of caches.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import afc
from tests.support.checks import EXAMPLES, compare, failures, inputs, poison, run
from tests.support.dense import VARIANTS, Variant, softmax_attention

Tensor = torch.Tensor
D = 16

PROGRAMS = """
mask listed(b, m, n; keep[1|B, M, N]: bool) = keep[b, m, n]
score tables(s, h, m, n; g[], t[H], a[M, N], r[L], d[2*L - 1], L: int) =
    s * g + t[h] + a[m, n] + r[m] - r[n] + d[m - n + L - 1]

attention biased(q, k, v; bias[1|B, 1|H, M, N]) {
    return softmax(additive_bias(scaled_dot_product(q, k); bias)) @ v
}
attention listed_lm(q, k, v; keep[1|B, M, N]: bool) = softmax(listed(scaled_dot_product(q, k); keep)) @ v
attention blocks(q, k, v; on[1|B, 1|H, MB, NB]: bool) {
    return softmax(block_sparse(scaled_dot_product(q, k); on, block = 16)) @ v
}
attention with_tables(q, k, v; g[], t[H], a[M, N], r[L], d[2*L - 1], L: int) {
    return softmax(tables(scaled_dot_product(q, k); g, t, a, r, d, L)) @ v
}
attention packed(q, k, v; qdoc[B, M]: int, kdoc[B, N]: int) {
    q, k = rope(q, k)
    return softmax(document(causal(scaled_dot_product(q, k)); qdoc, kdoc)) @ v
}
attention normed(q, k, v; keep[1|B, M, N]: bool, w[Dqk]: grad) {
    q = rms_norm(q; w)
    q = rope(q)
    k = l2_norm(k)
    return softmax(listed(scaled_dot_product(q, k); keep)) @ v
}
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("programs") / "programs.attn"
    path.write_text(PROGRAMS)
    return afc.load(path, D=D, dtype="float32", backend="cpu")


def example(name: str, dtype: str = "float32", d: int = 64, **options: Any) -> Any:
    module = afc.load(EXAMPLES / f"{name}.attn", D=d, dtype=dtype, backend="cpu", **options)
    return getattr(module, module.__all__[0])


def scaled(q: Tensor) -> Any:
    return lambda s: s * q.shape[-1] ** -0.5


def listed(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    return softmax_attention(q, k, v, scaled(q), keep[:, None])


def blocks(q: Tensor, k: Tensor, v: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
    keep = on.repeat_interleave(16, -2).repeat_interleave(16, -1)[..., : q.shape[2], : k.shape[2]]
    return softmax_attention(q, k, v, scaled(q), keep)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return softmax_attention(
        q, k, v, lambda s: scaled(q)(s) + bias.to(s.dtype), torch.ones((), dtype=torch.bool)
    )


def check(call: Any, reference: Any, tensors: tuple[Tensor, ...], **options: Any) -> None:
    bad = failures(compare(call, Variant("", "", reference), *tensors, options))  # type: ignore[arg-type]
    assert not bad, f"{[tuple(x.shape) for x in tensors]}: (error, allowed) {bad}"


def gradients(call: Any, tensors: tuple[Tensor, ...], do: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv as float64."""
    poison(megabytes=4)
    found = run(lambda *a, **x: call(*a, **x, return_lse=True), *tensors, do, None, options)  # type: ignore[arg-type]
    return found.o, found.lse, found.dq, found.dk, found.dv


# ---- rows without keys, infinities -----------------------------------------------------------------------


@pytest.mark.parametrize("m", [76, 34, 146])
def test_one_key_for_many_queries_leaves_no_nan_in_dq(m: int) -> None:
    """Causal, aligned at the end, one key: all rows but the last see nothing."""
    call = example("causal", "float16")
    q, k, v = inputs(1, 2, 2, m, 1, 64, 64, torch.float16, scale=3.0)
    check(call, VARIANTS["causal"].reference, (q, k, v), q_origin=1 - m)
    o, lse, dq, dk, dv = gradients(call, (q, k, v), torch.ones(1, 2, m, 64), kv_len=1)
    assert not o[:, :, :-1].any() and not dq[:, :, :-1].any() and torch.isneginf(lse[:, :, :-1]).all()
    assert all(torch.isfinite(x).all() for x in (o, dq, dk, dv))
    assert torch.equal(dv[:, :, 0], torch.ones(1, 2, 64, dtype=torch.float64))


def test_rows_killed_by_a_list_of_pairs(programs: Any) -> None:
    tensors = inputs(2, 2, 1, 70, 50, D, D, torch.float32)
    keep = torch.rand(2, 70, 50) < 0.3
    keep[0, :40] = False
    keep[1, :, :33] = False
    keep[1, 69] = False
    check(programs.listed_lm, listed, tensors, keep=keep)
    o, lse, dq, *_ = gradients(programs.listed_lm, tensors, torch.ones(2, 2, 70, D), keep=keep)
    assert not o[0, :, :40].any() and not dq[0, :, :40].any() and torch.isneginf(lse[0, :, :40]).all()
    assert not o[1, :, 69].any() and not dq[1, :, 69].any()


def test_rows_without_a_block(programs: Any) -> None:
    tensors = inputs(2, 2, 2, 64, 50, D, D, torch.float32)
    on = torch.rand(2, 2, 4, 4) < 0.5
    on[0, 0], on[0, 1, 1], on[1, :, 3] = False, False, False
    check(programs.blocks, blocks, tensors, on=on)
    o, _, dq, *_ = gradients(programs.blocks, tensors, torch.ones(2, 2, 64, D), on=on)
    assert not o[0, 0].any() and not dq[0, 0].any() and not o[1, :, 48:].any() and not dq[1, :, 48:].any()


@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min], ids=["inf", "min"])
def test_bias_of_minus_infinity_before_the_first_live_key(programs: Any, low: float) -> None:
    """Whole tiles of it, then one key: the running maximum is -inf when weights are rescaled."""
    q, k, v = inputs(1, 2, 2, 5, 1024, D, D, torch.float32)
    for key in (0, 500, 1023):
        bias = torch.full((1, 1, 5, 1024), low)
        bias[..., key] = 0.25
        o, lse, *_ = gradients(programs.biased, (q, k, v), torch.ones(1, 2, 5, D), bias=bias)
        torch.testing.assert_close(o.float(), v[:, :, key, None].expand(1, 2, 5, D), rtol=1e-6, atol=0)
        score = (q.double() @ k[:, :, key, :, None].double())[..., 0] / 4 + 0.25
        torch.testing.assert_close(lse, score, rtol=1e-5, atol=1e-5)
        check(programs.biased, biased, (q, k, v), bias=bias)


def test_bias_of_minus_infinity_everywhere_is_an_empty_row(programs: Any) -> None:
    q, k, v = inputs(1, 2, 2, 40, 300, D, D, torch.float32)
    bias = torch.randn(1, 2, 40, 300)
    bias[:, :, 3], bias[:, 1, :, 100:] = -math.inf, -math.inf
    check(programs.biased, biased, (q, k, v), bias=bias)
    o, lse, dq, dk, dv = gradients(programs.biased, (q, k, v), torch.ones(1, 2, 40, D), bias=bias)
    assert not o[:, :, 3].any() and not dq[:, :, 3].any() and torch.isneginf(lse[:, :, 3]).all()
    assert not dk[:, 1, 100:].any() and not dv[:, 1, 100:].any()


@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0, 30.0])
def test_large_inputs_in_float16_have_finite_gradients(scale: float) -> None:
    call, tensors = (
        example("causal", "float16"),
        inputs(1, 1, 1, 300, 300, 64, 64, torch.float16, scale=scale),
    )
    o, lse, dq, dk, dv = gradients(call, tensors, torch.ones(1, 1, 300, 64))
    assert all(torch.isfinite(x).all() for x in (o, lse, dq, dk, dv))
    check(call, VARIANTS["causal"].reference, tensors)


def test_value_of_weight_zero_does_not_overflow() -> None:
    """The largest float16 under a masked key, and under one whose weight underflows."""
    call = example("causal", "float16")
    q, k, v = inputs(1, 1, 1, 64, 64, 64, 64, torch.float16)
    v[:, :, 20] = 6e4
    k[:, :, 20], q[..., 0] = 0, 8.0
    k[:, :, 20, 0] = -200.0
    o = call(q, k, v)
    assert torch.isfinite(o).all() and o.abs().max() < 20


@pytest.mark.parametrize("poisoned", [math.nan, math.inf], ids=str)
def test_masked_rows_may_hold_anything(programs: Any, poisoned: float) -> None:
    """Padding beside live rows, in the same tiles: keys that no query sees, queries that see no key, with
    their dO. A key that only some queries see reaches those, and no others.
    """
    q, k, v = inputs(2, 4, 2, 70, 50, D, D, torch.float32)
    do, keep = torch.randn(2, 4, 70, D), torch.rand(2, 70, 50) < 0.5
    keep[:, 60:], keep[0, :, 45:], keep[1, :, 3:20] = False, False, False
    clean = gradients(programs.listed_lm, (q, k, v), do, keep=keep)
    for x in (k, v):
        x[0, :, 45:], x[1, :, 3:20] = poisoned, poisoned
    for x in (q, do):
        x[:, :, 60:] = poisoned
    dirty = gradients(programs.listed_lm, (q, k, v), do, keep=keep)
    for got, want in zip(dirty, clean, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    v[0, :, 7] = poisoned
    o = programs.listed_lm(q, k, v, keep=keep)[0].isfinite().all(-1)
    assert torch.equal(o, (~keep[0, :, 7]).expand(4, 70))


def test_masked_rows_give_norms_nothing(programs: Any) -> None:
    """Padding rows of NaN, and of zeros, whose norm has no derivative: gradients 0, the weight's unharmed."""
    q, k, v = inputs(2, 4, 2, 40, 50, D, D, torch.float32)
    weight, do, keep = torch.randn(D), torch.randn(2, 4, 40, D), torch.rand(2, 40, 50) < 0.5
    keep[:, 30:], keep[:, :, 45:] = False, False
    found = []
    for low in (1.0, 0.0, math.nan):
        q[:, :, 30:], k[:, :, 45:] = low, low
        leaves = [x.detach().requires_grad_() for x in (q, k, v, weight)]
        o = programs.normed(*leaves[:3], keep=keep, w=leaves[3])
        found.append((o, *torch.autograd.grad(o, leaves, do)))
    for result in found[1:]:
        for got, want in zip(result, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not found[2][1][:, :, 30:].any() and not found[2][2][:, :, 45:].any()


def test_nan_that_is_seen_is_not_hidden() -> None:
    call = example("causal")
    for argument in range(3):
        tensors = inputs(1, 1, 1, 40, 40, 64, 64, torch.float32)
        tensors[argument][:, :, 20, 5] = torch.nan
        rows = call(*tensors).isnan().any(-1)[0, 0]
        seen = torch.arange(40) == 20 if argument == 0 else torch.arange(40) >= 20
        assert torch.equal(rows, seen)


# ---- lengths, head sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "causal"])
def test_lengths_around_tiles(name: str) -> None:
    for m, n in zip((1, 2, 5) * 3, (1, 15, 16, 17, 63, 64, 65, 127, 129), strict=True):
        places = {"q_origin": n - m} if name == "causal" else {}
        check(example(name), VARIANTS[name].reference, inputs(4, 8, 2, m, n, 64, 64, torch.float32), **places)


def test_mask_made_for_other_lengths_is_refused(programs: Any) -> None:
    tensors = inputs(2, 2, 2, 2, 2, D, D, torch.float32)
    for shape in ((2, 128, 256), (2, 2, 256), (3, 2, 2), (2, 1, 2)):
        with pytest.raises(ValueError, match=r"keep: expected shape \[1\|B, M, N\] with .* = 2, got \("):
            programs.listed_lm(*tensors, keep=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"kdoc: expected shape \[B, N\] with N = 2, got \(2, 4096\)"):
        documents = (torch.zeros(2, n, dtype=torch.int64) for n in (2, 4096))
        programs.packed(*tensors, **dict(zip(("qdoc", "kdoc"), documents, strict=True)))


def test_values_of_another_width_in_groups() -> None:
    module = afc.load(EXAMPLES / "llama.attn", Dqk=24, Dv=72, dtype="float32", backend="cpu")
    check(module.llama, VARIANTS["llama"].reference, inputs(2, 8, 4, 100, 100, 24, 72, torch.float32))


def test_gradient_of_a_slice_is_the_slice_of_the_gradient() -> None:
    """The full call first, then one whose keys are a view of other strides."""
    call = example("full")
    q, k, v = inputs(1, 4, 4, 256, 256, 64, 64, torch.float32)
    gradients(call, (q, k, v), torch.ones_like(q))
    short = (q, k[:, :, :-128], v[:, :, :-128])
    do = torch.randn(1, 4, 256, 64)
    sliced = gradients(call, short, do)
    assert all(
        torch.equal(a, b)
        for a, b in zip(sliced, gradients(call, tuple(x.clone() for x in short), do), strict=True)
    )
    leaf = k.clone().requires_grad_()
    (whole,) = torch.autograd.grad(call(q, leaf[:, :, :-128], v[:, :, :-128]), leaf, do)
    assert torch.equal(whole[:, :, :-128].double(), sliced[3]) and not whole[:, :, -128:].any()
    zeros = tuple(torch.zeros_like(x) for x in short)
    assert not any(x.any() for x in gradients(call, zeros, torch.zeros_like(do))[2:])


def test_offsets_beyond_31_bits(tmp_path: Path) -> None:
    """Rows, heads and batches whose elements lie more than 2^31 elements apart, in a sparse file."""
    call = example("causal", "float16")
    shape, strides = (2, 2, 40, 64), (2**31 + 2**21, 2**20, 2**26 + 64, 1)
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1000
    assert extent > 2**32
    memory = torch.from_numpy(np.memmap(tmp_path / "sparse", np.float16, "w+", shape=(extent,)))
    tensors = inputs(*shape[:2], 2, 40, 40, 64, 64, torch.float16)
    far = []
    for n, x in enumerate(tensors):
        view = memory.as_strided(shape, strides, 64 * n)
        view.copy_(x)
        far.append(view)
    do = torch.randn(shape)
    got, want = gradients(call, tuple(far), do), gradients(call, tensors, do)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- corners, windows, positions -------------------------------------------------------------------------


def weights(call: Any, m: int, n: int, **options: Any) -> Tensor:
    """Which keys each query weighs, through V = identity."""
    q, k, _ = inputs(1, 1, 1, m, n, 64, 64, torch.float32)
    identity = torch.eye(64)[None, None, :n].contiguous()
    found: Tensor = call(q, k, identity, **options)[0, 0, :, :n] > 0
    return found


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (3, 3)])
def test_causal_has_a_named_corner(lengths: tuple[int, int]) -> None:
    """From the first row and key on by default, whatever the lengths; from the last ones with kv_len."""
    m, n = lengths
    call = example("causal")
    assert torch.equal(weights(call, m, n), torch.ones(m, n, dtype=torch.bool).tril())
    end = torch.ones(m, n, dtype=torch.bool).tril(n - m)
    assert torch.equal(weights(call, m, n, kv_len=n), end)
    assert torch.equal(weights(call, m, n, q_origin=n - m), end)


@pytest.mark.parametrize("w", [1, 2, 38, 39, 40, 400])
def test_window_of_w_keeps_w_keys(w: int) -> None:
    """The query's own key is one of them."""
    call = example("mistral")
    kept = weights(call, 40, 40, w=w)
    assert torch.equal(kept.sum(-1), torch.arange(1, 41).clamp(max=w))
    assert torch.equal(kept, torch.ones(40, 40, dtype=torch.bool).tril().triu(1 - w))
    tensors = inputs(1, 1, 1, 40, 40, 64, 64, torch.float32)
    if w >= 40:
        assert torch.equal(call(*tensors, w=w), call(*tensors, w=10**6))


def test_an_evicted_cache_counts_positions_not_rows() -> None:
    """One query at 100, 40 cached rows: the last ones, already rotated by nobody."""
    q, k, v = inputs(2, 4, 2, 101, 101, 64, 64, torch.float32)
    whole = example("mistral")(q, k, v, w=40)[:, :, 100:]
    row = example("mistral")(q[:, :, 100:], k[:, :, 61:], v[:, :, 61:], w=40, q_origin=100, k_origin=61)
    torch.testing.assert_close(row, whole, rtol=1e-5, atol=1e-6)


# ---- batches, documents, groups --------------------------------------------------------------------------


def test_lengths_of_each_batch_and_a_smaller_last_batch() -> None:
    """One compiled object for 8 and then 3 sequences; as many separate calls give the same numbers."""
    call = example("ragged", "float64", 32)
    for b in (8, 3):
        q, k, v = inputs(b, 2, 2, 60, 60, 32, 32, torch.float64)
        lengths = torch.randint(0, 61, (b,))
        lengths[0], lengths[-1] = 0, 60
        do = torch.randn(b, 2, 60, 32)
        together = gradients(call, (q, k, v), do, len=lengths)
        alone = [
            gradients(call, tuple(x[n : n + 1] for x in (q, k, v)), do[n : n + 1], len=lengths[n : n + 1])
            for n in range(b)
        ]
        for x, parts in zip(together, zip(*alone, strict=True), strict=True):
            assert torch.equal(x, torch.cat(parts))


def test_documents_do_not_leak(programs: Any) -> None:
    """Noise in one document changes no bit of the others; padding is no document."""
    call = programs.packed
    ends = (127, 128, 257, 300)
    ids = torch.repeat_interleave(
        torch.tensor([0, 1, 2, -1]), torch.tensor(ends).diff(prepend=torch.tensor([0]))
    )
    ids = ids.expand(2, 300).contiguous()
    q, k, v = inputs(2, 2, 1, 300, 300, D, D, torch.float32)
    do = torch.randn(2, 2, 300, D)
    before = gradients(call, (q, k, v), do, qdoc=ids, kdoc=ids)
    noisy = tuple(x.clone() for x in (q, k, v, do))
    for x in noisy:
        x[:, :, 128:257] += torch.randn_like(x[:, :, 128:257])
    after = gradients(call, noisy[:3], noisy[3], qdoc=ids, kdoc=ids)
    others = (ids[0] != 2).nonzero()[:, 0]
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, :, others], y[:, :, others])
    o, lse, dq, dk, dv = after
    assert not any(x[:, :, 257:].any() for x in (o, dq, dk, dv)) and torch.isneginf(lse[:, :, 257:]).all()


def test_tables_of_every_shape_and_one_table_twice(programs: Any) -> None:
    def reference(q: Tensor, k: Tensor, v: Tensor, **x: Any) -> tuple[Tensor, Tensor]:
        rows = torch.arange(90)
        distance = x["d"][rows[:, None] - rows + 89]
        bias = x["t"][:, None, None] + x["a"] + x["r"][:, None] - x["r"] + distance
        return softmax_attention(
            q, k, v, lambda s: scaled(q)(s) * x["g"] + bias, torch.ones((), dtype=torch.bool)
        )

    sizes = {"g": (), "t": (4,), "a": (90, 90), "r": (90,), "d": (179,)}
    tables = {n: torch.randn(s) for n, s in sizes.items()}
    check(programs.with_tables, reference, inputs(2, 4, 2, 90, 90, D, D, torch.float32), **tables, L=90)


@pytest.mark.parametrize("heads", [(16, 2), (12, 2), (6, 3), (7, 1)])
def test_groups_with_correlated_keys_and_outliers(heads: tuple[int, int]) -> None:
    """Random normal data and batch 1 hide a wrong group: rows of rank 1 with noise, a few very large."""
    h, hk = heads

    def correlated(heads: int) -> Tensor:
        x = torch.randn(3, heads, 1, 64) * torch.randn(3, heads, 70, 1) + 0.1 * torch.randn(3, heads, 70, 64)
        x[:, :, ::17] *= 8
        return x.bfloat16()

    tensors = (correlated(h), correlated(hk), correlated(hk))
    check(example("causal", "bfloat16"), VARIANTS["causal"].reference, tensors)
    do = torch.randn(3, h, 70, 64).bfloat16()
    ours = gradients(example("causal", "bfloat16"), tensors, do)
    truth = run(VARIANTS["causal"].reference, *(x.double() for x in tensors), do.double(), None, {})
    for got, want in zip(ours[2:], (truth.dq, truth.dk, truth.dv), strict=True):
        assert (torch.cosine_similarity(got.flatten(2), want.flatten(2), -1) > 0.99).all()


def test_deterministic_is_bitwise_equal() -> None:
    tensors = tuple(x.requires_grad_() for x in inputs(2, 4, 2, 150, 150, 64, 64, torch.bfloat16))
    do = torch.randn(2, 4, 150, 64).bfloat16()
    call, results = example("llama", "bfloat16"), []
    for _ in range(10):
        poison(megabytes=1)
        o, lse = call(*tensors, deterministic=True, return_lse=True)
        results.append((o, lse, *torch.autograd.grad(o, tensors, do)))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


# ---- keys of the cache -----------------------------------------------------------------------------------


def test_programs_that_differ_in_one_number_are_different(tmp_path: Path) -> None:
    """A constant, a default, an option of the build: each its own kernel, in memory and on disk."""
    text = (
        "score scaled(s; by: float = {default}) = s * by\n"
        "attention lm(q, k, v; w: int = 9) {{\n"
        "    return softmax(sliding_window(causal(scaled(dot(q, k))); w)) @ v\n"
        "}}\n"
    )
    q, k, v = inputs(1, 2, 2, 30, 30, D, D, torch.float32)

    def reference(by: float, w: int) -> Tensor:
        keep = torch.ones(30, 30, dtype=torch.bool).tril().triu(1 - w)
        return softmax_attention(*(x.double() for x in (q, k, v)), lambda s: s * by, keep)[0]

    for default in ("0.25", "0.5"):
        (tmp_path / "lm.attn").write_text(text.format(default=default))
        free = afc.load(tmp_path / "lm.attn", D=D, backend="cpu", backward=False)
        want = reference(float(default), 9)
        torch.testing.assert_close(free.lm(q, k, v).double(), want, rtol=1e-5, atol=1e-6)
    fixed = afc.load(tmp_path / "lm.attn", D=D, backend="cpu", backward=False, w=4)
    assert torch.equal(fixed.lm(q, k, v), free.lm(q, k, v, w=4)) and not torch.equal(
        fixed.lm(q, k, v), free.lm(q, k, v)
    )
