"""The pip commands that errors and pages print.

The distributions of this project are on no index, where anybody may take their names. A command
therefore names the place of each, and those that it requires and that are missing here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import importlib_metadata

__all__ = ["PROJECT", "engine_extra", "install_command", "origin_of"]

#: The distributions of this project, with those that each requires besides rl-core.
PROJECT = {
    **dict.fromkeys(("rl-core", "rl-cli", "rl-collective", "rl-losses", "rl-nemo"), ""),
    "rl-backends": "rl-cli",
    **dict.fromkeys(("rl-hf", "rl-hosting", "rl-megatron", "rl-trl"), "rl-cli rl-backends"),
    **dict.fromkeys(("rl-ray", "rl-sglang", "rl-vllm"), "rl-cli rl-backends rl-hosting"),
    "rl-guests": "rl-cli rl-backends rl-hosting rl-sglang rl-vllm",
    "rl-conformance": "rl-cli rl-backends rl-collective",
    "rl-train": "rl-cli rl-backends rl-losses",
}


def install_command(name: str, extra: str = "", python: str = "") -> str:
    """The shell command that installs a distribution, with what it requires of this project.

    Args:
        name: The distribution, of this project or an installed plugin.
        extra: One of its extras, or "".
        python: The interpreter of another environment, which has none of these.

    Returns:
        The command; before it, where it is to be run, if folders in it are relative.
    """
    ours = f"{python and 'rl-core'} {PROJECT.get(name, '')}".split()
    needed = (_source(each) for each in ours if python or not _read(each, "METADATA"))
    pip = f"{python} -m pip install".removeprefix(" -m ")
    command = " ".join((pip, *needed, _source(name, extra)))
    where = "in a checkout of this project: " if "./" in command and _root() != Path.cwd() else ""
    return where + command


def engine_extra(distribution: str, extra: str) -> str:
    """The extra that installs an engine here: ``cpu``, if there is one, without a usable GPU."""
    driver = shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists()
    gpu = driver and "\ncuda: Optional[str] = None" not in _read("torch", "../torch/version.py")
    offered = "\nProvides-Extra: cpu\n" in _read(distribution, "METADATA")
    return "cpu" if extra == "engine" and offered and not gpu else extra


def origin_of(name: str) -> dict[str, Any]:
    """Where pip took a distribution from (PEP 610); empty if that was an index, or is unknown."""
    try:
        return dict[str, Any](json.loads(_read(name, "direct_url.json") or "{}"))
    except ValueError:  # such as what a half-removed distribution leaves
        return {}


def _source(name: str, extra: str = "") -> str:
    """What pip is given for a distribution: its origin, or its folder in a checkout."""
    wanted, origin = f"[{extra}]" if extra else "", origin_of(name)
    if url := origin.get("url"):
        if origin.get("dir_info", {}).get("editable"):
            return f'-e "{unquote(urlsplit(url).path)}{wanted}"'
        if vcs := origin.get("vcs_info"):
            url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
        part = f"#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else ""
        return f'"{name}{wanted} @ {url}{part}"'
    if name not in PROJECT:  # it came from an index
        return f'"{name}{wanted}"'
    root, special = _root(), {"rl-core": "core", "rl-conformance": "tests/conformance"}
    place = f"{'.' if root in (None, Path.cwd()) else root}/{special.get(name, f'plugins/{name}')}"
    return f'"{place}{wanted}"' if wanted else place


def _root() -> Path | None:
    """The checkout that an installed distribution of this project came from, or None."""
    urls = (origin_of(name).get("url", "") for name in PROJECT)
    places = [Path(__file__), *(Path(unquote(urlsplit(url).path), "-") for url in urls if url)]
    return next((f for p in places for f in p.parents if (f / "core/src/rl_core").is_dir()), None)


def _read(name: str, file: str) -> str:
    found = next(iter(importlib_metadata.distributions(name=name)), None)
    return (found and found.read_text(file)) or ""
