# SPDX-License-Identifier: Apache-2.0
"""The CPU tile primitives and elementary functions, compiled alone, against NumPy in wider precision."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
TARGET = "-std=c++17 -O3 -march=x86-64-v3 -fopenmp -fno-math-errno -fno-trapping-math"
FLAGS = f"{TARGET} -fPIC -shared -Wall -Wextra -Werror"

SOURCE = r"""
#include "cpu/softmax.hpp"
#include "cpu/walk.hpp"

#define FUNCTION(NAME, T, SUFFIX)                                               \
  void NAME##_##SUFFIX(const T *__restrict x, T *__restrict y, int count) {     \
    _Pragma("omp simd") for (int k = 0; k < count; ++k) y[k] = afc::NAME(x[k]); \
  }
#define BOTH(NAME) FUNCTION(NAME, float, float32) FUNCTION(NAME, double, float64)

#define TILES(T, SUFFIX)                                                                                    \
  int lanes_##SUFFIX() { return afc::Panel<T>::lanes; }                                                     \
  void multiply_##SUFFIX(T *S, const T *Y, int pitch, const T *X, int rows, int depth) {                    \
    afc::multiply(S, Y, pitch, X, rows, depth);                                                             \
  }                                                                                                         \
  void accumulate_##SUFFIX(T *C, const T *rescale, const T *Y, int pitch, const T *S, int rows,             \
                           int width) {                                                                     \
    afc::accumulate(C, rescale, Y, pitch, S, rows, width);                                                  \
  }                                                                                                         \
  void load_tile_##SUFFIX(T *tile, int pitch, const T *from, int64_t row_stride, int64_t column_stride,     \
                          int first, int count, int width) {                                                \
    const afc::Matrix<const T> rows{from, row_stride, column_stride};                                       \
    afc::load_tile(tile, pitch, rows, first, count, width);                                                 \
  }                                                                                                         \
  void load_panels_##SUFFIX(T *panels, T *row, const T *from, int64_t row_stride, int first, int count,     \
                            int width) {                                                                    \
    afc::load_panels(panels, row, afc::Matrix<const T>{from, row_stride, 1}, first, count, width);          \
  }                                                                                                         \
  void online_softmax_##SUFFIX(T *X, int rows, T scale, T *maximum, T *sum, T *rescale) {                   \
    afc::online_softmax(X, rows, scale, maximum, sum, rescale);                                             \
  }

#define STORAGE(TYPE)                                                                                       \
  void load_##TYPE(float *to, const afc::TYPE *from, int count) { afc::load_row(to, from, count); }         \
  void store_##TYPE(afc::TYPE *to, const float *from, int count) { afc::store_row(to, from, count); }       \
  void round_##TYPE(float *row, int count) { afc::round_row<afc::TYPE>(row, count); }                       \
  void convert_##TYPE(afc::TYPE *to, const float *from, int count) {                                        \
    for (int k = 0; k < count; ++k) afc::convert(from[k], &to[k]);                                          \
  }                                                                                                         \
  void widen_##TYPE(float *to, const afc::TYPE *from, int count) {                                          \
    for (int k = 0; k < count; ++k) to[k] = afc::to_real(from[k]);                                          \
  }

