# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured tensors, row blocks and output blocks in the emitted CUDA of the sm_80 family, run by
the emulator, against dense float64 PyTorch: every published variant that has one, and every way in which the
scores of a tile share the elements of a tensor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from afc.api import emit  # noqa: E402
from afc.options import Options  # noqa: E402
from tests import emulator  # noqa: E402
from tests.support.checks import EXAMPLES, compare, failures, inputs, run, without_lse  # noqa: E402
from tests.support.dense import Variant, softmax_attention  # noqa: E402
from tests.support.published import PUBLISHED, Shape  # noqa: E402

Tensor = torch.Tensor
SCORES = (
    "clipped_distance",
    "deberta",
    "forgetting",
    "kerple",
    "learned_sink",
    "locality",
    "ssmax",
    "swin",
    "t5_decoder",
)
ROWS = ("gemma3_global", "qknorm", "qwen3", "vit22b")
OUTPUTS = ("alphafold", "headwise_norm", "qwen3_next")


@cache
def published(name: str, d: int) -> ModuleType:
    return emulator.load(EXAMPLES / f"{name}.attn", D=d)


def check(name: str, d: int, shape: Shape, module: ModuleType | None = None) -> None:
    variant = PUBLISHED[name]
    call = getattr(module or published(name, d), variant.attention)
    torch.manual_seed(sum(map(ord, name)))
    q, k, v = inputs(shape.b, shape.h, shape.hk, shape.m, shape.n, d, d, torch.bfloat16)
    learned = [t.name for t in call.info.tensors if t.grad]
    call = call if variant.lse else without_lse(call)
    bad = failures(compare(call, variant, q, k, v, variant.arguments(shape), learned=learned))
    assert not bad, f"{name} D{d} {shape}: (error, allowed) {bad}"


@pytest.mark.parametrize("name", [*SCORES, *ROWS, *OUTPUTS])
def test_published(name: str) -> None:
    check(name, 32, replace(PUBLISHED[name].shape, d=32))


@pytest.mark.parametrize("d", [40, 64, 128, 256])
@pytest.mark.parametrize("name", ["t5_decoder", "qwen3", "headwise_norm"])
def test_head_sizes(name: str, d: int) -> None:
    check(name, d, Shape(1, 4, 2, 67, 67, d))


@pytest.mark.parametrize("lengths", [(1, 1), (17, 17), (64, 64), (129, 129)])
@pytest.mark.parametrize("name", ["forgetting", "kerple", "qwen3_next"])
def test_lengths(name: str, lengths: tuple[int, int]) -> None:
    check(name, 32, Shape(2, 4, 1, *lengths, 32))


# ---- every sum over the scores of a tile -------------------------------------------------------------------

