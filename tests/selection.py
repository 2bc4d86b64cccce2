"""Which tests run: those that reach a file which differs from the newest commit that passed.

CI remembers the commits that passed as git notes (``refs/notes/ci``), or in a file that it passes
in as ``RL_CI_PASSED``. Without such an ancestor of the checkout, everything is concerned.
"""

from __future__ import annotations

import ast
import datetime as dt
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from mutants import Mutant

__all__ = [
    "SAMPLES",
    "Selection",
    "changed_since",
    "newest_passed",
    "number_of",
    "sampled",
    "touched",
]

#: What every test depends on: how environments are made, and how tests are chosen and run.
_OF_ALL = re.compile(
    r"pyproject\.toml|noxfile\.py|conftest\.py|constraints\.txt|\.ci/.*"
    r"|tests/(selection|nox_parts)\.py|tests/conformance/src/rl_conformance/models\.py"
    r"|(core|plugins/[^/]+|tests/conformance)/(pyproject\.toml|[^/]+\.txt)"
)
#: A string that names a module of this project; a dot at its end stands for any module below.
_DOTTED = re.compile(r"(rl_\w+(?:\.\w+)+\.?)(?::.*)?|(rl_\w+\.)")


#: Into so many samples all mutants are dealt. Clauses with as many are in each of them.
SAMPLES = 16


def newest_passed(root: Path) -> str | None:
    """Finds the newest ancestor of the checked-out commit, itself not included, that passed CI.

    Returns:
        Its hash, or None where no ancestor is known to have passed.
    """
    listed = os.environ.get("RL_CI_PASSED", "")
    passed = Path(listed).read_text().split() if listed and Path(listed).exists() else []
    log = _git(root, "log", "--skip=1", "--notes=ci", "--format=%x00%H %N")
    for entry in log.split("\0")[1:]:
        commit, _, note = entry.partition(" ")
        if note.strip().startswith("passed") or commit.strip() in passed:
            return commit.strip()
    return None


def changed_since(root: Path, commit: str) -> list[str]:
    """Lists the files that differ from a commit, those not committed yet included.

    Returns:
        Paths from the root of the checkout.
    """
    listed = _git(root, "diff", "--name-only", "-z", commit)
    listed += _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted(set(listed.split("\0")) - {""})


def _git(root: Path, *command: str) -> str:
    """Returns what git prints, or "" if it fails, as in a directory that is no checkout."""
    done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def number_of(root: Path) -> int:
    """Returns the number of the sample to run, from the checked-out commit or else the date."""
    commit = _git(root, "rev-parse", "HEAD").strip()
    turn = int(commit, 16) if commit else dt.datetime.now(dt.UTC).toordinal()
    return turn % SAMPLES


def sampled(mutants: Sequence[Mutant], number: int) -> list[Mutant]:
    """One sample: every sixteenth mutant, so that those of one clause are in different ones.

    Args:
        mutants: All of them, in the order of their clauses.
        number: Of the sample, from 0.
    """
    return list(mutants[number % SAMPLES :: SAMPLES])


