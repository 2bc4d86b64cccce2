"""Operators that change one value, order, bound or state in Python source."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Site", "replaced", "sites"]

_OPERATORS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_DTYPES = {"float32": "bfloat16", "bfloat16": "float32", "int64": "int32", "float64": "float32"}
_COPIES = ("clone", "detach", "contiguous", "copy")
_UNTOUCHED_FIELDS = ("annotation", "returns", "decorator_list")
_UNTOUCHED_NAMES = ("log", "logger", "logging", "TYPE_CHECKING", "TypeVar", "__all__")


class Site(NamedTuple):
    """A change that an operator can make.

    Attributes:
        operator: Its name.
        function: Where the change is.
        span: First line, column in bytes, last line and column of what is replaced.
        source: What is put in its place.
        lines: First and last line that run with the change: of a statement, or the head of a
            compound one. A default value belongs to the body of its function, and what is outside
            of functions to the whole file.
    """

    operator: str
    function: str
    span: Sequence[int]
    source: str
    lines: tuple[int, int]


def replaced(text: str, span: Sequence[int], source: str) -> str:
    """The text with a source in place of a span."""
    first, column, last, end = span
    lines = text.encode().splitlines(keepends=True)
    changed = lines[first - 1][:column] + source.encode() + lines[last - 1][end:]
    lines[first - 1 : last] = [changed]
    return b"".join(lines).decode()


def sites(
    node: Any, function: str = "", lines: tuple[int, int] = (1, 10**6), inside: bool = False
) -> Iterator[Site]:
    """Every change of a module that an operator can make."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inside = True
        lines = (node.body[0].lineno, node.end_lineno or 0)
    elif isinstance(node, ast.stmt) and inside:
        body = getattr(node, "body", None)
        last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or 0
        lines = (node.lineno, last)
    for operator, target, change in _changes(node):
        source = change if isinstance(change, str) else f"({ast.unparse(change)})"
        span = (target.lineno, target.col_offset, target.end_lineno, target.end_col_offset)
        yield Site(operator, function, span, source, lines)
    if _is_untouched(node):
        return
    for name, value in ast.iter_fields(node):
        if name not in _UNTOUCHED_FIELDS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from sites(child, function, lines, inside)


def _is_untouched(node: ast.AST) -> bool:
    """Whether a node is a message, a log entry or for type checkers only."""
    match node:
        case ast.JoinedStr() | ast.Raise():
            return True
        case ast.Call(func=callee):
            name = ast.unparse(callee)
            return name.endswith(("Error", "Warning")) or name.split(".")[0] in _UNTOUCHED_NAMES
        case ast.If(test=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name in _UNTOUCHED_NAMES
    return False


def _with(node: Any, **fields: Any) -> ast.expr:
    return type(node)(**dict(ast.iter_fields(node)) | fields)  # type: ignore[no-any-return]


def _changes(node: Any) -> Iterator[tuple[str, Any, ast.AST | str]]:
    """The operator, the node that is replaced, and its replacement."""
    if isinstance(node, ast.Raise):
        yield "swallowed exception", node, "pass"
    if _is_untouched(node):
        return
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.For(iter=iterated):
            yield "last element", iterated, f"list({ast.unparse(iterated)})[:-1]"
        case ast.withitem(context_expr=manager, optional_vars=None):
            yield "dropped with", manager, "__import__('contextlib').nullcontext()"
        case ast.Compare(ops=[operator]):
            yield "comparison", node, _with(node, ops=[_OPERATORS[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS and not _has_text(node):
            yield "arithmetic", node, _with(node, op=_OPERATORS[type(operator)]())
        case ast.BoolOp(op=operator):
            yield "and, or", node, _with(node, op=_OPERATORS[type(operator)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "dropped not", node, operand
        case ast.Constant(value=bool() as value):
            yield "flag", node, str(not value)
        case ast.Constant(value=int() as value):
            yield "constant", node, str(value + 1)
            yield "constant", node, str(value - 1)
        case ast.Constant(value=float() as value):
            yield "constant", node, str(value * 2 or 1.0)
        case ast.Slice(upper=ast.expr() as upper):
            earlier = ast.BinOp(upper, ast.Sub(), ast.Constant(1))
            yield "bound", node, ast.unparse(_with(node, upper=earlier))
        case ast.Slice(lower=ast.expr() as lower):
            later = ast.BinOp(lower, ast.Add(), ast.Constant(1))
            yield "bound", node, ast.unparse(_with(node, lower=later))
        case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in _DTYPES:
            yield "dtype", node, _with(node, attr=_DTYPES[attr])
        case ast.Call():
            for operator, replacement in _changes_of_call(node):
                yield operator, node, replacement
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "dropped call", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield "dropped assignment", node, "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "early return", node, "return None"
        case ast.Delete() | ast.Break() | ast.Continue():
            yield "dropped statement", node, "pass"


def _has_text(node: ast.BinOp) -> bool:
    """Whether strings are joined or formatted, which is most often a message."""
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def _changes_of_call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Call(func=ast.Name(id="range"), args=[*first, stop]) if len(first) < 2:
            shorter = ast.BinOp(stop, ast.Sub(), ast.Constant(1))
            yield "bound", _with(node, args=[*first, shorter])
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            yield "min, max", _with(node, func=ast.Name(_NAMES[name]))
        case ast.Call(func=ast.Name(id="sorted" | "reversed")):
            yield "order", ast.Call(ast.Name("list"), node.args[:1], [])
        case ast.Call(func=ast.Attribute(value=value, attr=attr), args=[]) if attr in _COPIES:
            yield "dropped copy", value
        case ast.Call(func=ast.Attribute(attr="get"), args=[key, _]):
            yield "default", _with(node, args=[key])
        case ast.Call(func=ast.Name(id="isinstance" | "getattr" | "hasattr" | "setattr")):
            return
        case ast.Call(args=[ast.Name() as first, ast.Name() as second, *rest]):
            yield "swapped arguments", _with(node, args=[second, first, *rest])
    for keyword in node.keywords:
        if keyword.arg is not None:
            others = [each for each in node.keywords if each is not keyword]
            yield "dropped argument", _with(node, keywords=others)
