# SPDX-License-Identifier: Apache-2.0
"""Blocks: what each slot may see, and the formula of a block with its arguments bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from afc.errors import Span
from afc.expr.evaluate import evaluate
from afc.expr.interval import Interval, interval
from afc.expr.nodes import Const, Expr, Formula, Op, Type, Var, variables
from afc.expr.operators import to_float
from afc.expr.printer import attn
from afc.expr.simplify import simplify
from afc.frontend import ast
from afc.frontend.report import Report, did_you_mean
from afc.frontend.scalars import Binding, Scope, TensorRef, as_int_result, expression, formula
from afc.ir.program import DIMENSIONS, INDEX_NAMES

INTEGER = Type.INT
MAX_INLINE_DEPTH = 32
AT_LEAST_ONE = {d: Interval(1, math.inf) for d in DIMENSIONS}  # where a formula is evaluated, there are rows
# Different sizes for all dimensions, to compare formulas of them: Dqk // 2 // 2 is Dqk // 4, M is not N.
SAMPLE = {d: 16 * prime for d, prime in zip(DIMENSIONS, (7, 11, 13, 17, 19, 23, 29), strict=True)}


@dataclass(frozen=True)
class Slot:
    """What a block of a kind may read by name, and what it returns."""

    inputs: Mapping[str, Type]
    dimensions: tuple[str, ...]
    result: Type
    results: int = 1


_INDICES = {name: INTEGER for name in INDEX_NAMES}

SLOTS: dict[str, Slot] = {
    "score": Slot({"s": Type.FLOAT, **_INDICES}, DIMENSIONS, Type.FLOAT),
    "mask": Slot(_INDICES, DIMENSIONS, Type.BOOL),
    "rotate": Slot(
        {
            "x0": Type.FLOAT,
            "x1": Type.FLOAT,
            "p": INTEGER,
            "c": INTEGER,
            "b": INTEGER,
            "h": INTEGER,
            "r": INTEGER,
        },
        (*DIMENSIONS, "D", "L"),
        Type.FLOAT,
        2,
    ),
    "row": Slot(
        {"x": Type.FLOAT, "c": INTEGER, "b": INTEGER, "h": INTEGER, "r": INTEGER},
        (*DIMENSIONS, "D", "L"),
        Type.FLOAT,
    ),
    "output": Slot(
        {"o": Type.FLOAT, "c": INTEGER, "b": INTEGER, "h": INTEGER, "m": INTEGER, "i": INTEGER},
        (*DIMENSIONS, "D"),
        Type.FLOAT,
    ),
    "weight": Slot({"p": Type.FLOAT, **_INDICES}, DIMENSIONS, Type.FLOAT),
    "normalizer": Slot(
        {"s": Type.FLOAT, "b": INTEGER, "h": INTEGER, "i": INTEGER, "m": INTEGER}, DIMENSIONS, Type.FLOAT
    ),
}

TYPES = {"float": Type.FLOAT, "int": Type.INT, "bool": Type.BOOL}


def option_type(parameter: ast.Parameter) -> Type:
    """Type of an option; without annotation a float."""
    return TYPES[parameter.type or "float"]


def new_dimensions(declaration: ast.Declaration) -> set[str]:
    """Capitalised names that the shapes of a block's tensors bind."""
    names: set[str] = set()
    for parameter in declaration.options:
        for extent in parameter.shape or ():
            names |= {n.id for n in _names(extent.size) if n.id[0].isupper()}
    return names - {p.name for p in declaration.options}


def _names(node: ast.Node) -> list[ast.Name]:
    match node:
        case ast.Name():
            return [node]
        case ast.Unary(operand=operand):
            return _names(operand)
        case ast.Binary(left=left, right=right):
            return _names(left) + _names(right)
        case _:
            return []


@dataclass(frozen=True)
class RuntimeBound:
    """`value > limit` must hold but can only be checked at a call; `what` names it in messages."""

    value: Expr
    limit: float
    what: str
    span: Span


