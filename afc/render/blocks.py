# SPDX-License-Identifier: Apache-2.0
"""The author's blocks as C++ functions: one function per block, named as in the source, the same on every
target.

    struct Item, load_item          terms that depend on neither row nor column
    score, score_gradient           the score steps and their derivative
    log_extra                       logarithm of what the normalizer adds to the sum
    weight_factor                   what the weight blocks multiply the weight of an element by
    captured_gradients, captured_offset_<n>
                                    what an element adds to the gradients of captured tensors, and where
    captured_extra_gradients        the same for a row's extra term
    captured_weight_gradients       the same for the weight blocks of an element
    keep                            the mask
    keep_box                        the mask on a box of tiles, where runs are found by a test (stored)
    key_run, query_run              runs of indices from the bounds of the mask, or from that test; on GPUs
                                    of a batch entry, with its places, and up to its last key
    row_<q|k>_<n>, …_gradient       a row block and its derivative, in place; row_<q|k>_<n>_offset_<m>: where
                                    what it reads lies in its gradient
    output_<n>, …                   the same of an output block
    rotate_<q|k>_coefficients_<r>   entries of a rotation's matrices, in double: of (position, pair) or, where
                                    these are not enough, of (args, b, h, row, position, pair)
    rotate_<q|k>_gradient_<r>_<n>, rotate_<q|k>_offset_<r>_<n>
                                    what a pair adds to the gradient of a captured tensor, and where

`docs/architecture.md` has the contract with the templates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from afc.expr.exact import exact
from afc.expr.interval import EVERYTHING, INT32, Interval, interval
from afc.expr.nodes import (
    Const,
    Expr,
    Formula,
    Let,
    Load,
    Op,
    Type,
    Var,
    children,
    formula_exprs,
    map_formula,
    rewrite,
    variables,
    walk,
)
from afc.expr.operators import neg, sub, to_float
from afc.expr.printer import Cpp, attn
from afc.expr.simplify import simplify
from afc.ir.masks import Bound
from afc.ir.program import DIMENSIONS, CapturedRead, Program, Rotation, RowStep, Step, Transform
from afc.ir.rotation import dependence, distinct_entries
from afc.ir.tiled import Semantics
from afc.masks.boxes import reads
from afc.render.boxes import box_function
from afc.schedule.stored import tabled

POSITION = Interval(1 - 2**30, 2**30 - 1)  # so that a difference of positions fits 32 bits
SIZE = Interval(0, 2**30)
RANGES = {
    **{name: POSITION for name in ("i", "j", "q_origin", "k_origin", "position")},
    **{name: SIZE for name in ("m", "n", "b", "h", "M", "N", "B", "H", "Hk", "p", "c")},
    "Dqk": Interval(0, 2**16),
    "Dv": Interval(0, 2**16),
}
DIMENSION_TEXT = {
    "M": "int(args.M)",
    "N": "int(args.N)",
    "B": "int(args.B)",
    "H": "int(args.Hq)",
    "Hk": "int(args.Hk)",
}
BOUND_TEXT = {  # in 64 bits
    "M": "args.M",
    "N": "args.N",
    "B": "args.B",
    "H": "args.Hq",
    "Hk": "args.Hk",
    "q_origin": "args.q_origin",
    "k_origin": "args.k_origin",
}
INDICES = ("m", "n", "i", "j")
DISTANCE = Var("distance", Type.FLOAT)
_I, _J = Var("i", Type.INT), Var("j", Type.INT)
DISTANCES: dict[Expr, Expr] = {to_float(sub(_I, _J)): DISTANCE, to_float(sub(_J, _I)): neg(DISTANCE)}
ROW_INDICES = ("b", "h", "r")  # of a row block, of an output block
OUTPUT_INDICES = ("b", "h", "m", "i")
TAKEN = frozenset(
    [
        "alignas",
        "and",
        "auto",
        "bool",
        "break",
        "case",
        "char",
        "class",
        "const",
        "continue",
        "default",
        "delete",
        "do",
        "double",
        "else",
        "enum",
        "explicit",
        "extern",
        "false",
        "float",
        "for",
        "friend",
        "goto",
        "if",
        "inline",
        "int",
        "long",
        "namespace",
        "new",
        "not",
        "operator",
        "or",
        "private",
        "public",
        "register",
        "return",
        "short",
        "signed",
        "sizeof",
        "static",
        "struct",
        "switch",
        "template",
        "this",
        "throw",
        "true",
        "try",
        "typedef",
        "union",
        "unsigned",
        "using",
        "virtual",
        "void",
        "volatile",
        "while",
        "xor",
        "args",
        "item",
        "Item",
        "Real",
        "Run",
        "Limits",
        "s",
        "c",
        "afc",
        "tile",
        "ptx",
        "main",
        "score",
        "score_gradient",
        "keep",
        "log_extra",
        "weight_factor",
        "keep_box",
        "key_run",
        "query_run",
        "tables",
        "row",
        "Row",
        "load_row",
        "column",
        "Column",
        "load_column",
        "captured_gradients",
        "captured_extra_gradients",
        "captured_weight_gradients",
        "d",
        "gradients",
    ]
)
TABLE_LIMIT = 512
PAIR = ("x0", "x1", "d0_value", "d1_value")  # of a rotation: ahead of it, and the gradient behind it


@dataclass(frozen=True)
class Dialect:
    """What differs between targets in the text of blocks: literals, rows, where the runs come from.

    A row is one thread's, or that of several lanes of a warp: each takes some of the columns, and they add up
    their parts of a mean.
    """

    suffix: str  # of literals of type Real; empty: a cast
    table: str  # declaration of a constant table of doubles
    columns: str  # head of a loop over the columns of a row, of their number
    mean: str  # a mean from the sum of a thread's columns, of both and their number
    sums: tuple[str, str]  # type of the sums of what a row block reads, and how a column's term gets there
    plans: bool = False  # a kernel of its own finds the runs that bounds alone do not decide
    hoists: bool = False  # what scores and masks read by row or by column is loaded ahead of the elements
    distance: bool = False  # i - j as Real is a parameter of scores, which kernels need not convert each time
    places: str = ""  # parameter that has the origins and the number of keys of a batch entry; empty: `args`


CPU = Dialect(
    "",
    "static const double",
    "for (int c = 0; c < {0}; ++c)",
    "{0} /= Real({1});",
    ("double", "+="),
)
CUDA = Dialect(
    "f",
    "static __device__ const double",
    "for (int c = tile::row_lane(); c < {0}; c += tile::ROW_LANES)",
    "{0} = tile::row_sum({0}) / Real({1});",
    ("Real", "="),
    plans=True,
    hoists=True,
    distance=True,
    places="const tile::Places &places",
)


Axes = tuple[int, int, int, int]  # dimensions of a captured tensor that b, h, m, i alone index, -1: none


@dataclass(frozen=True)
class RotationReadText:
    """A read of a captured tensor marked `grad` in a rotation: slot, the functions that give what a pair
    adds and where, and the dimensions that b, h, the row and the position alone index.
    """

    slot: int
    gradient: str
    offset: str
    axes: Axes


@dataclass(frozen=True)
class RotationText:
    """How a rotation reads its coefficient table: number of distinct values, and the matrix in terms of
    c[...]. `plain`: its coefficients are a function of position and pair alone.
    """

    coefficients: int
    a00: str
    a01: str
    a10: str
    a11: str
    plain: bool
    reads: tuple[RotationReadText, ...] = ()


@dataclass(frozen=True)
class CapturedText:
    """A read of a captured tensor whose gradient is asked for, in the order of `gradients[...]`.

    `slot`: of the tensor; `offset`: call that gives the offset of the element in its gradient, -1 outside;
    `by_row`: the element depends on no key; `reads_position`: it depends on the query's position;
    `extra`: the read is in the normalizer's extra term; `weight`: in a weight block; `axes`: what indexes its
    dimensions; `load`: the read.
    """

    slot: int
    offset: str
    by_row: bool
    reads_position: bool
    extra: bool
    axes: Axes
    load: Load
    weight: bool


@dataclass(frozen=True)
class RowReadText:
    """A read of a captured tensor marked `grad` in a row or output block: slot, the call that gives its place
    in the gradient for batch b, head h and column c (of an output block also row m, position i; of q or k the
    row r, if it is `by_row`), and `axes` as in CapturedText, r for m.
    """

    slot: int
    offset: str
    axes: Axes
    load: Load
    by_row: bool


@dataclass(frozen=True)
class RowText:
    """A row or output block: its functions are `name` and `name`_gradient."""

    name: str
    reads: tuple[RowReadText, ...]


@dataclass(frozen=True)
class BlockText:
    """Everything the templates get from `render.blocks`."""

    text: str
    has_score: bool
    has_score_gradient: bool
    has_mask: bool
    has_extra: bool
    q_rotations: tuple[RotationText, ...]
    k_rotations: tuple[RotationText, ...]
    captured: tuple[CapturedText, ...] = ()
    q_rows: tuple[RowText, ...] = ()
    k_rows: tuple[RowText, ...] = ()
    outputs: tuple[RowText, ...] = ()
    has_weight: bool = False
    row_terms: bool = False  # score, score_gradient and keep take a `row`, from load_row
    column_terms: bool = False  # and a `column`, from load_column
    distance: bool = False  # score and score_gradient take i - j as `distance`


@dataclass(frozen=True)
class _Field:
    """A member of Item, Row or Column: C++ type and name, the text that loads it, the expression it stands
    for, and the variable that has it.
    """

    c_type: str
    name: str
    value: str
    expr: Expr
    of: str = "item"

    @property
    def member(self) -> str:
        """Text of the member."""
        return f"{self.of}.{self.name}"


def render_blocks(
    program: Program, semantics: Semantics, dialect: Dialect, stored: bool = False
) -> BlockText:
    """Text of all functions of a program, and what the templates need to know of them.

    `stored`: runs are found by testing tiles at each call, not from bounds alone.
    """
    return _Writer(program, semantics, dialect, stored).write()


class _Writer:
    def __init__(self, program: Program, semantics: Semantics, dialect: Dialect, stored: bool) -> None:
        self.program, self.semantics, self.dialect, self.stored = program, semantics, dialect, stored
        self.slots = {t.name: n for n, t in enumerate(program.tensors)}
        self.scalars = {p.name: n for n, p in enumerate(program.scalars)}
        sizes = _captured_sizes(program)
        self.dimensions = {**DIMENSION_TEXT, **{name: f"int({text})" for name, text in sizes.items()}}
        self.bound_names = {**BOUND_TEXT, **sizes}
        if dialect.places:
            self.bound_names |= {name: f"places.{name}" for name in ("q_origin", "k_origin")}
        scalars = {p.name: POSITION for p in program.scalars if p.type is Type.INT}
        ranges = {**RANGES, **dict.fromkeys(sizes, SIZE), **scalars}
        self.printer = Cpp("Real", dialect.suffix, self.dimensions, ranges, self.slots)
        self.distance = dialect.distance and any(
            e in DISTANCES
            for s, g in zip(semantics.scores, semantics.score_gradients, strict=True)
            for f in (s.formula, g)
            if f is not None
            for e in formula_exprs(f)
        )
        self.taken: set[str] = {*TAKEN, *([DISTANCE.name] if self.distance else [])}
        self.rotations: dict[object, str] = {}
        self.fields = self._fields()
        self.rows = self._terms("row", {"m", "i"}) if dialect.hoists else ()
        self.columns = self._terms("column", {"n", "j"}) if dialect.hoists else ()
        self.parts: list[str] = []
        self.score_calls: list[str] = []
        self.derivative_calls: list[str | None] = []

    def write(self) -> BlockText:
        self._item()
        self._struct("Row", "query", ("m", "i"), self.rows)
        self._struct("Column", "key", ("n", "j"), self.columns)
        self._score()
        self._extra()
        self._weight()
        captured = self._captured()
        self._mask()
        self._runs()
        q = [self._rotation("q", n, r) for n, r in enumerate(self.semantics.q_rotations)]
        k = [self._rotation("k", n, r) for n, r in enumerate(self.semantics.k_rotations)]
        rows = [self._rows("q", self.semantics.q_steps), self._rows("k", self.semantics.k_steps)]
        steps = enumerate(self.semantics.output_steps)
        outputs = [self._row(self._name(f"output_{n}"), step, OUTPUT_INDICES) for n, step in steps]
        gradient = any(g is not None for g in self.semantics.score_gradients)
        return BlockText(
            "\n\n".join(self.parts),
            bool(self.semantics.scores),
            gradient,
            self.semantics.mask.predicate is not None,
            self.semantics.log_extra is not None,
            tuple(q),
            tuple(k),
            captured,
            rows[0],
            rows[1],
            tuple(outputs),
            bool(self.semantics.weight_steps),
            bool(self.rows),
            bool(self.columns),
            self.distance,
        )

    # ---- terms of a work item -----------------------------------------------------------------------------

    def _formulas(self) -> list[Formula]:
        gradients = [g for g in self.semantics.score_gradients if g is not None]
        extra = self.semantics.log_extra
        return [
            *(s.formula for s in self.program.scores),
            *gradients,
            *((extra,) if extra is not None else ()),
            *(f for r in self.program.captured_reads for f in (r.coefficient, Formula(r.load.indices))),
            *(s.factor for s in self.semantics.weight_steps if s.factor is not None),
            *(s.formula for s in self.program.masks),
        ]

    def _fields(self) -> tuple[_Field, ...]:
        """Scalars, batch and head, and captured values that depend on neither row nor column."""
        found: dict[Expr, _Field] = {}
        for expr in (
            e
            for f in self._formulas()
            for x in (*(let.value for let in f.lets), *f.results)
            for e in self._leaves(x)
        ):
            if expr in found:
                continue
            if isinstance(expr, Var) and expr.name in self.scalars:
                member = {Type.FLOAT: "f", Type.INT: "i", Type.BOOL: "i"}[expr.type]
                text = f"{self._c_type(expr.type)}(args.scalar[{self.scalars[expr.name]}].{member})"
                found[expr] = _Field(self._c_type(expr.type), self._name(expr.name), text, expr)
            elif isinstance(expr, Var) and expr.name in ("b", "h"):
                found[expr] = _Field("int", expr.name, expr.name, expr)
            elif isinstance(expr, Load) and self._uniform(expr):
                name = self._name("_".join([expr.tensor, *(attn(i) for i in expr.indices)]))
                text = replace(self.printer, names={**self.dimensions, **self._scalar_text()}).text(expr)
                kind = "int64_t" if expr.type is Type.INT else self._c_type(expr.type)
                found[expr] = _Field(kind, name, text, expr)
        return tuple(found.values())

    def _element_formulas(self) -> list[Formula]:
        """Formulas that are computed for each element: of scores, their derivatives, and the mask."""
        gradients = [g for g in self.semantics.score_gradients if g is not None]
        scores = [s.formula for s in self.semantics.scores]
        return [*scores, *gradients, *(s.formula for s in self.program.masks)]

    def _terms(self, of: str, indices: set[str]) -> tuple[_Field, ...]:
        """The outermost reads of captured tensors that depend on the query, or on the key, alone."""
        allowed = {*indices, "b", "h", *self.dimensions, *self.scalars}
        found: dict[Expr, _Field] = {}

        def visit(expr: Expr) -> None:
            if isinstance(expr, Load) and variables(expr) <= allowed and variables(expr) & indices:
                if expr not in found:
                    name = self._name("_".join([expr.tensor, *(attn(i) for i in expr.indices)]))
                    kind = "int64_t" if expr.type is Type.INT else self._c_type(expr.type)
                    inner = self._with_fields(Formula((expr,)), hoisted=False).result
                    names = {**self.dimensions, **{f.member: f.member for f in self.fields}}
                    printer = replace(self.printer, names=names, ranges=self._ranges())
                    found[expr] = _Field(kind, name, printer.text(inner), expr, of)
                return
            for part in children(expr):
                visit(part)

        for formula in self._element_formulas():
            for expr in (*(let.value for let in formula.lets), *formula.results):
                visit(expr)
        return tuple(found.values())

    def _ranges(self) -> dict[str, Interval]:
        ints = {f"item.{f.name}": POSITION for f in self.fields if f.c_type == "int"}
        return dict(self.printer.ranges) | ints

    def _struct(self, name: str, what: str, indices: tuple[str, str], fields: tuple[_Field, ...]) -> None:
        """A struct of what is read for a query or a key, and the function that reads it."""
        if not fields:
            return
        members = "".join(f"\n  {f.c_type} {f.name};" for f in fields)
        loads = ",\n             ".join(f.value for f in fields)
        index, position = indices
        self.parts.append(
            f"// What scores and mask read of captured tensors for a {what}.\n"
            f"struct {name} {{{members}\n}};\n\n"
            f"AFC_FN {name} load_{name.lower()}(int {index}, int {position}, const Item &item, "
            f"const afc_args &args) {{\n  return {name}{{{loads}}};\n}}"
        )

    @property
    def _terms_text(self) -> tuple[str, str]:
        """Parameters and arguments of the functions of an element, behind its indices."""
        parameters = ", const Row &row" * bool(self.rows) + ", const Column &column" * bool(self.columns)
        return parameters, ", row" * bool(self.rows) + ", column" * bool(self.columns)

    def _leaves(self, expr: Expr) -> list[Expr]:
        """Variables and reads of captured tensors, outermost first; what a uniform read depends on is its
        own affair.
        """
        if isinstance(expr, Load) and self._uniform(expr):
            return [expr]
        nested = [leaf for part in children(expr) for leaf in self._leaves(part)]
        return [expr, *nested] if isinstance(expr, (Var, Load)) else nested

    def _scalar_text(self) -> dict[str, str]:
        members = {Type.FLOAT: "f", Type.INT: "i", Type.BOOL: "i"}
        return {
            p.name: f"args.scalar[{self.scalars[p.name]}].{members[p.type]}" for p in self.program.scalars
        }

    def _uniform(self, expr: Load) -> bool:
        inner = variables(expr)
        nested = any(isinstance(e, Load) for i in expr.indices for e in walk(i))
        return not (inner & {*INDICES, "s"}) and not nested and inner <= {"b", "h", *self.dimensions}

    @staticmethod
    def _c_type(kind: Type) -> str:
        return {Type.FLOAT: "Real", Type.INT: "int", Type.BOOL: "bool"}[kind]

    def _name(self, wanted: str) -> str:
        """A C++ identifier that is not taken."""
        base = "".join(c if c.isalnum() or c == "_" else "_" for c in wanted).strip("_") or "value"
        name, count = (base, 1) if base not in self.taken else (f"{base}_", 1)
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name

    def _item(self) -> None:
        members = "".join(f"\n  {f.c_type} {f.name};" for f in self.fields)
        loads = ", ".join(f.value for f in self.fields)
        self.parts.append(
            "// Terms that depend on neither the query nor the key.\n"
            f"struct Item {{{members}{chr(10) if members else ''}}};\n\n"
            "AFC_FN Item load_item(const afc_args &args, int b, int h) {\n"
            f"  return Item{{{loads}}};\n}}"
        )

    # ---- score steps --------------------------------------------------------------------------------------

    def _score(self) -> None:
        steps = self.semantics.scores
        if not steps:
            return
        calls, gradients = [], []
        for step, derivative in zip(steps, self.semantics.score_gradients, strict=True):
            name = self._name(step.block)
            call = self._function(name, step, self._apart(step.formula), "Real", takes_s=True)
            self.score_calls.append(call)
            gradient_call = None
            if derivative is not None:
                gradient_call = self._function(
                    self._name(f"{step.block}_gradient"),
                    step,
                    self._apart(derivative),
                    "Real",
                    takes_s=True,
                    note=f"Derivative of {step.block} with respect to s.",
                )
                gradients.append(f"gradient *= {gradient_call};")
            self.derivative_calls.append(gradient_call)
            gradients.append(f"s = {call};")
            calls.append(f"s = {call};")
        terms = ", Real distance" * self.distance + self._terms_text[0]
        signature = f"Real s, int m, int n, int i, int j{terms}, const Item &item, const afc_args &args"
        body = "\n  ".join(calls)
        self.parts.append(f"AFC_FN Real score({signature}) {{\n  {body}\n  return s;\n}}")
        if any(g is not None for g in self.semantics.score_gradients):
            while gradients and gradients[-1].startswith("s ="):
                gradients.pop()
            if len(gradients) == 1:
                body = f"return {gradients[0].removeprefix('gradient *= ').removesuffix(';')};"
            else:
                body = "\n  ".join(["Real gradient = 1;", *gradients, "return gradient;"])
            self.parts.append(
                "// d score / d s, without its constant factor.\n"
                f"AFC_FN Real score_gradient({signature}) {{\n  {body}\n}}"
            )

    def _extra(self) -> None:
        formula = self.semantics.log_extra
        if formula is None:
            return
        n = self.program.normalizer
        step = Step(n.block, formula, n.call, n.doc, n.span, n.origin)
        note = f"Logarithm of what {n.block} adds to the sum of a row."
        name = self._name(f"{n.block}_log_extra")
        call = self._function(name, step, formula, "Real", takes_s=False, note=note, hoisted=False)
        self.parts.append(
            "AFC_FN Real log_extra(int m, int i, const Item &item, const afc_args &args) {\n"
            f"  return {call};\n}}"
        )

    def _weight(self) -> None:
        calls = []
        for step in self.semantics.weight_steps:
            assert step.factor is not None
            note = f"What {step.block} multiplies the weight p by."
            name = self._name(step.block)
            calls.append(
                self._function(name, step, step.factor, "Real", takes_s=False, note=note, hoisted=False)
            )
        if calls:
            self.parts.append(
                "AFC_FN Real weight_factor(int m, int n, int i, int j, const Item &item, "
                f"const afc_args &args) {{\n  return {' * '.join(calls)};\n}}"
            )

    # ---- gradients of captured tensors --------------------------------------------------------------------

    def _captured(self) -> tuple[CapturedText, ...]:
        reads = self.program.captured_reads
        if not reads:
            return ()
        found = tuple(self._captured_read(n, read) for n, read in enumerate(reads))
        if any(read.score for read in reads):
            self._captured_gradients(reads)
        weights = [(n, read) for n, read in enumerate(reads) if read.weight]
        if weights:
            lines = [f"gradients[{n}] = {self._captured_term(read, '')};" for n, read in weights]
            self.parts.append(
                "// What an element adds to gradients of captured tensors through the weight blocks; d is\n"
                "// its weight ahead of them times the gradient of its weight behind them.\n"
                "AFC_FN void captured_weight_gradients(\n"
                "    Real d, int m, int n, int i, int j, const Item &item, const afc_args &args,\n"
                "    Real *gradients) {\n  " + "\n  ".join(lines) + "\n}"
            )
        extra = [(n, read) for n, read in enumerate(reads) if read.step is None]
        if extra:
            lines = [f"gradients[{n}] = {self._captured_term(read, '')};" for n, read in extra]
            self.parts.append(
                "// What a row adds to the gradients of captured tensors through its extra term, of whose\n"
                "// logarithm d is the gradient.\n"
                "AFC_FN void captured_extra_gradients(Real d, int m, int i, const Item &item,\n"
                "                                     const afc_args &args, Real *gradients) {\n  "
                + "\n  ".join(lines)
                + "\n}"
            )
        return found

    def _captured_gradients(self, reads: tuple[CapturedRead, ...]) -> None:
        reads = tuple(replace(read, step=read.step if read.score else None) for read in reads)
        first = min(read.step for read in reads if read.step is not None)
        backward: list[str] = []
        for k in reversed(range(first, len(self.score_calls))):
            terms = [(n, r) for n, r in enumerate(reads) if r.step == k]
            backward += [f"gradients[{n}] = {self._captured_term(r, f's_{k}')};" for n, r in terms]
            derivative = self.derivative_calls[k]
            if k > first and derivative is not None:
                backward.append(f"d *= {_of_step(derivative, k)};")
        inputs = [int(k) for line in backward for k in re.findall(r"\bs_(\d+)", line)]
        forward = ["const Real s_0 = s;"] if inputs else []
        if any(re.search(r"\bdistance\b", line) for line in (*self.score_calls, *backward)):
            forward.insert(0, "const Real distance = Real(i - j);")
        forward += [
            f"const Real s_{k + 1} = {_of_step(call, k)};"
            for k, call in enumerate(self.score_calls[: max(inputs, default=0)])
        ]
        body = "\n  ".join([*forward, *backward])
        self.parts.append(
            "// What a score adds to the gradients of captured tensors; d is the gradient of the score.\n"
            "AFC_FN void captured_gradients("
            f"Real s, Real d, int m, int n, int i, int j{self._terms_text[0]}, const Item &item,\n"
            f"                               const afc_args &args, Real *gradients) {{\n  {body}\n}}"
        )

    def _captured_term(self, read: CapturedRead, s: str) -> str:
        match read.coefficient:
            case Formula(results=(Const(value=value),), lets=()):
                return "d" if value == 1 else f"d * Real({float(value)!r})"
        step = self._captured_step(read)
        name = self._name(f"{step.block}_{read.load.tensor}_gradient")
        behind = (
            "factors of the other weight blocks"
            if read.weight
            else "constant derivatives of the steps behind it"
        )
        note = f"Derivative by {attn(read.load)}, times the {behind}."
        call = self._function(
            name, step, read.coefficient, "Real", takes_s=bool(s), note=note, hoisted=read.score
        )
        return f"d * {call.replace('(s', f'({s}', 1) if s else call}"

    def _captured_step(self, read: CapturedRead) -> Step:
        n = self.program.normalizer
        if read.step is None:
            return Step(n.block, read.coefficient, n.call, n.doc, n.span, n.origin)
        if read.weight:
            return self.semantics.weight_steps[read.step]
        return self.semantics.scores[read.step]

    def _captured_read(self, index: int, read: CapturedRead) -> CapturedText:
        slot = self.slots[read.load.tensor]
        formula = self._with_fields(Formula(read.load.indices))
        parameters, arguments, names = self._parameters(formula, takes_s=False)
        if "args" not in arguments:
            parameters.append("const afc_args &args")
            arguments.append("args")
        ranges = self._ranges()
        printer = replace(self.printer, names={**self.dimensions, **names}, ranges=ranges)
        indices = "".join(f", {printer.text(i)}" for i in formula.results)
        name = f"captured_offset_{index}"
        self.parts.append(
            f"// Place of {attn(read.load)} in its gradient; -1 outside.\n"
            f"AFC_FN int64_t {name}({', '.join(parameters)}) {{\n"
            f"  return afc::element_offset(args.grad_captured[{slot}]{indices});\n}}"
        )
        used = {v for i in read.load.indices for v in variables(i)}
        return CapturedText(
            slot,
            f"{name}({', '.join(arguments)})",
            not used & {"n", "j"},
            "i" in used,
            read.step is None,
            _axes(read.load),
            read.load,
            read.weight,
        )

    def _function(
        self,
        name: str,
        step: Step,
        formula: Formula,
        result: str,
        takes_s: bool,
        note: str | None = None,
        hoisted: bool = True,
    ) -> str:
        """Emit a block's function; returns the text of its call. `hoisted`: it is called where `row` and
        `column` are.
        """
        formula = self._with_fields(formula, hoisted)
        parameters, arguments, names = self._parameters(formula, takes_s)
        body = self._body(formula, names, {p.split()[-1].lstrip("&") for p in parameters})
        comment = _comment(step, note)
        self.parts.append(f"{comment}\nAFC_FN {result} {name}({', '.join(parameters)}) {{\n{body}\n}}")
        return f"{name}({', '.join(arguments)})"

    def _parameters(self, formula: Formula, takes_s: bool) -> tuple[list[str], list[str], dict[str, str]]:
        """Parameters and arguments of a function of a formula, and the names of Item's fields inside it."""
        used = {e.name for e in formula_exprs(formula) if isinstance(e, Var)}
        parameters = ["Real s"] if takes_s else []
        arguments = ["s"] if takes_s else []
        for index in INDICES:
            if index in used:
                parameters.append(f"int {index}")
                arguments.append(index)
        if DISTANCE.name in used:
            parameters.append("Real distance")
            arguments.append("distance")
        fields = (*self.fields, *self.rows, *self.columns)
        for member in fields:
            if member.member in used:
                parameters.append(f"{member.c_type} {member.name}")
                arguments.append(member.member)
        if any(isinstance(e, Load) for e in formula_exprs(formula)) or used & set(self.dimensions):
            parameters.append("const afc_args &args")
            arguments.append("args")
        return parameters, arguments, {f.member: f.name for f in fields}

    def _apart(self, formula: Formula) -> Formula:
        """The formula with i - j as the parameter `distance`, where it is converted to a float."""
        if not self.distance:
            return formula
        return map_formula(formula, lambda expr: rewrite(expr, lambda e: DISTANCES.get(e, e)))

    def _with_fields(self, formula: Formula, hoisted: bool = False) -> Formula:
        fields = (*self.fields, *self.rows, *self.columns) if hoisted else self.fields
        table = {f.expr: Var(f.member, f.expr.type) for f in fields}

        def top_down(expr: Expr) -> Expr:
            if expr in table:
                return table[expr]
            match expr:
                case Op(args=args):
                    return replace(expr, args=tuple(map(top_down, args)))
                case Load(indices=indices):
                    return replace(expr, indices=tuple(map(top_down, indices)))
                case _:
                    return expr

        return Formula(
            tuple(map(top_down, formula.results)), tuple(Let(x.name, top_down(x.value)) for x in formula.lets)
        )

    def _body(self, formula: Formula, names: dict[str, str], parameters: set[str]) -> str:
        local, lines = dict(names), []
        ranges = self._ranges()
        for let in formula.lets:
            base = let.name if let.name not in TAKEN and let.name not in parameters else f"{let.name}_"
            local[let.name] = base
            printer = replace(self.printer, names={**self.dimensions, **local}, ranges=ranges)
            kind = "auto" if let.value.type is Type.INT else self._c_type(let.value.type)
            lines.append(f"  const {kind} {base} = {printer.text(let.value)};")
        printer = replace(self.printer, names={**self.dimensions, **local}, ranges=ranges)
        return "\n".join([*lines, f"  return {printer.text(formula.result)};"])

    # ---- mask ---------------------------------------------------------------------------------------------

    def _mask(self) -> None:
        if self.semantics.mask.predicate is None:
            return
        calls = []
        for step in self.program.masks:
            if simplify(step.formula.result) != Const(True, Type.BOOL):
                calls.append(
                    self._function(self._name(step.block), step, step.formula, "bool", takes_s=False)
                )
        self.parts.append(
            f"AFC_FN bool keep(int m, int n, int i, int j{self._terms_text[0]}, const Item &item, "
            "const afc_args &args) {\n"
            f"  return {' && '.join(calls)};\n}}"
        )

    def _runs(self) -> None:
        if self.stored:
            self._stored_runs()
            return
        plan = self.semantics.mask
        elements = "true" if plan.residual else "false"
        several = len(plan.alternatives)
        for name, own, other, limit in (
            ("key_run", "m", "k", self._key_limit),
            ("query_run", "n", "q", self._query_limit),
        ):
            length = "args.N" if other == "k" else "args.M"
            if other == "k" and self.dialect.places:
                length = "places.keys"
            parts = []
            for bounds in plan.conjunctions:
                lines = [f"Limits limits({self.bound_names[f'{other}_origin']}, {length});"]
                lines += [f"limits.{limit(b)};" for b in bounds]
                parts.append(lines)
            head = self._positions(own) if any(plan.conjunctions) else []
            what = (
                "Keys that queries m_first..m_last see."
                if own == "m"
                else "Queries that see keys n_first..n_last."
            )
            own_places = f"{self.dialect.places}, " if self.dialect.places else ""
            parameters = f"const afc_args &args, {own_places}int {own}_first, int {own}_last"
            if not several:
                result = "Run"
                lines = [*head, *parts[0], f"return limits.run({elements});"]
            else:
                result, parameters = "void", f"{parameters}, int grid, Runs<{several}> &runs"
                lines = [*head, "runs.clear();"]
                for part in parts:
                    inner = "\n    ".join([*part, f"runs.add(limits.run({elements}));"])
                    lines.append(f"{{\n    {inner}\n  }}")
                lines.append(f"runs.merge(grid, int({length}));")
                what += " No two runs touch one tile of `grid`."
            body = "\n  ".join(lines)
            self.parts.append(f"// {what}\nAFC_FN {result} {name}({parameters}) {{\n  {body}\n}}")

    def _positions(self, own: str) -> list[str]:
        """First and last position of a range, and of the steps that bounds count."""
        position, origin = ("i", "q_origin") if own == "m" else ("j", "k_origin")
        start = self.bound_names[origin]
        return [
            f"const int64_t {position}_first = {own}_first + {start}, {position}_last = {own}_last + {start};"
        ]

    def _key_limit(self, bound: Bound) -> str:
        first, last, step = self._ends("i", bound)
        return _key_limit(bound, self._offset(bound.offset), first, last, step)

    def _query_limit(self, bound: Bound) -> str:
        first, last, step = self._ends("j", bound)
        return _query_limit(bound, self._offset(bound.offset), first, last, step)

    def _ends(self, position: str, bound: Bound) -> tuple[str, str, str]:
        """Text of the first and last position, counted in steps, and of the step as a last argument."""
        first, last = f"{position}_first", f"{position}_last"
        if not bound.stepped:
            return first, last, ""
        step = self._offset(bound.step)
        return f"afc::floor_div({first}, {step})", f"afc::floor_div({last}, {step})", f", {step}"

    def _stored_runs(self) -> None:
        predicate = self.semantics.mask.predicate
        assert predicate is not None
        text = self._scalar_text()
        scalars = {
            p.name: (f"{p.name}_" if p.name in TAKEN else p.name, text[p.name], p.type)
            for p in self.program.scalars
        }
        axes = None
        if self.dialect.plans:
            having = {t.read for t in tabled(self.program, self.semantics)}
            axes = [-1 if r.axis is None or r not in having else r.axis for r in reads(predicate)]
        self.parts.append(box_function(predicate, self.bound_names, scalars, axes, self.dialect.places))
        if self.dialect.plans:
            return
        for name, own, other, size, what in (
            ("key_run", "m", "n", "N", "Keys that queries m_first..m_last see"),
            ("query_run", "n", "m", "M", "Queries that see keys n_first..n_last"),
        ):
            box = {own: own, other: "afc::Ints(first, end - 1)"}
            self.parts.append(
                f"// {what}: runs of tiles of the given size, written to `memory`.\n"
                f"AFC_FN afc::RunList {name}(const afc_args &args, const afc::Table *tables, int b, int h, "
                f"int {own}_first,\n{' ' * (len(name) + 23)}int {own}_last, int tile, Run *memory) {{\n"
                f"  const afc::Ints {own}({own}_first, {own}_last);\n"
                f"  return afc::runs_of(memory, tile, args.{size}, [&](int64_t first, int64_t end) {{\n"
                f"    return keep_box(args, tables, b, h, {box['m']}, {box['n']});\n  }});\n}}"
            )

    def _offset(self, offset: Expr) -> str:
        names = {**self.bound_names, **self._scalar_text()}
        return Cpp("double", "", names, {}, self.slots, native64=True).text(offset)

    # ---- row blocks ---------------------------------------------------------------------------------------

    def _rows(self, operand: str, steps: tuple[Transform, ...]) -> tuple[RowText, ...]:
        rows = [s for s in steps if isinstance(s, RowStep)]
        return tuple(self._row(f"row_{operand}_{n}", step, ROW_INDICES) for n, step in enumerate(rows))

    def _row(self, name: str, step: RowStep, indices: tuple[str, ...]) -> RowText:
        """A row or output block. `indices`: what beside the column c it may read, parameters of its
        functions.
        """
        assert step.value is not None and step.backward is not None and isinstance(step.first, Const)
        assert isinstance(step.width, Const)
        first, width = int(step.first.value), int(step.width.value)
        at = "c" if first == 0 else f"{first} + c"
        names = {**self.dimensions, **self._scalar_text(), "x": f"row[{at}]", "d_value": f"d[{at}]"}
        names |= {n: n for n in (*indices, "c")}

        def loop(formula: Formula, statement: str) -> list[str]:
            """A loop over the columns: the formula's intermediate values, a statement on its result."""
            local, lines = dict(names), []
            for let in formula.lets:
                local[let.name] = let.name
                printer = replace(self.printer, names=local)
                kind = "auto" if let.value.type is Type.INT else self._c_type(let.value.type)
                lines.append(f"    const {kind} {let.name} = {printer.text(let.value)};")
            result = replace(self.printer, names=local).text(formula.result)
            head = f"  {self.dialect.columns.format(width)} {{"
            return [head, *lines, f"    {statement.format(result)}", "  }"]

        def mean(of: str, formula: Formula) -> list[str]:
            lines = [
                f"  Real {of} = 0;",
                *loop(formula, f"{of} += {{}};"),
                f"  {self.dialect.mean.format(of, width)}",
            ]
            names[of] = of
            return lines

        means = [line for m in step.means for line in mean(m.name, m.formula)]
        value = loop(step.value, f"row[{at}] = {{}};")
        parameters = ", ".join(["const afc_args &args", *(f"int {n}" for n in indices)])
        self.parts.append(
            f"{_comment(step, None)}\nAFC_FN void {name}({parameters}, Real *row) {{\n"
            + "\n".join([*means, *value])
            + "\n}"
        )
        back = [line for of, term in step.backward.means for line in mean(of, term)]
        sum_type, add = self.dialect.sums
        sums = [
            line
            for n, read in enumerate(step.backward.reads)
            for line in loop(read.term, f"sums[{n * width} + c] {add} {{}};")
        ]
        gradient = loop(step.backward.x, f"d[{at}] = {{}};")
        note = "Gradient d of the row before it from that of the row after it; sums: of what it reads."
        self.parts.append(
            f"{_comment(step, note)}\n"
            f"AFC_FN void {name}_gradient({parameters}, const Real *row, Real *d, {sum_type} *sums) {{\n"
            + "\n".join([*means, *back, *sums, *gradient])
            + "\n}"
        )
        reads = [
            self._row_read(f"{name}_offset_{n}", r.load, indices) for n, r in enumerate(step.backward.reads)
        ]
        return RowText(name, tuple(reads))

    def _row_read(self, name: str, load: Load, offered: tuple[str, ...]) -> RowReadText:
        slot = self.slots[load.tensor]
        by_row = any("r" in variables(i) for i in load.indices)
        own = offered if by_row else tuple(n for n in offered if n != "r")
        names = {**self.dimensions, **self._scalar_text(), **{n: n for n in (*own, "c")}}
        printer = replace(self.printer, names=names)
        indices = "".join(f", {printer.text(i)}" for i in load.indices)
        self.parts.append(
            f"// Place of {attn(load)} in its gradient; -1 outside.\n"
            f"AFC_FN int64_t {name}(const afc_args &args{''.join(f', int {n}' for n in own)}, int c) {{\n"
            f"  return afc::element_offset(args.grad_captured[{slot}]{indices});\n}}"
        )
        return RowReadText(
            slot, f"{name}(args{''.join(f', int({n})' for n in own)}, c)", _axes(load), load, by_row
        )

    # ---- rotations ----------------------------------------------------------------------------------------

    def _rotation(self, operand: str, index: int, rotation: Rotation) -> RotationText:
        matrix = rotation.matrix
        assert matrix is not None and isinstance(rotation.width, Const)
        values, entries = distinct_entries(matrix.results)
        plain = dependence((rotation,)).plain
        name = f"rotate_{operand}_coefficients_{index}"
        comment = _comment(rotation, f"Coefficients of the rotation of {operand}.")
        reads = self._rotation_reads(operand, index, rotation)
        key = (matrix, rotation.width)
        parameters = "int position, int pair" if plain else _parameters(matrix, key in self.rotations)
        head = f"AFC_FN void {name}({parameters}, Real *c)"
        if key in self.rotations:
            arguments = "position, pair" if plain else "args, b, h, row, position, pair"
            self.parts.append(f"{comment}\n{head} {{\n  {self.rotations[key]}({arguments}, c);\n}}")
            return RotationText(len(values), *entries, plain, reads)
        self.rotations[key] = name
        formula, tables = self._tabulate(
            Formula(values, matrix.lets), f"{rotation.block}", int(rotation.width.value) // 2
        )
        self.parts += tables
        self.parts.append(f"{comment}\n{head} {{\n{self._coefficients(formula, plain)}\n}}")
        return RotationText(len(values), *entries, plain, reads)

    def _rotation_reads(self, operand: str, index: int, rotation: Rotation) -> tuple[RotationReadText, ...]:
        """Functions of what a pair of a rotation adds to the gradients of captured tensors."""
        found = []
        for n, read in enumerate(rotation.reads):
            slot = self.slots[read.load.tensor]
            gradient, offset = (
                f"rotate_{operand}_gradient_{index}_{n}",
                f"rotate_{operand}_offset_{index}_{n}",
            )
            used = {e.name for e in formula_exprs(read.term) if isinstance(e, Var)}
            pair = ", ".join(f"double {x}" if x in used else "double" for x in PAIR)
            note = f"What a pair adds to the gradient of {attn(read.load)}."
            self.parts.append(
                f"{_comment(rotation, note)}\n"
                f"AFC_FN double {gradient}({_parameters(read.term, True)}, {pair}) {{\n"
                f"{self._coefficients(read.term, False, 'return {1};', PAIR)}\n}}"
            )
            place = Formula(read.load.indices)
            names = {**self.dimensions, **self._scalar_text(), "p": "position", "r": "row", "c": "pair"}
            printer = Cpp("double", "", names, {}, self.slots, native64=True)
            indices = "".join(f", {printer.text(i)}" for i in place.results)
            self.parts.append(
                f"// Place of {attn(read.load)} in its gradient; -1 outside.\n"
                f"AFC_FN int64_t {offset}({_parameters(place, True)}) {{\n"
                f"  return afc::element_offset(args.grad_captured[{slot}]{indices});\n}}"
            )
            b, h, r, p = (_axis(read.load, x) for x in ("b", "h", "r", "p"))
            found.append(RotationReadText(slot, gradient, offset, (b, h, r, p)))
        return tuple(found)

    def _coefficients(
        self,
        formula: Formula,
        plain: bool,
        statement: str = "c[{0}] = Real({1});",
        parameters: tuple[str, ...] = (),
    ) -> str:
        """Statements that compute the results of a formula from the parameters of the function, in double."""
        used = {e.name for e in formula_exprs(formula) if isinstance(e, Var)}
        local = {**self.dimensions, "p": "position", "r": "row", "c": "pair"}
        ranges = {**RANGES, **dict.fromkeys(self.dimensions, SIZE), "r": SIZE}
        taken = {*TAKEN, "position", "pair", *parameters, *(() if plain else ("row", "b", "h"))}
        lines: list[str] = []

        def declare(name: str, kind: str, value: str) -> None:
            text = name if name not in taken else f"{name}_"
            taken.add(text)
            local[name] = text
            lines.append(f"  const {kind} {text} = {value};")

        for param in self.program.scalars:
            if param.name in used:
                member = f"args.scalar[{self.scalars[param.name]}]"
                ranges[param.name] = Interval(1, POSITION.hi) if param.positive else POSITION
                match param.type:
                    case Type.INT:
                        declare(param.name, "int", f"int({member}.i)")
                    case Type.BOOL:
                        declare(param.name, "bool", f"{member}.i != 0")
                    case Type.FLOAT:
                        declare(param.name, "double", f"{member}.f")
        for let in formula.lets:
            text = Cpp("double", "", dict(local), dict(ranges), self.slots).text(let.value)
            bounds = interval(let.value, ranges)
            narrow = let.value.type is Type.INT and bounds.within(*INT32)
            ranges[let.name] = bounds if narrow else EVERYTHING
            kind = {Type.FLOAT: "double", Type.INT: "int" if narrow else "int64_t", Type.BOOL: "bool"}
            declare(let.name, kind[let.value.type], text)
        printer = Cpp("double", "", local, ranges, self.slots)
        lines += [f"  {statement.format(n, printer.text(v))}" for n, v in enumerate(formula.results)]
        return "\n".join(lines)

    def _tabulate(self, formula: Formula, name: str, pairs: int) -> tuple[Formula, list[str]]:
        """Subexpressions of the pair alone become constant tables: their powers need not be computed per
        position.
        """
        tables: list[str] = []
        seen: dict[Expr, str] = {}

        def visit(expr: Expr) -> Expr:
            if expr in seen:
                return Var(seen[expr], Type.FLOAT)
            if _of_pair_alone(expr) and pairs <= TABLE_LIMIT:
                table = self._name(
                    f"{name}_by_pair".upper() if not seen else f"{name}_by_pair_{len(seen)}".upper()
                )
                seen[expr] = f"{table}[pair]"
                numbers = [repr(exact(expr, {"c": c})) for c in range(pairs)]
                rows = [", ".join(numbers[n : n + 4]) for n in range(0, pairs, 4)]
                body = ",\n    ".join(rows)
                tables.append(f"// {attn(expr)}\n{self.dialect.table} {table}[{pairs}] = {{\n    {body}}};")
                return Var(seen[expr], Type.FLOAT)
            match expr:
                case Op(args=args):
                    return replace(expr, args=tuple(map(visit, args)))
                case _:
                    return expr

        lets = tuple(Let(x.name, visit(x.value)) for x in formula.lets)
        return Formula(tuple(map(visit, formula.results)), lets), tables


