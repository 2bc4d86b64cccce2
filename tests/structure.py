"""How much code each distribution has, and what breaks the rules of its structure.

``python tests/structure.py`` prints the figures. It fails where modules import each other in a
circle, and where a figure is above its bar. Code is counted in tokens, because a limit of lines
rewards packing more into each line. A change that gets below a bar lowers it; raising one needs a
line in CHANGELOG.md that gives the reason.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

__all__ = ["Measured", "circles", "count_tokens", "main", "measure"]

ROOT = Path(__file__).parent.parent
#: Tokens of code that the sources of each distribution may have.
TOKENS = {
    "rl_core": 77_000,
    "rl_backends": 65_900,
    "rl_cli": 12_753,
    "rl_collective": 4_556,
    "rl_conformance": 152_000,
    "rl_guests": 6_720,
    "rl_hf": 20_278,
    "rl_hosting": 36_019,
    "rl_losses": 14_297,
    "rl_megatron": 20_510,
    "rl_nemo": 3_442,
    "rl_ray": 2_179,
    "rl_sglang": 15_250,
    "rl_train": 28_955,
    "rl_trl": 2_208,
    "rl_vllm": 11_060,
}
#: Tokens of code that all tests and the conformance suite may have together.
TEST_TOKENS = 530_000
#: Share of a distribution's functions that may be private and have one caller, in percent.
SINGLE = {
    "rl_core": 5.0,
    "rl_collective": 6.4,
    "rl_hf": 7.5,
    "rl_hosting": 5.4,
    "rl_losses": 6.6,
    "rl_megatron": 5.5,
    "rl_nemo": 10.4,
    "rl_ray": 4.6,
    "rl_sglang": 8.5,
    "rl_backends": 7.1,
    "rl_train": 7.6,
    "rl_trl": 10.0,
    "rl_vllm": 5.8,
    "rl_conformance": 5.9,
}
#: What the goal is for every distribution, and the bar of a new one.
SINGLE_GOAL = 6.0

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Python 3.12 cuts an f-string into parts; here it is one token in every version.
_FSTRING_START = getattr(tokenize, "FSTRING_START", -1)
_FSTRING_END = getattr(tokenize, "FSTRING_END", -1)


@dataclass
class Measured:
    """What a folder of sources contains.

    Attributes:
        files: The number of files.
        lines: All of their lines.
        tokens: Tokens of code, without comments and docstrings.
        statements: Statements, without docstrings.
        functions: The number of functions that are defined.
        single: Private functions that are named at one place besides their definition.
    """

    files: int = 0
    lines: int = 0
    tokens: int = 0
    statements: int = 0
    functions: int = 0
    single: list[str] = field(default_factory=list)


def measure(folder: Path) -> Measured:
    """Counts what a folder of Python sources contains."""
    measured = Measured()
    named: Counter[str] = Counter()
    defined: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        docstring_lines = set[int]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name):
                named[node.id] += 1
            elif isinstance(node, ast.Attribute):
                named[node.attr] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined.append(node.name)
            if _is_text(node):
                docstring_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            elif isinstance(node, ast.stmt):
                measured.statements += 1
        measured.files += 1
        measured.lines += len(text.splitlines())
        measured.tokens += count_tokens(text, docstring_lines)
    measured.functions = len(defined)
    # A name that is defined twice belongs to an interface with two implementations.
    measured.single = sorted(
        name
        for name, times in Counter(defined).items()
        if times == 1 and name.startswith("_") and not name.endswith("__") and named[name] == 1
    )
    return measured


def count_tokens(text: str, docstring_lines: set[int]) -> int:
    """Counts the tokens of a file as Python 3.11 cuts them, without layout and comments.

    Args:
        text: The file's text.
        docstring_lines: Lines on which strings are not counted.
    """
    count = 0
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        starts_string = token.type in (tokenize.STRING, _FSTRING_START)
        in_docstring = starts_string and token.start[0] in docstring_lines
        if depth == 0 and token.type not in _LAYOUT and not in_docstring:
            count += 1
        if token.type == _FSTRING_START:
            depth += 1
        elif token.type == _FSTRING_END:
            depth -= 1
    return count


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def circles(package: str) -> list[list[str]]:
    """Finds modules of a package that import each other; late imports count, too.

    Args:
        package: Its import name.

    Returns:
        For each knot of circles the modules in it, sorted.
    """
    graph = grimp.build_graph(package, cache_dir=None)
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    knots = {
        frozenset({module, *(other for other in others if module in reached[other])})
        for module, others in reached.items()
    }
    return sorted(sorted(knot) for knot in knots if len(knot) > 1)


def main() -> int:
    """Prints the figures.

    Returns:
        1 if there is a circle of imports or a figure above its bar, or else 0.
    """
    console = Console(width=120 if not sys.stdout.isatty() else None)
    table = Table("package", "files", "lines", "tokens", "a statement", "functions", "called once")
    bad: list[str] = []
    tokens_of_tests = 0
    places = ("core", "plugins/*", "tests/conformance")
    packages = [init.parent for p in places for init in ROOT.glob(f"{p}/src/*/__init__.py")]
    for package in sorted(packages):
        measured = measure(package)
        share = 100 * len(measured.single) / max(measured.functions, 1)
        most_tokens = TOKENS.get(package.name)
        most_single = SINGLE.get(package.name, SINGLE_GOAL)
        table.add_row(
            package.name,
            str(measured.files),
            f"{measured.lines:,}",
            f"{measured.tokens:,} (bar {most_tokens or 0:,})",
            f"{measured.tokens / max(measured.statements, 1):.1f}",
            str(measured.functions),
            f"{share:.1f}% (bar {most_single}%)",
        )
        if most_tokens is None:
            bad.append(f"{package.name}: has no bar in TOKENS; add {measured.tokens}")
        elif measured.tokens > most_tokens:
            bad.append(f"{package.name}: {measured.tokens:,} tokens, {most_tokens:,} at most")
        if share > most_single:
            bad.append(
                f"{package.name}: {share:.1f}% of the functions are private and called once, "
                f"{most_single}% at most: {', '.join(measured.single)}"
            )
        if package.is_relative_to(ROOT / "tests"):
            tokens_of_tests += measured.tokens
        knots = circles(package.name)
        bad += [f"in circles of imports: {', '.join(circle)}" for circle in knots]
    folders = [*ROOT.glob("core/tests"), *ROOT.glob("plugins/*/tests"), *ROOT.glob("tests/*")]
    folders = [each for each in folders if each.is_dir() and each.name != "conformance"]
    for folder in (*folders, ROOT / "tests/conformance/tests"):
        tokens_of_tests += measure(folder).tokens
    console.print(table)
    said = f"tests and suite: {tokens_of_tests:,} tokens (bar {TEST_TOKENS:,})"
    console.print(said, markup=False)
    if tokens_of_tests > TEST_TOKENS:
        bad.append(f"tests and suite: {tokens_of_tests:,} tokens, {TEST_TOKENS:,} at most")
    for line in bad:
        console.print(line, markup=False)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
