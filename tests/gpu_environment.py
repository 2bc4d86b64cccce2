"""Where ``tests/gpu_run.py`` runs: what is installed there, and which sources these are."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ROOT", "folder_of", "install_sources", "missing"]

ROOT = Path(__file__).parent.parent


def _distributions() -> dict[str, tuple[Path, dict[str, Any]]]:
    """Our own: their folders and what ``pyproject.toml`` says of each, by name."""
    files = [ROOT / "core", ROOT / "tests" / "conformance", *sorted((ROOT / "plugins").iterdir())]
    found = {}
    for folder in files:
        if (folder / "pyproject.toml").exists():
            project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
            found[project["name"]] = folder, project
    return found


def _is_installed(requirement: str) -> bool:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing(backend: str, needs: Sequence[str] = ()) -> list[str]:
    """What a backend, its engine and the suite need, and this environment has not.

    Args:
        backend: Its name.
        needs: More requirements.
    """
    ours, seen, wanted = _distributions(), set[str](), [*needs]
    names = ["rl-conformance", f"rl-{backend}"]
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for requirement in ours[name][1].get("dependencies", []):
            bare = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
            (names if bare in ours else wanted).append(bare if bare in ours else requirement)
    engines = ours[f"rl-{backend}"][1].get("optional-dependencies", {})
    either = [one for extra in ("engine", "cpu") for one in engines.get(extra, [])]
    if either and not any(map(_is_installed, either)):
        wanted.append(either[0])
    return [one for one in dict.fromkeys(wanted) if not _is_installed(one)]


def install_sources(folder: Path) -> list[str]:
    """Makes the sources count as installed where they are not, without pip or a network.

    Args:
        folder: For the metadata by which backends and commands are found.

    Returns:
        What is to come first in ``PYTHONPATH``; nothing where all are installed.
    """
    paths = []
    for name, (source, project) in _distributions().items():
        if _is_installed(name):
            continue
        info = folder / f"{name.replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {project['version']}"]
        lines += [f"Requires-Dist: {one}" for one in project.get("dependencies", [])]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
        entries = [
            line
            for group, points in groups.items()
            for line in (f"[{group}]", *(f"{key} = {value}" for key, value in points.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(entries) + "\n")
        paths.append(str(source / "src"))
    return [str(folder), *paths] if paths else []


def folder_of(out: Path, *, rehearse: bool = False) -> Path:
    """Where a run writes: the folder of this state of the sources, or a new one of today."""
    tree = ""
    if shutil.which("git"):
        git = ("git", "-C", str(ROOT))
        head = [*git, "rev-parse", "--short=10", "HEAD"]
        tree = subprocess.run(head, capture_output=True, text=True).stdout.strip()
        changes = subprocess.run([*git, "diff", "HEAD"], capture_output=True).stdout
        if tree and changes:
            tree += "-" + hashlib.sha256(changes).hexdigest()[:8]
    if not tree:  # a copy of the files alone
        files = [
            path for top in ("core", "plugins", "tests") for path in (ROOT / top).rglob("*.py")
        ]
        tree = hashlib.sha256(b"".join(map(Path.read_bytes, sorted(files)))).hexdigest()[:10]
    tree += "-rehearsal" * rehearse
    today = dt.datetime.now(dt.UTC).date().isoformat()
    found = sorted(out.glob(f"????-??-??-{tree}"))
    return found[-1] if found else out / f"{today}-{tree}"
