# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, what lands on which stream, and that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from afc.build import find_cuda
from afc.errors import ToolchainError
from tests.support.checks import EXAMPLES

ROOT = EXAMPLES.parent


def afc(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "afc", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)


def test_compile_and_import(tmp_path: Path) -> None:
    done = afc(
        "compile", EXAMPLES / "llama.attn", "-o", tmp_path / "kernel.so", "-D", "D=32", "--backend", "cpu"
    )
    assert done.returncode == 0 and done.stdout == "" and done.stderr == ""
    assert [p.name for p in tmp_path.iterdir()] == ["kernel.so"]
    code = (
        "import kernel, torch\n"
        "q, k, v = (torch.randn(1, 2, 9, 32, requires_grad=True) for _ in range(3))\n"
        "kernel.llama(q, k, v).sum().backward()\n"
        "print(kernel.llama.__doc__.splitlines()[0], tuple(q.grad.shape))\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("Llama's attention") and run.stdout.endswith("(1, 2, 9, 32)\n")


def test_a_module_without_afc_says_what_is_missing(tmp_path: Path) -> None:
    done = afc(
        "compile", EXAMPLES / "llama.attn", "-o", tmp_path / "alone.so", "-D", "D=32", "--backend", "cpu"
    )
    assert done.returncode == 0
    code = "import alone\nassert alone._afc_entries\nalone.llama"
    run = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path[:] = [p for p in sys.path if 'site' not in p]\n{code}",
        ],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert "AttributeError" in run.stderr and "afc" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["compile", "missing.attn", "-o", "k.so"], "E0620"),
        (["compile", str(EXAMPLES / "llama.attn")], "E0619"),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "my-kernel.so"], "E0520"),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "no/such/folder/k.so"], "E0521"),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "k.so", "--dtype", "int8"], "E0610"),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "k.so", "--backend", "tpu"], "E0611"),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "k.so", "--arch", "sm_75"], "E0618"),
        (["compile", str(EXAMPLES / "llama.attn"), "--emit", "cubin", "--arch", "sm_90"], "E0619"),
        (["compile", str(EXAMPLES / "llama.attn"), "--emit", "cubin", "-o", "k.cubin"], "E0626"),
        (
            ["compile", str(EXAMPLES / "llama.attn"), "--emit", "cubin", "-o", "k", "--arch", "compute_80"],
            "E0626",
        ),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "k.so", "-D", "D"], "E0617"),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "k.so", "-D", "D=x"], "E0617"),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "k.so", "-D", "Dqk=64"], "E0613"),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "k.so", "-D", "w=3"], "E0621"),
        (["compile", str(EXAMPLES / "mistral.attn"), "-o", "k.so", "-D", "w=-3"], "E0622"),
        (["compile", str(EXAMPLES / "mistral.attn"), "-o", "k.so", "-D", "w=three"], "E0612"),
        (
            [
                "compile",
                str(EXAMPLES / "llama.attn"),
                "-o",
                "k.so",
                "--backend",
                "cuda",
                "--dtype",
                "float32",
            ],
            "E0405",
        ),
        (["compile", str(EXAMPLES / "llama.attn"), "-o", "k.so", "--backend", "cuda", "-D", "D=44"], "E0406"),
        (["compile", str(EXAMPLES / "gptj.attn"), "-o", "k.so", "--backend", "cpu", "-D", "D=16"], "E0409"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_wrong_requests_exit_with_2(arguments: list[str], code: str, tmp_path: Path) -> None:
    done = afc(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"error[{code}]" in done.stderr and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_wrong_sources_exit_with_1(tmp_path: Path) -> None:
    (tmp_path / "bad.attn").write_text("attention lm(q, k, v) = softmax(kausal(dot(q, k))) @ v\n")
    done = afc("compile", "bad.attn", "-o", "k.so", cwd=tmp_path)
    assert done.returncode == 1 and "bad.attn:1:" in done.stderr and "did you mean `causal`?" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["bad.attn"]
    found = afc("check", "bad.attn", "--json", cwd=tmp_path)
    data = json.loads(found.stdout)
    assert found.returncode == data["exit_code"] == 1
    assert data["diagnostics"][0]["code"] == "E0105" and data["diagnostics"][0]["span"]["line"] == 1


def test_check_runs_examples() -> None:
    done = afc("check", *sorted(EXAMPLES.glob("*.attn")))
    assert done.returncode == 0 and "llama.attn: llama" in done.stdout


def test_a_missing_compiler_exits_with_3_and_leaves_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    target = tmp_path / "out"
    target.mkdir()
    common = ["compile", str(EXAMPLES / "llama.attn"), "-o", str(target / "k.so")]
    done = afc(*common, "--backend", "cpu", PATH=str(empty), CXX="", AFC_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 3 and "error[E0502]" in done.stderr and "apt install g++" in done.stderr
    done = afc(
        *common, "--backend", "cuda", AFC_NVCC=str(empty / "nvcc"), AFC_CACHE_DIR=str(tmp_path / "cache")
    )
    assert done.returncode == 3 and "error[E0501]" in done.stderr and str(empty / "nvcc") in done.stderr
    assert list(target.iterdir()) == []


def test_a_compiler_that_fails_exits_with_3_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) echo "g++ 12.2.0";; '
        "*-dumpversion*|*-dumpfullversion*) echo 12.2.0;; "
        '*) echo "ice: out of luck" >&2; exit 1;; esac\n'
    )
    broken.chmod(0o755)
    target = tmp_path / "out"
    target.mkdir()
    done = afc(
        "compile",
        EXAMPLES / "llama.attn",
        "-o",
        target / "k.so",
        "--backend",
        "cpu",
        CXX=str(broken),
        AFC_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.returncode == 3 and "out of luck" in done.stderr
    assert list(target.iterdir()) == []


def test_emit_prints_to_stdout() -> None:
    for stage in ("program", "plan", "tiled", "cpp", "cu", "launch"):
        done = afc("compile", "examples/llama.attn", "--emit", stage, "-D", "D=64")
        assert done.returncode == 0 and "llama" in done.stdout, stage


def test_light_commands_do_not_import_torch() -> None:
    code = (
        "import sys, afc.cli\nassert afc.cli.main(['check', 'examples/llama.attn']) == 0\n"
        "assert afc.cli.main(['compile', 'examples/llama.attn', '--emit', 'cpp']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_doctor_and_cache() -> None:
    done = afc("doctor", "--json")
    found = json.loads(done.stdout)["findings"]
    assert done.returncode == 0 and found["g++"]["state"] == "ok" and found["Python headers"]["state"] == "ok"
    assert afc("cache", "dir").stdout.strip() == found["cache"]["detail"]
    assert afc("cache", "ls").returncode == 0


def test_doctor_tries_what_it_finds_and_says_what_mends_it(tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    wheel.parent.mkdir(parents=True)
    wheel.write_text(
        "#!/bin/sh\ncase \"$1\" in --version) echo 'release 13.9, V13.9.1';; --list-gpu-code) echo sm_90;;\n"
        "*) echo 'ptxas fatal : Unsupported .version 9.9; current version is 9.0' >&2; exit 1;; esac\n"
    )
    wheel.chmod(0o755)
    done = afc("doctor", AFC_NVCC=str(wheel))
    assert done.returncode == 3
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("!!  nvcc")]
    assert str(wheel) in line and "Unsupported .version 9.9" in line
    assert (
        "mend it by: pip install --upgrade --force-reinstall 'cuda-toolkit[nvcc,cudart,cccl]" in done.stdout
    )
    assert "!!  CUDA builds       by nvcc, which does not work" in done.stdout
    done = afc("doctor", AFC_NVCC=str(tmp_path / "gone"))
    assert done.returncode == 3 and "mend it by: unset AFC_NVCC" in done.stdout
    assert f"looked at AFC_NVCC: {tmp_path / 'gone'}: no such program" in done.stdout
    done = afc("doctor", CXX=str(tmp_path / "no-g++"))
    assert done.returncode == 3 and "mend it by: apt install g++" in done.stdout


def test_folders_for_other_build_systems() -> None:
    assert (Path(afc("config", "cmake").stdout.strip()) / "afcConfig.cmake").is_file()
    assert (Path(afc("config", "include").stdout.strip()) / "abi" / "afc_abi.h").is_file()


@pytest.mark.nvcc
def test_bare_gpu_code(tmp_path: Path) -> None:
    try:
        find_cuda()
    except ToolchainError:
        pytest.skip("no CUDA compiler here")
    common = ("compile", EXAMPLES / "causal.attn", "-D", "D=64", "--no-backward", "--arch", "sm_90")
    for form, start in (("cubin", b"\x7fELF"), ("ptx", b"//")):
        done = afc(*common, "--emit", form, "-o", tmp_path / f"lm.{form}")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"lm.{form}").read_bytes().lstrip().startswith(start)
    assert b".target sm_90" in (tmp_path / "lm.ptx").read_bytes()
