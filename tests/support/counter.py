# SPDX-License-Identifier: Apache-2.0
"""The hash behind `random(seed, b, h, m, n)`, written again in PyTorch's int64 from its description."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
LOW = 2**32 - 1


def mixed(z: Tensor) -> Tensor:
    z = (z ^ z >> 16) * 2246822507 & LOW
    z = (z ^ z >> 13) * 3266489909 & LOW
    return z ^ z >> 16


def uniform(seed: int, *indices: Tensor) -> Tensor:
    """float64 values in [0, 1) of int64 indices b, h, m, n that broadcast."""
    x, y = torch.tensor(608135816), torch.tensor(2242054355)
    for word in (torch.tensor(seed & LOW), torch.tensor(seed >> 32 & LOW), *indices):
        x = mixed((x ^ (word & LOW)) + y & LOW)
        y = mixed((y ^ x) + 2654435769 & LOW)
    return (y >> 8).double() / 2**24


def uniform_scores(seed: int, b: int, h: int, m: int, n: int) -> Tensor:
    """The values of all elements, [b, h, m, n]."""
    shape = (b, h, m, n)
    places = (
        torch.arange(size).reshape([-1 if d == k else 1 for d in range(4)]) for k, size in enumerate(shape)
    )
    return uniform(seed, *places)
