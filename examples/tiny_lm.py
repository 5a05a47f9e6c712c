# SPDX-License-Identifier: Apache-2.0
"""Train a small character model with afc's attention and with PyTorch's in step, and compare the losses.

    python examples/tiny_lm.py --plot loss.svg

The text is Python's own manual, which ships with it (``help("if")`` prints from it). All models start from
the same weights and see the same batches; they differ only in who computes attention:

afc       ``llama.attn``, compiled: RoPE and the causal mask are inside the kernel, which gets raw q and k
sdpa      RoPE in PyTorch, then scaled_dot_product_attention

Two correct programs differ by rounding, and training amplifies that, so "the curves agree" needs a yardstick.
It is measured here, by two more models whose attention is sdpa's, rounded differently:

exact     in float64
mirrored  with all sums over keys and over the head dimension in reverse order

Take each curve's relative distance from ``exact`` (root mean square over the steps): the curves are equal if
afc's is at most twice the larger of sdpa's and mirrored's. The exit code is 0 if they are equal, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, HIDDEN = 128, 4, 2, 384
HEAD_DIM = WIDTH // HEADS
CONTEXT, BATCH = 128, 8
LEARNING_RATE = 2e-3
FLOAT32_ROUNDING = 2.0**-24  # losses are float32: a distance below this is none
ROPE_BASE = 500000.0  # as in llama.attn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Curves = dict[str, list[float]]


# ---- attention, four times: q, k, v and the result are [batch, heads, length, HEAD_DIM] ------------


def afc_attention(device: torch.device, dtype: torch.dtype) -> Attention:
    """The compiled kernel (a few seconds the first time, then from a cache)."""
    import afc

    path = Path(__file__).with_name("llama.attn")
    kernel = afc.load(path, D=HEAD_DIM, dtype=dtype, backend=device.type)
    llama: Attention = kernel.llama
    return llama


def rope(x: Tensor) -> Tensor:
    """Turn each pair (c, c + HEAD_DIM/2) of a row by its position times base^(-2c/HEAD_DIM); rounds once."""
    c = torch.arange(HEAD_DIM // 2, dtype=torch.float64, device=x.device)
    position = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)
    angle = torch.outer(position, ROPE_BASE ** (-2 * c / HEAD_DIM))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own."""
    return F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in float64, rounded once at the end."""
    return sdpa(q.double(), k.double(), v.double()).to(q.dtype)


def mirrored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with every sum in reverse order: positions from last to first, head dimension too."""
    q, k, v = rope(q).flip(-1, -2), rope(k).flip(-1, -2), v.flip(-2)
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=later).flip(-2)


# ---- the model -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention, then a gated MLP, each behind a norm and added to the stream."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, WIDTH]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        added: Tensor = self.down(F.silu(gate) * value)
        return x + added


class TinyLM(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, vocabulary: int, attention: Attention) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """characters: [batch, length] → [batch, length, vocabulary]."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(characters))))
        return logits


class Trainer:
    """One model, its optimizer and its losses so far."""

    def __init__(
        self, vocabulary: int, attention: Attention, device: torch.device, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        self.model = TinyLM(vocabulary, attention).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        self.losses: list[float] = []

    def logits(self, characters: Tensor) -> Tensor:
        """The model in its dtype, the result in float32."""
        with self.autocast:
            logits: Tensor = self.model(characters)
        return logits.float()

    def step(self, batch: Tensor) -> None:
        """Learn from one batch [BATCH, CONTEXT + 1]."""
        loss = F.cross_entropy(self.logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


# ---- text ----------------------------------------------------------------------------------------


class Text:
    """Python's language reference as numbers, one per character."""

    def __init__(self, device: torch.device) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        self.data = torch.tensor([number[character] for character in text], device=device)
        self.random = torch.Generator().manual_seed(0)

    def batch(self) -> Tensor:
        """BATCH random excerpts, [BATCH, CONTEXT + 1]."""
        starts = torch.randint(len(self.data) - CONTEXT, (BATCH,), generator=self.random).tolist()
        return torch.stack([self.data[start : start + CONTEXT + 1] for start in starts])


