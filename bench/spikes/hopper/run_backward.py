# SPDX-License-Identifier: Apache-2.0
"""Builds, checks and times the hand-written Hopper backward kernels (backward.cu).

    python run_backward.py build NAME...  nvcc and its gate; needs no GPU
    python run_backward.py check          gradients against float64, odd lengths, guards around every tensor
    python run_backward.py quick          a short time of every cubin, and of its three kernels
    python run_backward.py full NAME...   bench/protocol.py beside cuDNN (and FA4 where installed)
    python run_backward.py all            check, quick, and full for the best two causal ones at D128
    python run_backward.py count NAME...  one launch of each, for a profiler

A name is ``d<D><c|f>_<kind><dQ mode>``: causal or full; kind ``plain`` (64 queries a step, 128 at D64),
``e`` (plain, row terms read before the waits), ``w`` (plain, 80 queries), ``p`` (pipelined), ``s``
(pipelined, dQ issued before dK has completed); dQ mode 0 red.v4 at once, 1 red.v4 late (pipelined only),
2 bulk reduction.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch

from bench.protocol import CudaClock, Protocol, measure, pair_ratios

L2_SECTION_BYTES = 40 << 20
GUARD = 4096  # elements of NaN before and after every tensor
HERE = Path(__file__).resolve().parent


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def checked(status: int, what: str) -> None:
    """Raises RuntimeError with the driver's name of a status that is not success."""
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"{what}: {name.value!r}")


class Arguments(ctypes.Structure):
    """Mirror of Arguments in backward_config.cuh."""

    _fields_ = (
        [(n, ctypes.c_void_p) for n in ("o", "d_o", "lse", "dq", "dq_sums", "row_lse", "row_delta")]
        + [
            (n, ctypes.c_int)
            for n in (
                "batches",
                "k_heads",
                "group",
                "q_len",
                "k_len",
                "padded_rows",
                "offset",
                "section_heads",
            )
        ]
        + [("scale", ctypes.c_float)]
    )


def tensor_map(t: torch.Tensor, rows: int) -> ctypes.c_void_p:
    """TMA map of a (B, H, N, D) bf16 tensor: boxes of 64 columns and ``rows`` rows, 128-byte swizzle."""
    buffer = ctypes.create_string_buffer(192)
    address = (ctypes.addressof(buffer) + 63) & ~63
    batch, heads, length, dim = t.shape
    sizes = (ctypes.c_uint64 * 4)(dim, length, heads, batch)
    strides = (ctypes.c_uint64 * 3)(t.stride(2) * 2, t.stride(1) * 2, t.stride(0) * 2)
    box = (ctypes.c_uint32 * 4)(64, rows, 1, 1)
    ones = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    bfloat16, interleave_none, swizzle_128, promote_256, zeros = 9, 0, 3, 3, 0
    checked(
        driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(address),
            bfloat16,
            4,
            ctypes.c_void_p(t.data_ptr()),
            sizes,
            strides,
            box,
            ones,
            interleave_none,
            swizzle_128,
            promote_256,
            zeros,
        ),
        "cuTensorMapEncodeTiled",
    )
    pointer = ctypes.c_void_p(address)
    pointer.buffer = buffer  # type: ignore[attr-defined]
    return pointer