TEXT = """\
score tilt(s; t[]: grad) = s * t[]
score rows(s, b, m, n; x[B, M]: grad) = s + x[b, m] - x[b, n]
score twice(s, h, i, j; t[H, 9]: grad) =
    if i >= j then tanh(s) * t[h, (i - j) % 9] + t[h, min(i - j, 8)] else s
score shifted(s, m, i, n; y[Rows, N]: grad) = s + y[m, n] * y[i, n]
score chosen(s, b, h, n; ids[B, N]: int, table[5, H]: grad) = s + table[ids[b, n], h]
score crossed(s, m, n; t[7]: grad) = s + t[(m * n) % 7]

attention scalar(q, k, v; t[]: grad) = softmax(causal(tilt(scaled_dot_product(q, k); t))) @ v
attention bias(q, k, v; bias[1|B, 1|H, 1|M, 1|N]: grad) {
    return softmax(additive_bias(scaled_dot_product(q, k); bias)) @ v
}
attention same(q, k, v; x[B, M]: grad) = softmax(causal(rows(scaled_dot_product(q, k); x))) @ v
attention table(q, k, v; t[H, 9]: grad) = softmax(twice(scaled_dot_product(q, k); t)) @ v
attention moved(q, k, v; y[Rows, N]: grad) = softmax(shifted(scaled_dot_product(q, k); y)) @ v
attention embedded(q, k, v; ids[B, N]: int, table[5, H]: grad) {
    return softmax(chosen(scaled_dot_product(q, k); ids, table)) @ v
}
attention scattered(q, k, v; t[7]: grad) = softmax(crossed(scaled_dot_product(q, k); t)) @ v
attention sigmoid_bias(q, k, v; slope[H]: grad) {
    return sigmoid_attention(causal(alibi(scaled_dot_product(q, k); slope))) @ v
}
attention several(q, k, v; slope[H]: grad, bias[1|B, H, M, N]: grad, t[7]: grad) {
    s = crossed(additive_bias(alibi(scaled_dot_product(q, k); slope); bias); t)
    return softmax(sliding_window(causal(s); w = 40)) @ v
}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: Any) -> ModuleType:
    path: Path = tmp_path_factory.mktemp("gradients") / "gradients.attn"
    path.write_text(TEXT, encoding="utf-8")
    return emulator.load(path, D=32)


def places(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[2]).unsqueeze(1), torch.arange(k.shape[2]).unsqueeze(0)


def dense(score: Any, keep: Any = None) -> Any:
    """The attention of softmax(score(s, q, k, m, n, arguments)) over kept keys."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        m, n = places(q, k)
        kept = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if keep is None else keep(m, n)
        scale = q.shape[-1] ** -0.5
        options = {x: t.to(q.dtype) if t.is_floating_point() else t for x, t in options.items()}
        return softmax_attention(q, k, v, lambda s: score(s * scale, m, n, **options), kept)

    return attention


def lower(m: Tensor, n: Tensor) -> Tensor:
    return n <= m


def twice(s: Tensor, m: Tensor, n: Tensor, t: Tensor) -> Tensor:
    far = (m - n).clamp(0)
    return torch.where(m >= n, torch.tanh(s) * t[:, far % 9] + t[:, far.clamp(max=8)], s)


def several(s: Tensor, m: Tensor, n: Tensor, slope: Tensor, bias: Tensor, t: Tensor) -> Tensor:
    return s - slope[:, None, None] * (m - n) + bias + t[(m * n) % 7]


REFERENCES = {
    "scalar": (dense(lambda s, m, n, t: s * t, lower), {"t": ()}),
    "bias": (dense(lambda s, m, n, bias: s + bias), {"bias": (1, 4, 70, 90)}),
    "same": (dense(lambda s, m, n, x: s + x[:, None, m] - x[:, None, n], lower), {"x": (2, 70)}),
    "table": (dense(twice), {"t": (4, 9)}),
    "moved": (dense(lambda s, m, n, y: s + y[m, n] * y[m, n]), {"y": (75, 90)}),
    "scattered": (dense(lambda s, m, n, t: s + t[(m * n) % 7]), {"t": (7,)}),
    "several": (
        dense(several, lambda m, n: (n <= m) & (m - n < 40)),
        {"slope": (4,), "bias": (1, 4, 70, 70), "t": (7,)},
    ),
}


def agrees(module: ModuleType, name: str, reference: Any, m: int, n: int, options: dict[str, Any]) -> None:
    q, k, v = inputs(2, 4, 2, m, n, 32, 32, torch.bfloat16)
    learned = [x for x, value in options.items() if isinstance(value, Tensor) and value.is_floating_point()]
    variant = Variant(name, name, reference)
    bad = failures(compare(getattr(module, name), variant, q, k, v, options, learned=learned))
    assert not bad, f"{name}: (error, allowed) {bad}"


@pytest.mark.parametrize("name", REFERENCES)
def test_sums(module: ModuleType, name: str) -> None:
    reference, shapes = REFERENCES[name]
    torch.manual_seed(len(name))
    n = 70 if name in ("same", "several", "scalar") else 90
    agrees(module, name, reference, 70, n, {x: torch.randn(shape) for x, shape in shapes.items()})


