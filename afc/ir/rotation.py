# SPDX-License-Identifier: Apache-2.0
"""The matrix of a rotation as a few stored values: rope has four entries but two values, cos and sin."""

from __future__ import annotations

from collections.abc import Iterable

from afc.expr.nodes import Const, Expr, Op


def distinct_entries(results: Iterable[Expr]) -> tuple[tuple[Expr, ...], tuple[str, str, str, str]]:
    """Distinct entries up to sign, and (a00, a01, a10, a11) in terms of `c[...]`; constants stay literals."""
    values: list[Expr] = []
    entries: list[str] = []
    for expr in results:
        if isinstance(expr, Const):
            entries.append(f"Real({expr.value!r})")
            continue
        negative = isinstance(expr, Op) and expr.name == "neg"
        bare = expr.args[0] if isinstance(expr, Op) and negative else expr
        if bare not in values:
            values.append(bare)
        entries.append(f"{'-' if negative else ''}c[{values.index(bare)}]")
    a00, a01, a10, a11 = entries
    return tuple(values), (a00, a01, a10, a11)