def _axis(load: Load, index: str) -> int:
    """The dimension that is indexed by this index itself, -1 where none is."""
    return next((n for n, i in enumerate(load.indices) if i == Var(index, Type.INT)), -1)


def _axes(load: Load) -> Axes:
    """The dimensions that b, h, m, i alone index; in a row block of q or k, r is the m."""
    return _axis(load, "b"), _axis(load, "h"), max(_axis(load, "m"), _axis(load, "r")), _axis(load, "i")


def _of_step(call: str, step: int) -> str:
    """A call of a function of s, for the input of a step."""
    return call.replace("(s", f"(s_{step}", 1)


def _captured_sizes(program: Program) -> dict[str, str]:
    """Sizes that captured tensors name (`T` of `up[B, M, T]`), read from the first tensor that has each."""
    found: dict[str, str] = {}
    for slot, tensor in enumerate(program.tensors):
        for axis, extent in enumerate(tensor.shape):
            if isinstance(extent.size, Var) and extent.size.name not in DIMENSIONS:
                found.setdefault(extent.size.name, f"args.captured[{slot}].size[{axis}]")
    return {name: text for name, text in found.items() if program.constant(name) is None}


def _of_pair_alone(expr: Expr) -> bool:
    costly = any(isinstance(e, Op) and e.name in ("pow", "exp", "log", "sqrt", "rsqrt") for e in walk(expr))
    reads = any(isinstance(e, Load) for e in walk(expr))
    return costly and not reads and expr.type is Type.FLOAT and variables(expr) == {"c"}


