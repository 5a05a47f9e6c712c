# SPDX-License-Identifier: Apache-2.0
"""A built module in PyTorch: tracing, operators, autograd, errors of a call, two modules of one name."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import afc
from tests.support.checks import EXAMPLES, inputs


def module(name: str, dtype: str = "float32", **options: Any) -> Any:
    return afc.load(EXAMPLES / f"{name}.attn", D=64, dtype=dtype, backend="cpu", **options)


def sample(requires_grad: bool = True, dtype: torch.dtype = torch.float32, m: int = 40) -> list[torch.Tensor]:
    return [x.requires_grad_(requires_grad) for x in inputs(2, 4, 2, m, m, 64, 64, dtype)]


FLOATS = """
score cut(s; cap: float > 0, shift: float) = cap * tanh(s / cap) + shift * s
weight fade(p, i, j; near: float) = p * exp(-abs(i - j) / near)
attention softly(q, k, v; cap: float > 0, w: int, near: float, shift: float) {
    return fade(softmax(sliding_window(cut(scaled_dot_product(q, k); cap, shift); w)); near) @ v
}
"""


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("floats") / "softly.attn"
    path.write_text(FLOATS, encoding="utf-8")
    return afc.load(path, D=64, dtype=torch.float32, backend="cpu")


# ---- tracing ---------------------------------------------------------------------------------------------


def test_compiles_without_graph_breaks() -> None:
    kernel = module("alibi")
    slope = torch.rand(4)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernel.alibi_lm(q * 2, k, v, slope=slope) + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    q, k, v = sample()
    do = torch.randn(2, 4, 40, 64)
    want, got = step(q, k, v), compiled(q, k, v)
    assert torch.equal(want, got)
    for a, b in zip(
        torch.autograd.grad(want, (q, k, v), do), torch.autograd.grad(got, (q, k, v), do), strict=True
    ):
        assert torch.equal(a, b)


def test_inductor_and_dynamic_shapes() -> None:
    kernel = module("mistral")
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: kernel.mistral(q, k, v, w=9), fullgraph=True, dynamic=True)
    for m in (33, 50, 64):
        q, k, v = sample(m=m)
        torch.testing.assert_close(compiled(q, k, v), kernel.mistral(q, k, v, w=9), rtol=0, atol=0)


@pytest.mark.skipif(torch._dynamo.config.specialize_float, reason="Dynamo compiles each float in")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_floats_that_change_are_not_compiled_in(floats: Any, backend: str, dynamic: bool | None) -> None:
    """One graph for all values or, where Dynamo has to find out, two; with gradients and a constant."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float, near: float) -> torch.Tensor:
        o: torch.Tensor = floats.softly(q, k, v, cap=cap, near=near, shift=0.25, w=7)
        return o

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=counter)
    rows = sample()
    values = ((0.7, 3.0), (1.9, 2.5), (1e-3, 5.5), (2.3, 0.1), (41.0, 1e9))
    for number, (cap, near) in enumerate(values):
        want, got = step(*rows, cap, near), compiled(*rows, cap, near)
        assert torch.equal(want, got)
        do = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(want, rows, do), torch.autograd.grad(got, rows, do), strict=True):
            assert torch.equal(a, b)
        assert counter.frame_count == (1 if dynamic or number == 0 else 2)
    with pytest.raises(ValueError, match="cap: expected a number above 0"):
        compiled(*rows, -1.0, 3.0)


def test_first_call_may_be_inside_torch_compile(tmp_path: Path) -> None:
    """The module is imported before torch, and its first call is traced."""
    afc.compile_file(EXAMPLES / "causal.attn", tmp_path / "traced.so", afc_options(64))
    code = (
        "import traced, torch\n"
        "f = torch.compile(lambda q, k, v: traced.causal_lm(q, k, v), fullgraph=True, backend='aot_eager')\n"
        "q, k, v = (torch.randn(1, 2, 9, 64) for _ in range(3))\n"
        "assert torch.equal(f(q, k, v), traced.causal_lm(q, k, v))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env=_environment())


def afc_options(*heads: int, dtypes: tuple[str, ...] = ("float32",)) -> Any:
    from afc.options import Options

    return Options(("cpu",), tuple((h, h) for h in heads), dtypes)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}


