# SPDX-License-Identifier: Apache-2.0
"""Text to syntax tree: Lark's LALR parser with spans, and parse errors in words."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken

from afc import paths
from afc.errors import SourceError, Span
from afc.frontend import ast

EDITION = 1

TERMINALS = {
    "NAME": "a name",
    "INT": "a number",
    "FLOAT": "a number",
    "STRING": "a string",
    "SLOT": "a declaration",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "COMMA": "`,`",
    "SEMICOLON": "`;`",
    "COLON": "`:`",
    "EQUAL": "`=`",
    "VBAR": "`|`",
    "PLUS": "an operator",
    "MINUS": "an operator",
    "STAR": "an operator",
    "SLASH": "an operator",
    "SLASHSLASH": "an operator",
    "PERCENT": "an operator",
    "AT": "`@`",
    "POW": "an operator",
    "COMPARE": "a comparison",
    "AND": "`and`",
    "OR": "`or`",
    "NOT": "`not`",
    "IF": "`if`",
    "THEN": "`then`",
    "ELSE": "`else`",
    "RETURN": "`return`",
    "TRUE": "`true`",
    "FALSE": "`false`",
    "EXAMPLE": "`example`",
    "IMPORT": "`import`",
    "EDITION": "`edition`",
    "OVER": "`over`",
    "TYPE": "a type",
    "GRAD": "`grad`",
    "$END": "the end of the file",
}


@lru_cache(maxsize=1)
def _parser() -> Lark:
    text = (paths.grammar() / "attn.lark").read_text(encoding="utf-8")
    return Lark(text, parser="lalr", propagate_positions=True, maybe_placeholders=True)


def parse(text: str, path: str) -> ast.File:
    """Parse a file's text; `path` is only a name for messages.

    Raises SourceError (E0001 unexpected character, E0002 unexpected token, E0003 unfinished, E0004 edition);
    RecursionError for an expression nested thousands deep.
    """
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise _syntax_error(error, text, path) from None
    return _Builder(text, path).file(tree)


def _syntax_error(error: UnexpectedInput, text: str, path: str) -> SourceError:
    if isinstance(error, UnexpectedCharacters):
        span = Span(path, error.line, error.column, error.line, error.column + 1)
        return SourceError.of("E0001", f"unexpected character {text[error.pos_in_stream]!r}", span)  # type: ignore[index]
    if isinstance(error, UnexpectedToken) and error.token.type != "$END":
        token = error.token
        line, column = token.line or 1, token.column or 1
        span = Span(path, line, column, token.end_line or line, token.end_column or column + 1)
        return SourceError.of("E0002", f"unexpected `{token}`", span, hint=_expected(error))
    assert isinstance(error, (UnexpectedToken, UnexpectedEOF))
    lines = text.rstrip().split("\n")
    span = Span(path, len(lines), len(lines[-1]) + 1, len(lines), len(lines[-1]) + 2)
    return SourceError.of(
        "E0003", "the file ends in the middle of a declaration", span, hint=_expected(error)
    )


def _expected(error: UnexpectedToken | UnexpectedEOF) -> str | None:
    names = sorted({TERMINALS.get(name, name) for name in error.expected})
    return f"expected {', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else f"expected {names[0]}"


class _Builder:
    """Turns Lark's tree into dataclasses. A method per rule that needs one; the rest goes by `_node`."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.text = text
        self.lines = text.split("\n")

    def span(self, item: Any) -> Span:
        meta = item.meta if isinstance(item, Tree) else item
        return Span(self.path, meta.line, meta.column, meta.end_line, meta.end_column)

    def file(self, tree: Tree[Token]) -> ast.File:
        declarations, examples, imports = [], [], []
        edition = None
        for item in (c for c in tree.children if isinstance(c, Tree)):
            match item.data:
                case "edition":
                    edition = self.edition(item)
                case "short" | "long":
                    declarations.append(self.declaration(item))
                case "example":
                    examples.append(self.example(item))
                case "import_":
                    imports.append(ast.Import(str(item.children[0])[1:-1], self.span(item)))
        return ast.File(self.path, self.text, edition, tuple(declarations), tuple(examples), tuple(imports))

    def edition(self, tree: Tree[Token]) -> int:
        number = int(tree.children[0])  # type: ignore[arg-type]
        if number != EDITION:
            raise SourceError.of(
                "E0004",
                f"edition {number} of the language is not known",
                self.span(tree),
                hint=f"this compiler reads edition {EDITION}",
            )
        return number

    def declaration(self, tree: Tree[Token]) -> ast.Declaration:
        kind, name, parameters, pairing, result_type, *rest = tree.children
        inputs, options = self.parameters(parameters)
        body = tuple(self.assignment(c) for c in rest[:-1] if isinstance(c, Tree))
        last: Any = rest[-1]
        result = last.children[0] if isinstance(last, Tree) and last.data == "return_" else last
        return ast.Declaration(
            str(kind),
            str(name),
            inputs,
            options,
            _only(pairing),
            _only(result_type),
            body,
            self.node(result),
            self.doc(tree.meta.line),
            self.span(name),
            self.span(tree),
        )

    def doc(self, line: int) -> str:
        """The `##` comment lines directly above a line."""
        found: list[str] = []
        index = line - 2
        while index >= 0 and self.lines[index].lstrip().startswith("##"):
            found.append(self.lines[index].strip()[2:].strip())
            index -= 1
        return "\n".join(reversed(found))

    def parameters(self, tree: Any) -> tuple[tuple[ast.Parameter, ...], tuple[ast.Parameter, ...]]:
        if tree is None:
            return (), ()
        groups = [
            tuple(self.parameter(p) for p in g.children) if g is not None else () for g in tree.children
        ]
        if tree.data == "only_options":
            return (), groups[0]
        return groups[0], groups[1] if len(groups) > 1 else ()

    def parameter(self, tree: Any) -> ast.Parameter:
        name, shape, annotation, default = tree.children
        extents = (
            tuple(self.extent(e) for e in shape.children if e is not None) if shape is not None else None
        )
        kind, grad, bound = None, False, None
        for part in annotation.children if annotation is not None else ():
            if isinstance(part, Tree):
                bound = self.node(part.children[0])
            elif part is not None and part.type == "GRAD":
                grad = True
            elif part is not None:
                kind = str(part)
        if grad and extents is None:
            raise SourceError.of(
                "E0402",
                f"`{name}` is a number; only a captured tensor has a gradient",
                self.span(tree),
                hint=f"capture it as a tensor: `{name}[1]: grad`",
            )
        return ast.Parameter(str(name), extents, kind, grad, bound, self.optional(default), self.span(tree))

    def extent(self, tree: Any) -> ast.Extent:
        if tree.data == "broadcast":
            ones, size = tree.children
            if int(ones) != 1:
                raise SourceError.of(
                    "E0006", f"only `1|size` marks a broadcast dimension, not `{ones}|`", self.span(ones)
                )
            return ast.Extent(self.node(size), True)
        return ast.Extent(self.node(tree.children[0]), False)

    def assignment(self, tree: Tree[Token]) -> ast.Assignment:
        *targets, value = tree.children
        return ast.Assignment(tuple(self.target(t) for t in targets), self.node(value), self.span(tree))

    def target(self, tree: Any) -> ast.Slice:
        name, section = tree.children
        lo, hi = (self.optional(c) for c in section.children) if section is not None else (None, None)
        return ast.Slice(str(name), lo, hi, section is None, self.span(tree))

    def example(self, tree: Tree[Token]) -> ast.Example:
        call, operator, expected = tree.children
        if str(operator) != "==":
            raise SourceError.of("E0007", f"an example says `==`, not `{operator}`", self.span(operator))
        return ast.Example(self.node(call), self.node(expected), self.span(tree))

    def optional(self, tree: Any) -> ast.Node | None:
        return None if tree is None else self.node(tree)

    def node(self, tree: Any) -> ast.Node:
        """Any expression."""
        span = self.span(tree)
        parts = tree.children
        match tree.data:
            case "name":
                return ast.Name(str(parts[0]), span)
            case "integer":
                return ast.Literal(int(parts[0]), str(parts[0]), span)
            case "real":
                return self.real(parts[0], span)
            case "true" | "false":
                return ast.Literal(tree.data == "true", str(tree.data), span)
            case "negative":
                return ast.Unary("-", self.node(parts[1]), span)
            case "not_":
                return ast.Unary("not", self.node(parts[0]), span)
            case "and_" | "or_":
                return ast.Binary(str(tree.data)[:-1], self.node(parts[0]), self.node(parts[1]), span)
            case "binary":
                return ast.Binary(str(parts[1]), self.node(parts[0]), self.node(parts[2]), span)
            case "compare":
                return ast.Compare(tuple(map(str, parts[1::2])), tuple(map(self.node, parts[::2])), span)
            case "conditional":
                condition, then, otherwise = map(self.node, parts)
                return ast.Conditional(condition, then, otherwise, span)
            case "call":
                return self.call(tree, span)
            case "index":
                return self.index(parts, span)
            case "list" | "pair":
                return ast.Items(tuple(map(self.node, parts)), tree.data == "pair", span)
        raise AssertionError(f"grammar rule without a node: {tree.data}")

    def real(self, token: Token, span: Span) -> ast.Literal:
        value = float(token)
        if value in (float("inf"), float("-inf")):
            raise SourceError.of("E0008", f"{token} is too large for a float64", span)
        return ast.Literal(value, str(token), span)

    def call(self, tree: Any, span: Span) -> ast.Call:
        name, arguments = tree.children
        positional: tuple[ast.Node, ...] = ()
        keywords: tuple[ast.Keyword, ...] = ()
        for group in arguments.children if arguments is not None else ():
            if group is not None and group.data == "positional":
                positional = tuple(map(self.node, group.children))
            elif group is not None:
                keywords = tuple(map(self.keyword, group.children))
        return ast.Call(str(name), positional, keywords, span)

    def keyword(self, tree: Any) -> ast.Keyword:
        name, value = tree.children
        span = self.span(tree)
        return ast.Keyword(str(name), ast.Name(str(name), span) if value is None else self.node(value), span)

    def index(self, parts: list[Any], span: Span) -> ast.Node:
        if parts[1] is None:
            return ast.Index(str(parts[0]), (), span)
        if isinstance(parts[1], Tree) and parts[1].data == "slice":
            lo, hi = (self.optional(c) for c in parts[1].children)
            return ast.Slice(str(parts[0]), lo, hi, False, span)
        return ast.Index(str(parts[0]), tuple(map(self.node, parts[1:])), span)


def _only(item: Any) -> str | None:
    """The single token below an optional rule."""
    if item is None:
        return None
    return str(item.children[0]) if isinstance(item, Tree) else str(item)
