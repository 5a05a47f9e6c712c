# SPDX-License-Identifier: Apache-2.0
"""Value of a formula on NumPy arrays (float64 and int64): the definition of the language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from afc.expr.nodes import Const, Expr, Formula, Load, Op, Type, Var
from afc.expr.operators import OPERATORS


def evaluate(expr: Expr, env: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> Any:
    """Value of `expr`; arrays in `env` broadcast.

    A read outside a captured tensor is NaN (float), false (bool) or 0 (int), never a neighbour's value.
    Raises KeyError for a name that `env` lacks.
    """
    with np.errstate(all="ignore"):
        return _value(expr, env, tensors or {})


def evaluate_formula(
    formula: Formula, env: Mapping[str, Any], tensors: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    """Values of all results, intermediate values computed once each."""
    scope = dict(env)
    for let in formula.lets:
        scope[let.name] = evaluate(let.value, scope, tensors)
    return tuple(evaluate(e, scope, tensors) for e in formula.results)


def _value(expr: Expr, env: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    match expr:
        case Const(value=value):
            return value
        case Var(name=name):
            return env[name]
        case Load(tensor=name, indices=indices, type=kind):
            return _read(np.asarray(tensors[name]), [_value(i, env, tensors) for i in indices], kind)
        case Op(name=name, args=args):
            return OPERATORS[name].numpy(*(_value(a, env, tensors) for a in args))


def _read(tensor: Any, indices: list[Any], kind: Type) -> Any:
    """Guarded gather; a dimension of size 1 broadcasts (`1|B`)."""
    index = np.broadcast_arrays(*[np.asarray(i, np.int64) for i in indices]) if indices else []
    inside: Any = np.True_
    safe = []
    for axis, position in enumerate(index):
        size = tensor.shape[axis]
        position = np.zeros_like(position) if size == 1 else position
        inside = inside & (position >= 0) & (position < size)
        safe.append(np.clip(position, 0, max(size - 1, 0)))
    value = np.zeros(np.shape(inside), tensor.dtype) if tensor.size == 0 else tensor[tuple(safe)]
    outside = {Type.FLOAT: np.nan, Type.BOOL: False, Type.INT: 0}[kind]
    if kind is Type.FLOAT:
        value = np.asarray(value, np.float64)
    return np.where(inside, value, outside)