def test_opcheck() -> None:
    kernel = module("alibi")
    glue = kernel.alibi_lm.glue
    q, k, v = sample(requires_grad=False)
    slope = torch.rand(4)
    torch.library.opcheck(glue.forward_op, (q, k, v, [slope], [], [0, 0, -1], [], []))
    o, lse = glue.forward_op(q, k, v, [slope], [], [0, 0, -1], [], [])
    saved = (torch.randn_like(o), None, q, k, v, o, lse, [slope])
    torch.library.opcheck(glue.backward_op, (*saved, [], [0, 0, -1], [], [], False, [True]))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_opcheck_strides(layout: str) -> None:
    glue = module("llama").llama.glue
    q, k, v = inputs(2, 4, 2, 17, 23, 64, 64, torch.float32, layout=layout)
    torch.library.opcheck(glue.forward_op, (q, k, v, [], [], [0, 0, -1], [], []))


def test_checkpoint_deepcopy_and_autocast() -> None:
    from torch.utils.checkpoint import checkpoint

    kernel = module("llama")
    q, k, v = sample()
    plain = torch.autograd.grad(kernel.llama(q, k, v).sum(), (q, k, v))
    again = torch.autograd.grad(checkpoint(kernel.llama, q, k, v, use_reentrant=False).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    half = module("llama", "bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        o = half.llama(q, k.bfloat16(), v)
    assert o.dtype is torch.bfloat16
    assert torch.autograd.grad(o.float().sum(), q)[0].dtype is torch.float32


def test_lse_is_differentiable_and_o_alone_too() -> None:
    kernel = module("causal", "float64")
    q, k, v = sample(dtype=torch.float64, m=9)
    assert torch.autograd.gradcheck(
        lambda *a: kernel.causal_lm(*a, return_lse=True)[1], (q, k, v), fast_mode=True
    )
    assert not kernel.causal_lm(q.detach(), k.detach(), v.detach()).requires_grad


def test_signature_and_documentation() -> None:
    attention = module("mistral").mistral
    assert (
        str(inspect.signature(attention))
        == "(q, k, v, *, w, q_origin=None, k_origin=0, kv_len=None, return_lse=False, deterministic=False)"
    )
    assert "Mistral 7B" in attention.__doc__ and "w: int > 0" in attention.__doc__


def test_fixed_parameter_leaves_the_signature() -> None:
    free, fixed = module("mistral").mistral, module("mistral", w=9).mistral
    q, k, v = sample(requires_grad=False)
    assert torch.equal(free(q, k, v, w=9), fixed(q, k, v))
    with pytest.raises(TypeError, match="unexpected argument `w`"):
        fixed(q, k, v, w=9)


# ---- errors of a call ------------------------------------------------------------------------------------


def _bad(change: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    q, k, v = inputs(2, 4, 2, 20, 30, 64, 64, torch.float32)
    arguments, options = [q, k, v], {"w": 5}
    change(arguments, options)
    return arguments, options


CASES = {
    "dtype not built": (
        TypeError,
        "no kernel for cpu float16.*afc compile mistral.attn",
        lambda a, o: a.__setitem__(slice(None), [x.half() for x in a]),
    ),
    "mixed dtypes": (
        TypeError,
        "v: expected q's dtype torch.float32, got torch.bfloat16",
        lambda a, o: a.__setitem__(2, a[2].bfloat16()),
    ),
    "integers": (TypeError, "q: expected float64", lambda a, o: a.__setitem__(0, a[0].long())),
    "not a tensor": (TypeError, "k: expected a torch.Tensor, got list", lambda a, o: a.__setitem__(1, [1.0])),
    "rank": (ValueError, "q: expected 4 dimensions", lambda a, o: a.__setitem__(0, a[0][0])),
    "batch": (ValueError, r"k: expected shape \[2, Hk, N, 64\]", lambda a, o: a.__setitem__(1, a[1][:1])),
    "heads": (
        ValueError,
        "k: expected a number of heads that divides q's 4, got 3",
        lambda a, o: a.__setitem__(slice(1, 3), [torch.randn(2, 3, 30, 64)] * 2),
    ),
    "lengths": (ValueError, "v: expected shape", lambda a, o: a.__setitem__(2, a[2][:, :, :-1])),
    "head size": (
        TypeError,
        "no kernel for cpu float32 Dqk=32",
        lambda a, o: a.__setitem__(slice(None), [x[..., :32].contiguous() for x in a]),
    ),
    "stride": (
        ValueError,
        "q: expected stride 1 in the last dimension",
        lambda a, o: a.__setitem__(0, torch.randn(2, 4, 20, 128)[..., ::2]),
    ),
    "device": (
        ValueError,
        "k: expected q's device cpu, got meta",
        lambda a, o: a.__setitem__(1, a[1].to("meta")),
    ),
    "missing scalar": (TypeError, "missing argument `w`", lambda a, o: o.pop("w")),
    "scalar type": (TypeError, "w: expected an int, got 2.5", lambda a, o: o.__setitem__("w", 2.5)),
    "scalar sign": (
        ValueError,
        "w: expected a value greater than 0, got 0",
        lambda a, o: o.__setitem__("w", 0),
    ),
    "scalar range": (ValueError, "w: expected an int between", lambda a, o: o.__setitem__("w", 2**40)),
    "unknown name": (
        TypeError,
        "unexpected argument `window`; its named arguments are w,",
        lambda a, o: o.__setitem__("window", 3),
    ),
    "kv_len range": (
        ValueError,
        r"kv_len: expected a number of keys in 0..30, got 31",
        lambda a, o: o.__setitem__("kv_len", 31),
    ),
    "kv_len of a batch": (
        ValueError,
        r"kv_len: expected values in 0..30, got -2 for batch 1",
        lambda a, o: o.__setitem__("kv_len", torch.tensor([30, -2])),
    ),
    "kv_len shape": (
        ValueError,
        r"kv_len: expected shape \[\] or \[2\], got \(3,\)",
        lambda a, o: o.__setitem__("kv_len", torch.tensor([1, 2, 3])),
    ),
    "origin type": (TypeError, "k_origin: expected an int", lambda a, o: o.__setitem__("k_origin", 1.5)),
    "origin dtype": (
        TypeError,
        "q_origin: expected an int32 or int64 tensor, got torch.float32",
        lambda a, o: o.__setitem__("q_origin", torch.tensor(3.0)),
    ),
    "origin of a batch": (
        ValueError,
        "q_origin: expected values in .*, got 1099511627776 for batch 0",
        lambda a, o: o.__setitem__("q_origin", torch.tensor(2**40)),
    ),
    "origin range": (
        ValueError,
        "q_origin: expected positions below",
        lambda a, o: o.__setitem__("q_origin", 2**31),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_call_names_the_argument(case: str) -> None:
    kind, text, change = CASES[case]
    arguments, options = _bad(change)
    with pytest.raises(kind, match=text):
        module("mistral").mistral(*arguments, **options)


def test_wrong_captured_tensors() -> None:
    attention = module("alibi").alibi_lm
    q, k, v = sample(requires_grad=False)
    for slope, kind, text in (
        (None, TypeError, "missing argument `slope`"),
        (torch.rand(3), ValueError, r"slope: expected shape \[H\] with H = 4, got \(3,\)"),
        (torch.rand(4, 1), ValueError, "slope"),
        (torch.ones(4, dtype=torch.int64), TypeError, "slope: expected float32"),
        (torch.rand(4, requires_grad=True), ValueError, "slope: expected a tensor without requires_grad"),
        ([1.0] * 4, TypeError, "slope"),
    ):
        with pytest.raises(kind, match=text):
            attention(q, k, v, **({} if slope is None else {"slope": slope}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_captured_dtypes(dtype: torch.dtype) -> None:
    attention = module("alibi").alibi_lm
    q, k, v = sample(requires_grad=False)
    slope = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    assert torch.equal(attention(q, k, v, slope=slope.to(dtype)), attention(q, k, v, slope=slope))
    strided = torch.stack((slope, slope * 0), 1).to(dtype)[:, 0]
    assert torch.equal(attention(q, k, v, slope=strided), attention(q, k, v, slope=slope))


# ---- modules ---------------------------------------------------------------------------------------------


def test_two_modules_of_one_name(tmp_path: Path) -> None:
    """Both files are called kernel.so and declare `lm`; each keeps its own meaning."""
    results = []
    q, k, v = sample(requires_grad=False)
    for number, mask in enumerate(("causal", "full")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "lm.attn").write_text(
            f"attention lm(q, k, v) = softmax({mask}(scaled_dot_product(q, k))) @ v\n"
        )
        afc.compile_file(folder / "lm.attn", folder / "kernel.so", afc_options(64))
        sys.modules.pop("kernel", None)
        sys.path.insert(0, str(folder))
        try:
            kernel = __import__("kernel")
        finally:
            sys.path.pop(0)
        results.append(kernel.lm(q, k, v))
    sys.modules.pop("kernel", None)
    assert not torch.allclose(results[0], results[1])
    from tests.support import dense

    for got, reference in zip(results, (dense.causal, dense.full), strict=True):
        torch.testing.assert_close(got, reference(q, k, v)[0], rtol=1e-4, atol=1e-5)


def test_one_module_with_several_configurations(tmp_path: Path) -> None:
    afc.compile_file(
        EXAMPLES / "causal.attn", tmp_path / "several.so", afc_options(32, 64, dtypes=("float32", "bfloat16"))
    )
    from afc.runtime.loading import import_module

    kernel = import_module(tmp_path / "several.so")
    for d in (32, 64):
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.randn(1, 1, 5, d, dtype=dtype)
            assert kernel.causal_lm(q, q, q).shape == (1, 1, 5, d)


def test_operators_are_shared_only_by_equal_code_for_equal_devices() -> None:
    import json

    from afc.api import module_spec
    from afc.frontend import check_file
    from afc.options import Options

    checked = check_file(EXAMPLES / "causal.attn")
    options = [
        Options(("cuda",), ((64, 64),), (), archs) for archs in (("sm_80",), ("sm_80", "sm_90"), ("sm_90",))
    ]
    options += [
        Options(("cpu",), ((64, 64),)),
        Options(("cpu",), ((32, 32),)),
        Options(("cpu",), ((64, 64),), backward=False),
    ]
    keys = [json.loads(module_spec(checked, o).metadata)["attentions"]["causal_lm"]["key"] for o in options]
    assert len(set(keys)) == len(keys)


def test_loading_twice_gives_one_module() -> None:
    assert module("llama") is module("llama")
    assert module("llama") is not module("llama", backward=False)


def test_without_backward() -> None:
    kernel = module("llama", backward=False)
    q, k, v = sample()
    with pytest.raises(NotImplementedError, match="without its backward"):
        kernel.llama(q, k, v)
    assert kernel.llama(q.detach(), k.detach(), v.detach()).shape == q.shape


def test_module_in_a_model_can_be_copied() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module("llama").llama

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attention(x, x, x)
            return out

    x = torch.randn(1, 2, 9, 64)
    assert torch.equal(copy.deepcopy(Layer())(x), Layer()(x))
    again = pickle.loads(pickle.dumps(module("llama").llama))
    assert again is module("llama").llama


def test_errors_survive_pickling() -> None:
    with pytest.raises(afc.SourceError) as caught:
        from afc.frontend import check_text

        check_text("attention a(q, k, v) = softmax(scaled_dot_product(q, kk)) @ v")
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.diagnostics == caught.value.diagnostics


def test_raw_calls_check_their_scalars() -> None:
    """What the Python layer refuses, the module itself refuses too: C callers go past Python."""
    kernel = module("mistral")
    sizes, tensors = (1, 1, 1, 1, 1), []
    for shape in ((1, 1, 1, 64),) * 4:
        tensors.append(torch.zeros(shape))
    views = tuple((x.data_ptr(), *x.stride()) for x in tensors)
    lse = torch.zeros(1, 1, 1)
    views = (*views, (lse.data_ptr(), 1, 1, 1, 1), None, None, None, None, None)
    size = kernel._afc_workspace(0, False, -1, sizes, 0, 0, 1, ())
    memory = torch.empty(size + 256, dtype=torch.uint8)
    pointer = (memory.data_ptr() + 255) // 256 * 256
    for w, wrong in ((5, False), (0, True), (2**40, True)):
        arguments = (0, False, 0, -1, sizes, views, (), (), (w,), 0, 0, pointer, size, 0, 1)
        if wrong:
            with pytest.raises(ValueError, match="w: expected an int above 0"):
                kernel._afc_run(*arguments)
        else:
            kernel._afc_run(*arguments)
