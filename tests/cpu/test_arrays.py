# SPDX-License-Identifier: Apache-2.0
"""Calls with NumPy arrays and DLPack objects: the numbers of the torch call, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import afc
from tests.support.checks import EXAMPLES, inputs

NUMPY = (torch.float64, torch.float32, torch.float16)


def module(name: str, dtype: Any = "float32") -> Any:
    return afc.load(EXAMPLES / f"{name}.attn", D=64, dtype=dtype, backend="cpu")


def sample(dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> tuple[torch.Tensor, ...]:
    return inputs(2, 4, 2, 33, 40, 64, 64, dtype, layout=layout)


class Foreign:
    """An array of a framework that shares nothing but DLPack."""

    def __init__(self, tensor: torch.Tensor, device: int | None = None) -> None:
        self._tensor, self._device = tensor, device

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__() if self._device is None else (self._device, 0)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", NUMPY, ids=str)
@pytest.mark.parametrize("wrap", [lambda x: x.numpy(), Foreign], ids=["numpy", "dlpack"])
def test_arrays_give_the_numbers_of_the_torch_call(wrap: Any, dtype: torch.dtype, layout: str) -> None:
    call = module("llama", str(dtype)).llama
    tensors = sample(dtype, layout)
    o, lse = call(*map(wrap, tensors), q_origin=7, return_lse=True)
    want, want_lse = call(*tensors, q_origin=7, return_lse=True)
    assert type(o) is np.ndarray and type(lse) is np.ndarray
    assert np.array_equal(o, want.numpy()) and np.array_equal(lse, want_lse.numpy())
    assert o.dtype == want.numpy().dtype and lse.dtype == want_lse.numpy().dtype
    if 0 not in want.stride():
        assert [s // o.itemsize for s in o.strides] == list(want.stride())


def test_captured_arrays_scalars_and_places() -> None:
    q, k, v = (x.numpy() for x in sample())
    slope = np.random.default_rng(0).random((4, 2))[:, 0]  # float64, strided
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    alibi = module("alibi").alibi_lm
    want = alibi(*tensors, slope=torch.from_numpy(slope.copy()))
    assert np.array_equal(alibi(q, k, v, slope=slope), want.numpy())
    assert np.array_equal(alibi(q, k, v, slope=Foreign(torch.from_numpy(slope))), want.numpy())
    mistral = module("mistral").mistral
    for places in (
        {"kv_len": np.array([40, 3])},
        {"kv_len": np.int32(20), "k_origin": np.array([4, 9])},
        {"q_origin": np.array(11), "k_origin": 2},
        {"kv_len": 5},
    ):
        tensor_places = {n: torch.as_tensor(x) for n, x in places.items()}
        want = mistral(*tensors, w=9, **tensor_places)
        assert np.array_equal(mistral(q, k, v, w=9, **places), want.numpy()), places


def test_bfloat16_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    call, tensors = module("llama", "bfloat16").llama, sample(torch.bfloat16)
    o = call(*(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for x in tensors))
    assert o.dtype == ml_dtypes.bfloat16
    assert np.array_equal(o.view(np.int16), call(*tensors).view(torch.int16).numpy())


def test_dtypes_are_named_as_in_numpy() -> None:
    for dtype in (np.float32, np.dtype(np.float32), "float32", torch.float32):
        assert module("llama", dtype) is module("llama")
    with pytest.raises(afc.UsageError, match=r"unknown dtype .*numpy\.int8"):
        module("llama", np.int8)


def test_empty_arrays() -> None:
    call = module("llama").llama
    for b, m, n in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        o, lse = call(*(np.zeros((b, 2, rows, 64), np.float32) for rows in (m, n, n)), return_lse=True)
        assert o.shape == (b, 2, m, 64) and lse.shape == (b, 2, m) and not o.any()


def test_torch_is_not_imported(tmp_path: Path) -> None:
    """A module that torch would change nothing of: imported, called, checked without it."""
    from afc.options import Options

    afc.compile_file(EXAMPLES / "causal.attn", tmp_path / "plain.so", Options(("cpu",), ((64, 64),)))
    code = (
        "import sys, numpy as np, plain\n"
        "q = np.random.default_rng(0).standard_normal((2, 2, 9, 64)).astype(np.float32)\n"
        "o, lse = plain.causal_lm(q, q, q, return_lse=True)\n"
        "assert 'torch' not in sys.modules and np.allclose(o[:, :, 0], q[:, :, 0], atol=1e-6)\n"
        "try:\n"
        "    plain.causal_lm([1.0], q, q)\n"
        "except TypeError as error:\n"
        "    assert 'q: expected a torch.Tensor, a NumPy array' in str(error), error\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "t = torch.from_numpy(q)\n"
        "assert np.array_equal(plain.causal_lm(t, t, t).numpy(), o)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


Q = np.zeros((2, 4, 20, 64), np.float32)
K = np.zeros((2, 2, 30, 64), np.float32)
CASES: dict[str, tuple[type[Exception], str, list[Any], dict[str, Any]]] = {
    "torch among arrays": (TypeError, "k: expected a NumPy array .*got Tensor", [Q, torch.zeros(1), K], {}),
    "array among tensors": (
        TypeError,
        "k: expected a torch.Tensor, got ndarray",
        [torch.from_numpy(Q), K, K],
        {},
    ),
    "list": (
        TypeError,
        "q: expected a torch.Tensor, a NumPy array or a DLPack object, got list",
        [[], K, K],
        {},
    ),
    "masked": (TypeError, "k: expected .*got MaskedArray", [Q, np.ma.masked_array(K), K], {}),
    "dtype": (TypeError, "q: expected float64, float32.*got int64", [Q.astype(np.int64), K, K], {}),
    "mixed": (TypeError, "v: expected q's dtype float32, got float16", [Q, K, K.astype(np.float16)], {}),
    "not built": (TypeError, "no kernel for cpu float64", [x.astype(np.float64) for x in (Q, K, K)], {}),
    "byte order": (TypeError, "k: expected elements in the byte order", [Q, K.astype(">f4"), K], {}),
    "rank": (ValueError, "q: expected 4 dimensions", [Q[0], K, K], {}),
    "heads": (ValueError, "k: expected a number of heads", [Q[:, :3], K, K], {}),
    "rows": (ValueError, "v: expected shape", [Q, K, K[:, :, :9]], {}),
    "stride": (
        ValueError,
        "q: expected stride 1",
        [np.zeros((2, 4, 20, 128), np.float32)[..., ::2], K, K],
        {},
    ),
    "unaligned": (
        ValueError,
        "k: expected aligned elements",
        [Q, np.zeros(K.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(K.shape), K],
        {},
    ),
    "device": (ValueError, "k: expected memory of the CPU", [Q, Foreign(torch.zeros(1), device=2), K], {}),
    "bfloat16": (
        TypeError,
        r"q: expected a DLPack object that NumPy can read \(bfloat16: .*ml_dtypes",
        [Foreign(torch.zeros(Q.shape, dtype=torch.bfloat16)), K, K],
        {},
    ),
    "gradient": (
        TypeError,
        "q: expected a DLPack object",
        [Foreign(torch.zeros(Q.shape, requires_grad=True)), K, K],
        {},
    ),
    "kv_len": (
        ValueError,
        "kv_len: expected values in 0..30, got 31",
        [Q, K, K],
        {"kv_len": np.array([1, 31])},
    ),
    "kv_len type": (TypeError, "kv_len: expected an int", [Q, K, K], {"kv_len": 2.0}),
    "kv_len shape": (
        ValueError,
        r"kv_len: expected shape \(\) or \(2,\)",
        [Q, K, K],
        {"kv_len": np.arange(3)},
    ),
    "origin": (ValueError, "q_origin: expected positions below", [Q, K, K], {"q_origin": 2**31}),
    "scalar": (TypeError, "w: expected an int", [Q, K, K], {"w": 1.5}),
    "name": (TypeError, "unexpected argument `window`", [Q, K, K], {"window": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_call_names_the_argument(case: str) -> None:
    kind, text, arguments, options = CASES[case]
    with pytest.raises(kind, match=text):
        module("mistral").mistral(*arguments, **{"w": 5, **options})


def test_wrong_captured_arrays() -> None:
    call = module("alibi").alibi_lm
    for slope, kind, text in (
        (np.zeros(3, np.float32), ValueError, r"slope: expected shape \[H\] with H = 4, got \(3,\)"),
        (np.zeros(4, np.int64), TypeError, "slope: expected float32 or"),
        (torch.zeros(4), TypeError, "slope: expected a NumPy array"),
        ([1.0] * 4, TypeError, "slope"),
    ):
        with pytest.raises(kind, match=text):
            call(Q, K, K, slope=slope)
    with pytest.raises(TypeError, match="missing argument `slope`"):
        call(Q, K, K)


def test_weights_without_a_sum_have_no_lse() -> None:
    call = module("sigmoid").sigmoid_lm
    assert call(Q, K, K).shape == Q.shape
    with pytest.raises(ValueError, match="return_lse"):
        call(Q, K, K, return_lse=True)
