# SPDX-License-Identifier: Apache-2.0
"""Builds, checks and times the hand-written Hopper forward kernel.

``python3 -m bench.spikes.hopper.run_forward build DIR`` compiles every candidate where nvcc is; ``check DIR``
and ``time DIR --out FILE`` need the GPU. Times go through ``bench.protocol``, fa3 and cudnn in one process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from bench.protocol import CudaClock, Protocol, measure

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("forward.cu")
GRID_ORDER, GRID_LONGEST_FIRST, PERSISTENT = 0, 1, 2
EXACT, STALE, WATCHED = 0, 1, 2
NONE, PER_SCORE, COLUMNS = 0, 1, 2
NARROW = 16
SEARCH = Protocol(
    burst_rounds=3, idle_ms=100, burst_ms=12, sustained_rounds=1, settle_ms=80, sustained_ms=60, quick=True
)
QUICK = Protocol(burst_rounds=5, sustained_rounds=2, quick=True)
L2_BYTES = 40 << 20
BLOCKS = 132


@dataclass(frozen=True)
class Candidate:
    """One build of the kernel. Fields are the switches of forward.cu."""

    head_dim: int
    consumers: int
    tile_n: int
    stages: int = 2
    causal: int = 1
    overlap: int = 1
    ping_pong: int = 0
    peel: int = 1
    maximum: int = 0
    schedule: int = PERSISTENT
    rotate: int = 0
    term: int = NONE

    @property
    def name(self) -> str:
        """Unique, and readable in a table."""
        switches = {
            "ov": self.overlap,
            "pp": self.ping_pong,
            "peel": self.peel,
            "rotate": self.rotate,
            "stale": self.maximum == STALE,
            "watched": self.maximum == WATCHED,
            "per_score": self.term == PER_SCORE,
            "columns": self.term == COLUMNS,
        }
        flags = "-".join(word for word, on in switches.items() if on) or "bare"
        mask = "causal" if self.causal else "full"
        tile = f"{64 * self.consumers}x{self.tile_n}"
        return f"d{self.head_dim}-{mask}-{tile}-s{self.stages}-{flags}-sched{self.schedule}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the tiles, and the barriers after them."""
        narrow = 2 * NARROW * (64 * self.consumers + self.stages * self.tile_n) if self.term == COLUMNS else 0
        return 2 * self.head_dim * (64 * self.consumers + 2 * self.stages * self.tile_n) + narrow + 256

    def defines(self) -> list[str]:
        """The switches, for the compiler."""
        return [f"-DAFC_{key.upper()}={value}" for key, value in asdict(self).items()]


def stages_of_design(causal: int = 1) -> list[Candidate]:
    """The same tile, one switch after the other."""
    base: dict[str, int] = {"head_dim": 128, "consumers": 2, "tile_n": 128, "causal": causal}
    return [
        Candidate(**base, overlap=0, peel=0, schedule=GRID_ORDER),
        Candidate(**base, overlap=1, peel=0, schedule=GRID_ORDER),
        Candidate(**base, overlap=1, ping_pong=1, peel=0, schedule=GRID_ORDER),
        Candidate(**base, schedule=GRID_ORDER),
        Candidate(**base, schedule=GRID_LONGEST_FIRST),
        Candidate(**base),
        Candidate(**base, ping_pong=1),
        Candidate(**base, maximum=STALE),
        Candidate(**base, maximum=STALE, ping_pong=1),
        Candidate(**base, maximum=WATCHED),
        Candidate(**base, maximum=WATCHED, ping_pong=1),
    ]


def tiles(causal: int) -> list[Candidate]:
    """The tile search, under each way to treat the maximum."""
    shapes = [(128, 2, n) for n in (112, 128, 144, 160, 176, 192)] + [(128, 3, 80), (128, 3, 64)]
    shapes += [(64, 3, n) for n in (64, 96, 112, 128)] + [(64, 2, n) for n in (128, 160, 192)]
    found = [
        Candidate(d, consumers, n, causal=causal, maximum=maximum)
        for d, consumers, n in shapes
        for maximum in (EXACT, STALE, WATCHED)
    ]
    deeper = [(128, 2, 112, 3), (128, 3, 80, 3), (128, 3, 80, 4), (64, 3, 128, 3), (64, 3, 128, 4)]
    found += [Candidate(d, c, n, stages, causal, maximum=WATCHED) for d, c, n, stages in deeper]
    found += [
        Candidate(128, 3, 80, causal=causal, schedule=s, maximum=WATCHED) for s in (GRID_LONGEST_FIRST,)
    ]
    return found + [Candidate(64, 3, 128, causal=causal, ping_pong=1, maximum=m) for m in (EXACT, WATCHED)]


