# SPDX-License-Identifier: Apache-2.0
"""The plan pass: exact on the masks of the field, canonical and sound on random ones, fast on a long one."""

from __future__ import annotations

import random
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from afc.expr.evaluate import evaluate
from afc.expr.nodes import Expr
from afc.frontend import check_text
from afc.masks import derive
from afc.masks.boxes import BoxTest
from afc.masks.stored import StoredRuns, stored_runs
from tests.unit.test_boxes import Author

LENGTH = 1100
BLOCKS = {  # name: (blocks applied to the score, parameters)
    "causal": ("causal(S)", ""),
    "window": ("causal(sliding_window(S; w = 300))", ""),
    "sink and window": ("streaming(S; w = 300)", ""),
    "prefix": ("prefix_lm(S; prefix)", "prefix[B]: int"),
    "chunked": ("chunked(S; size = 200)", ""),
    "document": ("document(S; qdoc, kdoc)", "qdoc[B, M]: int, kdoc[B, N]: int"),
    "document, causal": ("causal(document(S; qdoc, kdoc))", "qdoc[B, M]: int, kdoc[B, N]: int"),
    "global or window": ("near_or_global(S)", ""),
    "negated window": ("far(S)", ""),
    "block sparse": ("block_sparse(S; on, block = 64)", "on[1|B, 1|H, MB, NB]: bool"),
}
TEXT = """mask near_or_global(i, j) = i < 4 or j < 4 or abs(i - j) < 150
mask far(i, j) = not (abs(i - j) < 250)
"""


def predicate(name: str) -> Expr:
    """The formula of a mask above."""
    blocks, parameters = BLOCKS[name]
    head = f"attention a(q, k, v{'; ' + parameters if parameters else ''})"
    checked = check_text(f"{TEXT}{head} = softmax({blocks.replace('S', 'dot(q, k)')}) @ v\n")
    found = derive(s.formula for s in checked.programs[0].masks).predicate
    assert found is not None
    return found