class Blocks:
    """Checks and instantiates the blocks of a library."""

    def __init__(self, declarations: Mapping[str, ast.Declaration], report: Report) -> None:
        self.declarations = declarations
        self.report = report
        self.functions = {
            n: d for n, d in declarations.items() if d.kind in ("fn", "mask", "score", "weight")
        }
        self.runtime_bounds: list[RuntimeBound] = []
        self.reserved: frozenset[str] = frozenset()  # parameters of the attention that is being checked

    def check_alone(self, declaration: ast.Declaration) -> None:
        """Check a block without a caller: options are variables of their declared type."""
        if declaration.kind == "attention":
            return
        if declaration.kind == "fn" and self.is_macro(declaration):
            return
        options: dict[str, Binding] = {}
        for option in declaration.options:
            if option.shape is not None:
                options[option.name] = TensorRef(option.name, len(option.shape), option_type(option))
            elif option.name not in INDEX_NAMES:
                options[option.name] = Var(option.name, option_type(option))
        self.instantiate(declaration, options, {})

    def is_macro(self, declaration: ast.Declaration, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a `fn` works on rows and scores (it reaches `dot`), not on numbers."""
        calls = [c for a in declaration.body for c in _calls(a.value)] + _calls(declaration.result)
        for name in calls:
            callee = self.declarations.get(name)
            if name == "dot" or (
                callee is not None
                and callee.kind == "fn"
                and name not in seen
                and self.is_macro(callee, seen | {declaration.name})
            ):
                return True
        return False

    def instantiate(
        self, declaration: ast.Declaration, options: Mapping[str, Binding], dimensions: Mapping[str, Expr]
    ) -> Formula | None:
        """The block's formula with `options` bound; `dimensions` gives values to D and L of a rotation."""
        names = self._inputs(declaration)
        if names is None:
            return None
        slot = SLOTS.get(declaration.kind)
        bound: dict[str, Binding] = {d: Var(d, INTEGER) for d in (slot.dimensions if slot else DIMENSIONS)}
        bound |= own_dimensions(declaration, options)
        bound |= dimensions
        scope = Scope(
            {**bound, **names, **options},
            self.report,
            self.functions,
            self.inline,
            require_positive=self.require_positive,
            reserved=self.reserved,
            width=dimensions.get("D", Var("D", INTEGER)) if declaration.kind in ("row", "output") else None,
        )
        result = formula(declaration, scope)
        return None if result is None else self._result(declaration, result)

    def require_positive(self, divisor: Expr, symbol: str, span: Span) -> None:
        """A divisor must be greater than 0: proven here, or checked at every call."""
        if interval(divisor, AT_LEAST_ONE).lo > 0:
            return
        match divisor:
            case Op(name="add" | "mul", args=(left, right)):
                self.require_positive(left, symbol, span)
                self.require_positive(right, symbol, span)
            case _:
                self.runtime_bounds.append(RuntimeBound(divisor, 0.0, f"the divisor of `{symbol}`", span))

    def _inputs(self, declaration: ast.Declaration) -> dict[str, Binding] | None:
        if declaration.kind == "fn":
            return {p.name: Var(p.name, option_type(p) if p.type else INTEGER) for p in declaration.inputs}
        allowed = SLOTS[declaration.kind].inputs
        extra = [p for p in declaration.options if p.shape is None and p.type is None and p.name in allowed]
        wrong = [p for p in declaration.inputs if p.name not in allowed]
        for parameter in wrong:
            self.report.error(
                "E0115",
                f"a {declaration.kind} block cannot see `{parameter.name}`",
                parameter.span,
                hint=f"it may name any of: {', '.join(allowed)}",
            )
        if wrong:
            return None
        return {p.name: Var(p.name, allowed[p.name]) for p in (*declaration.inputs, *extra)}

    def _result(self, declaration: ast.Declaration, result: Formula) -> Formula | None:
        slot = SLOTS.get(declaration.kind)
        if slot is None:
            return result
        if len(result.results) != slot.results:
            self.report.error(
                "E0116",
                f"a {declaration.kind} block returns {slot.results} value(s), "
                f"this returns {len(result.results)}",
                declaration.result.span,
            )
            return None
        converted = []
        for value in result.results:
            if slot.result is Type.FLOAT and value.type is Type.INT:
                value = to_float(value)
            if value.type is not slot.result:
                self.report.error(
                    "E0103",
                    f"a {declaration.kind} block returns {slot.result.value}, "
                    f"this returns {value.type.value}",
                    declaration.result.span,
                )
                return None
            converted.append(value)
        return Formula(tuple(converted), result.lets)

    def inline(
        self, declaration: ast.Declaration, node: ast.Call, args: list[Expr], scope: Scope
    ) -> Expr | None:
        """A function, mask, score or weight block called inside a formula."""
        if scope.depth >= MAX_INLINE_DEPTH:
            self.report.error(
                "E0117", f"`{declaration.name}` calls itself; recursion has no meaning here", node.span
            )
            return None
        if len(args) > len(declaration.inputs):
            self.report.error(
                "E0106",
                f"`{declaration.name}` takes {len(declaration.inputs)} argument(s) before `;`, "
                f"not {len(args)}",
                node.span,
            )
            return None
        options = self.bind_options(declaration, node, scope, inputs_too=len(args))
        names: dict[str, Binding] = {d: Var(d, INTEGER) for d in DIMENSIONS}
        names |= own_dimensions(declaration, options or {})
        types = SLOTS[declaration.kind].inputs if declaration.kind in SLOTS else {}
        for parameter, arg in zip(declaration.inputs, args, strict=False):
            wanted = types.get(parameter.name, option_type(parameter) if parameter.type else arg.type)
            if not convertible(arg.type, wanted):
                self.report.error(
                    "E0103",
                    f"`{parameter.name}` of `{declaration.name}` must be {wanted.value}, "
                    f"not {arg.type.value}",
                    node.span,
                )
                return None
            names[parameter.name] = to_float(arg) if wanted is Type.FLOAT else arg
        if options is None:
            return None
        prefix = self._prefix(declaration.name, scope)
        inner = Scope(
            {**names, **options},
            self.report,
            self.functions,
            self.inline,
            scope.lets,
            prefix,
            scope.depth + 1,
            self.require_positive,
            scope.reserved,
        )
        result = formula(declaration, inner)
        if result is None:
            return None
        value = result.result
        return as_int_result(value) if declaration.result_type == "int" else value

    @staticmethod
    def _prefix(name: str, scope: Scope) -> str:
        taken = {let.name for let in scope.lets}
        prefix, count = f"{name}_", 1
        while any(t.startswith(prefix) for t in taken):
            count += 1
            prefix = f"{name}{count}_"
        return prefix

    def bind_options(
        self,
        declaration: ast.Declaration,
        node: ast.Call,
        scope: Scope,
        inputs_too: int | None = None,
        dimensions: Mapping[str, Expr] | None = None,
    ) -> dict[str, Binding] | None:
        """Values of a call's named arguments, defaults filled in; checks names, types and `> bound`.

        `inputs_too`: inputs from this position on may have defaults and be named too (functions).
        `dimensions`: values of D and L, which the shapes of a rotation's tensors may name.
        """
        given = {k.name: k for k in node.keywords}
        parameters = list(declaration.options)
        if inputs_too is not None:
            parameters = [*declaration.inputs[inputs_too:], *parameters]
        index_names = SLOTS[declaration.kind].inputs if declaration.kind in SLOTS else {}
        parameters = [p for p in parameters if p.shape is not None or p.type or p.name not in index_names]
        ok = self._known_names(declaration, node, {p.name for p in parameters})
        bound: dict[str, Binding] = {}
        for parameter in parameters:
            value = self._option(declaration, parameter, given.get(parameter.name), node, scope, bound)
            if value is None:
                ok = False
            else:
                bound[parameter.name] = value
        return bound if ok and self._shapes(declaration, bound, node, dimensions or {}) else None

    def _shapes(
        self,
        declaration: ast.Declaration,
        bound: Mapping[str, Binding],
        node: ast.Call,
        dimensions: Mapping[str, Expr],
    ) -> bool:
        """Report E0201 where a tensor's declared sizes contradict those of the block."""
        names: dict[str, Binding] = {d: Var(d, INTEGER) for d in (*DIMENSIONS, "D", "L")}
        names |= dimensions
        scalars = {n: b for n, b in bound.items() if not isinstance(b, TensorRef)}
        scope = Scope(
            {**names, **own_dimensions(declaration, bound), **scalars},
            self.report,
            self.functions,
            self.inline,
        )
        ok = True
        for parameter in declaration.options:
            tensor = bound.get(parameter.name)
            if not isinstance(tensor, TensorRef) or parameter.shape is None:
                continue
            for axis, (wanted, given) in enumerate(zip(parameter.shape, tensor.shape, strict=False)):
                size = expression(wanted.size, scope)
                if size is None or not contradict(simplify(size), given.size):
                    continue
                self.report.error(
                    "E0201",
                    f"dimension {axis} of `{parameter.name}` of `{declaration.name}` has size "
                    f"{attn(simplify(size))}; that of `{tensor.name}` has {attn(given.size)}",
                    node.span,
                    hint=f"declare `1|{attn(size)}`, which also takes size 1" if wanted.broadcast else None,
                )
                ok = False
        return ok

    def _known_names(self, declaration: ast.Declaration, node: ast.Call, names: set[str]) -> bool:
        ok = True
        for position, keyword in enumerate(node.keywords):
            if keyword.name not in names:
                options = ", ".join(sorted(names)) or "none"
                self.report.error(
                    "E0118",
                    f"`{declaration.name}` has no option `{keyword.name}`",
                    keyword.span,
                    hint=did_you_mean(keyword.name, names) or f"its options: {options}",
                )
                ok = False
            elif keyword.name in [k.name for k in node.keywords[:position]]:
                self.report.error("E0119", f"option `{keyword.name}` is given twice", keyword.span)
                ok = False
        return ok

    def _option(
        self,
        declaration: ast.Declaration,
        parameter: ast.Parameter,
        keyword: ast.Keyword | None,
        node: ast.Call,
        scope: Scope,
        bound: Mapping[str, Binding],
    ) -> Binding | None:
        if keyword is None and parameter.default is None:
            self.report.error(
                "E0120",
                f"`{declaration.name}` needs a value for `{parameter.name}`",
                node.span,
                hint=f"write `{declaration.name}(...; {parameter.name} = ...)`",
            )
            return None
        if parameter.shape is not None:
            assert keyword is not None or parameter.default is not None
            return self._tensor(declaration, parameter, keyword, scope)
        if keyword is not None:
            value = expression(keyword.value, scope)
            span = keyword.span
        else:
            assert parameter.default is not None
            dims = {d: Var(d, INTEGER) for d in DIMENSIONS}
            inner = Scope({**dims, **bound}, self.report, self.functions, self.inline, depth=scope.depth + 1)
            value, span = expression(parameter.default, inner), parameter.span
        if value is None:
            return None
        wanted = option_type(parameter)
        if not convertible(value.type, wanted):
            self.report.error(
                "E0103",
                f"option `{parameter.name}` of `{declaration.name}` must be {wanted.value}, "
                f"not {value.type.value}",
                span,
            )
            return None
        value = simplify(to_float(value) if wanted is Type.FLOAT else value)
        return value if self._bound(declaration, parameter, value, span, scope) else None

    def _tensor(
        self,
        declaration: ast.Declaration,
        parameter: ast.Parameter,
        keyword: ast.Keyword | None,
        scope: Scope,
    ) -> Binding | None:
        node = keyword.value if keyword is not None else parameter.default
        assert node is not None and parameter.shape is not None
        rank = len(parameter.shape)
        binding = scope.names.get(node.id) if isinstance(node, ast.Name) else None
        if not isinstance(binding, TensorRef):
            name = node.id if isinstance(node, ast.Name) else parameter.name
            self.report.error(
                "E0121",
                f"option `{parameter.name}` of `{declaration.name}` must be a tensor of rank {rank}",
                node.span,
                hint=f"declare it in the attention's signature: `{name}[...]`",
            )
            return None
        if binding.rank != rank or binding.type is not option_type(parameter):
            self.report.error(
                "E0201",
                f"`{parameter.name}` of `{declaration.name}` is a {option_type(parameter).value} tensor "
                f"of rank {rank}; `{binding.name}` is {binding.type.value} of rank {binding.rank}",
                node.span,
            )
            return None
        return binding

    def _bound(
        self, declaration: ast.Declaration, parameter: ast.Parameter, value: Expr, span: Span, scope: Scope
    ) -> bool:
        if parameter.bound is None:
            return True
        limit = expression(parameter.bound, scope)
        if not isinstance(limit, Const):
            self.report.error("E0122", "a bound is a literal", parameter.bound.span)
            return False
        if isinstance(value, Const) and not value.value > limit.value:
            self.report.error(
                "E0301",
                f"`{parameter.name}` of `{declaration.name}` must be greater than {limit.value}, "
                f"not {value.value}",
                span,
            )
            return False
        if not isinstance(value, Const):
            self.runtime_bounds.append(
                RuntimeBound(value, float(limit.value), f"`{declaration.name}; {parameter.name}`", span)
            )
        return True


def own_dimensions(declaration: ast.Declaration, options: Mapping[str, Binding]) -> dict[str, Binding]:
    """Sizes that the shapes of a block's tensors name: those of the tensors given, the first one deciding."""
    found: dict[str, Binding] = {}
    own = new_dimensions(declaration) - {*DIMENSIONS, "D", "L"}
    for parameter in declaration.options:
        tensor = options.get(parameter.name)
        if isinstance(tensor, TensorRef):
            for wanted, given in zip(parameter.shape or (), tensor.shape, strict=False):
                if isinstance(wanted.size, ast.Name) and wanted.size.id in own:
                    found.setdefault(wanted.size.id, given.size)
    return {**{d: Var(d, INTEGER) for d in own}, **found}


def contradict(wanted: Expr, given: Expr) -> bool:
    """Whether two sizes made of the dimensions of q, k and v alone differ; others may be equal at a call."""
    known = {*SAMPLE}
    if wanted == given or not (variables(wanted) <= known and variables(given) <= known):
        return False
    return bool(evaluate(wanted, SAMPLE) != evaluate(given, SAMPLE))


def convertible(given: Type, wanted: Type) -> bool:
    """Whether a value may stand where another type is asked for: int becomes float, nothing else changes."""
    return given is wanted or (given is Type.INT and wanted is Type.FLOAT)


def call_text(declaration: ast.Declaration, options: dict[str, Binding]) -> str:
    """How a block reads with its options, e.g. `softcap(cap = 50.0)`."""
    parts = []
    for name, value in options.items():
        parts.append(f"{name} = {value.name if isinstance(value, TensorRef) else attn(value)}")
    return f"{declaration.name}({', '.join(parts)})" if parts else declaration.name


def _calls(node: ast.Node) -> list[str]:
    match node:
        case ast.Call(function=function, args=args, keywords=keywords):
            nested = [c for a in args for c in _calls(a)] + [c for k in keywords for c in _calls(k.value)]
            return [function, *nested]
        case ast.Unary(operand=operand):
            return _calls(operand)
        case ast.Binary(left=left, right=right):
            return _calls(left) + _calls(right)
        case ast.Conditional(condition=condition, then=then, otherwise=otherwise):
            return _calls(condition) + _calls(then) + _calls(otherwise)
        case ast.Compare(operands=operands):
            return [c for o in operands for c in _calls(o)]
        case ast.Index(indices=indices):
            return [c for i in indices for c in _calls(i)]
        case ast.Items(items=items):
            return [c for i in items for c in _calls(i)]
        case _:
            return []