extern "C" {
BOTH(exp) BOTH(exp2) BOTH(exp2_weight) BOTH(log) BOTH(tanh) BOTH(sigmoid) BOTH(sin) BOTH(cos) BOTH(rsqrt)
TILES(float, float32) TILES(double, float64)
STORAGE(bfloat16) STORAGE(float16)

void integers(int64_t a, int b, int64_t *result) {
  result[0] = afc::floor_div(a, b);
  result[1] = afc::floor_mod(a, b);
  result[2] = afc::floor_div(int(a), b);
  result[3] = afc::floor_mod(int(a), b);
  result[4] = afc::max(int(a), b);
  result[5] = afc::min(a, b);
  result[6] = afc::abs(a);
  result[7] = afc::ipow(int64_t(b), 3);
}

void selections(const double *x, double *result) {
  result[0] = afc::max(x[0], x[1]);
  result[1] = afc::min(x[0], x[1]);
}

void read_captured(void *data, int dtype, int64_t rows, int64_t columns, int64_t r, int64_t c,
                   double *result) {
  afc_captured tensor{data, dtype, 2, {rows, columns, 0, 0}, {columns, 1, 0, 0}};
  result[0] = afc::read<double>(tensor, r, c);
  result[1] = double(afc::read<int64_t>(tensor, r, c));
  result[2] = afc::read<bool>(tensor, r, c);
}

int walk(int begin, int full_begin, int full_end, int end, int tile, int *visited) {
  int count = 0;
  afc::walk(afc::Run{begin, full_begin, full_end, end}, tile, [&](int first, int size, bool full) {
    visited[3 * count] = first, visited[3 * count + 1] = size, visited[3 * count + 2] = full, ++count;
  });
  return count;
}

void count_tasks(int threads, int64_t tasks, int *visits) {
  afc::parallel_for(threads, tasks,
                    [&](int64_t task, int thread) { visits[task] += thread < threads ? 1 : 1000; });
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The primitives as a shared library; without g++ these tests are skipped."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("cpu_tiles")
    (folder / "tiles.cpp").write_text(SOURCE)
    command = ["g++", *FLAGS.split(), f"-I{RUNTIME}", "tiles.cpp", "-o", "tiles.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "tiles.so"))


def pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    """Address of an array's first element."""
    return ctypes.c_void_p(array.ctypes.data)


def aligned(shape: tuple[int, ...], dtype: Any, fill: float = np.nan) -> np.ndarray[Any, Any]:
    """An array that starts at a multiple of 64 bytes, filled with NaN: what is not written shows."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array: np.ndarray[Any, Any] = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def apply(library: ctypes.CDLL, name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """afc::<name> of every element."""
    y = np.empty_like(x)
    library[f"{name}_{x.dtype}"](pointer(x), pointer(y), x.size)
    return y


def units(y: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> float:
    """Largest error in units in the last place of the result; kinds (NaN, infinity, zero sign) must agree."""
    rounded = exact.astype(y.dtype)
    assert np.array_equal(np.isnan(y), np.isnan(rounded))
    assert np.array_equal(y[np.isinf(rounded)], rounded[np.isinf(rounded)])
    finite = np.isfinite(rounded) & np.isfinite(y)
    spacing = np.spacing(np.abs(rounded[finite])).astype(exact.dtype)
    return float(np.max(np.abs(y[finite] - exact[finite]) / spacing, initial=0.0))


def sweep(dtype: str, low: float, high: float) -> np.ndarray[Any, Any]:
    """Numbers over [low, high], dense near zero, with the special ones."""
    rng = np.random.default_rng(7)
    near_zero = rng.standard_normal(20000) * 10.0 ** rng.uniform(-30, 0, 20000)
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1.0,
        -1.0,
        low,
        high,
        np.finfo(dtype).tiny,
        -np.finfo(dtype).tiny,
    ]
    return np.concatenate([rng.uniform(low, high, 100000), near_zero, special]).astype(dtype)


Exact = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
FUNCTIONS: dict[str, tuple[Exact, dict[str, tuple[float, float]], float]] = {
    "exp": (np.exp, {"float32": (-110, 95), "float64": (-760, 720)}, 1.5),
    "exp2": (np.exp2, {"float32": (-155, 130), "float64": (-1080, 1030)}, 1.5),
    "log": (np.log, {"float32": (-1, 1e6), "float64": (-1, 1e6)}, 1.5),
    "tanh": (np.tanh, {"float32": (-25, 25), "float64": (-50, 50)}, 3.0),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), {"float32": (-85, 90), "float64": (-700, 720)}, 3.0),
    "sin": (np.sin, {"float32": (-1e4, 1e4), "float64": (-1e4, 1e4)}, 1.0),
    "cos": (np.cos, {"float32": (-1e4, 1e4), "float64": (-1e4, 1e4)}, 1.0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), {"float32": (0, 1e4), "float64": (0, 1e4)}, 1.5),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_function_is_accurate(library: ctypes.CDLL, name: str, dtype: str) -> None:
    """Against float64 for float and 80-bit arithmetic for double."""
    exact, ranges, limit = FUNCTIONS[name]
    x = sweep(dtype, *ranges[dtype])
    with np.errstate(all="ignore"):
        reference = exact(x.astype(np.float64 if dtype == "float32" else np.longdouble))
        assert units(apply(library, name, x), reference) <= limit


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logarithm_of_subnormal_and_large_numbers(library: ctypes.CDLL, dtype: str) -> None:
    info = np.finfo(dtype)
    x = np.exp2(np.linspace(info.minexp - info.nmant, info.maxexp - 0.01, 10000)).astype(dtype)
    assert units(apply(library, "log", x), np.log(x.astype(np.longdouble))) <= 1.5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weight_is_exact_in_kind(library: ctypes.CDLL, dtype: str) -> None:
    """A masked score has weight 0, the maximum 1, NaN stays NaN; else as exp2, or 0 for a subnormal."""
    lowest = float(np.finfo(dtype).minexp)
    special = np.array([-np.inf, -1e30, lowest - 1, 0.0, -0.0, np.nan], dtype)
    assert np.array_equal(apply(library, "exp2_weight", special), [0, 0, 0, 1, 1, np.nan], equal_nan=True)
    x = np.linspace(lowest, 0, 100001).astype(dtype)
    assert units(apply(library, "exp2_weight", x), np.exp2(x.astype(np.longdouble))) <= 1.5


def bfloat16_bits(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 -> bfloat16 to nearest even, by integer arithmetic on one number at a time."""
    bits = x.view(np.uint32).astype(np.uint64)
    low, up = bits & 0xFFFF, bits >> 16
    rounded = up + ((low > 0x8000) | ((low == 0x8000) & (up & 1 == 1)))
    return np.where(np.isnan(x), up | 0x40, rounded).astype(np.uint16)


def widened(bits: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Patterns of 16 bits as float32."""
    if kind == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_every_16_bit_number_goes_there_and_back(library: ctypes.CDLL, kind: str) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    exact = widened(bits, kind)
    wide, scalar, back = np.empty(65536, np.float32), np.empty(65536, np.float32), np.empty(65536, np.uint16)
    library[f"load_{kind}"](pointer(wide), pointer(bits), 65536)
    library[f"widen_{kind}"](pointer(scalar), pointer(bits), 65536)
    assert np.array_equal(wide, exact, equal_nan=True) and np.array_equal(scalar, exact, equal_nan=True)
    for name in ("store", "convert"):
        library[f"{name}_{kind}"](pointer(back), pointer(exact), 65536)
        assert np.array_equal(back[~np.isnan(exact)], bits[~np.isnan(exact)]), name


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_rounding_to_16_bits_is_to_nearest_even(library: ctypes.CDLL, kind: str) -> None:
    rng = np.random.default_rng(3)
    patterns = rng.integers(0, 2**32, 200001, dtype=np.uint32)
    ties = (rng.integers(0, 2**19, 50000, dtype=np.uint32) << 13) | 0x1000
    x = np.concatenate([patterns, ties]).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = x.astype(np.float16).view(np.uint16) if kind == "float16" else bfloat16_bits(x)
    number = ~np.isnan(x)
    for name in ("store", "convert"):
        stored = np.zeros(x.size, np.uint16)
        library[f"{name}_{kind}"](pointer(stored), pointer(x), x.size)
        assert np.array_equal(stored[number], exact[number]), name
    wide = widened(exact, kind)
    rounded = x.copy()
    library[f"round_{kind}"](pointer(rounded), x.size)
    assert np.array_equal(rounded[number], wide[number]) and np.isnan(rounded[~number]).all()


def padded(rows: int) -> int:
    """Rows of a streamed tile: a multiple of four."""
    return -(-rows // 4) * 4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (4, 8), (7, 5), (63, 64), (64, 129)])
def test_products(library: ctypes.CDLL, dtype: str, rows: int, depth: int) -> None:
    """Both products against NumPy, with rows beyond the tile left NaN where they must not be read."""
    rng = np.random.default_rng(rows)
    lanes, width = library[f"lanes_{dtype}"](), padded(depth)
    X, Y = aligned((depth, lanes), dtype), aligned((padded(rows), width), dtype, 0)
    X[...], Y[:rows, :depth] = rng.standard_normal(X.shape), rng.standard_normal((rows, depth))
    S = aligned((padded(rows), lanes), dtype)
    library[f"multiply_{dtype}"](pointer(S), pointer(Y), width, pointer(X), rows, depth)
    tolerance = 64 * depth**0.5 * np.finfo(dtype).eps
    product = Y[:rows, :depth].astype(float) @ X.astype(float)
    np.testing.assert_allclose(S[:rows], product, atol=tolerance, rtol=0)

    S[rows:] = np.nan
    C, rescale = aligned((width, lanes), dtype), aligned((lanes,), dtype)
    C[...], rescale[...] = rng.standard_normal(C.shape), rng.uniform(0, 1, lanes)
    expected = C.astype(float) * rescale + Y[:rows].astype(float).T @ S[:rows].astype(float)
    library[f"accumulate_{dtype}"](pointer(C), pointer(rescale), pointer(Y), width, pointer(S), rows, width)
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(C, expected, atol=64 * rows**0.5 * scale * np.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("column_stride", [1, 3])
def test_streamed_tile_ends_in_zeros(library: ctypes.CDLL, dtype: str, column_stride: int) -> None:
    """Rows beyond the tensor and columns beyond the row are zero although memory there holds NaN."""
    memory = np.full((9, 40), np.nan, dtype)
    memory[:7, : 5 * column_stride : column_stride] = np.arange(35).reshape(7, 5)
    tile = aligned((4, 8), dtype)
    load = library[f"load_tile_{dtype}"]
    load(pointer(tile), 8, pointer(memory), ctypes.c_int64(40), ctypes.c_int64(column_stride), 4, 3, 5)
    expected = np.zeros((4, 8))
    expected[:3, :5] = np.arange(20, 35).reshape(3, 5)
    assert np.array_equal(tile, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_panels_are_transposed_and_end_in_zeros(library: ctypes.CDLL, dtype: str) -> None:
    lanes = library[f"lanes_{dtype}"]()
    count, width = lanes + 3, 5
    memory = np.full((count + 4, 6), np.nan, dtype)
    memory[2 : 2 + count, :width] = np.random.default_rng(0).standard_normal((count, width))
    panels, row = aligned((2, width, lanes), dtype), np.empty(width, dtype)
    load = library[f"load_panels_{dtype}"]
    load(pointer(panels), pointer(row), pointer(memory), ctypes.c_int64(6), 2, count, width)
    expected = np.zeros((2 * lanes, width), dtype)
    expected[:count] = memory[2 : 2 + count, :width]
    assert np.array_equal(panels.transpose(0, 2, 1).reshape(2 * lanes, width), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_online_softmax_over_tiles(library: ctypes.CDLL, dtype: str) -> None:
    """Maximum, sum and rescaling; a lane may be masked in its first tiles, in all, or hold -inf scores."""
    rng = np.random.default_rng(11)
    lanes, rows, scale = library[f"lanes_{dtype}"](), 13, 0.7
    real = ctypes.c_float if dtype == "float32" else ctypes.c_double
    X = rng.standard_normal((4, rows, lanes)).astype(dtype) * 5
    X[:, :, 0], X[:2, :, 1], X[1:, :, 2], X[:, ::2, 3] = -np.inf, -np.inf, -np.inf, -np.inf
    maximum, total, rescale = (aligned((lanes,), dtype, fill) for fill in (-np.inf, 0.0, np.nan))
    weighted = np.zeros(lanes)
    for x in X:
        tile = aligned(x.shape, dtype)
        tile[...] = x
        state = (pointer(maximum), pointer(total), pointer(rescale))
        library[f"online_softmax_{dtype}"](pointer(tile), rows, real(scale), *state)
        weighted = weighted * rescale + (tile * np.arange(rows)[:, None]).sum(0)
    flat = X.reshape(-1, lanes).astype(float)
    top = flat.max(0)
    weights = np.exp2(scale * (flat - np.where(np.isinf(top), 0, top)))
    tolerance = 100 * float(np.finfo(dtype).eps)
    assert np.array_equal(maximum, top)
    np.testing.assert_allclose(total, weights.sum(0), rtol=tolerance)
    weights *= np.tile(np.arange(rows), 4)[:, None]
    np.testing.assert_allclose(weighted, weights.sum(0), rtol=tolerance)
    assert total[0] == 0 and weighted[0] == 0


@pytest.mark.parametrize(("a", "b"), [(7, 3), (-7, 3), (6, 3), (-6, 3), (0, 5), (-1, 8), (-2147483648, 7)])
def test_integer_functions(library: ctypes.CDLL, a: int, b: int) -> None:
    result = np.empty(8, np.int64)
    library.integers(ctypes.c_int64(a), b, pointer(result))
    assert result.tolist() == [a // b, a % b, a // b, a % b, max(a, b), min(a, b), abs(a), b**3]


def test_maximum_and_minimum_propagate_nan(library: ctypes.CDLL) -> None:
    result = np.empty(2)
    for a, b in ((1.0, 2.0), (2.0, 1.0), (np.nan, 1.0), (1.0, np.nan), (-np.inf, np.inf)):
        library.selections(pointer(np.array([a, b])), pointer(result))
        assert np.array_equal(result, [np.maximum(a, b), np.minimum(a, b)], equal_nan=True)


DTYPES = [(0, "bool"), (1, "int32"), (2, "int64"), (3, "float16"), (5, "float32"), (6, "float64")]


@pytest.mark.parametrize(("code", "dtype"), DTYPES)
def test_captured_tensor_is_never_read_outside(library: ctypes.CDLL, code: int, dtype: str) -> None:
    data = np.array([[1, 0, 1], [0, 1, 1]]).astype(dtype)
    result = np.empty(3)
    for r, c in ((0, 0), (1, 2), (0, 1)):
        library.read_captured(pointer(data), code, *map(ctypes.c_int64, (2, 3, r, c)), pointer(result))
        assert result.tolist() == [data[r, c]] * 3
    for r, c in ((-1, 0), (2, 0), (0, 3), (0, -1), (2**40, 0)):
        library.read_captured(pointer(data), code, *map(ctypes.c_int64, (2, 3, r, c)), pointer(result))
        assert np.isnan(result[0]) and result[1:].tolist() == [0, 0]


RUNS = [(0, 0, 100, 100), (3, 17, 81, 97), (5, 5, 5, 5), (2, 2, 2, 40), (9, 40, 40, 40)]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("tile", [4, 32, 128])
def test_walk_visits_every_index_once(
    library: ctypes.CDLL, run: tuple[int, int, int, int], tile: int
) -> None:
    """Indices of [begin, end) once each, the full ones in full pieces, those that need a test before them."""
    visited = np.zeros((200, 3), np.int32)
    pieces = visited[: library.walk(*run, tile, pointer(visited))].tolist()
    indices = [(first + k, full) for first, size, full in pieces for k in range(size)]
    assert sorted(indices) == [(n, int(run[1] <= n < run[2])) for n in range(run[0], run[3])]
    assert all(0 < size <= tile for _, size, _ in pieces)
    assert [full for *_, full in pieces] == sorted(full for *_, full in pieces)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tasks", [0, 1, 3, 100])
def test_every_task_runs_once(library: ctypes.CDLL, threads: int, tasks: int) -> None:
    visits = np.zeros(tasks + 1, np.int32)
    library.count_tasks(threads, ctypes.c_int64(tasks), pointer(visits))
    assert visits.tolist() == [1] * tasks + [0]