def test_a_table_read_through_ids(module: ModuleType) -> None:
    ids = torch.randint(0, 5, (2, 90))
    reference = dense(lambda s, m, n, ids, table: s + table[ids].transpose(1, 2)[:, :, None])
    agrees(module, "embedded", reference, 70, 90, {"ids": ids, "table": torch.randn(5, 4)})


@pytest.mark.parametrize(
    "sizes", [(2, 4, 70, 90), (2, 1, 70, 90), (1, 1, 70, 1), (1, 4, 1, 90), (1, 1, 1, 1)]
)
def test_broadcast_dimensions(module: ModuleType, sizes: tuple[int, ...]) -> None:
    reference, _ = REFERENCES["bias"]
    agrees(module, "bias", reference, 70, 90, {"bias": torch.randn(sizes)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_gradient_has_the_dtype_of_its_tensor(module: ModuleType, dtype: torch.dtype) -> None:
    q, k, v = inputs(1, 4, 2, 40, 40, 32, 32, torch.bfloat16)
    bias = torch.randn(4, 40, 40).to(dtype).transpose(1, 2)[None].requires_grad_()
    o = module.bias(q, k, v, bias=bias)
    [gradient] = torch.autograd.grad(o.float().square().sum(), bias)
    assert gradient.dtype is dtype and gradient.shape == bias.shape and gradient.abs().sum() > 0


def test_equal_calls_give_equal_gradients(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a block run in another order each time; dQ alone is added in no fixed order."""
    q, k, v = (x.requires_grad_() for x in inputs(2, 4, 2, 70, 70, 32, 32, torch.bfloat16))
    given = [torch.randn(4), torch.randn(2, 4, 70, 70), torch.randn(7)]
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("AFC_EMULATOR_SEED", seed)
        slope, bias, t = (x.detach().clone().requires_grad_() for x in given)
        o = module.several(q, k, v, slope=slope, bias=bias, t=t)
        found.append(torch.autograd.grad(o.float().square().sum(), (k, v, slope, bias, t)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["qwen3", "headwise_norm", "deberta"])
def test_deterministic_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, shape = PUBLISHED[name], Shape(1, 4, 2, 70, 70, 32)
    call = getattr(published(name, 32), variant.attention)
    rows = [x.requires_grad_() for x in inputs(1, 4, 2, 70, 70, 32, 32, torch.bfloat16)]
    options = variant.arguments(shape)
    learned = [options[t.name].requires_grad_() for t in call.info.tensors if t.grad]
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("AFC_EMULATOR_SEED", seed)
        o = call(*rows, **options, deterministic=True)
        found.append(torch.autograd.grad(o.float().square().sum(), (*rows, *learned)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    usual = torch.autograd.grad(call(*rows, **options).float().square().sum(), (*rows, *learned))
    for a, b in zip(found[0], usual, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-8 * float(b.abs().max()))


def test_weights_without_a_sum(module: ModuleType) -> None:
    def reference(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        m, n = places(q, k)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * 32**-0.5 - slope.to(q.dtype)[:, None, None] * (m - n)
        p = torch.where(n <= m, torch.sigmoid(s), 0.0).to(v.dtype)
        return p @ v, (q * 0).sum(-1)

    slope = torch.rand(4)
    q, k, v = inputs(2, 4, 2, 70, 70, 32, 32, torch.bfloat16)
    variant = Variant("sigmoid_bias", "sigmoid_bias", reference)
    call = without_lse(module.sigmoid_bias)
    bad = failures(compare(call, variant, q, k, v, {"slope": slope}, learned=("slope",)))
    assert not bad, f"(error, allowed) {bad}"


@pytest.mark.parametrize("name", ["forgetting", "qwen3", "qwen3_next", "t5_decoder"])
def test_key_counts_and_origins_of_each_batch_entry(name: str) -> None:
    """As many calls with k, v and captured tensors cut to the keys of one batch entry, at its origins."""
    variant, shape = PUBLISHED[name], Shape(2, 4, 2, 40, 90, 32)
    call = getattr(published(name, 32), variant.attention)
    options = {x: y for x, y in variant.arguments(shape).items() if x not in ("q_origin", "k_origin")}
    tensors = inputs(2, 4, 2, 40, 90, 32, 32, torch.bfloat16)
    counts, q_origins, k_origins = [70, 3], [60, 5], [10, 0]
    learned = [options[t.name] for t in call.info.tensors if t.grad]
    leaves = [x.requires_grad_() for x in (*tensors, *learned)]
    do = torch.randn(2, 4, 40, 32, dtype=torch.bfloat16)

    def of_batch(b: int, count: int) -> Tensor:
        own = dict(options)
        for info in call.info.tensors:
            for axis, (size, _) in enumerate(info.shape):
                x = own[info.name]
                if size == "N" or (size == "B" and x.shape[axis] > 1):
                    own[info.name] = x.narrow(axis, *((0, count) if size == "N" else (b, 1)))
        q, k, v = (x[b : b + 1] for x in tensors)
        origins = {"q_origin": q_origins[b], "k_origin": k_origins[b]}
        o: Tensor = call(q, k[:, :, :count], v[:, :, :count], **own, **origins)
        return o

    every = {"kv_len": counts, "q_origin": q_origins, "k_origin": k_origins}
    together = call(*tensors, **options, **{x: torch.tensor(y) for x, y in every.items()})
    alone = torch.cat([of_batch(b, count) for b, count in enumerate(counts)])
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    for x, y in zip(*(torch.autograd.grad(o, leaves, do) for o in (together, alone)), strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7, atol=2**-9 * float(y.abs().max()))


def test_only_some_gradients_are_asked_for(module: ModuleType) -> None:
    q, k, v = inputs(1, 4, 2, 70, 70, 32, 32, torch.bfloat16)
    slope, bias, t = torch.randn(4), torch.randn(1, 4, 70, 70), torch.randn(7)
    every = [x.clone().requires_grad_() for x in (slope, bias, t)]
    o = module.several(q, k, v, slope=every[0], bias=every[1], t=every[2])
    want = torch.autograd.grad(o.float().sum(), every)
    one = t.clone().requires_grad_()
    o = module.several(q, k, v, slope=slope, bias=bias, t=one)
    [got] = torch.autograd.grad(o.float().sum(), one)
    assert torch.equal(got, want[2])


def test_rows_without_a_key(module: ModuleType) -> None:
    """NaN where no key is seen reaches no gradient."""
    q, k, v = inputs(2, 4, 2, 30, 30, 32, 32, torch.bfloat16)
    q[:, :, :10] = torch.nan
    x = torch.randn(2, 30, requires_grad=True)
    o = module.same(q, k, v, x=x, k_origin=10)
    [gradient] = torch.autograd.grad(o.float().square().sum(), x)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0


# ---- row and output blocks ---------------------------------------------------------------------------------

BLOCKS = """\
output doubled(o, b, h, m, c; g[1|B, H, 1|M, Dv]: grad) = o * g[b, h, m, c]
output centred(o) = o - mean(o)
row shifted(x, b, h, c; w[1|B, Hk, D]: grad) = x + w[b, h, c]

attention rows(q, k, v; a[Dqk]: grad, w[1|B, Hk, 16]: grad, z[16]: grad) {
    q = rope(q)
    q = rms_norm(q; w = a)
    k = layer_norm(k; w = a)
    k[16:32] = shifted(k[16:32]; w)
    q[:16], k[:16] = per_dim_scale(q[:16], k[:16]; w = z)
    q[:16], k[:16] = rope_interleaved(q[:16], k[:16])
    return softmax(sliding_window(causal(scaled_dot_product(q, k)); w = 20)) @ v
}
attention outputs(q, k, v; g[1|B, H, 1|M, Dv]: grad, w[Dv]: grad, r[H]: grad) {
    s = temperature(scaled_dot_product(q, k); tau = r)
    return centred(doubled(output_norm(softmax(causal(s)) @ v; w); g))
}
"""


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: Any) -> ModuleType:
    path: Path = tmp_path_factory.mktemp("blocks") / "blocks.attn"
    path.write_text(BLOCKS, encoding="utf-8")
    return emulator.load(path, D=32)


def outputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    plain = dense(lambda s, m, n: s * r.to(q.dtype)[:, None, None], lower)
    o, lse = plain(q, k, v)
    o = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + 1e-5) * w * g
    return o - o.mean(-1, keepdim=True), lse


@pytest.mark.parametrize("sizes", [(2, 4, 50, 32), (1, 4, 50, 32), (1, 4, 1, 32)])
def test_output_blocks(blocks: ModuleType, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    agrees(
        blocks,
        "outputs",
        outputs,
        50,
        50,
        {"g": torch.randn(sizes), "w": torch.randn(32), "r": torch.rand(4) + 0.5},
    )


def test_output_blocks_of_rows_without_a_key(blocks: ModuleType) -> None:
    q, k, v = inputs(1, 4, 2, 150, 40, 32, 32, torch.bfloat16)
    extras = {"g": torch.ones(1, 4, 1, 32), "w": torch.ones(32), "r": torch.ones(4), "k_origin": 130}
    q[:, :, :128] = torch.nan
    call: Any = lambda *a, **x: blocks.outputs(*a, **x, return_lse=True)  # noqa: E731
    found = run(call, q, k, v, torch.randn(1, 4, 150, 32).bfloat16(), None, extras, ("g", "w"))
    assert not found.o[:, :, :130].any() and not found.dq[:, :, :130].any()
    assert all(
        torch.isfinite(x).all() for x in (found.o, found.dq, found.dk, found.dv, *found.learned.values())
    )


def rotate(x: Tensor, adjacent: bool) -> Tensor:
    """RoPE of base 10000 in float64."""
    d = x.shape[-1]
    angle = torch.arange(x.shape[2]).double()[:, None] * 10000.0 ** (-torch.arange(d // 2) * 2.0 / d)
    c, s = angle.cos(), angle.sin()
    if adjacent:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, a * s + b * c), -1).to(x.dtype)


def rows(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    q = rotate(q, False)
    q = q * torch.rsqrt((q * q).mean(-1, keepdim=True) + 1e-6) * a
    k = torch.nn.functional.layer_norm(k, (32,), eps=1e-5) * a
    k = torch.cat((rotate(k[..., :16] * z, True), k[..., 16:] + w[:, :, None]), -1)
    q = torch.cat((rotate(q[..., :16] * z, True), q[..., 16:]), -1)
    plain = dense(lambda s, m, n: s, lambda m, n: (n <= m) & (m - n < 20))
    return plain(q.to(v.dtype), k.to(v.dtype), v)


@pytest.mark.parametrize("batch", [1, 2])
def test_row_blocks(blocks: ModuleType, batch: int) -> None:
    torch.manual_seed(5)
    given = {"a": torch.rand(32) + 0.5, "w": torch.randn(batch, 2, 16), "z": torch.rand(16) + 0.5}
    agrees(blocks, "rows", rows, 50, 50, given)


def test_masked_rows_of_k_may_hold_anything(blocks: ModuleType) -> None:
    q, k, v = inputs(1, 4, 2, 20, 150, 32, 32, torch.bfloat16)
    k[:, :, 64:], v[:, :, 64:] = torch.nan, torch.nan
    extras = {"a": torch.ones(32), "w": torch.zeros(1, 2, 16), "z": torch.ones(16)}
    call: Any = lambda *a, **x: blocks.rows(*a, **x, return_lse=True)  # noqa: E731
    found = run(call, q, k, v, torch.randn(1, 4, 20, 32).bfloat16(), None, extras, ("a", "w", "z"))
    assert not found.dk[:, :, 64:].any()
    assert all(
        torch.isfinite(x).all() for x in (found.o, found.dq, found.dk, found.dv, *found.learned.values())
    )


def test_forward_alone_needs_no_gradient() -> None:
    text = emit(EXAMPLES / "qwen3.attn", "cu", Options(("cuda",), ((64, 64),), backward=False))
    assert "_transform_forward(" in text and "_shares(" not in text and "_clear(" not in text