def additions() -> list[Candidate]:
    """Rotary embedding of q in the kernel, and a term that is linear in the column, in both forms."""
    tiles = ((2, 128, EXACT), (2, 128, WATCHED), (3, 80, WATCHED))
    found = []
    for consumers, n, maximum in tiles:
        plain = Candidate(128, consumers, n, maximum=maximum)
        found += [replace(plain, rotate=1), replace(plain, term=PER_SCORE), replace(plain, term=COLUMNS)]
    return found


def candidates() -> list[Candidate]:
    """All builds, each once."""
    return list(dict.fromkeys([*stages_of_design(), *tiles(1), *tiles(0), *additions()]))


# ---- Build ---------------------------------------------------------------------------------------------


def build_one(candidate: Candidate, folder: Path) -> dict[str, Any]:
    """Compile one candidate. Raises RuntimeError on an error, a C75xx remark, a spill or a stack frame."""
    cubin = folder / f"{candidate.name}.cubin"
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-cubin"]
    command += ["-Xptxas", "-v", f"-I{ROOT / 'runtime'}", *candidate.defines(), str(SOURCE), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout + done.stderr
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text and "(C75" not in text
    if done.returncode or not clean:
        cubin.unlink(missing_ok=True)
        raise RuntimeError(f"{candidate.name}: {text.strip()}")
    return {"name": candidate.name, "fields": asdict(candidate), "bytes": cubin.stat().st_size}


def build(folder: Path, keep: str) -> int:
    """Compile the candidates whose name matches and write the list of those that pass the static gate."""
    folder.mkdir(parents=True, exist_ok=True)
    passed: list[dict[str, Any]] = []
    with ThreadPoolExecutor(2) as pool:
        futures = {c.name: pool.submit(build_one, c, folder) for c in candidates() if re.search(keep, c.name)}
    for name, future in futures.items():
        error = future.exception()
        if error is None:
            passed.append(future.result())
        else:
            print(f"{name} left out: {str(error)[:300]}", file=sys.stderr)
    (folder / "candidates.json").write_text(json.dumps(passed, indent=1) + "\n")
    print(f"{len(passed)} of {len(futures)} built, {sum(p['bytes'] for p in passed) >> 10} KiB")
    return 0


# ---- Driver interface ----------------------------------------------------------------------------------


class Parameters(ctypes.Structure):
    """ForwardParameters of forward.cu."""

    _fields_ = [
        ("out", ctypes.c_uint64),
        ("lse", ctypes.c_uint64),
        ("counter", ctypes.c_uint64),
        ("out_batch", ctypes.c_int64),
        ("out_row", ctypes.c_int64),
        ("out_head", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("group", ctypes.c_int),
        ("batches", ctypes.c_int),
        ("row_tiles", ctypes.c_int),
        ("work_items", ctypes.c_int),
        ("section", ctypes.c_int),
        ("factor", ctypes.c_float),
        ("turns", ctypes.c_uint64),
        ("slope", ctypes.c_uint64),
    ]


class Cuda:
    """The few driver calls needed, in the context that PyTorch made."""

    def __init__(self) -> None:
        import torch

        torch.zeros(1, device="cuda")  # makes the context
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Call and raise RuntimeError unless it succeeded."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: error {code}")

    def load(self, cubin: Path, shared_bytes: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """The kernels of a cubin: forward, allowed its shared memory, and rotate_keys."""
        module, forward, rotate = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin.read_bytes())
        self.call("cuModuleGetFunction", ctypes.byref(forward), module, b"forward")
        self.call("cuModuleGetFunction", ctypes.byref(rotate), module, b"rotate_keys")
        self.call("cuFuncSetAttribute", forward, 8, shared_bytes)
        return forward, rotate

    def tensor_map(self, tensor: Any, box_rows: int) -> ctypes.Array[ctypes.c_char]:
        """Map of a (batch, row, head, column) bf16 tensor: boxes of 64 columns (16, if it has no more)."""
        batch, rows, heads, columns = tensor.shape
        memory = ctypes.create_string_buffer(192)
        start = -ctypes.addressof(memory) % 64
        aligned = (ctypes.c_char * 128).from_buffer(memory, start)
        strides = [2 * tensor.stride(1), 2 * tensor.stride(2), 2 * tensor.stride(0)]
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.byref(aligned),
            9,  # bfloat16
            4,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * 4)(columns, rows, heads, batch),
            (ctypes.c_uint64 * 3)(*strides),
            (ctypes.c_uint32 * 4)(min(columns, 64), box_rows, 1, 1),
            (ctypes.c_uint32 * 4)(1, 1, 1, 1),
            0,  # no interleave
            1 if columns == NARROW else 3,  # 32-byte or 128-byte swizzle
            3,  # L2 promotion to 256 bytes
            0,  # zeros outside
        )
        return aligned


