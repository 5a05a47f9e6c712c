# SPDX-License-Identifier: Apache-2.0
"""Programs with normalizers other than softmax, and the same in PyTorch, written from their papers."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.dense import Tensor, Variant
from tests.support.published import (
    averaged_relu,
    causal_scores,
    of_its_head,
    pointwise,
    shifted_sigmoid,
    with_a_sink,
)

SCORES = "causal(scaled_dot_product(q, k))"
TEXTS = {
    "softmax1": f"attention a(q, k, v) = softmax1({SCORES}) @ v",
    "softmax_sink": f"attention a(q, k, v; sink[H]) = softmax_sink({SCORES}; sink) @ v",
    "sigmoid": f"attention a(q, k, v) = sigmoid_attention({SCORES}; bias = -log(N)) @ v",
    "relu": f"attention a(q, k, v) = relu_attention({SCORES}) @ v",
    "identity": f"normalizer linear(s) = s\nattention a(q, k, v) = linear({SCORES}) @ v",
    "sink_per_row": "normalizer moving(s, i, h; t[H]) = exp(s) / (sum(exp(s)) + exp(t[h] * i))\n"
    f"attention a(q, k, v; sink[H]) = moving(softcap({SCORES}; cap = 5.0); t = sink) @ v",
}
POINTWISE = ("sigmoid", "relu", "identity")


def capped_scores(q: Tensor, k: Tensor, q_origin: int, k_origin: int) -> tuple[Tensor, Tensor]:
    s, keep = causal_scores(q, k, q_origin, k_origin)
    return 5.0 * torch.tanh(s / 5.0), keep


def sinks(heads: int, device: Any) -> dict[str, Any]:
    return {"sink": torch.randn(heads) * 2}


per_head = with_a_sink(of_its_head, causal_scores)
VARIANTS = {
    "softmax1": Variant("softmax1", "a", per_head),
    "softmax_sink": Variant("softmax_sink", "a", per_head, sinks),
    "sigmoid": Variant("sigmoid", "a", pointwise(shifted_sigmoid, causal_scores)),
    "relu": Variant("relu", "a", pointwise(averaged_relu, causal_scores)),
    "identity": Variant("identity", "a", pointwise(lambda s: s, causal_scores)),
    "sink_per_row": Variant(
        "sink_per_row",
        "a",
        with_a_sink(lambda t, i: t * i, capped_scores),
        lambda heads, device: {"sink": torch.rand(heads) * 0.1},
    ),
}
