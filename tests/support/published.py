# SPDX-License-Identifier: Apache-2.0
"""Published variants in plain PyTorch, written from their papers or models and not from our formulas.

Masks are built from what the paper enumerates (the keys of a query), not from a predicate; angles come from
the steps of the models' own set-up code. Each entry of PUBLISHED names a file of examples/ and makes random
extra arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.counter import uniform_scores
from tests.support.dense import Variant, rotary, softmax_attention

Tensor = torch.Tensor
Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a test: q is [b, h, m, d], k and v are [b, hk, n, d]."""

    b: int = 2
    h: int = 4
    hk: int = 2
    m: int = 67
    n: int = 83
    d: int = 32


@dataclass(frozen=True)
class Published(Variant):
    """A variant with the shape it is tested at; `arguments` gives its named arguments for that shape."""

    arguments: Callable[[Shape], dict[str, Any]] = field(default=lambda shape: {})
    shape: Shape = field(default=Shape())
    lse: bool = True


# ---- helpers ----------------------------------------------------------------------------------------------


def keys_of(rows: int, columns: int, keys: Callable[[int], Iterable[int]]) -> Tensor:
    """Mask [rows, columns] from the keys that each query sees; keys outside the tensor are dropped."""
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        for key in keys(row):
            if 0 <= key < columns:
                mask[row, key] = True
    return mask


def lower(q: Tensor, k: Tensor, q_origin: int = 0, k_origin: int = 0) -> Tensor:
    """The causal mask [M, N]."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(q_origin - k_origin)


def distance(q: Tensor, k: Tensor, q_origin: int = 0) -> Tensor:
    """Query position less key position [M, N]."""
    return (torch.arange(q.shape[2]) + q_origin).unsqueeze(1) - torch.arange(k.shape[2])


def scaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Result:
    """softmax(scale * q k + bias) v over the kept keys; `scale` is 1 / sqrt(D) by default."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if keep is None else keep
    extra = torch.zeros((), dtype=q.dtype) if bias is None else bias.to(q.dtype)
    return softmax_attention(q, k, v, lambda s: s * factor + extra, keep)


def turned(x: Tensor, angle: Tensor, gain: float | Tensor = 1.0, interleaved: bool = False) -> Tensor:
    """Pairs of the columns of x turned by angle [L, D/2] and multiplied by `gain`."""
    cos, sin = (angle.cos() * gain).to(x.dtype), (angle.sin() * gain).to(x.dtype)
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def inverse_frequencies(width: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)


def positions(x: Tensor, origin: int) -> Tensor:
    return torch.arange(x.shape[2], dtype=torch.float64)[:, None] + origin


# ---- positions --------------------------------------------------------------------------------------------


def llama31(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0) -> Result:
    """The set-up code of Llama 3.1: three cases by wavelength."""
    frequency = inverse_frequencies(q.shape[-1], 500000.0)
    scaled_down = []
    for f in frequency.tolist():
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            scaled_down.append(f)
        elif wavelength > 8192 / 1:
            scaled_down.append(f / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled_down.append((1 - smooth) * f / 8 + smooth * f)
    frequency = torch.tensor(scaled_down, dtype=torch.float64)
    q, k = turned(q, positions(q, q_origin) * frequency), turned(k, positions(k, 0) * frequency)
    return scaled(q, k, v, lower(q, k, q_origin))


def qwen25_yarn(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0) -> Result:
    """The set-up code of YaRN's authors: a ramp between two column pairs."""
    width, base, factor, old = q.shape[-1], 1e6, 4.0, 32768

    def pair_that_turns(times: int) -> float:
        return width * math.log(old / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(32)), 0)
    high = min(math.ceil(pair_that_turns(1)), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    frequency = inverse_frequencies(width, base)
    frequency = frequency / factor * ramp + frequency * (1 - ramp)
    gain = 0.1 * math.log(factor) + 1
    q = turned(q, positions(q, q_origin) * frequency, gain)
    k = turned(k, positions(k, 0) * frequency, gain)
    return scaled(q, k, v, lower(q, k, q_origin))


def half_rotated(interleaved: bool) -> Callable[..., Result]:
    def reference(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0) -> Result:
        width = q.shape[-1] // 2
        q, k = rotary(q, 1e4, q_origin, width, interleaved), rotary(k, 1e4, 0, width, interleaved)
        return scaled(q, k, v, lower(q, k, q_origin))

    return reference


def command_r(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0) -> Result:
    q, k = rotary(q, 8e6, q_origin, interleaved=True), rotary(k, 8e6, 0, interleaved=True)
    return scaled(q, k, v, lower(q, k, q_origin))


def xpos(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0) -> Result:
    """Pair c of q at position p is scaled by zeta_c^(p/512), that of k by its reciprocal; gamma = 0.4."""
    width = q.shape[-1]
    zeta = (torch.arange(0, width, 2, dtype=torch.float64) + 0.4 * width) / (1.4 * width)
    frequency = inverse_frequencies(width, 1e4)
    p, r = positions(q, q_origin), positions(k, 0)
    q = turned(q, p * frequency, zeta ** (p / 512), interleaved=True)
    k = turned(k, r * frequency, 1 / zeta ** (r / 512), interleaved=True)
    return scaled(q, k, v, lower(q, k, q_origin))


def half_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The models' own x cos + rotate_half(x) sin; cos and sin [..., L, D] repeat after D/2 columns."""
    low, high = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-high, low), -1) * sin.to(x.dtype)