def documents(generator: Any, length: int, longest: int) -> Any:
    """Numbers of packed documents of random lengths [1, length]."""
    lengths = generator.integers(1, longest, 4 * length // longest + 8)
    return np.repeat(np.arange(len(lengths)), lengths)[None, :length]


def tensors(seed: int) -> dict[str, Any]:
    g = np.random.default_rng(seed)
    ids = documents(g, LENGTH, 400)
    blocks = -(-LENGTH // 64)
    return {
        "qdoc": ids,
        "kdoc": ids,
        "prefix": np.array([int(g.integers(0, LENGTH))]),
        "on": g.random((1, 1, blocks, blocks)) < 0.2,
    }


def classes(runs: StoredRuns, own: int, other: int, tile: int, size: int) -> Any:
    """[tiles, tiles of the other axis]: 0 empty, 1 partial, 2 full."""
    found = np.zeros((own, other), int)
    for t in range(own):
        at = 0
        for run in runs.of(t):
            assert at <= run.begin <= run.full_begin <= run.full_end <= run.end <= size
            assert run.begin < run.end
            at = run.end
            for piece, full in run.pieces(tile):
                assert piece.start % tile == 0
                found[t, piece.start // tile] = 2 if full else 1
    return found


def brute(kept: Any, tile: tuple[int, int]) -> Any:
    """The true classes of the tiles of a matrix."""
    rows, columns = (np.arange(0, size, side) for size, side in zip(kept.shape, tile, strict=True))
    some = np.logical_or.reduceat(np.logical_or.reduceat(kept, rows, 0), columns, 1)
    every = np.logical_and.reduceat(np.logical_and.reduceat(kept, rows, 0), columns, 1)
    return some.astype(int) + every


def elements(mask: Expr, values: dict[str, Any], arrays: dict[str, Any]) -> Any:
    m, n = np.arange(values["M"])[:, None], np.arange(values["N"])[None]
    env = {**values, "m": m, "n": n, "i": m + values["q_origin"], "j": n + values["k_origin"], "b": 0, "h": 0}
    return np.broadcast_to(evaluate(mask, env, arrays), (values["M"], values["N"]))


@pytest.mark.parametrize("tile", [(128, 128), (96, 64)], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_exact_on_masks_of_the_field(name: str, tile: tuple[int, int]) -> None:
    """The class of every tile, of either axis, is that of its elements."""
    mask = predicate(name)
    values = {"B": 1, "H": 1, "M": LENGTH, "N": LENGTH, "q_origin": 0, "k_origin": 0}
    for seed in range(3):
        arrays = tensors(seed)
        want = brute(elements(mask, values, arrays), tile)
        assert {0, 1, 2} <= {*want.flat} or name in ("prefix", "block sparse", "document")
        test = BoxTest(mask, values, arrays)
        for by_keys in (False, True):
            runs = stored_runs(test, (LENGTH, LENGTH), tile, by_keys)
            expected = want.T if by_keys else want
            got = classes(runs, *expected.shape, tile[0 if by_keys else 1], LENGTH)
            np.testing.assert_array_equal(got, expected)


def test_random_masks() -> None:
    """Whatever the mask: as each tile is tested, disjoint, in order, with as few runs as there can be."""
    seed = random.randrange(2**32)
    author = Author(seed)
    for _ in range(150):
        mask, arrays, g = author.condition(2), author.tensors(), author.numbers
        size = tuple(int(x) for x in g.integers(0, 150, 2))
        tile = tuple(int(x) for x in g.integers(3, 40, 2))
        values = {"M": size[0], "N": size[1], "q_origin": 3, "k_origin": -5, "w": 7, "rate": 0.5}
        test = BoxTest(mask, values, arrays)
        counts = [-(-s // t) for s, t in zip(size, tile, strict=True)]
        rows, keys = np.meshgrid(*map(np.arange, counts), indexing="ij")
        ends = [
            (x * t, np.minimum((x + 1) * t, s) - 1) for x, t, s in zip((rows, keys), tile, size, strict=True)
        ]
        may, must = test(*ends, 0, 0)
        for by_keys in (False, True):
            runs = stored_runs(test, size, tile, by_keys)  # type: ignore[arg-type]
            expected = may.astype(int) + must
            expected = expected.T if by_keys else expected
            other = 0 if by_keys else 1
            got = classes(runs, *expected.shape, tile[other], size[other])
            # A box that is tested as a whole may be decided where its tiles are not; never the reverse.
            assert ((got == expected) | (expected == 1)).all(), f"seed {seed}"
            for t in range(len(got)):
                for a, b in pairwise(runs.of(t)):
                    assert a.end < b.begin or a.full_begin < a.full_end, f"seed {seed}: {a} {b}"


def test_a_million_tokens() -> None:
    """A packed document of 2**20 tokens, causal: at most 0.5 s and 64 MB, and nothing grows with N * N."""
    length, tile = 2**20, (128, 128)
    ids = documents(np.random.default_rng(1), length, 2000)
    mask = predicate("document, causal")
    values = {"B": 1, "H": 1, "M": length, "N": length, "q_origin": 0, "k_origin": 0}
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        test = BoxTest(mask, values, {"qdoc": ids, "kdoc": ids})
        runs = stored_runs(test, (length, length), tile)
        seconds.append(time.perf_counter() - begin)
    tracemalloc.start()
    test = BoxTest(mask, values, {"qdoc": ids, "kdoc": ids})
    again = stored_runs(test, (length, length), tile)
    transposed = stored_runs(test, (length, length), tile, by_keys=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(seconds) <= 0.5 and peak <= 64e6, (seconds, peak)
    assert np.array_equal(runs.runs, again.runs) and len(runs.runs) == len(transposed.runs) == length // 128
    # The keys of a tile of queries: from the first document of the tile on.
    first = ids[0, ::128]
    start = np.searchsorted(ids[0], first) // 128 * 128
    assert np.array_equal(runs.runs[:, 0], start)
    assert np.array_equal(runs.runs[:, 3], np.arange(128, length + 1, 128))
