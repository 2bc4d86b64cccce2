"""Names of this package whose code is in a distribution of its own."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from rl_core.errors import MissingEngineError


def fetch(name: str, module: str, install: str) -> Any:
    """The name, from where its code is.

    Args:
        name: As it was here, and is there.
        module: Where it is.
        install: What pip is given to install that.

    Raises:
        MissingEngineError: It is not installed.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise MissingEngineError(
            f"{name} is in a distribution that is not installed: from {module} import {name}",
            fix=f"pip install {install}",
        )
    return getattr(importlib.import_module(module), name)