def _parameters(matrix: Formula, forwards: bool) -> str:
    """Parameters of the coefficients of a rotation that is not plain; one that is not used has no name."""
    used = {e.name for e in formula_exprs(matrix) if isinstance(e, Var)} - {let.name for let in matrix.lets}
    other = used - {"b", "h", "r", "p", "c"} or any(isinstance(e, Load) for e in formula_exprs(matrix))
    parameters = [f"const afc_args &{'args' if other or forwards else ''}"]
    for name, text in (("b", "b"), ("h", "h"), ("r", "row"), ("p", "position"), ("c", "pair")):
        parameters.append(f"int {text}" if name in used or forwards else "int")
    return ", ".join(parameters)


def _comment(step: Step, note: str | None) -> str:
    place = f"{step.span.file.rsplit('/', 1)[-1]}:{step.span.line}"
    text = note or step.doc.split("\n")[0]
    return f"// {step.call}  [{place}]" + (f"\n// {text}" if text else "")


def _key_limit(bound: Bound, c: str, first: str, last: str, step: str) -> str:
    upper = bound.side == "upper"
    if bound.of == "i":
        return _only_if(upper, _wrapped(c), first, last)
    ends = {
        0: (c, c),
        1: (f"{first} + {_wrapped(c)}", f"{last} + {_wrapped(c)}"),
        -1: (f"{_wrapped(c)} - {last}", f"{_wrapped(c)} - {first}"),
    }
    low, high = ends[bound.slope]
    return f"{'at_most' if upper else 'at_least'}({_plain(low)}, {_plain(high)}{step})"


def _query_limit(bound: Bound, c: str, first: str, last: str, step: str) -> str:
    c, upper = _wrapped(c), bound.side == "upper"
    if bound.of == "i":
        return f"{'at_most' if upper else 'at_least'}({c}, {c}{step})"
    if bound.slope == 0:
        return _only_if(upper, c, first, last)
    if bound.slope == 1:
        low, high = _plain(f"{first} - {c}"), _plain(f"{last} - {c}")
        return f"{'at_least' if upper else 'at_most'}({low}, {high}{step})"
    low, high = _plain(f"{c} - {last}"), _plain(f"{c} - {first}")
    return f"{'at_most' if upper else 'at_least'}({low}, {high}{step})"


def _only_if(upper: bool, c: str, first: str, last: str) -> str:
    some, every = (f"{first} <= {c}", f"{last} <= {c}") if upper else (f"{last} >= {c}", f"{first} >= {c}")
    return f"only_if({some}, {every})"


def _wrapped(text: str) -> str:
    return (
        text
        if text.replace(".", "").replace("_", "").replace("[", "").replace("]", "").isalnum()
        else f"({text})"
    )


def _plain(text: str) -> str:
    """Drop a zero offset."""
    return text.removesuffix(" + 0").removesuffix(" - 0")