def llama_tables(
    q: Tensor, k: Tensor, v: Tensor, qcos: Tensor, qsin: Tensor, kcos: Tensor, ksin: Tensor, q_origin: int = 0
) -> Result:
    """Tables [B, L, D/2] as the model code has them: doubled, and with a dimension for the heads."""
    qcos, qsin, kcos, ksin = (torch.cat((t, t), -1)[:, None] for t in (qcos, qsin, kcos, ksin))
    return scaled(half_turned(q, qcos, qsin), half_turned(k, kcos, ksin), v, lower(q, k, q_origin))


def qwen2_vl(q: Tensor, k: Tensor, v: Tensor, qpos: Tensor, kpos: Tensor, q_origin: int = 0) -> Result:
    """As the model's code does it: all three tables, cut into sections, one of the three taken of each."""
    width = q.shape[-1]
    sections = [width // 8, 3 * width // 16, 3 * width // 16] * 2

    def turn(x: Tensor, pos: Tensor) -> Tensor:
        angle = pos[..., None].double() * inverse_frequencies(width, 1e6)
        angle = torch.cat((angle, angle), -1)
        parts = angle.split(sections, -1)
        angle = torch.cat([part[n % 3] for n, part in enumerate(parts)], -1)[:, None]
        return half_turned(x, angle.cos(), angle.sin())

    return scaled(turn(q, qpos), turn(k, kpos), v, lower(q, k, q_origin))


def axial_vit(q: Tensor, k: Tensor, v: Tensor, cols: int) -> Result:
    """Frequencies 100 ** -(4 t / D) of both axes side by side, multiplied as complex numbers in the paper."""
    width = q.shape[-1]
    frequency = 100.0 ** (-torch.arange(0, width, 4, dtype=torch.float64) / width)
    pixel = torch.arange(q.shape[2])
    across, down = pixel % cols, torch.div(pixel, cols, rounding_mode="floor")
    angle = torch.cat([t[:, None].double() * frequency for t in (across, down)], -1)
    return scaled(turned(q, angle, interleaved=True), turned(k, angle, interleaved=True), v)


def rope_mixed(q: Tensor, k: Tensor, v: Tensor, fx: Tensor, fy: Tensor, cols: int) -> Result:
    """Angles of both axes added, one frequency of each for a pair and a head."""
    pixel = torch.arange(q.shape[2])
    across, down = (pixel % cols)[:, None], torch.div(pixel, cols, rounding_mode="floor")[:, None]
    angle = across * fx.double()[:, None] + down * fy.double()[:, None]
    return scaled(turned(q, angle, interleaved=True), turned(k, angle, interleaved=True), v)


def speculative(q: Tensor, k: Tensor, v: Tensor, up: Tensor, qpos: Tensor, kpos: Tensor) -> Result:
    """Draft by draft: context and ancestors are a sequence, of which the draft is the last. No tree."""
    context = k.shape[2] - q.shape[2]
    rows = []
    for draft in range(q.shape[2]):
        path = [*range(context), *(context + n for n in up[0, draft].nonzero()[:, 0].tolist())]
        keys, values = rotary(k[:, :, path], 1e4), v[:, :, path]
        rows.append(scaled(rotary(q[:, :, draft : draft + 1], 1e4, len(path) - 1), keys, values))
    return torch.cat([o for o, _ in rows], 2), torch.cat([lse for _, lse in rows], 2)


# ---- scores -----------------------------------------------------------------------------------------------


def bucket_of(relative: Tensor, both: bool) -> Tensor:
    """T5's bucket of key position less query position, 32 buckets, farthest distance 128."""
    count = 16 if both else 32
    offset = (relative > 0).long() * 16 if both else torch.zeros_like(relative)
    far = relative.abs() if both else (-relative).clamp(min=0)
    exact = count // 2
    spread = torch.log(far.clamp(min=1).float() / exact) / math.log(128 / exact) * (count - exact)
    return offset + torch.where(far < exact, far, (exact + spread.long()).clamp(max=count - 1))


def t5_encoder(q: Tensor, k: Tensor, v: Tensor, table: Tensor, keep: Tensor) -> Result:
    bias = table[bucket_of(-distance(q, k), True)].permute(2, 0, 1)
    return scaled(q, k, v, keep[:, None, None, :], bias, 1.0)


def t5_decoder(q: Tensor, k: Tensor, v: Tensor, table: Tensor, q_origin: int = 0) -> Result:
    bias = table[bucket_of(-distance(q, k, q_origin), False)].permute(2, 0, 1)
    return scaled(q, k, v, lower(q, k, q_origin), bias, 1.0)


def swin(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Result:
    return scaled(q, k, v, None, bias)


def clipped_distance(q: Tensor, k: Tensor, v: Tensor, table: Tensor, R: int) -> Result:
    return scaled(q, k, v, None, table[:, (-distance(q, k)).clamp(-R, R) + R])


def kerple(q: Tensor, k: Tensor, v: Tensor, r1: Tensor, r2: Tensor, q_origin: int = 0) -> Result:
    far = distance(q, k, q_origin).abs().to(r1.dtype)
    bias = -r1[:, None, None] * torch.log1p(r2[:, None, None] * far)
    return scaled(q, k, v, lower(q, k, q_origin), bias)


def deberta(q: Tensor, k: Tensor, v: Tensor, c2p: Tensor, p2c: Tensor, R: int, keep: Tensor) -> Result:
    """Gathers as in the model's code: content to position by rows, position to content by columns."""
    far = distance(q, k)
    rows = (far + R).clamp(0, 2 * R - 1).expand(*c2p.shape[:2], -1, -1)
    columns = (-far + R).clamp(0, 2 * R - 1).T.expand(*p2c.shape[:2], -1, -1)
    bias = c2p.gather(-1, rows) + p2c.gather(-1, columns).transpose(-1, -2)
    scale = 1 / math.sqrt(3 * q.shape[-1])
    return scaled(q, k, v, keep[:, None, None, :], bias * scale, scale)


def forgetting(q: Tensor, k: Tensor, v: Tensor, cq: Tensor, ck: Tensor, q_origin: int = 0) -> Result:
    """D_ij, the sum of log f_l over j < l <= i: those up to i less those up to j, summed term by term."""

    def up_to(sums: Tensor) -> Tensor:
        log_f = torch.diff(sums.double(), prepend=torch.zeros_like(sums[..., :1], dtype=torch.float64))
        return torch.einsum("bhl,il->bhi", log_f, torch.ones(2 * [sums.shape[2]], dtype=torch.float64).tril())

    decay = up_to(cq)[..., :, None] - up_to(ck)[..., None, :]
    return scaled(q, k, v, lower(q, k, q_origin), decay)


def ssmax(q: Tensor, k: Tensor, v: Tensor, a: Tensor, q_origin: int = 0) -> Result:
    """exp(a log(n) s) = n^(a s), n counted on the mask."""
    q, k = rotary(q, 1e4, q_origin), rotary(k, 1e4)
    keep = lower(q, k, q_origin)
    seen = keep.sum(-1, keepdim=True).double().log()
    factor = (a.double()[:, None, None] * seen / math.sqrt(q.shape[-1])).to(q.dtype)
    return softmax_attention(q, k, v, lambda s: s * factor, keep)


def llama4_nope(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0, k_origin: int = 0) -> Result:
    """The model scales the queries, not the scores."""
    p = positions(q, q_origin)
    factor = torch.log(torch.floor((p + 1) / 8192) + 1) * 0.1 + 1
    return scaled(q * factor.to(q.dtype), k, v, lower(q, k, q_origin, k_origin))


def capped(cap: float, local: bool) -> Callable[..., Result]:
    def reference(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0, w: int = 0) -> Result:
        keep = lower(q, k, q_origin)
        keep = keep.triu(q_origin - w + 1) if local else keep
        q, k = rotary(q, 1e4, q_origin), rotary(k, 1e4)
        root = math.sqrt(q.shape[-1])
        return softmax_attention(q, k, v, lambda s: torch.tanh(s / root / cap) * cap, keep)

    return reference


def locality(q: Tensor, k: Tensor, v: Tensor, tau: Tensor) -> Result:
    keep = ~torch.eye(q.shape[2], k.shape[2], dtype=torch.bool)
    return softmax_attention(q, k, v, lambda s: s * tau.to(q.dtype)[:, None, None], keep)


# ---- masks ------------------------------------------------------------------------------------------------


def gpt_neo(q: Tensor, k: Tensor, v: Tensor, w: int, q_origin: int = 0) -> Result:
    keep = keys_of(q.shape[2], k.shape[2], lambda m: range(m + q_origin - w + 1, m + q_origin + 1))
    return scaled(q, k, v, keep, scale=1.0)


def longformer(q: Tensor, k: Tensor, v: Tensor, w: int, first: int) -> Result:
    m, n = q.shape[2], k.shape[2]
    keep = keys_of(m, n, lambda i: range(n) if i < first else range(i - w // 2, i + w // 2 + 1))
    keep[:, :first] = True
    return scaled(q, k, v, keep)


def bigbird(q: Tensor, k: Tensor, v: Tensor, pick: Tensor, block: int) -> Result:
    n = k.shape[2]
    last = math.ceil(n / block) - 1

    def keys(head: int, m: int) -> list[int]:
        x = m // block
        chosen = {0, last, x - 1, x, x + 1, *pick[head, x].tolist()}
        chosen = set(range(last + 1)) if x in (0, last) else chosen
        return [y * block + r for y in chosen for r in range(block)]

    masks = [keys_of(q.shape[2], n, lambda m, h=h: keys(h, m)) for h in range(q.shape[1])]
    return scaled(q, k, v, torch.stack(masks))


def sparse_strided(q: Tensor, k: Tensor, v: Tensor, stride: int, q_origin: int = 0) -> Result:
    def keys(m: int) -> list[int]:
        i = m + q_origin
        return [*range(i - stride + 1, i + 1), *range(i, -1, -stride)]

    return scaled(q, k, v, keys_of(q.shape[2], k.shape[2], keys))


def sparse_fixed(q: Tensor, k: Tensor, v: Tensor, stride: int, summary: int, q_origin: int = 0) -> Result:
    def keys(m: int) -> list[int]:
        i = m + q_origin
        own = i - i % stride
        tails = [end - 1 - r for end in range(stride, i + stride + 1, stride) for r in range(summary)]
        return [n for n in (*range(own, own + stride), *tails) if n <= i]

    return scaled(q, k, v, keys_of(q.shape[2], k.shape[2], keys))


def dilated(q: Tensor, k: Tensor, v: Tensor, w: int, q_origin: int = 0) -> Result:
    keep = keys_of(q.shape[2], k.shape[2], lambda m: [m + q_origin - 2 * t for t in range(w)])
    return scaled(q, k, v, keep)


def natten2d(q: Tensor, k: Tensor, v: Tensor, rows: int, cols: int) -> Result:
    """A 7 x 7 window that starts 3 before the pixel, moved to lie inside the image."""

    def keys(m: int) -> list[int]:
        top = min(max(m // cols - 3, 0), rows - 7)
        left = min(max(m % cols - 3, 0), cols - 7)
        return [y * cols + x for y in range(top, top + 7) for x in range(left, left + 7)]

    return scaled(q, k, v, keys_of(q.shape[2], k.shape[2], keys))


def criss_cross(q: Tensor, k: Tensor, v: Tensor, cols: int) -> Result:
    n = k.shape[2]
    keep = keys_of(
        q.shape[2], n, lambda m: [*range(m // cols * cols, (m // cols + 1) * cols), *range(m % cols, n, cols)]
    )
    return scaled(q, k, v, keep)


def prefix_lm(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor, q_origin: int = 0) -> Result:
    keep = lower(q, k, q_origin).repeat(q.shape[0], 1, 1)
    for batch, length in enumerate(prefix.tolist()):
        keep[batch, :, :length] = True
    q, k = rotary(q, 1e4, q_origin), rotary(k, 1e4)
    return scaled(q, k, v, keep[:, None])


def packed(q: Tensor, k: Tensor, v: Tensor, qdoc: Tensor, kdoc: Tensor, qpos: Tensor, kpos: Tensor) -> Result:
    """Each document by itself, its positions counted from 0 here once more."""
    keep = torch.zeros(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)
    start = torch.zeros(q.shape[0], q.shape[2], dtype=torch.long)
    for batch, ids in enumerate(kdoc.tolist()):
        for number in {x for x in ids if x >= 0}:
            rows = [n for n, x in enumerate(ids) if x == number]
            keep[batch, 0, rows[0] : rows[-1] + 1, rows[0] : rows[-1] + 1] = True
            start[batch, rows[0] : rows[-1] + 1] = rows[0]
    own = (torch.arange(q.shape[2]) - start).double()
    angle = (own[:, None, :, None] * inverse_frequencies(q.shape[-1], 1e4)).to(torch.float64)
    return scaled(turned(q, angle), turned(k, angle), v, keep.tril())


# ---- QK-norm ----------------------------------------------------------------------------------------------


def qwen3(q: Tensor, k: Tensor, v: Tensor, qw: Tensor, kw: Tensor, q_origin: int = 0) -> Result:
    """PyTorch's RMSNorm over the head, then the rotation."""
    width = (q.shape[-1],)
    q = torch.nn.functional.rms_norm(q, width, qw.to(q.dtype), 1e-6)
    k = torch.nn.functional.rms_norm(k, width, kw.to(q.dtype), 1e-6)
    return scaled(rotary(q, 1e6, q_origin), rotary(k, 1e6), v, lower(q, k, q_origin))


def gemma3_global(q: Tensor, k: Tensor, v: Tensor, qw: Tensor, kw: Tensor, q_origin: int = 0) -> Result:
    """The model's norm multiplies by one plus its weight; positions are divided by 8."""
    width = (q.shape[-1],)
    q = torch.nn.functional.rms_norm(q, width, 1 + qw.to(q.dtype), 1e-6)
    k = torch.nn.functional.rms_norm(k, width, 1 + kw.to(q.dtype), 1e-6)
    frequency = inverse_frequencies(q.shape[-1], 1e6)
    q, k = turned(q, positions(q, q_origin) / 8 * frequency), turned(k, positions(k, 0) / 8 * frequency)
    return scaled(q, k, v, lower(q, k, q_origin), scale=256**-0.5)


def vit22b(q: Tensor, k: Tensor, v: Tensor, qw: Tensor, kw: Tensor) -> Result:
    """PyTorch's LayerNorm without its bias."""
    width = (q.shape[-1],)
    q = torch.nn.functional.layer_norm(q, width, qw.to(q.dtype))
    return scaled(q, torch.nn.functional.layer_norm(k, width, kw.to(q.dtype)), v)


def qknorm(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Result:
    """Cosine similarities times a learned factor."""
    q, k = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (q, k))
    factor = g.to(q.dtype)[:, None, None]
    return softmax_attention(
        q, k, v, lambda s: s * factor, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    )


# ---- blocks on the output ---------------------------------------------------------------------------------


def qwen3_next(
    q: Tensor, k: Tensor, v: Tensor, qw: Tensor, kw: Tensor, g: Tensor, q_origin: int = 0
) -> Result:
    """PyTorch's RMSNorm with one plus the weight, a rotation of a quarter, and the sigmoid of the gates."""
    width, quarter = (q.shape[-1],), q.shape[-1] // 4
    q = torch.nn.functional.rms_norm(q, width, 1 + qw.to(q.dtype), 1e-6)
    k = torch.nn.functional.rms_norm(k, width, 1 + kw.to(q.dtype), 1e-6)
    q, k = rotary(q, 1e7, q_origin, quarter), rotary(k, 1e7, 0, quarter)
    o, lse = scaled(q, k, v, lower(q, k, q_origin))
    return o * torch.sigmoid(g.to(q.dtype)), lse


def alphafold(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor, g: Tensor) -> Result:
    """The pair bias before the softmax, the gates after it."""
    o, lse = scaled(q, k, v, keep[:, None, None, :], bias)
    return torch.sigmoid(g.to(q.dtype)) * o, lse


def headwise_norm(q: Tensor, k: Tensor, v: Tensor, w: Tensor, g: Tensor, q_origin: int = 0) -> Result:
    """PyTorch's RMSNorm of each head's output, times the sigmoid of the gate of its head."""
    o, lse = scaled(rotary(q, 1e4, q_origin), rotary(k, 1e4), v, lower(q, k, q_origin))
    o = torch.nn.functional.rms_norm(o, (o.shape[-1],), w.to(q.dtype), 1e-5)
    return o * torch.sigmoid(g.to(q.dtype))[..., None], lse


def llama4_local(q: Tensor, k: Tensor, v: Tensor, size: int) -> Result:
    """Chunk by chunk on the diagonal."""
    ones = [
        torch.ones(min(size, q.shape[2] - a), min(size, q.shape[2] - a)) for a in range(0, q.shape[2], size)
    ]
    keep = torch.block_diag(*ones).bool().tril()
    q, k = rotary(q, 5e5, interleaved=True), rotary(k, 5e5, interleaved=True)
    return scaled(q, k, v, keep)


def streaming(q: Tensor, k: Tensor, v: Tensor, w: int, q_origin: int = 0) -> Result:
    def keys(m: int) -> list[int]:
        i = m + q_origin
        return [n for n in (*range(4), *range(i - w + 1, i + 1)) if n <= i]

    keep = keys_of(q.shape[2], k.shape[2], keys)
    q, k = rotary(q, 1e4, q_origin), rotary(k, 1e4)
    return scaled(q, k, v, keep)


def moba(q: Tensor, k: Tensor, v: Tensor, pick: Tensor, block: int) -> Result:
    chosen = pick.repeat_interleave(block, -1)[..., : k.shape[2]]
    own = torch.block_diag(*[torch.ones(block, block)] * pick.shape[-1])[: q.shape[2], : k.shape[2]].bool()
    q, k = rotary(q, 1e4), rotary(k, 1e4)
    return scaled(q, k, v, (chosen | own).tril())


def tree(q: Tensor, k: Tensor, v: Tensor, up: Tensor) -> Result:
    context = torch.ones(1, q.shape[2], k.shape[2] - up.shape[-1], dtype=torch.bool)
    return scaled(q, k, v, torch.cat((context, up), -1)[:, None])


def padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Result:
    return scaled(q, k, v, keep[:, None, None, :])


def bert(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, rate: float, seed: int) -> Result:
    """The weights themselves, as the attention to the rows of a unit matrix; then dropout by hand."""
    b, h, n = q.shape[0], q.shape[1], k.shape[2]
    weights, lse = padded(q, k, torch.eye(n, dtype=q.dtype).expand(b, k.shape[1], n, n), keep)
    dropped = uniform_scores(seed, b, h, q.shape[2], n) < rate
    weights = weights.masked_fill(dropped, 0.0) * (1 / (1 - rate))
    return weights @ v.repeat_interleave(h // v.shape[1], 1), lse


def dropkey(q: Tensor, k: Tensor, v: Tensor, rate: float, seed: int) -> Result:
    b, h, m = q.shape[:3]
    return scaled(q, k, v, uniform_scores(seed, b, h, m, k.shape[2]) >= rate)


def ragged(q: Tensor, k: Tensor, v: Tensor, len: Tensor, q_origin: int = 0) -> Result:
    keep = lower(q, k, q_origin).repeat(q.shape[0], 1, 1)
    for batch, length in enumerate(len.tolist()):
        keep[batch, :, length:] = False
    return scaled(q, k, v, keep[:, None])


def block_sparse(q: Tensor, k: Tensor, v: Tensor, on: Tensor, block: int, q_origin: int = 0) -> Result:
    wide = on.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., : q.shape[2], : k.shape[2]]
    return scaled(q, k, v, wide & lower(q, k, q_origin))


def block_causal(q: Tensor, k: Tensor, v: Tensor, block: int) -> Result:
    keep = keys_of(q.shape[2], k.shape[2], lambda m: range((m // block + 1) * block))
    q, k = rotary(q, 1e4), rotary(k, 1e4)
    return scaled(q, k, v, keep)


def with_a_sink(
    exponent: Callable[[Tensor, Tensor], Tensor],
    scores: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., Result]:
    """Softmax over the keys and one more, with score `exponent(sink, query position)` and value 0.

    `scores` gives the scores and which of them count.
    """

    def reference(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, q_origin: int = 0, k_origin: int = 0
    ) -> Result:
        s, keep = scores(q, k, q_origin, k_origin)
        sink = torch.zeros(q.shape[1]) if sink is None else sink
        i = positions(q, q_origin)
        extra = exponent(sink.to(q.dtype)[:, None, None], i.reshape(-1, 1).to(q.dtype)).expand(
            *s.shape[:-1], 1
        )
        s = torch.cat((torch.where(keep, s, torch.full_like(s, -torch.inf)), extra), -1)
        values = torch.cat((v, torch.zeros_like(v[:, :, :1])), 2).repeat_interleave(
            q.shape[1] // v.shape[1], 1
        )
        return s.softmax(-1) @ values, s.logsumexp(-1)

    return reference


def pointwise(weight: Callable[[Tensor], Tensor], scores: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """Weights from their own scores alone; there is no LSE, which is given as 0."""

    def reference(q: Tensor, k: Tensor, v: Tensor, q_origin: int = 0, k_origin: int = 0) -> Result:
        s, keep = scores(q, k, q_origin, k_origin)
        p = torch.where(keep, weight(s), torch.zeros_like(s))
        return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), torch.zeros_like(p[..., 0])

    return reference


def every_score(q: Tensor, k: Tensor, q_origin: int = 0, k_origin: int = 0) -> tuple[Tensor, Tensor]:
    """q k / sqrt(D), all of which count."""
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    return s, torch.ones(s.shape[-2:], dtype=torch.bool)


def causal_scores(q: Tensor, k: Tensor, q_origin: int = 0, k_origin: int = 0) -> tuple[Tensor, Tensor]:
    """q k / sqrt(D), and the causal mask."""
    return every_score(q, k)[0], lower(q, k, q_origin, k_origin)


def rotated_scores(q: Tensor, k: Tensor, q_origin: int = 0, k_origin: int = 0) -> tuple[Tensor, Tensor]:
    """Causal, after RoPE."""
    return causal_scores(rotary(q, 1e4, q_origin), rotary(k, 1e4, k_origin), q_origin, k_origin)


def window_scores(q: Tensor, k: Tensor, q_origin: int = 0, k_origin: int = 0) -> tuple[Tensor, Tensor]:
    """Causal, and no key 128 or more before the query."""
    s, keep = causal_scores(q, k, q_origin, k_origin)
    return s, keep & ~torch.ones(s.shape[-2:], dtype=torch.bool).tril(q_origin - k_origin - 128)


def of_its_head(sink: Tensor, i: Tensor) -> Tensor:
    """The score of a sink that is the same for every query."""
    return sink


def shifted_sigmoid(s: Tensor) -> Tensor:
    """sigmoid(s - log N)."""
    return torch.sigmoid(s - math.log(s.shape[-1]))


def averaged_relu(s: Tensor) -> Tensor:
    """relu(s) / N."""
    return torch.relu(s) / s.shape[-1]


# ---- arguments --------------------------------------------------------------------------------------------


def shifted(shape: Shape) -> dict[str, Any]:
    """The last m of n positions: a prefill that continues."""
    return {"q_origin": shape.n - shape.m}


def with_shift(**makers: Callable[[Shape], Any]) -> Callable[[Shape], dict[str, Any]]:
    return lambda shape: {**{n: make(shape) for n, make in makers.items()}, **shifted(shape)}


def plain(**makers: Callable[[Shape], Any]) -> Callable[[Shape], dict[str, Any]]:
    return lambda shape: {n: make(shape) for n, make in makers.items()}


def value(x: Any) -> Callable[[Shape], Any]:
    return lambda shape: x


def per_head(low: float, high: float) -> Callable[[Shape], Tensor]:
    return lambda shape: low + (high - low) * torch.rand(shape.h)


def real_keys(shape: Shape) -> Tensor:
    """Padding at the end; the last batch entry has no key at all."""
    keep = torch.arange(shape.n) < torch.tensor([[shape.n - 9 * b] for b in range(shape.b)])
    keep[-1] = False
    return keep


def documents(shape: Shape) -> Tensor:
    """Documents of 1 to 40 rows, and padding (-1) at the end."""
    rows = torch.repeat_interleave(torch.arange(5), torch.tensor([13, 1, 40, 5, shape.n - 59]))
    rows = torch.where(rows == 4, -1, rows)
    return torch.stack([rows if b % 2 else (torch.arange(shape.n) // 31) for b in range(shape.b)])


def packed_rows(shape: Shape) -> dict[str, Any]:
    """Documents and, in the same rows of q and k, positions that start anew with each."""
    ids = documents(shape)
    first = torch.searchsorted(torch.where(ids < 0, 99, ids), torch.where(ids < 0, 99, ids))
    pos = torch.arange(shape.n) - first
    return {"qdoc": ids, "kdoc": ids, "qpos": pos, "kpos": pos}


def left_padded_tables(shape: Shape) -> dict[str, Any]:
    """Cosines and sines in float32; batch entry b begins with 5 b rows of padding, all at position 1."""
    pos = (torch.arange(shape.n) - 5 * torch.arange(shape.b)[:, None]).clamp(min=0) + 1
    angle = (pos[..., None] * inverse_frequencies(shape.d, 5e5)).float()
    k = {"kcos": angle.cos(), "ksin": angle.sin()}
    q = {n.replace("k", "q"): x[:, shape.n - shape.m :] for n, x in k.items()}
    return {**q, **k, **shifted(shape)}


def image_between_texts(shape: Shape) -> dict[str, Any]:
    """Text counts all three axes alike, an image of 5 x 6 patches line and column from where the text ends;
    the text behind it goes on after the largest position so far.
    """
    rows = []
    for b in range(shape.b):
        text = torch.arange(11 + b).expand(3, -1)
        line, column = torch.meshgrid(torch.arange(5), torch.arange(6), indexing="ij")
        image = torch.stack((torch.zeros(30, dtype=torch.long), line.flatten(), column.flatten())) + 11 + b
        rest = torch.arange(shape.n - 41 - b).expand(3, -1) + image.max() + 1
        rows.append(torch.cat((text, image, rest), -1))
    pos = torch.stack(rows, 1)
    return {"qpos": pos[..., shape.n - shape.m :], "kpos": pos, **shifted(shape)}


def drafts(shape: Shape) -> dict[str, Any]:
    """A tree of drafts, each at the position of the context's end plus its depth."""
    up = ancestors(shape)
    context = shape.n - shape.m
    qpos = context + up.sum(-1) - 1
    return {"up": up, "qpos": qpos, "kpos": torch.cat((torch.arange(context)[None], qpos), -1)}


def gates(shape: Shape) -> dict[str, Any]:
    sums = torch.nn.functional.logsigmoid(torch.randn(shape.b, shape.h, shape.n) + 2).cumsum(-1)
    return {"cq": sums[..., shape.n - shape.m :], "ck": sums, **shifted(shape)}


def ancestors(shape: Shape) -> Tensor:
    """A random tree of m drafts: each descends from an earlier one or from the context."""
    up = torch.eye(shape.m, dtype=torch.bool)
    for node in range(1, shape.m):
        parent = int(torch.randint(-1, node, ()))
        if parent >= 0:
            up[node] |= up[parent]
    return up[None]


def randn(*sizes: str | int) -> Callable[[Shape], Tensor]:
    return lambda shape: torch.randn(*(getattr(shape, x) if isinstance(x, str) else x for x in sizes))


def coins(share: float, *sizes: str | int) -> Callable[[Shape], Tensor]:
    return lambda shape: torch.rand(*(getattr(shape, x) if isinstance(x, str) else x for x in sizes)) < share


SQUARE = Shape(m=83, n=83)
IMAGE = Shape(m=63, n=63)  # 7 x 9 pixels
CROSS = Shape(m=83, n=67)
FEW = Shape(h=6, hk=1)

PUBLISHED = {
    v.name: v
    for v in (
        Published("llama31", "llama31", llama31, arguments=shifted),
        Published("qwen25_yarn", "qwen25_yarn", qwen25_yarn, arguments=shifted),
        Published("phi", "phi", half_rotated(False), arguments=shifted),
        Published("chatglm2", "chatglm2", half_rotated(True), arguments=shifted, shape=FEW),
        Published("command_r", "command_r", command_r, arguments=shifted),
        Published("xpos", "xpos_lm", xpos, arguments=shifted),
        Published("llama_tables", "llama_tables", llama_tables, arguments=left_padded_tables),
        Published("qwen2_vl", "qwen2_vl", qwen2_vl, arguments=image_between_texts),
        Published("axial_vit", "axial_vit", axial_vit, arguments=plain(cols=value(9)), shape=IMAGE),
        Published(
            "rope_mixed",
            "rope_mixed",
            rope_mixed,
            arguments=lambda s: {
                "fx": torch.randn(s.h, s.d // 2),
                "fy": torch.randn(s.h, s.d // 2),
                "cols": 9,
            },
            shape=Shape(hk=4, m=63, n=63),
        ),
        Published("speculative", "speculative", speculative, arguments=drafts, shape=Shape(m=23, n=83)),
        Published(
            "t5_encoder",
            "t5_encoder",
            t5_encoder,
            arguments=plain(table=randn(32, "h"), keep=real_keys),
            shape=Shape(m=167, n=150),
        ),
        Published(
            "t5_decoder",
            "t5_decoder",
            t5_decoder,
            arguments=with_shift(table=randn(32, "h")),
            shape=Shape(m=100, n=167),
        ),
        Published("swin", "swin", swin, arguments=plain(bias=randn(1, "h", "m", "n")), shape=SQUARE),
        Published(
            "clipped_distance",
            "clipped_distance",
            clipped_distance,
            arguments=plain(table=randn("h", 41), R=value(20)),
            shape=CROSS,
        ),
        Published(
            "kerple", "kerple_lm", kerple, arguments=with_shift(r1=per_head(0.1, 2), r2=per_head(0.1, 1))
        ),
        Published(
            "deberta",
            "deberta_encoder",
            deberta,
            arguments=plain(
                c2p=randn("b", "h", "m", 48), p2c=randn("b", "h", "n", 48), R=value(24), keep=real_keys
            ),
            shape=SQUARE,
        ),
        Published("forgetting", "forgetting", forgetting, arguments=gates),
        Published("ssmax", "ssmax_lm", ssmax, arguments=with_shift(a=per_head(0.2, 0.6))),
        Published(
            "llama4_nope",
            "llama4_nope",
            llama4_nope,
            arguments=plain(q_origin=value(16350), k_origin=value(16334)),
        ),
        Published("gemma2_local", "gemma2_local", capped(50.0, True), arguments=with_shift(w=value(21))),
        Published("grok1", "grok1", capped(30.0, False), arguments=shifted),
        Published("locality", "locality", locality, arguments=plain(tau=per_head(0.1, 0.4)), shape=SQUARE),
        Published("gpt_neo", "gpt_neo_local", gpt_neo, arguments=with_shift(w=value(19))),
        Published(
            "longformer",
            "longformer",
            longformer,
            arguments=plain(w=value(12), first=value(3)),
            shape=SQUARE,
        ),
        Published(
            "bigbird",
            "bigbird_encoder",
            bigbird,
            arguments=plain(pick=lambda s: torch.randint(0, 11, (s.h, 11, 3)), block=value(8)),
            shape=SQUARE,
        ),
        Published("sparse_strided", "sparse_strided", sparse_strided, arguments=with_shift(stride=value(9))),
        Published(
            "sparse_fixed",
            "sparse_fixed",
            sparse_fixed,
            arguments=with_shift(stride=value(11), summary=value(2)),
        ),
        Published("dilated", "dilated_lm", dilated, arguments=with_shift(w=value(7))),
        Published(
            "natten2d", "natten2d", natten2d, arguments=plain(rows=value(7), cols=value(9)), shape=IMAGE
        ),
        Published("criss_cross", "criss_cross", criss_cross, arguments=plain(cols=value(9)), shape=IMAGE),
        Published(
            "prefix_lm",
            "prefix_attention",
            prefix_lm,
            arguments=with_shift(prefix=lambda s: torch.arange(s.b) * 31),
        ),
        Published("packed", "packed", packed, arguments=packed_rows, shape=SQUARE),
        Published(
            "llama4_local", "llama4_local", llama4_local, arguments=plain(size=value(24)), shape=SQUARE
        ),
        Published("streaming", "streaming_llm", streaming, arguments=with_shift(w=value(15))),
        Published(
            "moba",
            "moba_lm",
            moba,
            arguments=plain(pick=coins(0.3, "b", "h", "m", 6), block=value(16)),
            shape=SQUARE,
        ),
        Published("tree", "tree_verify", tree, arguments=plain(up=ancestors), shape=Shape(m=23, n=83)),
        Published(
            "bert",
            "bert",
            bert,
            arguments=plain(keep=real_keys, rate=value(0.1), seed=value(1234)),
            shape=SQUARE,
        ),
        Published(
            "dropkey", "dropkey", dropkey, arguments=plain(rate=value(0.3), seed=value(7)), shape=IMAGE
        ),
        Published("cross", "cross", padded, arguments=plain(keep=real_keys), shape=CROSS),
        Published(
            "ragged",
            "ragged",
            ragged,
            arguments=with_shift(len=lambda s: torch.tensor([s.n - 3] + [0] * (s.b - 1))),
        ),
        Published(
            "block_sparse",
            "block_sparse_lm",
            block_sparse,
            arguments=with_shift(on=coins(0.5, 1, "h", 5, 6), block=value(16)),
        ),
        Published("qwen3", "qwen3", qwen3, arguments=with_shift(qw=randn("d"), kw=randn("d"))),
        Published(
            "gemma3_global",
            "gemma3_global",
            gemma3_global,
            arguments=with_shift(qw=randn("d"), kw=randn("d")),
        ),
        Published("vit22b", "vit22b", vit22b, arguments=plain(qw=randn("d"), kw=randn("d")), shape=IMAGE),
        Published("qknorm", "qknorm", qknorm, arguments=plain(g=per_head(1.0, 8.0)), shape=CROSS),
        Published(
            "qwen3_next",
            "qwen3_next",
            qwen3_next,
            arguments=with_shift(qw=randn("d"), kw=randn("d"), g=randn("b", "h", "m", "d")),
        ),
        Published(
            "alphafold",
            "alphafold",
            alphafold,
            arguments=plain(bias=randn(1, "h", "m", "n"), keep=real_keys, g=randn("b", "h", "m", "d")),
            shape=SQUARE,
        ),
        Published(
            "headwise_norm",
            "headwise_norm",
            headwise_norm,
            arguments=with_shift(w=randn("d"), g=randn("b", "h", "m")),
        ),
        Published("softmax1", "softmax1_lm", with_a_sink(of_its_head, rotated_scores), arguments=shifted),
        Published(
            "learned_sink",
            "learned_sink",
            with_a_sink(of_its_head, window_scores),
            arguments=with_shift(sink=per_head(-2.0, 2.0)),
            shape=Shape(m=190, n=201),
        ),
        Published(
            "sigmoid", "sigmoid_lm", pointwise(shifted_sigmoid, causal_scores), arguments=shifted, lse=False
        ),
        Published("relu_vit", "relu_vit", pointwise(averaged_relu, every_score), shape=IMAGE, lse=False),
        Published(
            "block_causal", "block_causal", block_causal, arguments=plain(block=value(16)), shape=SQUARE
        ),
    )
}
