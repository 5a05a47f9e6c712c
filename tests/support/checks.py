# SPDX-License-Identifier: Apache-2.0
"""Running a kernel and its references on the same inputs, and the derived tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.dense import Variant

Tensor = torch.Tensor
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@dataclass
class Outcome:
    """Output, LSE and gradients of one run, as float64."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    learned: dict[str, Tensor]


def poison(device: str = "cpu", megabytes: int = 64) -> None:
    """Fill memory with NaN and free it, so that recycled buffers come back full of NaN."""
    blocks = [torch.full((megabytes * 2**18 // n,), torch.nan, device=device) for n in (1, 2, 4, 8, 64)]
    blocks += [torch.full((2**k,), torch.nan, device=device) for k in range(4, 18)]
    del blocks


def inputs(
    b: int,
    h: int,
    hk: int,
    m: int,
    n: int,
    dqk: int,
    dv: int,
    dtype: torch.dtype,
    device: str = "cpu",
    layout: str = "contiguous",
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh random q, k, v in a layout: contiguous, transposed (rows before heads in memory), sliced,
    expanded.
    """

    def make(heads: int, rows: int, d: int) -> Tensor:
        def fresh(*shape: int) -> Tensor:
            return (torch.randn(*shape, dtype=torch.float64) * scale).to(device, dtype)

        if layout == "transposed":
            return fresh(b, rows, heads, d).transpose(1, 2)
        if layout == "sliced":
            return fresh(b, heads, rows + 5, 2 * d)[:, :, 3 : rows + 3, d:]
        if layout == "expanded":
            return fresh(1, heads, rows, d).expand(b, heads, rows, d)
        return fresh(b, heads, rows, d)

    return make(h, m, dqk), make(hk, n, dqk), make(hk, n, dv)


def run(
    call: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    extras: dict[str, Any],
    learned: Sequence[str] = (),
) -> Outcome:
    """Forward and backward of `call(q, k, v, **extras) -> (o, lse)`; `learned`: extras with a gradient."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    extras = extras | {name: extras[name].detach().requires_grad_() for name in learned}
    o, lse = call(q, k, v, **extras)
    loss = (o.double() * do.double()).sum()
    if dlse is not None:
        finite = torch.isfinite(lse)
        loss = loss + (torch.where(finite, lse.double(), 0.0) * dlse.double()).sum()
    leaves = (q, k, v, *(extras[name] for name in learned))
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    zero = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]
    dq, dk, dv, *rest = (x.detach().double() for x in zero)
    return Outcome(
        o.detach().double(), lse.detach().double(), dq, dk, dv, dict(zip(learned, rest, strict=True))
    )


def relative(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius error of a against b; infinities must agree exactly, NaN counts as infinite
    error.
    """
    infinite = torch.isinf(b)
    if not torch.equal(a[infinite], b[infinite]):
        return float("inf")
    a, b = a[~infinite], b[~infinite]
    error, norm = (a - b).norm().item(), b.norm().item()
    if error == 0.0:
        return 0.0
    return float("inf") if error != error else error / max(norm, 1e-300)


def on_the_cpu(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference for tensors on the GPU; it computes, and its gradients pass, on the CPU."""

    def down(x: Any) -> Any:
        return x.cpu() if isinstance(x, Tensor) else x

    def moved(*rows: Any, **options: Any) -> Any:
        results = reference(*map(down, rows), **{n: down(x) for n, x in options.items()})
        return tuple(x.cuda() for x in results)

    return moved


def compare(
    call: Callable[..., Any],
    variant: Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: dict[str, Any],
    with_dlse: bool = True,
    learned: Sequence[str] = (),
) -> dict[str, tuple[float, float]]:
    """Errors of o, lse and gradients as (ours, allowed): twice that of dense math in the input dtype, plus a
    floor.
    """
    dtype = q.dtype
    shape = (*q.shape[:3], v.shape[3])
    do = torch.randn(shape, dtype=torch.float64).to(q.device, dtype)
    dlse = torch.randn(q.shape[:3], dtype=torch.float64).to(q.device) if with_dlse else None
    double = {
        n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in extras.items()
    }
    truth = run(variant.reference, q.double(), k.double(), v.double(), do, dlse, double, learned)
    yard = run(variant.reference, q, k, v, do, dlse, extras, learned)
    poison(q.device.type)
    ours = run(lambda *a, **x: call(*a, **x, return_lse=True), q, k, v, do, dlse, extras, learned)
    floors = _floors(q, k, v, do, truth)
    found = {}
    for name in ("o", "lse", "dq", "dk", "dv"):
        want = getattr(truth, name)
        found[name] = (
            relative(getattr(ours, name), want),
            2 * relative(getattr(yard, name), want) + floors[name],
        )
    for name in learned:
        want = truth.learned[name]
        allowed = 2 * relative(yard.learned[name], want) + floors["learned"]
        found[name] = relative(ours.learned[name], want), allowed
    return found


def _floors(q: Tensor, k: Tensor, v: Tensor, do: Tensor, truth: Outcome) -> dict[str, float]:
    """Relative errors that the algorithm itself may have, whatever luck the yardstick had.

    o: one rounding to the dtype (in float64, where reference and yardstick are one: the bound of a sum of
    Dqk + N
    products). LSE: the roundings of maximum, product, logarithm and sum. Gradients: P = exp(s - LSE) from an
    LSE rounded
    once has relative error eps |LSE| / 2, and dP - delta carries an error of eps of each,
    |dP_ij| <= |dO_i| |V_j|, which reaches dQ through |K| and dK through |Q|.
    """
    dtype = q.dtype
    double = dtype is torch.float64
    eps = torch.finfo(torch.float64 if double else torch.float32).eps
    own = torch.finfo(dtype).eps * ((q.shape[3] + k.shape[2]) if double else 1)
    largest = torch.nan_to_num(truth.lse, neginf=0.0).abs().amax().item() if truth.lse.numel() else 0.0
    product = eps * (2 + 0.5 * largest)
    rows = {
        n: x.double().norm(dim=-1).amax().item() if x.numel() else 0.0
        for n, x in (("q", q), ("k", k), ("v", v))
    }
    size = do.double().norm().item() * rows["v"] * float(q.shape[3]) ** -0.5
    reach = {"dq": size * rows["k"], "dk": size * rows["q"], "dv": do.double().norm().item()}
    gradient = {
        n: own + product * max(1.0, x / max(getattr(truth, n).norm().item(), 1e-300))
        for n, x in reach.items()
    }
    # A captured tensor's gradient sums the same dS times coefficients, which enter as q and k do.
    gradient["learned"] = max(gradient["dq"], gradient["dk"])
    return {"o": own, "lse": 4 * eps + (own if double else 0.0), **gradient}


def failures(found: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The entries whose error is above what is allowed."""
    return {n: pair for n, pair in found.items() if not pair[0] <= pair[1]}


def without_lse(call: Callable[..., Any]) -> Callable[..., Any]:
    """Gives an attention that has no LSE the LSE of its reference, which is 0."""

    def attention(*args: Any, return_lse: bool = False, **options: Any) -> Any:
        o = call(*args, **options)
        return (o, o.float().sum(-1) * 0) if return_lse else o

    return attention