@torch.no_grad()
def write(trainer: Trainer, text: Text, length: int = 300) -> str:
    """What the trained model writes after a line break."""
    random = torch.Generator().manual_seed(0)
    written = [text.characters.index("\n")]
    for _ in range(length):
        context = torch.tensor([written[-CONTEXT:]], device=text.data.device)
        chances = trainer.logits(context)[0, -1].div(0.8).softmax(-1).cpu()
        written.append(int(torch.multinomial(chances, 1, generator=random)))
    return "".join(text.characters[i] for i in written).strip()


# ---- training and comparing ----------------------------------------------------------------------


def train(trainers: dict[str, Trainer], text: Text, steps: int | None, seconds: float) -> None:
    """All models in step on the same batches, for a number of steps or, without one, for some time."""
    print(f"{'step':>6}" + "".join(f"{name:>12}" for name in trainers))
    start, step = time.perf_counter(), 0
    while step < steps if steps else time.perf_counter() - start < seconds:
        batch = text.batch()
        for trainer in trainers.values():
            trainer.step(batch)
        if step % 20 == 0:
            print(f"{step:>6}" + "".join(f"{t.losses[-1]:12.6f}" for t in trainers.values()), flush=True)
        step += 1


def differences(curve: list[float], reference: list[float]) -> list[float]:
    """Relative, step by step."""
    return [abs(a - b) / abs(b) for a, b in zip(curve, reference, strict=True)]


def spread(curve: list[float], reference: list[float]) -> float:
    """Root mean square of the relative differences."""
    squares = [d * d for d in differences(curve, reference)]
    return math.sqrt(sum(squares) / len(squares))


def compare(curves: Curves) -> dict[str, float | bool]:
    """The verdict and the numbers behind it. A loss that is not a number makes it false."""
    noise = {name: spread(curves[name], curves["exact"]) for name in ("sdpa", "mirrored")}
    ours = spread(curves["afc"], curves["exact"])
    return {
        "largest_relative_difference": max(differences(curves["afc"], curves["sdpa"])),
        "afc_from_exact": ours,
        "sdpa_from_exact": noise["sdpa"],
        "mirrored_from_exact": noise["mirrored"],
        "equal": ours <= 2 * max(*noise.values(), FLOAT32_ROUNDING),
    }


# ---- the plot ------------------------------------------------------------------------------------

PLOTTED = ("mirrored", "sdpa", "afc")  # back to front: the wide line shows behind the narrow one
COLOURS = {"mirrored": "#8d99ae", "sdpa": "#f2a541", "afc": "#1f3b73"}
STROKES = {"mirrored": 1.0, "sdpa": 5.0, "afc": 1.5}
PANEL, HEIGHT, MARGIN = 420, 260, 50


def panel(x0: float, title: str, curves: Curves, log: bool) -> list[str]:
    """One set of axes with its curves, as SVG elements; on a log axis zeros are left out."""
    points = {
        name: [(i, math.log10(y) if log else y) for i, y in enumerate(curve) if y > 0 or not log]
        for name, curve in curves.items()
    }
    heights = [y for curve in points.values() for _, y in curve if math.isfinite(y)] or [0.0]
    low, high = math.floor(min(heights)), math.ceil(max(heights))
    high += low == high
    last = max(1, *(len(curve) - 1 for curve in curves.values()))

    def place(x: float, y: float) -> str:
        return f"{x0 + PANEL * x / last:.1f},{MARGIN + HEIGHT * (high - y) / (high - low):.1f}"

    out = [f'<text x="{x0}" y="{MARGIN - 18}" font-weight="bold">{title}</text>']
    for tick in range(low, high + 1):
        y = MARGIN + HEIGHT * (high - tick) / (high - low)
        label = f"1e{tick}" if log else str(tick)
        out.append(f'<path d="M{x0} {y:.1f}h{PANEL}" stroke="#ddd"/>')
        out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for i, (name, curve) in enumerate(points.items()):
        line = " ".join(place(x, y) for x, y in curve if math.isfinite(y))
        style = f'stroke="{COLOURS[name]}" stroke-width="{STROKES[name]}"'
        out.append(f'<polyline points="{line}" fill="none" stroke-linejoin="round" {style}/>')
        legend = x0 + PANEL - 90, MARGIN + 14 + 18 * i
        out.append(f'<path d="M{legend[0]} {legend[1] - 4}h20" {style}/>')
        out.append(f'<text x="{legend[0] + 26}" y="{legend[1]}">{name}</text>')
    out.append(f'<text x="{x0 + PANEL}" y="{MARGIN + HEIGHT + 20}" text-anchor="end">step {last}</text>')
    return out


