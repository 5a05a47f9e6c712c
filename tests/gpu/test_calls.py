# SPDX-License-Identifier: Apache-2.0
"""Calls on a GPU: streams, graphs, tracing, errors, training."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import afc  # noqa: E402
from tests.support.checks import EXAMPLES, inputs  # noqa: E402

ARCH = os.environ.get("AFC_TEST_ARCH")


def module(name: str = "llama", d: int = 64, **options: Any) -> Any:
    return afc.load(EXAMPLES / f"{name}.attn", D=d, dtype="bfloat16", backend="cuda", arch=ARCH, **options)


def sample(requires_grad: bool = False, m: int = 200) -> list[Any]:
    return [x.requires_grad_(requires_grad) for x in inputs(2, 4, 2, m, m, 64, 64, torch.bfloat16, "cuda")]


def test_current_stream() -> None:
    kernel = module()
    q, k, v = sample(m=3000)
    want = kernel.llama(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = q.clone()
        torch.cuda._sleep(20_000_000)
        late.mul_(1.0)
        got = kernel.llama(late, k, v)
    stream.synchronize()
    assert torch.equal(got, want)


def test_graph_capture_and_replay() -> None:
    kernel = module()
    q, k, v = sample()
    kernel.llama(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kernel.llama(q, k, v)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, kernel.llama(q, k, v))


def test_compiles_without_graph_breaks() -> None:
    kernel = module()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: kernel.llama(q * 2, k, v) + 1, fullgraph=True)
    q, k, v = sample(requires_grad=True)
    do = torch.randn_like(q)
    want, got = kernel.llama(q * 2, k, v) + 1, compiled(q, k, v)
    assert torch.equal(want, got)
    plain, traced = torch.autograd.grad(want, (k, v), do), torch.autograd.grad(got, (k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def test_opcheck() -> None:
    glue = module("alibi").alibi_lm.glue
    q, k, v = sample()
    slope = torch.rand(4, device="cuda")
    torch.library.opcheck(glue.forward_op, (q, k, v, [slope], [], [0, 0, -1], [], []))


def test_misaligned_inputs_give_the_same_numbers() -> None:
    kernel = module()
    q, k, v = sample()
    shifted = []
    for x in (q, k, v):
        memory = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
        shifted.append(memory[1:].view(x.shape).copy_(x))
    assert shifted[0].data_ptr() % 16 != 0
    assert torch.equal(kernel.llama(*shifted), kernel.llama(q, k, v))


def test_wrong_calls() -> None:
    kernel = module()
    q, k, v = sample()
    with pytest.raises(TypeError, match="bfloat16 or float16 on CUDA"):
        kernel.llama(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="k: expected q's device cuda:0, got cpu"):
        kernel.llama(q, k.cpu(), v)
    with pytest.raises(TypeError, match="no kernel for cpu"):
        kernel.llama(q.cpu(), k.cpu(), v.cpu())


def test_an_architecture_that_is_not_in_the_module() -> None:
    kernel = afc.load(EXAMPLES / "causal.attn", D=64, dtype="bfloat16", backend="cuda", arch="sm_120")
    if torch.cuda.get_device_capability()[0] == 12:
        pytest.skip("this device runs it")
    q, k, v = sample()
    with pytest.raises(RuntimeError, match=r"sm_120.*--arch"):
        kernel.causal_lm(q, k, v)


def test_threads_share_a_module() -> None:
    from concurrent.futures import ThreadPoolExecutor

    kernel = module("causal")
    q, k, v = sample()
    want = kernel.causal_lm(q, k, v)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: kernel.causal_lm(q, k, v), range(64)))
    assert all(torch.equal(o, want) for o in results)


def test_bare_cubin_loads_in_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    from afc.api import module_spec
    from afc.build import Cache, CubinResult, Toolchain, compile_units
    from afc.frontend import check_file
    from afc.options import Options

    major, minor = torch.cuda.get_device_capability()
    options = Options(("cuda",), ((64, 64),), ("bfloat16",), (ARCH or f"sm_{major}{minor}",))
    spec = module_spec(check_file(EXAMPLES / "causal.attn"), options)
    (units,) = spec.cuda.values()
    (cubin,) = compile_units(list(units), Toolchain.find(cuda=True), Cache())
    assert isinstance(cubin, CubinResult)
    path = Cache().root / "test_bare.cubin"
    path.write_bytes(cubin.cubin)
    assert cupy.RawModule(path=str(path)).get_function("causal_lm_forward").num_regs > 0


def test_a_small_model_trains_like_sdpa() -> None:
    """examples/tiny_lm.py exits with 0 if its curves agree to rounding."""
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "tiny_lm.py"), "--steps", "60"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH")))),
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
