"""How large the distributions are, how they are cut, and what breaks the rules of their structure.

``python tests/structure.py`` prints the figures. It fails where there is a circle of imports, where
a source file is too long, and where a figure is above its bar. A bar is what was last reached: a
change that gets below it lowers it, and none raises it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

__all__ = ["Measured", "circles", "main", "measure", "test_lines"]

ROOT = Path(__file__).parent.parent
#: Lines that a source file may have.
FILE_LINES = 700
#: Lines that a folder may have.
BARS = {
    "core/src/rl_core": 13_573,
    "core/src/rl_core/batch": 1_434,
    "core/src/rl_core/interfaces": 1_275,
    "core/src/rl_core/plugins": 769,
    "core/src/rl_core/weights": 8_999,
    "plugins/rl-train/src/rl_train": 4_478,
}
#: Lines of all tests and of what they are run with, for a hundred lines of the distributions.
TEST_LINES = 79.7
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


@dataclass
class Measured:
    """What a folder of sources is made of, in lines.

    Attributes:
        folder: Of these sources, relative to the workspace.
        files: How many there are.
        lines: All of them.
        code: Lines with a statement on them that is no import.
        imports: Lines of imports and of ``__all__``.
        docstrings: Lines of docstrings.
        comments: Lines that are a comment alone.
        functions: How many are defined.
        single: Private ones that are named at one place besides their definition.
        long: Files that are longer than they may be, with their lines.
    """

    folder: str
    files: int = 0
    lines: int = 0
    code: int = 0
    imports: int = 0
    docstrings: int = 0
    comments: int = 0
    functions: int = 0
    single: list[str] = field(default_factory=list)
    long: dict[str, int] = field(default_factory=dict)


def measure(folder: Path, within: Path | None = None) -> Measured:
    """Counts the lines and functions of a folder.

    Args:
        folder: With Python sources.
        within: The whole distribution, in which a function's callers are looked for; ``folder``
            when absent.

    Returns:
        The figures.
    """
    measured = Measured(
        str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else str(folder)
    )
    named: Counter[str] = Counter()
    for path in (within or folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name):
                named[node.id] += 1
            elif isinstance(node, ast.Attribute):
                named[node.attr] += 1
    defined: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        imports, docstrings, code = set[int](), set[int](), set[int]()
        for node in ast.walk(ast.parse(text)):
            span = range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", 0) or 0) + 1)
            if isinstance(node, ast.Import | ast.ImportFrom) or _declares_all(node):
                imports.update(span)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined.append(node.name)
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docstrings.update(span)
        comments = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                comments.add(token.start[0])
            elif token.type not in _LAYOUT:
                code.update(range(token.start[0], token.end[0] + 1))
        measured.files += 1
        measured.lines += lines
        measured.imports += len(imports)
        measured.docstrings += len(docstrings)
        measured.comments += len(comments)
        measured.code += len(code - imports - docstrings)
        if lines > FILE_LINES:
            measured.long[str(path.relative_to(folder))] = lines
    measured.functions = len(defined)
    # A name that is defined twice is an interface's, with two that implement it.
    measured.single = sorted(
        name
        for name, times in Counter(defined).items()
        if times == 1 and name.startswith("_") and not name.endswith("__") and named[name] == 1
    )
    return measured


_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _declares_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
    )


def circles(package: str) -> list[list[str]]:
    """Modules of a package that import each other, those for type checkers and late ones included.

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


def test_lines() -> int:
    """Lines of Python in all folders of tests, the sources of the suite left out."""
    suite = ROOT / "tests/conformance/src"
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for folder in (ROOT / "core/tests", *ROOT.glob("plugins/*/tests"), ROOT / "tests")
        for path in folder.rglob("*.py")
        if not path.is_relative_to(suite)
    )


def main() -> int:
    """Prints the figures.

    Returns:
        1 if there is a circle, a file that is too long or a figure above its bar, or else 0.
    """
    console = Console(width=120 if not sys.stdout.isatty() else None)
    places = ("core", "plugins/*", "tests/conformance")  # elsewhere lies what a run or a user made
    found = [path for place in places for path in sorted(ROOT.glob(f"{place}/pyproject.toml"))]
    folders = [path.parent for path in found]
    sources = [
        path
        for folder in folders
        if "project" in tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        for path in sorted((folder / "src").iterdir())
        if (path / "__init__.py").exists()
    ]
    table = Table(
        "folder",
        *(["files", "lines", "code", "imports", "docstrings", "comments", "functions", "single"]),
    )
    bad: list[str] = []
    lines_of_all = 0
    for package in sources:
        rooms = (
            sorted(path.parent for path in package.glob("*/__init__.py"))
            if package.name == "rl_core"
            else []
        )
        for folder in (package, *rooms):
            m = measure(folder, package)
            bar = BARS.get(m.folder)
            share = 100 * len(m.single) / max(m.functions, 1)
            most = SINGLE.get(package.name, SINGLE_GOAL)
            table.add_row(
                folder.name if folder == package else f"  {folder.name}",
                str(m.files),
                f"{m.lines:,}" + (f" (bar {bar:,})" if bar else ""),
                *(f"{n:,}" for n in (m.code, m.imports, m.docstrings, m.comments, m.functions)),
                f"{share:.1f}%" + (f" (bar {most}%)" if folder == package else ""),
            )
            if bar and m.lines > bar:
                bad.append(f"{m.folder}: {m.lines:,} lines, {bar:,} at most")
            if folder == package and share > most:
                bad.append(
                    f"{folder.name}: {share:.1f}% of the functions are private and called once, "
                    f"{most}% at most"
                )
            if folder == package:
                lines_of_all += m.lines
                bad += [
                    f"{folder.name}: {n} has {lines} lines, {FILE_LINES} at most"
                    for n, lines in m.long.items()
                ]
        bad += ["in circles of imports: " + ", ".join(circle) for circle in circles(package.name)]
    console.print(table)
    tests = test_lines()
    per_hundred = 100 * tests / lines_of_all
    console.print(
        f"tests: {tests:,} lines, {per_hundred:.1f} for 100 of the distributions "
        f"(bar {TEST_LINES})",
        markup=False,
    )
    if per_hundred > TEST_LINES:
        bad.append(f"the tests: {per_hundred:.1f} lines for 100, {TEST_LINES} at most")
    for line in bad:
        console.print(line, markup=False)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