class Kernel:
    """A loaded candidate, launched on PyTorch tensors (batch, row, head, column)."""

    def __init__(self, cuda: Cuda, folder: Path, candidate: Candidate) -> None:
        import torch

        self.cuda, self.candidate = cuda, candidate
        self.forward, self.rotate = cuda.load(folder / f"{candidate.name}.cubin", candidate.shared_bytes)
        self.counter = torch.zeros(2, dtype=torch.int32, device="cuda")

    def bind(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, section: int | None = None, extras: Any = None
    ) -> Callable[[], None]:
        """A call that launches on the current stream, all prepared. The scale is 1 / sqrt(head_dim)."""
        import torch

        c, extras = self.candidate, extras or Extras.of(q, k)
        batch, rows, heads, head_dim = q.shape
        group = heads // k.shape[2]
        tiles_m = -(-rows // (64 * c.consumers))
        if section is None:
            section = group << max(0, (L2_BYTES // (k.shape[1] * head_dim * 4)).bit_length() - 1)
        items = tiles_m * heads * batch
        parameters = Parameters(
            out.data_ptr(), lse.data_ptr(), self.counter.data_ptr(),
            out.stride(0), out.stride(1), out.stride(2),
            rows, k.shape[1], heads, group, batch, tiles_m, items, min(section, heads * batch),
            math.log2(math.e) / math.sqrt(head_dim), extras.turns.data_ptr(), extras.slope.data_ptr(),
        )  # fmt: skip
        keys = torch.empty_like(k) if c.rotate else k
        boxes = [(q, 64 * c.consumers), (keys, c.tile_n), (v, c.tile_n)]
        boxes += [(extras.narrow_q, 64 * c.consumers), (extras.narrow_k, c.tile_n)]
        held = [parameters, *(self.cuda.tensor_map(tensor, box_rows) for tensor, box_rows in boxes)]
        pointers = (ctypes.c_void_p * 6)(*(ctypes.addressof(x) for x in held))
        grid = min(BLOCKS, items) if c.schedule == PERSISTENT else items
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = (grid, 1, 1, 128 * (c.consumers + 1), 1, 1, c.shared_bytes, stream, pointers, None)
        rotate = self._rotation(k, keys, extras.turns, stream) if c.rotate else None

        def launch() -> None:
            if rotate:
                rotate()
            self.cuda.call("cuLaunchKernel", self.forward, *shape)

        launch.held = (held, extras, keys, q, k, v, out, lse)  # type: ignore[attr-defined]
        return launch

    def _rotation(self, k: Any, rotated: Any, turns: Any, stream: ctypes.c_void_p) -> Callable[[], None]:
        if not k.is_contiguous():
            raise ValueError(f"k: expected contiguous keys to rotate, got strides {k.stride()}")
        batch, columns, heads, head_dim = k.shape
        rows = batch * columns * heads
        values = [ctypes.c_uint64(t.data_ptr()) for t in (k, rotated, turns)]
        scalars = (ctypes.c_int(columns), ctypes.c_int(heads), ctypes.c_int64(rows))
        pointers = (ctypes.c_void_p * 6)(*(ctypes.addressof(x) for x in (*values, *scalars)))
        grid = -(-rows * head_dim // 16 // 256)

        def launch() -> None:
            self.cuda.call("cuLaunchKernel", self.rotate, grid, 1, 1, 256, 1, 1, 0, stream, pointers, None)

        launch.held = (values, scalars)  # type: ignore[attr-defined]
        return launch


@dataclass(frozen=True)
class Extras:
    """What the additions read: (cos, sin) by position, and a slope per head, also as 16 more columns."""

    turns: Any  # float32 (positions, head_dim / 2, 2)
    slope: Any  # float32 (head,), in units of unscaled scores
    narrow_q: Any
    narrow_k: Any

    @staticmethod
    def of(q: Any, k: Any) -> Extras:
        """For tensors (batch, row, head, column). The slope times a column is a sum of exact bf16 products.

        A column below 65536 is 256 a + b, and three bf16 pieces hold the slope to 24 bits, so six of the
        sixteen columns are used.
        """
        import torch

        batch, rows, heads, head_dim = q.shape
        columns, key_heads = k.shape[1], k.shape[2]
        half = torch.arange(head_dim // 2, device="cuda", dtype=torch.float64)
        angle = torch.outer(torch.arange(columns, device="cuda").double(), 10000.0 ** (-2 * half / head_dim))
        turns = torch.stack((angle.cos(), angle.sin()), -1).float().contiguous()
        slope = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device="cuda") / heads) * math.sqrt(head_dim)
        left, pieces = slope.clone(), []
        for _ in range(3):
            pieces += [left.bfloat16()] * 2
            left = left - pieces[-1].float()
        narrow_q = torch.zeros(1, 1, heads, NARROW, dtype=torch.bfloat16, device="cuda")
        narrow_q[0, 0, :, :6] = torch.stack(pieces, -1)
        column = torch.arange(columns, device="cuda")
        narrow_k = torch.zeros(1, columns, 1, NARROW, dtype=torch.bfloat16, device="cuda")
        narrow_k[0, :, 0, :6] = torch.stack([column % 256, column // 256 * 256] * 3, -1).bfloat16()
        wide_q = narrow_q.expand(batch, rows, heads, NARROW)
        return Extras(turns, slope, wide_q, narrow_k.expand(batch, columns, key_heads, NARROW))


def rotated(x: Any, turns: Any, first: int) -> Any:
    """float64 rows (batch, row, head, column), row 0 at `first`; those before position 0 unturned."""
    import torch

    start = max(0, -first)
    turn = turns[first + start : first + x.shape[1]].double()[None, :, None]
    low, high = x[:, start:].double().chunk(2, -1)
    cos, sin = turn[..., 0], turn[..., 1]
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return torch.cat((x[:, :start].double(), turned), 1)


def load(folder: Path) -> Iterator[Candidate]:
    """The candidates that were built."""
    for entry in json.loads((folder / "candidates.json").read_text()):
        yield Candidate(**entry["fields"])


# ---- Check ---------------------------------------------------------------------------------------------


def reference(q: Any, k: Any, v: Any, candidate: Candidate) -> tuple[Any, Any]:
    """float64 attention of (batch, row, head, column) tensors: output, and log-sum-exp (batch, head, row)."""
    import torch

    extras, group = Extras.of(q, k), q.shape[2] // k.shape[2]
    rows, columns = q.shape[1], k.shape[1]
    if candidate.rotate:
        # Rounded as the kernel must round them: the products take 16-bit operands.
        q = rotated(q, extras.turns, columns - rows).bfloat16()
        k = rotated(k, extras.turns, 0).bfloat16()
    qd, kd, vd = (t.double().transpose(1, 2) for t in (q, k, v))
    kd, vd = (t.repeat_interleave(group, 1) for t in (kd, vd))
    score = qd @ kd.transpose(-1, -2)
    if candidate.term:
        score += extras.slope.double()[:, None, None] * torch.arange(columns, device="cuda")
    score /= math.sqrt(q.shape[-1])
    if candidate.causal:
        live = torch.ones(rows, columns, dtype=torch.bool, device="cuda").tril(columns - rows)
        score.masked_fill_(~live, -math.inf)
    lse = score.logsumexp(-1)
    probability = torch.nan_to_num(torch.exp(score - lse[..., None]), nan=0.0)
    return (probability @ vd).transpose(1, 2), lse


def beyond(batch: int, rows: int, heads: int, columns: int) -> Any:
    """Normal data; what lies behind each batch's last row is NaN."""
    import torch

    whole = torch.full((batch, rows + 200, heads, columns), math.nan, dtype=torch.bfloat16, device="cuda")
    whole[:, :rows] = torch.randn(batch, rows, heads, columns, device="cuda")
    return whole[:, :rows]


SHAPES = (
    (1, 2, 2, 256, 256),
    (2, 4, 2, 1000, 1000),
    (1, 3, 1, 129, 517),
    (1, 2, 2, 517, 129),
    (2, 2, 1, 1, 333),
    (1, 2, 2, 333, 1),
    (1, 8, 2, 2049, 2111),
    (3, 40, 8, 640, 640),
)


@lru_cache(maxsize=256)
def problem(shape: tuple[int, ...], plain: Candidate, data: str) -> tuple[Any, ...]:
    """q, k, v, and what is expected. Keys may grow towards the first ones, which a kernel reads last."""
    import torch

    batch, heads, key_heads, rows, columns = shape
    torch.manual_seed(rows * 7 + columns)
    q = beyond(batch, rows, heads, plain.head_dim)
    k, v = (beyond(batch, columns, key_heads, plain.head_dim) for _ in range(2))
    k[:, : max(1, columns // 3) : 97] *= {"normal": 1.0, "rise": 6.0, "jump": 400.0}[data]
    if plain.rotate:
        k = k.contiguous()
    return (q, k, v, *reference(q, k, v, plain))


def function_of(candidate: Candidate) -> Candidate:
    """A candidate that stands for all that compute the same function."""
    term = min(candidate.term, 1)
    return Candidate(candidate.head_dim, 2, 128, causal=candidate.causal, rotate=candidate.rotate, term=term)


def check_one(kernel: Kernel, shape: tuple[int, ...], data: str) -> float:
    """Relative error against float64 at one shape; inf if a wrong element was written or none was."""
    import torch

    batch, heads, _, rows, _ = shape
    d = kernel.candidate.head_dim
    q, k, v, expected, expected_lse = problem(shape, function_of(kernel.candidate), data)
    out = torch.full((batch, rows + 5, heads, d), math.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((batch, heads, rows), math.nan, device="cuda")
    launch = kernel.bind(q, k, v, out[:, :rows], lse)
    launch()
    launch()
    torch.cuda.synchronize()
    same = torch.isneginf(expected_lse) == torch.isneginf(lse)
    if not bool(same.all()) or not bool(torch.isnan(out[:, rows:]).all()):
        return math.inf
    finite = ~torch.isneginf(expected_lse)
    off = (lse.double() - expected_lse).abs()
    allowed = 2e-3 * (1 + expected_lse.abs())
    if kernel.candidate.rotate:
        # Turned in float32, an element of a key can fall to the other side of a tie of bf16.
        largest_q = q.double().abs().amax(-1).transpose(1, 2)
        allowed += largest_q * float(k.double().abs().amax()) * 2.0**-7 / math.sqrt(d)
    if not bool((off < allowed)[finite].all()):
        return math.inf
    error = (out[:, :rows].double() - expected).norm() / expected.norm().clamp_min(1e-9)
    return float(error) if math.isfinite(float(error)) else math.inf


def check(folder: Path, keep: str, shapes: Sequence[tuple[int, ...]], limit: float = 8e-3) -> int:
    """Every candidate whose name matches, at the shapes and every kind of data. Returns how many failed."""
    cuda, failed = Cuda(), 0
    for candidate in load(folder):
        if not re.search(keep, candidate.name):
            continue
        kernel = Kernel(cuda, folder, candidate)
        kinds = ("normal", "rise", "jump") if candidate.maximum else ("normal",)
        errors = {(data, shape): check_one(kernel, shape, data) for data in kinds for shape in shapes}
        bad = {key: error for key, error in errors.items() if not error < limit}
        failed += bool(bad)
        verdict = f"FAILED {bad}" if bad else "passed"
        print(f"{candidate.name:50s} worst {max(errors.values()):.2e} {verdict}", flush=True)
    return failed


# ---- Time ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A shape to time: (batch, N, heads, head_dim), queries and keys alike."""

    batch: int
    n: int
    heads: int
    head_dim: int
    causal: int

    @property
    def flops(self) -> float:
        """Multiply-adds count two; half of the square under the causal mask."""
        return 4.0 * self.batch * self.heads * self.n**2 * self.head_dim / (2 if self.causal else 1)


CELLS = {
    "d128-causal-16k": Cell(1, 16384, 16, 128, 1),
    "d128-full-16k": Cell(1, 16384, 16, 128, 0),
    "d128-causal-8k": Cell(2, 8192, 16, 128, 1),
    "d128-causal-2k": Cell(8, 2048, 16, 128, 1),
    "d64-causal-16k": Cell(1, 16384, 32, 64, 1),
    "d64-full-16k": Cell(1, 16384, 32, 64, 0),
}


def peers(cell: Cell, q: Any, k: Any, v: Any) -> dict[str, Callable[[], object]]:
    """fa3 where installed, and cudnn through PyTorch."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found: dict[str, Callable[[], object]] = {}
    try:
        from fa3_fwd_interface import flash_attn_func

        found["fa3"] = lambda: flash_attn_func(q, k, v, causal=bool(cell.causal))
    except ImportError as error:
        print(f"fa3 left out: {error}", file=sys.stderr)
    qt, kt, vt = (t.transpose(1, 2).contiguous() for t in (q, k, v))

    def cudnn() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, is_causal=bool(cell.causal))

    found["cudnn"] = cudnn
    return found


def time_cell(
    folder: Path,
    name: str,
    chosen: Sequence[tuple[Candidate, int | None]],
    protocol: Protocol,
    twin: bool = False,
) -> dict[str, Any]:
    """TFLOP/s of the chosen candidates (with a section of heads, or the default) and of the peers."""
    import torch

    cell, cuda = CELLS[name], Cuda()
    shape = (cell.batch, cell.n, cell.heads, cell.head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(cell.batch, cell.heads, cell.n, device="cuda")
    systems: dict[str, Callable[[], object]] = dict(peers(cell, q, k, v))
    if twin and "fa3" in systems:
        systems["fa3 again"] = systems["fa3"]
    for candidate, section in chosen:
        label = candidate.name + (f" section {section}" if section else "")
        systems[label] = Kernel(cuda, folder, candidate).bind(q, k, v, out, lse, section)
    result = measure(systems, protocol, CudaClock())

    def speed(system: str) -> dict[str, float]:
        return {
            regime: round(cell.flops / median(times.times(system)) / 1e9, 1)
            for regime, times in result.items()
        }

    rows = {system: speed(system) for system in systems}
    report(name, rows)
    return {"cell": asdict(cell), "protocol": protocol.to_json(), "tflops": rows}


def report(name: str, rows: dict[str, dict[str, float]]) -> None:
    """A short table, fastest burst first."""
    print(f"\n{name}: TFLOP/s burst, sustained")
    for system, regimes in sorted(rows.items(), key=lambda row: -row[1]["burst"]):
        print(f"  {system:52s} {regimes['burst']:7.1f} {regimes['sustained']:7.1f}", flush=True)


def search(folder: Path, names: list[str], keep: str) -> dict[str, Any]:
    """All candidates that fit each cell and whose name matches, briefly."""
    results = {}
    for name in names:
        cell = CELLS[name]
        fit = [c for c in load(folder) if (c.head_dim, c.causal) == (cell.head_dim, cell.causal)]
        fit = [c for c in fit if re.search(keep, c.name)]
        results[name] = time_cell(folder, name, [(c, None) for c in fit], SEARCH)
    return results


def best(results: dict[str, Any], folder: Path, name: str, count: int) -> list[Candidate]:
    """The fastest candidates of a search, by the sum of both regimes."""
    rows = results[name]["tflops"]
    known = [c for c in load(folder) if c.name in rows and not c.rotate and not c.term]
    return sorted(known, key=lambda c: -sum(rows[c.name].values()))[:count]


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("build", "check", "time"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("forward.json"))
    parser.add_argument("--keep", default="", help="regular expression on candidate names")
    parser.add_argument("--short", action="store_true", help="check two shapes only, for a sanitizer")
    parser.add_argument("--search", nargs="*", default=["d128-causal-16k"])
    parser.add_argument("--full", nargs="*", default=[])
    parser.add_argument("--quick", nargs="*", default=[])
    parser.add_argument("--sections", nargs="*", type=int, default=[])
    options = parser.parse_args()
    if options.action == "build":
        return build(options.folder, options.keep)
    if options.action == "check":
        return check(options.folder, options.keep, SHAPES[2:4] if options.short else SHAPES)
    results = search(options.folder, options.search, options.keep)
    options.out.write_text(json.dumps(results, indent=1))
    for name in options.search[:1] if options.sections else []:
        [winner] = best(results, options.folder, name, 1)
        sections = [(winner, section) for section in options.sections]
        results[f"{name} sections"] = time_cell(options.folder, name, sections, SEARCH)
    for name in options.full + options.quick:
        source = next(n for n in results if n.rsplit("-", 1)[0] == name.rsplit("-", 1)[0])
        protocol = Protocol() if name in options.full else QUICK
        chosen = [(c, None) for c in best(results, options.folder, source, 1)]
        measured = time_cell(options.folder, name, chosen, protocol, twin=name in options.full)
        results[f"{name} protocol"] = measured
        options.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