def touched(mutants: Sequence[Mutant], changed: Collection[str]) -> list[Mutant]:
    """The mutants about clauses whose checks are in files that changed, or which are there.

    Args:
        mutants: All of them.
        changed: Paths from the root of the checkout.
    """
    from rl_conformance.registry import all_checks

    files = (re.sub("^tests/conformance/(src|tests)/", "", path) for path in changed)
    modules = {file.removesuffix(".py").replace("/", ".") for file in files}
    clauses = {c.clause.id for c in all_checks() if c.function.__module__ in modules}
    return [m for m in mutants if m.breaks[0] in clauses or m.module in modules]


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Selection:
    """The tests and backends that changed files concern.

    A test is concerned by every file that it reaches: modules that it imports, and what these
    import in turn, late imports and modules named in strings included; all modules of a backend or
    a transport whose name stands in the test; and other files whose name or folder stands there.
    The tests under ``tests/integration`` reach all sources.

    Attributes:
        root: The checkout.
        changed: Paths of the files that changed, from its root.
    """

    root: Path
    changed: tuple[str, ...]

    def concerns_all(self) -> bool:
        """Returns whether a file changed on which every test depends."""
        return any(_OF_ALL.fullmatch(path) for path in self.changed)

    def concerns_packages(self, *packages: str) -> bool:
        """Returns whether a file changed that the sources of these packages reach."""
        sources = {path for each in packages for path in self._sources[each].rglob("*.py")}
        return self.concerns_all() or bool(sources & self._concerned)

    def concerns_test(self, file: Path) -> bool:
        """Returns whether a file of tests has to run."""
        if file.is_relative_to(self.root / "tests" / "integration") and self._changed_sources:
            return True
        conftests = {folder / "conftest.py" for folder in file.parents if folder != self.root}
        return self.concerns_all() or bool({file, *conftests} & self._concerned)

    @cached_property
    def _sources(self) -> dict[str, Path]:
        """Import names of the distributions, and the folders of their sources."""
        places = ("core", "plugins/*", "tests/conformance")
        inits = [init for place in places for init in self.root.glob(f"{place}/src/*/__init__.py")]
        return {init.parent.name: init.parent for init in inits}

    @cached_property
    def _changed_sources(self) -> set[Path]:
        """Changed modules; of a module that is gone, or of another file, all of the package."""
        changed = set[Path]()
        for path in (self.root / each for each in self.changed):
            for folder in self._sources.values():
                if path.is_relative_to(folder):
                    is_module = path.suffix == ".py" and path.exists()
                    changed.update([path] if is_module else folder.rglob("*.py"))
        return changed

    @cached_property
    def _concerned(self) -> set[Path]:
        """Modules and tests that reach a file which changed."""
        others = [
            Path(path)
            for path in self.changed
            if not path.endswith(".py") or path.startswith(("docs", "examples"))
        ]
        sources = {path for folder in self._sources.values() for path in folder.rglob("*.py")}
        places = ("core/tests", "plugins/*/tests", "tests", "benchmarks", "examples")
        tests = {path for place in places for path in self.root.glob(f"{place}/**/*.py")} - sources
        waiting = [*self._changed_sources, *(self.root / path for path in self.changed)]
        for path in tests:
            text = _read(path)
            words = set(re.findall(r"[\w-]+", text)) - {"core", "plugins", "tests"}
            if any(other.name in text or other.parts[0] in words for other in others):
                waiting.append(path)
        named_by: dict[Path, list[Path]] = {}
        for path in sources | tests:
            for named in self._named_in(path, is_test=path in tests):
                named_by.setdefault(named, []).append(path)
        reached = set[Path]()
        while waiting:
            path = waiting.pop()
            if path not in reached:
                reached.add(path)
                waiting += named_by.get(path, [])
        return reached

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        """Names of backends and transports, and the sources of their packages."""
        modules: dict[str, list[Path]] = {}
        for folder in self._sources.values():
            project = tomllib.loads(_read(folder.parents[1] / "pyproject.toml"))["project"]
            entry_points = project.get("entry-points", {})
            for group in ("rl_core.backends", "rl_core.transports"):
                for name in entry_points.get(group, {}):
                    modules[name] = list(folder.rglob("*.py"))
        return modules

    @cached_property
    def _test_modules(self) -> dict[str, list[Path]]:
        """Modules that tests import from the folders that pytest puts on the path."""
        settings = tomllib.loads(_read(self.root / "pyproject.toml"))
        modules: dict[str, list[Path]] = {}
        for folder in settings["tool"]["pytest"]["ini_options"]["pythonpath"]:
            for path in (self.root / folder).glob("*.py"):
                modules.setdefault(path.stem, []).append(path)
            for init in (self.root / folder).glob("*/__init__.py"):
                modules.setdefault(init.parent.name, []).extend(init.parent.rglob("*.py"))
        return modules

    def _named_in(self, path: Path, is_test: bool) -> list[Path]:
        """Returns the files of this project that a file imports, or names in a string."""
        named: list[Path] = []
        for node in _nodes_that_run(ast.parse(_read(path))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = _DOTTED.fullmatch(node.value)
                # What a package's __init__ names in a string is loaded when it is asked for.
                lazy = match is None or path.name == "__init__.py"
                modules = [] if lazy else [match[1] or match[2]]
                if is_test:
                    for word in self._by_name.keys() & set(re.findall(r"[\w-]+", node.value)):
                        named += self._by_name[word]
            else:
                continue
            for module in modules:
                named += self._module(module)
                if is_test:
                    named += self._test_modules.get(module.partition(".")[0], [])
        return named

    def _module(self, dotted: str) -> list[Path]:
        """Returns the files that an import of a dotted name runs, without what they import."""
        package, *names = dotted.rstrip(".").split(".")
        folder = self._sources.get(package)
        if folder is None:
            return []
        files = [folder / "__init__.py"]
        for name in names:
            if (folder / f"{name}.py").exists():
                return [*files, folder / f"{name}.py"]
            if not (folder / name / "__init__.py").exists():
                is_lazy = "def __getattr__" in _read(folder / "__init__.py")
                return list(folder.rglob("*.py")) if is_lazy else files
            folder /= name
            files.append(folder / "__init__.py")
        return list(folder.rglob("*.py")) if dotted.endswith(".") else files


def _nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a module, but for imports that only type checkers see."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


if __name__ == "__main__":
    print(newest_passed(Path(__file__).parent.parent) or "")