def plot(curves: Curves) -> str:
    """The losses, and on a log scale how far each curve is from the exact one."""
    drawn = {name: curves[name] for name in PLOTTED if name in curves}
    losses = {name: curve for name, curve in drawn.items() if name != "mirrored"}
    body = panel(MARGIN, "loss", losses, log=False)
    if "exact" in curves:
        distances = {name: differences(curve, curves["exact"]) for name, curve in drawn.items()}
        body += panel(PANEL + 2.6 * MARGIN, "relative distance from exact", distances, log=True)
    size = f'width="{2 * PANEL + 4 * MARGIN}" height="{HEIGHT + 2 * MARGIN}"'
    style = 'font-family="sans-serif" font-size="13"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([opening, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


# ---- the command line ----------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """The command line; exits with 2 if it makes no sense."""
    parser = argparse.ArgumentParser(description="Train a tiny language model with attention from afc.")
    add = parser.add_argument
    add("--attention", choices=("both", "afc", "sdpa"), default="both", help="default: both, and compare")
    add("--minutes", type=float, default=1.0, help="training time of all models together (default 1)")
    add("--steps", type=int, help="train this many steps instead")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on CUDA, else float32")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the curves")
    add("--json", type=Path, metavar="FILE.json", help="write the curves and the verdict")
    given = parser.parse_args()
    if given.minutes <= 0 or (given.steps is not None and given.steps < 1):
        parser.error("--minutes and --steps: expected more than 0")
    given.dtype = given.dtype or ("bfloat16" if given.device.startswith("cuda") else "float32")
    return given


def main() -> int:
    """Exit code 0, or 1 if the curves differ by more than float noise."""
    given = arguments()
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    text = Text(device)
    attentions: dict[str, Attention] = {"sdpa": sdpa, "exact": exact, "mirrored": mirrored}
    if given.attention != "sdpa":
        attentions = {"afc": afc_attention(device, dtype), **attentions}
    names = list(attentions) if given.attention == "both" else [given.attention]
    vocabulary = len(text.characters)
    trainers = {name: Trainer(vocabulary, attentions[name], device, dtype) for name in names}
    print(f"{len(text.data)} characters of Python's manual, {vocabulary} different; {device}, {given.dtype}")
    train(trainers, text, given.steps, 60 * given.minutes)
    print(f"\n{names[0]} writes:\n{write(trainers[names[0]], text)}\n")

    curves = {name: trainer.losses for name, trainer in trainers.items()}
    verdict = compare(curves) if given.attention == "both" else {}
    for what, value in verdict.items():
        print(f"{what.replace('_', ' ')}: {value if isinstance(value, bool) else f'{value:.3g}'}")
    if given.plot:
        given.plot.write_text(plot(curves), encoding="utf-8")
    if given.json:
        settings = {"device": given.device, "dtype": given.dtype, "steps": len(curves[names[0]])}
        given.json.write_text(json.dumps({**settings, **verdict, "loss": curves}, indent=1), encoding="utf-8")
    return 0 if verdict.get("equal", True) else 1


if __name__ == "__main__":
    sys.exit(main())
