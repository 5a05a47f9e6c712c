# SPDX-License-Identifier: Apache-2.0
"""The tile operations of each kind of kernel, in order. The same lists serve every target.

Forward (FlashAttention-2, arXiv:2307.08691, algorithm 1) and backward (algorithm 2), with the score chain,
the mask and
every rounding explicit.
"""

from __future__ import annotations

from typing import Literal

from afc.ir.tiled import (
    Load,
    Mask,
    Matmul,
    Normalize,
    OnlineSoftmax,
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

SCORES: tuple[TileOp, ...] = (Matmul("S", "Q", "K", transpose_b=True), Scores("X", "S"), Mask("X"))

# P and dS of the backward pass, from the saved LSE.
RECOMPUTE: tuple[TileOp, ...] = (
    *SCORES,
    Weights("P", "X", "LSE"),
    Matmul("dP", "dO", "V", transpose_b=True),
    ScoreGradient("dS", "P", "dP", "delta", "S"),
    Round("P"),
    Round("dS"),
)

ROWS = (Load("Q", "q"), Load("dO", "do"), Load("LSE", "lse"), Load("delta", "delta"))
KEYS = (Load("K", "k"), Load("V", "v"))


def forward(name: str, tile: Tile, form: Literal["exact", "stale", "watched"] = "exact") -> TiledKernel:
    """O and LSE of a tile of queries; `form` of the softmax in full tiles."""
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
            *SCORES,
            OnlineSoftmax("P", "X", "m", "l", ("O",), form),
            Round("P"),
            Matmul("O", "P", "V", accumulate=True),
        ),
        epilogue=(Normalize("O", "m", "l", "LSE"), Round("O"), Store("O", "o"), Store("LSE", "lse")),
    )


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


def backward_queries(name: str, tile: Tile, gradient_scale: float) -> TiledKernel:
    """dQ of a tile of queries: walks the keys, so nothing is added across work items."""
    return TiledKernel(
        name,
        "backward",
        "queries",
        tile,
        "longest first",
        prologue=ROWS,
        walk=Walk("keys"),
        body=(*KEYS, *RECOMPUTE, Matmul("dQ", "dS", "K", accumulate=True)),
        epilogue=(Scale("dQ", gradient_scale), RotateBack("dQ", "q"), Round("dQ"), Store("dQ", "dq")),
    )


def backward_keys(name: str, tile: Tile, gradient_scale: float, add_dq: bool) -> TiledKernel:
    """dK and dV of a tile of keys: walks the queries of every head of the group.

    `add_dq`: dQ goes to a float32 sum.
    """
    dq: tuple[TileOp, ...] = (Matmul("dQ", "dS", "K"), Store("dQ", "dq_sum", add=True)) if add_dq else ()
    return TiledKernel(
        name,
        "backward",
        "keys",
        tile,
        "longest first",
        prologue=KEYS,
        walk=Walk("queries", over_group=True),
        body=(
            *ROWS,
            *RECOMPUTE,
            Matmul("dV", "P", "dO", transpose_a=True, accumulate=True),
            Matmul("dK", "dS", "Q", transpose_a=True, accumulate=True),
            *dq,
        ),
        epilogue=(
            Scale("dK", gradient_scale),
            RotateBack("dK", "k"),
            Round("dK"),
            Round("dV"),
            Store("dK", "dk"),
            Store("dV", "dv"),
        ),
    )


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


def rotate(name: str, tile: Tile) -> TiledKernel:
    """Rotation coefficients of every position, and rotated rows in the workspace."""
    return TiledKernel(name, "rotate", "keys", tile, "any", prologue=(), walk=None, body=(), epilogue=())
