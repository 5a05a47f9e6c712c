# SPDX-License-Identifier: Apache-2.0
"""What is timed: cells (one pass of one attention at one shape) and the groups they come in."""

from __future__ import annotations

from dataclasses import dataclass, replace

DTYPES = ("float64", "float32", "bfloat16", "float16")
MASKS = ("causal", "full")
PASSES = ("fwd", "bwd")

CAUSAL_PROGRAM = "bench/programs/causal.attn:causal_attention"
FULL_PROGRAM = "bench/programs/full.attn:full_attention"
ROPE_PROGRAM = "examples/llama.attn:llama"


@dataclass(frozen=True)
class Cell:
    """One pass of self-attention over N tokens.

    ``program`` is ``path:name``, the path relative to the repository. ``rope_base`` is the base of a
    half-split rotation of q and k (inside the program for afc, in PyTorch for the others); None means no
    rotation.
    """

    group: str
    pass_: str
    B: int
    Hq: int
    Hk: int
    N: int
    D: int
    mask: str
    dtype: str
    program: str
    rope_base: float | None = None

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ("pass_", self.pass_, PASSES),
            ("mask", self.mask, MASKS),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in allowed:
                raise ValueError(f"{field}: expected one of {', '.join(allowed)}, got {value!r}")
        for field, size in (("B", self.B), ("Hq", self.Hq), ("Hk", self.Hk), ("N", self.N), ("D", self.D)):
            if size < 1:
                raise ValueError(f"{field}: expected a positive size, got {size}")
        if self.Hq % self.Hk:
            raise ValueError(f"Hq: expected a multiple of Hk = {self.Hk}, got {self.Hq}")

    @property
    def name(self) -> str:
        """``plain fwd causal D128 N8192 B2 H16/16 bfloat16``: unique among cells."""
        parts = (
            self.group,
            self.pass_,
            self.mask,
            f"D{self.D}",
            f"N{self.N}",
            f"B{self.B}",
            f"H{self.Hq}/{self.Hk}",
            self.dtype,
        )
        return " ".join(parts)

    @property
    def flop(self) -> float:
        """Floating-point operations of one call, by the convention of ``attention_flop``."""
        return attention_flop(
            self.pass_, self.B, self.Hq, self.N, self.N, self.D, self.D, self.mask == "causal"
        )


def attention_flop(pass_: str, B: int, Hq: int, M: int, N: int, Dqk: int, Dv: int, causal: bool) -> float:
    """The field's count: forward 2·B·Hq·M·N·(Dqk + Dv), half of it if causal, backward 2.5 times that.

    Rotations, masks and exponentials count as nothing, so systems that do more of them do not look faster.
    """
    forward = 2.0 * B * Hq * M * N * (Dqk + Dv)
    return forward * (0.5 if causal else 1.0) * (2.5 if pass_ == "bwd" else 1.0)


def _both_passes(cell: Cell) -> tuple[Cell, Cell]:
    return cell, replace(cell, pass_="bwd")


def _plain() -> list[Cell]:
    shapes = [(D, H, B, N) for D, H in ((128, 16), (64, 32)) for B, N in ((8, 2048), (2, 8192))]
    return [
        cell
        for D, H, B, N in shapes
        for cell in _both_passes(Cell("plain", "fwd", B, H, H, N, D, "causal", "bfloat16", CAUSAL_PROGRAM))
    ]


def _grid() -> list[Cell]:
    heads = ((128, 16), (64, 32))
    shapes = [(D, H, m, B, N) for D, H in heads for m in MASKS for B, N in ((8, 2048), (2, 8192), (1, 16384))]
    programs = {"causal": CAUSAL_PROGRAM, "full": FULL_PROGRAM}
    return [
        cell
        for D, H, mask, B, N in shapes
        for cell in _both_passes(Cell("grid", "fwd", B, H, H, N, D, mask, "bfloat16", programs[mask]))
    ]


def _rope() -> list[Cell]:
    shapes = [(Hq, Hk, B, N) for Hq, Hk in ((32, 8), (16, 16)) for B, N in ((8, 2048), (2, 8192))]
    return [
        cell
        for Hq, Hk, B, N in shapes
        for cell in _both_passes(
            Cell("rope", "fwd", B, Hq, Hk, N, 128, "causal", "bfloat16", ROPE_PROGRAM, rope_base=500000.0)
        )
    ]


def _smoke() -> list[Cell]:
    plain = Cell("smoke", "fwd", 1, 4, 2, 300, 64, "causal", "bfloat16", CAUSAL_PROGRAM)
    full = replace(plain, mask="full", program=FULL_PROGRAM)
    rope = replace(plain, D=32, N=256, Hk=4, program=ROPE_PROGRAM, rope_base=500000.0)
    return [cell for forward in (plain, full, rope) for cell in _both_passes(forward)]


GROUPS: dict[str, tuple[Cell, ...]] = {
    "plain": tuple(_plain()),
    "grid": tuple(_grid()),
    "rope": tuple(_rope()),
    "smoke": tuple(_smoke()),
}


def select(
    groups: list[str], passes: list[str], containing: str = "", dtype: str | None = None
) -> list[Cell]:
    """Cells of the groups, in order, whose pass is listed and whose name has every word of ``containing``.

    ``dtype`` replaces the cells' own. Raises ValueError for an unknown group or if nothing is left.
    """
    unknown = [g for g in groups if g not in GROUPS]
    if unknown:
        raise ValueError(f"group: expected some of {', '.join(GROUPS)}, got {unknown[0]!r}")
    cells = [cell for group in groups for cell in GROUPS[group] if cell.pass_ in passes]
    if dtype is not None:
        cells = [replace(cell, dtype=dtype) for cell in cells]
    cells = [cell for cell in cells if all(word in cell.name.split() for word in containing.split())]
    if not cells:
        raise ValueError(f"no cell in {', '.join(groups)} matches pass {'/'.join(passes)} and {containing!r}")
    return cells
