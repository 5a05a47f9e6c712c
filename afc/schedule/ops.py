# SPDX-License-Identifier: Apache-2.0
"""The tile operations of each kind of kernel, in order. The same lists serve every target.

Forward (FlashAttention-2, arXiv:2307.08691, algorithm 1) and backward (algorithm 2), with the score chain,
the mask and every rounding explicit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from afc.ir.program import CapturedRead
from afc.ir.tiled import (
    AddCaptured,
    AddCapturedExtra,
    AddCapturedWeights,
    AddOutputs,
    Load,
    Mask,
    Matmul,
    Normalize,
    OnlineSoftmax,
    Outputs,
    OutputsBack,
    Reweigh,
    RotateBack,
    Round,
    RowDot,
    Scale,
    ScoreGradient,
    Scores,
    Store,
    Tile,
    TiledKernel,
    TileOp,
    Walk,
    Weights,
)

PRODUCT = Matmul("S", "Q", "K", transpose_b=True)
SCORES: tuple[TileOp, ...] = (PRODUCT, Scores("X", "S"), Mask("X"))

# Without a sum over the keys the last score step gives the weight; what the mask removes has weight 0.
WEIGHTS: tuple[TileOp, ...] = (PRODUCT, Scores("P", "S"), Mask("P", 0.0))

ROUND_BOTH = (Round("P"), Round("dS"))
GRADIENT_OF_WEIGHTS = Matmul("dP", "dO", "V", transpose_b=True)


def _reweigh(x: str, has_weight: bool) -> tuple[TileOp, ...]:
    """The weight blocks on P, or their derivative on dP."""
    return (Reweigh(x),) if has_weight else ()


def _recompute(has_sum: bool, has_weight: bool) -> tuple[TileOp, ...]:
    """dS of the backward pass, and P as it meets V, from the saved LSE where there is one."""
    gradient_of_weights = (GRADIENT_OF_WEIGHTS, *_reweigh("dP", has_weight))
    end = (*_reweigh("P", has_weight), *ROUND_BOTH)
    if has_sum:
        gradient = ScoreGradient("dS", "P", "dP", "delta", "S")
        return (*SCORES, Weights("P", "X", "LSE"), *gradient_of_weights, gradient, *end)
    pointwise = ScoreGradient("dS", "P", "dP", None, "S")
    return (*WEIGHTS, *gradient_of_weights, pointwise, Mask("dS", 0.0), *end)


def _rows(has_sum: bool) -> tuple[TileOp, ...]:
    """What the backward pass loads of a tile of queries."""
    rows: tuple[TileOp, ...] = (Load("Q", "q"), Load("dO", "do"))
    return (*rows, Load("LSE", "lse"), Load("delta", "delta")) if has_sum else rows


KEYS = (Load("K", "k"), Load("V", "v"))


def forward(
    name: str,
    tile: Tile,
    form: Literal["exact", "stale", "watched"] = "exact",
    has_sum: bool = True,
    has_output: bool = False,
    has_weight: bool = False,
) -> TiledKernel:
    """O and LSE of a tile of queries; `form` of the softmax in full tiles.

    Without a sum over the keys there is no LSE. `has_output`: output blocks turn O into Y; both are stored.
    `has_weight`: weight blocks change P once the sum has it.
    """
    weights: tuple[TileOp, ...] = WEIGHTS
    epilogue: tuple[TileOp, ...] = (Round("O"), Store("O", "o"))
    if has_output:
        epilogue = (Outputs("Y", "O"), *epilogue, Round("Y"), Store("Y", "y"))
    if has_sum:
        weights = (*SCORES, OnlineSoftmax("P", "X", "m", "l", ("O",), form))
        epilogue = (Normalize("O", "m", "l", "LSE"), *epilogue, Store("LSE", "lse"))
    return TiledKernel(
        name,
        "forward",
        "queries",
        tile,
        "longest first",
        prologue=(Load("Q", "q"),),
        walk=Walk("keys"),
        body=(
            *KEYS,
            *weights,
            *_reweigh("P", has_weight),
            Round("P"),
            Matmul("O", "P", "V", accumulate=True),
        ),
        epilogue=epilogue,
    )


def output(name: str, tile: Tile, has_sum: bool = True, captured: bool = False) -> TiledKernel:
    """dO of a tile of queries from the gradient of the output after its blocks; `captured`: and what they add
    to the gradients of captured tensors.
    """
    rows: tuple[TileOp, ...] = (Load("dY", "dy"), Load("O", "o"))
    rows = (*rows, Load("LSE", "lse")) if has_sum else rows
    back = (OutputsBack("dO", "dY", "O", "LSE" if has_sum else None), Round("dO"))
    epilogue: tuple[TileOp, ...] = (Store("dO", "do"),)
    if captured:
        epilogue = (*epilogue, AddOutputs("dY", "O"))
    return TiledKernel(name, "output", "queries", tile, "any", (*rows, *back), None, (), epilogue)


def output_captured(name: str, tile: Tile) -> TiledKernel:
    """Gradients of the captured tensors that output blocks read, of a tile of queries."""
    rows = (Load("dY", "dy"), Load("O", "o"))
    return TiledKernel(name, "captured", "queries", tile, "any", rows, None, (), (AddOutputs("dY", "O"),))


def clear(name: str, tile: Tile) -> TiledKernel:
    """Sets the float32 sum of dQ of a tile of queries to zero (a zeroed buffer of the plan)."""
    return TiledKernel(name, "preprocess", "queries", tile, "any", (), None, (), ())


def preprocess(name: str, tile: Tile) -> TiledKernel:
    """delta = rowsum(dO * O) - dLSE of a tile of queries."""
    return TiledKernel(
        name,
        "preprocess",
        "queries",
        tile,
        "any",
        prologue=(Load("dO", "do"), Load("O", "o"), Load("dLSE", "dlse"), RowDot("delta", "dO", "O", "dLSE")),
        walk=None,
        body=(),
        epilogue=(Store("delta", "delta"),),
    )


def backward_queries(
    name: str,
    tile: Tile,
    gradient_scale: float,
    has_sum: bool = True,
    has_weight: bool = False,
    raw_dq: bool = False,
) -> TiledKernel:
    """dQ of a tile of queries: walks the keys, so nothing is added across work items. `raw_dq`: it stays in
    float32, for a kernel behind this one.
    """
    dq: tuple[TileOp, ...] = (
        Scale("dQ", gradient_scale),
        RotateBack("dQ", "q"),
        Round("dQ"),
        Store("dQ", "dq"),
    )
    return TiledKernel(
        name,
        "backward",
        "queries",
        tile,
        "longest first",
        prologue=_rows(has_sum),
        walk=Walk("keys"),
        body=(*KEYS, *_recompute(has_sum, has_weight), Matmul("dQ", "dS", "K", accumulate=True)),
        epilogue=(Store("dQ", "dq_sum"),) if raw_dq else dq,
    )


def backward_keys(
    name: str,
    tile: Tile,
    gradient_scale: float,
    add_dq: bool,
    has_sum: bool = True,
    has_weight: bool = False,
    raw_dk: bool = False,
) -> TiledKernel:
    """dK and dV of a tile of keys: walks the queries of every head of the group.

    `add_dq`: dQ goes to a float32 sum; `raw_dk`: dK stays in float32, for a kernel behind this one.
    """
    dq: tuple[TileOp, ...] = (Matmul("dQ", "dS", "K"), Store("dQ", "dq_sum", add=True)) if add_dq else ()
    dk: tuple[TileOp, ...] = (Scale("dK", gradient_scale), RotateBack("dK", "k"), Round("dK"))
    return TiledKernel(
        name,
        "backward",
        "keys",
        tile,
        "longest first",
        prologue=KEYS,
        walk=Walk("queries", over_group=True),
        body=(
            *_rows(has_sum),
            *_recompute(has_sum, has_weight),
            Matmul("dV", "P", "dO", transpose_a=True, accumulate=True),
            Matmul("dK", "dS", "Q", transpose_a=True, accumulate=True),
            *dq,
        ),
        epilogue=(
            *(() if raw_dk else dk),
            Round("dV"),
            Store("dK", "dk_sum" if raw_dk else "dk"),
            Store("dV", "dv"),
        ),
    )


def captured(
    name: str, tile: Tile, reads: Sequence[CapturedRead], has_sum: bool = True, has_weight: bool = False
) -> TiledKernel:
    """Gradients of captured tensors: of each tile of queries, all keys. Reads of the extra term alone need no
    scores.
    """
    extra: tuple[TileOp, ...] = ()
    if any(r.step is None for r in reads):
        extra = (AddCapturedExtra("LSE", "delta"),)
    if all(r.step is None for r in reads):
        rows = (Load("LSE", "lse"), Load("delta", "delta"))
        return TiledKernel(name, "captured", "queries", tile, "any", rows, None, (), extra)
    weights = (*SCORES, Weights("P", "X", "LSE")) if has_sum else WEIGHTS
    body = (*KEYS, *weights, GRADIENT_OF_WEIGHTS)
    if any(r.weight for r in reads):
        body = (*body, AddCapturedWeights("P", "dP"))
    if any(r.score for r in reads):
        masked: tuple[TileOp, ...] = () if has_sum else (Mask("dP", 0.0),)
        add = AddCaptured("P", "dP", "delta" if has_sum else None, "S")
        body = (*body, *_reweigh("dP", has_weight), *masked, add)
    return TiledKernel(name, "captured", "queries", tile, "any", _rows(has_sum), Walk("keys"), body, extra)


def postprocess(name: str, tile: Tile, gradient_scale: float) -> TiledKernel:
    """dQ from its float32 sum."""
    return TiledKernel(
        name,
        "postprocess",
        "queries",
        tile,
        "any",
        prologue=(Load("dQ", "dq_sum"), Scale("dQ", gradient_scale), RotateBack("dQ", "q"), Round("dQ")),
        walk=None,
        body=(),
        epilogue=(Store("dQ", "dq"),),
    )


def postprocess_keys(name: str, tile: Tile, gradient_scale: float) -> TiledKernel:
    """dK from its float32 sum."""
    return TiledKernel(
        name,
        "postprocess",
        "keys",
        tile,
        "any",
        prologue=(Load("dK", "dk_sum"), Scale("dK", gradient_scale), RotateBack("dK", "k"), Round("dK")),
        walk=None,
        body=(),
        epilogue=(Store("dK", "dk"),),
    )


def sums(name: str, kind: Literal["clear", "sum"]) -> TiledKernel:
    """Gradients of captured tensors: from 0 before the kernels that add to them; the sum of their copies."""
    return TiledKernel(name, kind, "queries", Tile(0, 0), "any", prologue=(), walk=None, body=(), epilogue=())


def rotate(name: str, tile: Tile) -> TiledKernel:
    """Rotation coefficients of every position, and rotated rows in the workspace."""
    return TiledKernel(name, "rotate", "keys", tile, "any", prologue=(), walk=None, body=(), epilogue=())
