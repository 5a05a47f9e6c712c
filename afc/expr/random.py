# SPDX-License-Identifier: Apache-2.0
"""`random(seed, b, h, m, n)`: a number in [0, 1) for each element, from a counter and not from a state.

Six 32-bit words, the low and the high half of `seed` and the low halves of b, h, m, n, go one after the other
into a state (x, y) that starts as the first 64 bits of the fraction of pi:

    x = mix((x ^ word) + y)
    y = mix((y ^ x) + 0x9E3779B9)

and the value is the 24 high bits of y, times 2^-24: exact in float32. All sums and products are modulo 2^32.

Sources: `mix` is the 32-bit finalizer of MurmurHash3 (Austin Appleby, public domain), 0x9E3779B9 is 2^32
divided by the golden ratio, as in Knuth's multiplicative hashing and in splitmix (Steele, Lea and Flood,
OOPSLA 2014). For one word each step is a bijection of (x, y), so rows m of one head never share a state.
`runtime/abi/afc_random.h` is the same function in C++; a test compares the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

START_X, START_Y, STEP = 0x243F6A88, 0x85A308D3, 0x9E3779B9


def random(seed: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    """float64 values, multiples of 2^-24; the ints (also arrays that broadcast) count modulo 2^64 for `seed`,
    modulo 2^32 for the others.
    """
    low, high = (_word(np.asarray(seed, np.int64) >> shift) for shift in (0, 32))
    x, y = np.uint32(START_X), np.uint32(START_Y)
    with np.errstate(over="ignore"):
        for word in (low, high, *map(_word, (b, h, m, n))):
            x = _mix((x ^ word) + y)
            y = _mix((y ^ x) + np.uint32(STEP))
    return np.asarray(y >> np.uint32(8), np.float64) * 2.0**-24


def _word(x: Any) -> Any:
    return (np.asarray(x, np.int64) & 0xFFFFFFFF).astype(np.uint32)


def _mix(x: Any) -> Any:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
