# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead: nothing is compiled later, under fake tensors, inside torch.compile or anywhere."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import afc
from tests.support.checks import inputs

PROGRAM = "attention scaled(q, k, v) = softmax(causal(scaled_dot_product(q, k; scale = {scale}))) @ v\n"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that no other test compiles."""
    path = tmp_path / "scaled.attn"
    path.write_text(PROGRAM.format(scale=torch.rand(()).item()))
    return path


def test_prepared_modules_are_loaded_and_traced_without_compiling(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = afc.prepare(program, D=(48, 32), dtype=[torch.bfloat16], backend="cpu")
    assert len(set(modules)) == 2
    commands: list[list[str]] = []
    start = subprocess.Popen

    def record(command: Any, *arguments: Any, **options: Any) -> Any:
        commands.append(list(command))
        return start(command, *arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", record)
    with FakeTensorMode():
        found = [afc.load(program, D=d, dtype="bf16", backend="cpu") for d in (48, 32)]
        q = torch.empty(2, 4, 10, 48, dtype=torch.bfloat16, requires_grad=True)
        k = torch.empty(2, 2, 30, 48, dtype=torch.bfloat16)
        o, lse = found[0].scaled(q, k, k, return_lse=True)
        assert o.shape == q.shape and lse.shape == (2, 4, 10) and lse.dtype is torch.float32
        assert torch.autograd.grad(o.sum(), q)[0].shape == q.shape
    assert tuple(found) == modules
    torch._dynamo.reset()
    step = torch.compile(lambda *a: modules[1].scaled(*a), fullgraph=True, backend="aot_eager")
    tensors = inputs(1, 2, 2, 9, 9, 32, 32, torch.bfloat16)
    assert torch.equal(step(*tensors), modules[1].scaled(*tensors))
    assert not [c for c in commands if "-c" in c or "-o" in c]  # asking a compiler for its version is none


def test_loading_under_fake_tensors_does_not_compile(program: Path) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"under fake tensors: call afc.prepare\("):
        afc.load(program, D=32, backend="cpu")
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"afc.prepare\("):
        afc.prepare(program, D=32, backend="cpu")
    assert afc.load(program, D=32, backend="cpu").scaled(*inputs(1, 1, 1, 3, 3, 32, 32, torch.float32)).any()


def test_loading_inside_a_traced_function_names_prepare(program: Path) -> None:
    def step(*tensors: torch.Tensor) -> Any:
        return afc.load(program, D=32, backend="cpu").scaled(*tensors)

    torch._dynamo.reset()
    traced = torch.compile(step, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="prepare"):
        traced(*inputs(1, 1, 1, 3, 3, 32, 32, torch.float32))
