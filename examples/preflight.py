"""Finds what is missing before an example runs, so that it fails in its first second."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Where a package that is imported under another name comes from.
_PLUGINS = ("losses", "ray")
_NAMES = {"rl_core": "./core"} | {f"rl_{name}": f"./plugins/rl-{name}" for name in _PLUGINS}


def require_packages(*modules: str) -> None:
    """Ends the program, with the line that installs them, if packages are missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(_NAMES.get(name, name) for name in missing)
        sys.exit(f"This example needs {', '.join(missing)}.\nFix: pip install {packages}")


def check(*, policy: str, generation: str, file: Path | None) -> None:
    """Finds both backends, with their engines, and makes sure that the figures can be written.

    Args:
        policy: Backend that is to train.
        generation: Backend that is to generate.
        file: What will be written at the end; its folder is made.

    Raises:
        PluginError: A backend or its engine is missing; the fix says how to install it.
        ConfigError: The file cannot be written.
    """
    from rl_core.errors import ConfigError
    from rl_core.plugins.registry import resolve

    resolve(policy, "policy", config={})  # with its engine
    resolve(generation, "generation", config={})
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(file if file.exists() else file.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable or file.is_dir():
        raise ConfigError(f"{file} cannot be written", fix="name a file in a folder of yours")


@contextmanager
def plain_errors() -> Iterator[None]:
    """An error of the product ends the program with its message, without a traceback."""
    from rl_core.errors import RLError

    try:
        yield
    except RLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
