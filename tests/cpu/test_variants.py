# SPDX-License-Identifier: Apache-2.0
"""Published variants on the CPU target, forward and backward, against PyTorch written from their papers."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import pytest
import torch

import afc
from tests.support.checks import EXAMPLES, compare, failures, inputs, without_lse
from tests.support.dense import VARIANTS
from tests.support.published import PUBLISHED, Shape


@cache
def load(name: str, dtype: torch.dtype) -> ModuleType:
    return afc.load(EXAMPLES / f"{name}.attn", D=Shape.d, dtype=dtype, backend="cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str, dtype: torch.dtype) -> None:
    variant = PUBLISHED[name]
    shape = variant.shape
    torch.manual_seed(sum(map(ord, name)))
    q, k, v = inputs(shape.b, shape.h, shape.hk, shape.m, shape.n, shape.d, shape.d, dtype)
    call = getattr(load(name, dtype), variant.attention)
    learned = [t.name for t in call.info.tensors if t.grad]
    call = call if variant.lse else without_lse(call)
    bad = failures(compare(call, variant, q, k, v, variant.arguments(shape), learned=learned))
    assert not bad, f"{name} {dtype} {shape}: (error, allowed) {bad}"


@pytest.mark.parametrize("dtype", [torch.float64], ids=["float64"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_lengths_of_zero(name: str, dtype: torch.dtype) -> None:
    """No query, no key, neither: no division by a length, nothing read, zeros out."""
    variant = PUBLISHED[name]
    call = getattr(load(name, dtype), variant.attention)
    for m, n in ((0, variant.shape.n), (variant.shape.m, 0), (0, 0)):
        shape, options = variant.shape, variant.arguments(variant.shape)
        for info in call.info.tensors:  # cut to the lengths of this call
            for axis, (size, _) in enumerate(info.shape):
                if size in ("M", "N"):
                    options[info.name] = options[info.name].narrow(axis, 0, m if size == "M" else n)
        tensors = inputs(shape.b, shape.h, shape.hk, m, n, shape.d, shape.d, dtype)
        learned = [options[t.name] for t in call.info.tensors if t.grad]
        leaves = [x.requires_grad_() for x in (*tensors, *learned)]
        o = call(*tensors, **options)
        assert o.shape == (shape.b, shape.h, m, shape.d) and not o.any()
        for x, g in zip(leaves, torch.autograd.grad(o.sum(), leaves), strict=True):
            assert g.shape == x.shape and not g.any()


# Formulas that read N, the number of rows of k: it stays what it is, whatever kv_len.
READ_N = ("bigbird", "relu_vit", "sigmoid", "speculative", "tree")
# Random numbers go by the place of a batch entry in the call.
READ_B = ("bert", "dropkey")


@pytest.mark.parametrize("dtype", [torch.float64], ids=["float64"])
@pytest.mark.parametrize("name", [n for n in PUBLISHED if n not in READ_N + READ_B])
def test_kv_len_is_a_cut(name: str, dtype: torch.dtype) -> None:
    """As many calls with k, v and captured tensors cut to the keys of one batch give the same numbers."""
    variant, shape = PUBLISHED[name], PUBLISHED[name].shape
    call = getattr(load(name, dtype), variant.attention)
    options = {"q_origin": 0, **variant.arguments(shape)}
    options |= {t.name: options[t.name].double() for t in call.info.tensors if t.type == "float"}
    tensors = inputs(shape.b, shape.h, shape.hk, shape.m, shape.n, shape.d, shape.d, dtype)
    counts = [shape.n - 1, 3, *(0 for _ in range(shape.b - 2))]
    leaves = [x.requires_grad_() for x in (*tensors, *(options[t.name] for t in call.info.tensors if t.grad))]
    do = torch.randn(shape.b, shape.h, shape.m, shape.d, dtype=dtype)

    def of_batch(b: int, count: int) -> torch.Tensor:
        own = dict(options)
        for info in call.info.tensors:
            for axis, (size, _) in enumerate(info.shape):
                x = own[info.name]
                if size == "N" or (size == "B" and x.shape[axis] > 1):
                    own[info.name] = x.narrow(axis, *((0, count) if size == "N" else (b, 1)))
        q, k, v = (x[b : b + 1] for x in tensors)
        o: torch.Tensor = call(q, k[:, :, :count], v[:, :, :count], **own)
        return o

    together = call(*tensors, **options, kv_len=torch.tensor(counts))
    alone = torch.cat([of_batch(b, count) for b, count in enumerate(counts)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    for x, y in zip(*(torch.autograd.grad(o, leaves, do) for o in (together, alone)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


def test_every_example_has_a_reference() -> None:
    """A program that nothing checks would be decoration."""
    assert {p.stem for p in EXAMPLES.glob("*.attn")} == {*VARIANTS, *PUBLISHED}