@dataclass(frozen=True)
class Configuration:
    """What a cubin was compiled for."""

    name: str
    dim: int
    rows: int
    causal: bool
    dq_mode: int
    kind: str

    def shared_bytes(self) -> int:
        """Dynamic shared memory of backward_main: kSharedBytes of backward_config.cuh."""
        bulk = self.dq_mode == 2
        ds_stages = 1 if self.rows == 80 and bulk else 2
        tiles = 2 * 128 * self.dim * 2 + 4 * self.rows * self.dim * 2
        ds = ds_stages * -(-self.rows // 64) * 128 * 128
        return tiles + ds + (self.rows * self.dim * 4 if bulk else 0) + 4 * self.rows * 4 + 12 * 8


def configuration(name: str) -> Configuration:
    """Reads a cubin's name. Raises ValueError if it is none."""
    parts = re.fullmatch(r"d(64|128)([cf])_(plain|e|w|p|s)([012])", name)
    if not parts:
        raise ValueError(f"name: expected d<64|128><c|f>_<plain|e|w|p|s><0|1|2>, got {name!r}")
    dim, kind = int(parts[1]), parts[3]
    rows = 128 if dim == 64 else 80 if kind == "w" else 64
    return Configuration(name, dim, rows, parts[2] == "c", int(parts[4]), kind)


def build(name: str, cubins: Path) -> bool:
    """Compiles a configuration; false if ptxas spilled, used a stack or serialised wgmma."""
    c = configuration(name)
    values = {
        "HEAD_DIM": c.dim,
        "Q_ROWS": c.rows,
        "CAUSAL": int(c.causal),
        "PIPELINED": int(c.kind in "ps"),
        "DQ_SOON": int(c.kind == "s"),
        "TERMS_EARLY": int(c.kind == "e"),
        "DQ_MODE": c.dq_mode,
    }
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-cubin"]
    command += ["-Xptxas", "-v"]
    command += [f"-D{key}={value}" for key, value in values.items()]
    command += ["-I", str(HERE.parents[2] / "runtime"), str(HERE / "backward.cu")]
    command += ["-o", str(cubins / f"{name}.cubin")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    bad = re.findall(r"C75\d\d|[1-9]\d* bytes (?:stack|spill)[^,\n]*", text)
    print(name, bad or "ok", flush=True)
    return not bad


class Module:
    """A loaded cubin."""

    def __init__(self, path: Path) -> None:
        torch.zeros(1, device="cuda")
        self.configuration = configuration(path.stem)
        handle = ctypes.c_void_p()
        checked(driver().cuModuleLoadData(ctypes.byref(handle), path.read_bytes()), "cuModuleLoadData")
        self.functions = {}
        for name in ("backward_before", "backward_main", "backward_after"):
            function = ctypes.c_void_p()
            checked(driver().cuModuleGetFunction(ctypes.byref(function), handle, name.encode()), name)
            self.functions[name] = function
        self.shared_bytes = self.configuration.shared_bytes()
        checked(
            driver().cuFuncSetAttribute(self.functions["backward_main"], 8, self.shared_bytes),
            "shared memory",
        )

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        block: int,
        shared: int,
        parameters: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        """Launches on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        checked(
            driver().cuLaunchKernel(
                self.functions[name], *grid, 1, block, 1, 1, shared, stream, parameters, None
            ),
            name,
        )


@dataclass
class Problem:
    """Inputs and outputs of one backward call, (B, H, length, D) bf16 contiguous; lse float32 natural."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    d_o: torch.Tensor
    lse: torch.Tensor
    causal: bool
    offset: int

    def flops(self) -> float:
        """Of the five products; a causal problem with equal lengths counts half."""
        batch, heads, rows, dim = self.q.shape
        return 10.0 * batch * heads * rows * self.k.shape[2] * dim / (2 if self.causal else 1)


class Call:
    """A backward call with its workspace, outputs and tensor maps; ``parts`` runs one kernel."""

    def __init__(self, module: Module, problem: Problem, guarded: bool = False, poison: bool = True) -> None:
        self.module, self.problem = module, problem
        batch, heads, rows, dim = problem.q.shape
        k_heads, keys = problem.k.shape[1:3]
        tile = module.configuration.rows
        padded = -(-rows // tile) * tile
        make = guard if guarded else torch.empty_like
        self.dq, self.dk, self.dv = make(problem.q), make(problem.k), make(problem.v)
        self.sums = torch.empty((batch, heads, padded, dim), device="cuda")
        self.row_terms = torch.empty((2, batch, heads, padded), device="cuda")
        if poison:
            self.sums.fill_(math.nan)
            self.row_terms.fill_(math.nan)
        per_head = (rows * dim * 8) * (heads // k_heads)  # Q and dO in bf16, dQ sums in float32
        self.arguments = Arguments(
            problem.o.data_ptr(),
            problem.d_o.data_ptr(),
            problem.lse.data_ptr(),
            self.dq.data_ptr(),
            self.sums.data_ptr(),
            self.row_terms[0].data_ptr(),
            self.row_terms[1].data_ptr(),
            batch,
            k_heads,
            heads // k_heads,
            rows,
            keys,
            padded,
            problem.offset,
            min(batch * k_heads, max(1, L2_SECTION_BYTES // per_head)),
            1.0 / math.sqrt(dim),
        )
        self.maps = [
            tensor_map(problem.q, tile),
            tensor_map(problem.k, 128),
            tensor_map(problem.v, 128),
            tensor_map(problem.d_o, tile),
            tensor_map(self.dk, 64),
            tensor_map(self.dv, 64),
        ]
        only = ctypes.addressof(self.arguments)
        self.few = (ctypes.c_void_p * 1)(only)
        self.all = (ctypes.c_void_p * 7)(only, *[m.value for m in self.maps])
        per_block = 256 // (dim // 8)
        self.grids = {
            "backward_before": (-(-padded // per_block), batch * heads),
            "backward_main": (-(-keys // 128) * batch * k_heads, 1),
            "backward_after": (padded // tile, batch * heads),
        }

    def part(self, name: str) -> None:
        """One of the three kernels."""
        if name == "backward_main":
            self.module.launch(name, self.grids[name], 384, self.module.shared_bytes, self.all)
        else:
            self.module.launch(name, self.grids[name], 256, 0, self.few)

    def __call__(self) -> None:
        for name in self.grids:
            self.part(name)


def guard(like: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor inside a larger one that is NaN around it."""
    outer = torch.full((like.numel() + 2 * GUARD,), math.nan, device="cuda", dtype=like.dtype)
    inner = outer[GUARD : GUARD + like.numel()].view(like.shape)
    inner.copy_(like)
    return inner


def guards_intact(t: torch.Tensor) -> bool:
    """Whether what lies around a guarded tensor is still NaN."""
    outer = torch.as_strided(t, (t.numel() + 2 * GUARD,), (1,), t.storage_offset() - GUARD)
    return bool(outer[:GUARD].isnan().all() and outer[-GUARD:].isnan().all())


def visible(rows: int, keys: int, offset: int) -> torch.Tensor:
    """Causal mask (rows, keys): key j for query i when j <= i + offset."""
    i = torch.arange(rows, device="cuda")[:, None]
    j = torch.arange(keys, device="cuda")[None, :]
    return j <= i + offset


def reference(
    problem: Problem,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """O, LSE, dQ, dK, dV in float64 from the bf16 inputs."""
    group = problem.q.shape[1] // problem.k.shape[1]
    q, k, v = (t.double().requires_grad_() for t in (problem.q, problem.k, problem.v))
    s = q @ k.repeat_interleave(group, 1).transpose(2, 3) / math.sqrt(q.shape[3])
    if problem.causal:
        s = s.masked_fill(~visible(q.shape[2], k.shape[2], problem.offset), -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None])
    o = p @ v.repeat_interleave(group, 1)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), problem.d_o.double())
    return o.detach(), lse.detach(), dq, dk, dv


def random_problem(b: int, h: int, hk: int, m: int, n: int, d: int, causal: bool, seed: int) -> Problem:
    """Guarded normal inputs, O and LSE from float64."""
    g = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return guard(torch.randn(shape, generator=g, device="cuda", dtype=torch.float32).bfloat16())

    q, k, v, d_o = draw(b, h, m, d), draw(b, hk, n, d), draw(b, hk, n, d), draw(b, h, m, d)
    problem = Problem(q, k, v, q, d_o, q, causal, n - m)
    o, lse, *_ = reference(problem)
    problem.o, problem.lse = guard(o.bfloat16()), guard(lse.float())
    return problem


SHAPES = (  # batch, query heads, key heads, rows, keys
    (1, 1, 1, 64, 128),
    (2, 3, 3, 129, 257),
    (1, 2, 2, 511, 511),
    (1, 4, 2, 300, 71),
    (2, 4, 1, 71, 300),
    (1, 1, 1, 1, 1),
    (1, 2, 2, 1000, 1003),
)


def check(modules: list[Module], shapes: Sequence[tuple[int, int, int, int, int]] = SHAPES) -> bool:
    """Every module at the shapes; prints the worst relative error of each gradient."""
    passed = True
    problems: dict[tuple[int, bool], list[tuple[Problem, tuple[torch.Tensor, ...]]]] = {}
    for module in modules:
        c = module.configuration
        if (c.dim, c.causal) not in problems:
            drawn = [random_problem(*s, c.dim, c.causal, i) for i, s in enumerate(shapes)]
            problems[c.dim, c.causal] = [(p, reference(p)[2:]) for p in drawn]
        worst, notes = [0.0, 0.0, 0.0], []
        for problem, expected in problems[c.dim, c.causal]:
            call = Call(module, problem, guarded=True)
            for t in (call.dq, call.dk, call.dv):
                t.fill_(math.nan)
            call()
            torch.cuda.synchronize()
            for i, (got, want) in enumerate(zip((call.dq, call.dk, call.dv), expected, strict=True)):
                error = float((got.double() - want).norm() / want.norm().clamp_min(1e-3))
                if not error < 1e-2:
                    notes.append(f"{tuple(problem.q.shape)}x{problem.k.shape[2]} d{'qkv'[i]} {error:.3g}")
                worst[i] = max(worst[i], error) if error == error else math.nan
                if not guards_intact(got):
                    notes.append(f"d{'qkv'[i]} written outside")
        passed &= not notes
        errors = " ".join(f"d{x} {e:.2e}" for x, e in zip("qkv", worst, strict=True))
        print(f"check {c.name:14s} {errors} {'ok' if not notes else notes[:6]}", flush=True)
    return passed


def large_problem(b: int, h: int, n: int, d: int, causal: bool) -> Problem:
    """A benchmark problem: O and LSE from cuDNN's forward."""
    q, k, v, d_o = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return Problem(q, k, v, o.contiguous(), d_o, lse.reshape(b, h, n).contiguous(), causal, 0)


def cudnn_call(problem: Problem) -> Callable[[], tuple[torch.Tensor, ...]]:
    """PyTorch's cuDNN backward alone."""
    q, k, v = (t.detach().requires_grad_() for t in (problem.q, problem.k, problem.v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)
    return lambda: torch.autograd.grad(out, (q, k, v), problem.d_o, retain_graph=True)


def fa4_call(problem: Problem) -> Callable[[], tuple[torch.Tensor, ...]] | None:
    """FlashAttention 4's backward alone, on its own layout (B, N, H, D); None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as reason:
        print("fa4 left out:", reason)
        return None
    inputs = [t.transpose(1, 2).contiguous().requires_grad_() for t in (problem.q, problem.k, problem.v)]
    out = flash_attn_func(*inputs, causal=problem.causal)
    out = out[0] if isinstance(out, tuple) else out
    d_o = problem.d_o.transpose(1, 2).contiguous()
    return lambda: torch.autograd.grad(out, inputs, d_o, retain_graph=True)


def agree(call: Call, other: Callable[[], tuple[torch.Tensor, ...]]) -> list[float]:
    """Relative distance of dQ, dK, dV from another system's."""
    call()
    return [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip((call.dq, call.dk, call.dv), other(), strict=True)
    ]


def block_ms(call: Callable[[], object], calls: int) -> float:
    """Milliseconds per call of a block of calls."""
    return CudaClock().block(call, calls)[0]


def quick(modules: list[Module], n: int, h: int) -> dict[str, float]:
    """TFLOP/s: burst (median of 3 blocks of 15 ms after 0.3 s idle), sustained (0.2 s after 0.2 s)."""
    rates: dict[str, float] = {}
    for dim, causal in sorted({(m.configuration.dim, m.configuration.causal) for m in modules}, reverse=True):
        problem = large_problem(1, h, n, dim, causal)
        other = cudnn_call(problem)
        chosen = [m for m in modules if (m.configuration.dim, m.configuration.causal) == (dim, causal)]
        calls: list[tuple[str, Callable[[], object]]] = [("cudnn", other)]
        calls += [(m.configuration.name, Call(m, problem)) for m in chosen]
        for name, call in calls:
            call()
            rough = block_ms(call, 2)
            bursts = []
            for _ in range(3):
                torch.cuda.synchronize()
                time.sleep(0.3)
                call()
                bursts.append(block_ms(call, max(1, int(15 / rough) - 1)))
            block_ms(call, max(1, int(200 / rough)))
            steady = block_ms(call, max(1, int(200 / rough)))
            rates[name] = problem.flops() / median(bursts) / 1e9
            sustained = problem.flops() / steady / 1e9
            line = f"quick {name:14s} burst {rates[name]:6.1f} sustained {sustained:6.1f} TFLOP/s"
            if isinstance(call, Call):
                parts = [median(block_ms(partial(call.part, p), 2) for _ in range(3)) for p in call.grids]
                line += "  parts ms " + " ".join(f"{p:.3f}" for p in parts)
                line += "  from cudnn " + " ".join(f"{e:.1e}" for e in agree(call, other))
            print(line, flush=True)
        del problem, other, calls
        torch.cuda.empty_cache()
    return rates


def full(modules: list[Module], cells: list[tuple[int, int, int]], out: Path | None) -> None:
    """The protocol, in one process and random order; the first module enters twice."""
    results = []
    for b, h, n in cells:
        c = modules[0].configuration
        problem = large_problem(b, h, n, c.dim, c.causal)
        systems: dict[str, Callable[[], object]] = {m.configuration.name: Call(m, problem) for m in modules}
        systems["twin"] = Call(modules[0], problem)
        systems["cudnn"] = cudnn_call(problem)
        fa4 = fa4_call(problem)
        if fa4:
            systems["fa4"] = fa4
        result = measure(systems, Protocol(), CudaClock())
        ratios = pair_ratios(result, c.name, "twin")
        for regime, rounds in result.items():
            row = {name: problem.flops() / median(rounds.times(name)) / 1e9 for name in systems}
            results.append(
                {"cell": [b, h, n, c.dim, c.causal], "regime": regime, "tflops": row, "pair": ratios[regime]}
            )
            text = " ".join(f"{name} {value:.1f}" for name, value in row.items())
            mask = "causal" if c.causal else "full"
            print(
                f"full B{b} H{h} N{n} D{c.dim} {mask} {regime}: {text} A/A {ratios[regime]:.4f}", flush=True
            )
        del problem, systems
        torch.cuda.empty_cache()
    if out:
        out.write_text(json.dumps(results, indent=1))


def everything(modules: list[Module], n: int, h: int, out: Path | None) -> None:
    """Check all, time the causal D128 kernels, the best two by the protocol, then the others."""
    right = [m for m in modules if check([m])]
    first = [m for m in right if m.configuration.dim == 128 and m.configuration.causal]
    rates = quick(first, n, h)
    best = sorted(first, key=lambda m: -rates[m.configuration.name])[:2]
    full(best, [(1, 16, 16384)], out)
    quick([m for m in right if m not in first], n, h)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "all", "check", "quick", "full", "count"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--cubins", type=Path, required=True)
    parser.add_argument("--n", type=int, default=16384)
    parser.add_argument("--h", type=int, default=16)
    parser.add_argument("--cells", default="1x16x16384,2x16x8192")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--short", action="store_true", help="check two shapes only, for a sanitizer")
    options = parser.parse_args()
    if options.what == "build":
        raise SystemExit(0 if all([build(name, options.cubins) for name in options.names]) else 1)
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    paths = [options.cubins / f"{n}.cubin" for n in options.names] or sorted(options.cubins.glob("d*.cubin"))
    modules = [Module(p) for p in paths]
    if options.what == "all":
        everything(modules, options.n, options.h, options.out)
    if options.what == "check":
        raise SystemExit(0 if check(modules, SHAPES[1:4:2] if options.short else SHAPES) else 1)
    if options.what == "quick":
        quick(modules, options.n, options.h)
    if options.what == "full":
        cells = [tuple(int(x) for x in cell.split("x")) for cell in options.cells.split(",")]
        full(modules, cells, options.out)  # type: ignore[arg-type]
    if options.what == "count":
        for module in modules:
            c = module.configuration
            call = Call(module, large_problem(1, options.h, options.n, c.dim, c.causal))
            call()
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
