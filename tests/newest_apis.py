"""What the newest release of an engine lacks of that which its plugin imports, and what it has new.

::

    python tests/newest_apis.py [vllm] [sglang] [megatron]

Downloads a wheel, which needs a network, and reads it; nothing is installed or run. It says no more
than that names are there: a range of versions is declared when its tests have run.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ENGINES", "Engine", "differences", "main"]

ROOT = Path(__file__).parent.parent


class Engine(NamedTuple):
    """An engine's newest wheel, and where its plugin keeps what it knows of arguments.

    Attributes:
        distribution: On the package index.
        package: That it installs.
        options: For pip, so that it takes the newest also where this Python is too old for it.
        arguments: Module and class of its arguments; empty if none are passed on.
    """

    distribution: str
    package: str
    options: tuple[str, ...] = ()
    arguments: tuple[str, str] | tuple[()] = ()


ENGINES = {
    "vllm": Engine("vllm", "vllm", (), ("vllm.engine.arg_utils", "EngineArgs")),
    "sglang": Engine("sglang", "sglang", (), ("sglang.srt.server_args", "ServerArgs")),
    "megatron": Engine("megatron-core", "megatron", ("--python-version", "3.12")),
}


def differences(engine: Engine, plugin: Path, wheel: zipfile.ZipFile) -> list[str]:
    """What is imported and not there, a line each, and arguments that no table of the plugin has.

    Args:
        engine: Whose.
        plugin: Its package of ours.
        wheel: A release.
    """
    files = set(wheel.namelist())
    found = []
    for module, name, where in sorted(set(_imports(plugin, engine.package))):
        if name and _file_of(f"{module}.{name}", files):
            continue
        at = _file_of(module, files)
        if at is None:
            found.append(f"{where}: there is no module {module}")
        elif name and name not in _defined(wheel.read(at).decode()):
            found.append(f"{where}: {module} has no {name}")
    if engine.arguments:
        module, kind = engine.arguments
        tables = importlib.import_module(f"{plugin.name}.engine_args")
        known = {*tables.OWN_KEYS, *tables.ALLOWED, *tables.WITHOUT_REFITS, *tables.REFUSED}
        at = _file_of(module, files)
        there = _fields(wheel.read(at).decode(), kind) if at else set()
        found += [f"a new argument: {name}" for name in sorted(there - known)]
    return found


def _imports(plugin: Path, package: str) -> Iterator[tuple[str, str, str]]:
    """Modules of a package, the name that is taken of each, and by which file."""
    for path in sorted(plugin.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                pairs = [(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                pairs = [(alias.name, "") for alias in node.names]
            else:
                continue
            for module, name in pairs:
                if module.partition(".")[0] == package:
                    yield module, name, path.name


def _file_of(module: str, files: set[str]) -> str | None:
    path = PurePosixPath(*module.split("."))
    for one in (f"{path}.py", f"{path}/__init__.py"):
        if one in files:
            return one
    return None


class _All:
    """Of a module that makes names as they are asked for, or has all of another."""

    def __contains__(self, name: object) -> bool:
        return True


def _defined(source: str) -> set[str] | _All:
    """Names that a module has, also where they are defined under a condition."""
    found: set[str] = set()
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        for node in ast.iter_child_nodes(stack.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {(a.asname or a.name).partition(".")[0] for a in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)  # of a table of names that are imported late
            else:
                stack.append(node)
    return _All() if found & {"__getattr__", "*"} else found


def _fields(source: str, name: str) -> set[str]:
    """The annotated fields of a class."""
    return {
        field.target.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == name
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def main(argv: Sequence[str] | None = None, engines: Mapping[str, Engine] = ENGINES) -> int:
    """Prints the differences of each engine; 1 if something that is imported is not there."""
    lacking = False
    for name in (sys.argv[1:] if argv is None else argv) or engines:
        engine = engines[name]
        with tempfile.TemporaryDirectory() as folder:
            to = ["-q", "--no-deps", "--only-binary=:all:", "-d", folder, *engine.options]
            pip = [sys.executable, "-m", "pip", "download", *to, engine.distribution]
            subprocess.run(pip, check=True, env={**os.environ, "PIP_CONSTRAINT": ""})
            [wheel] = Path(folder).glob("*.whl")
            plugin = ROOT / "plugins" / f"rl-{name}" / "src" / f"rl_{name}"
            with zipfile.ZipFile(wheel) as opened:
                found = differences(engine, plugin, opened)
        lines = [f"{wheel.name}: {len(found)} differences", *(f"  {one}" for one in found)]
        print("\n".join(lines), flush=True)
        lacking |= any("there is no" in one or "has no" in one for one in found)
    return int(lacking)


if __name__ == "__main__":
    sys.exit(main())
