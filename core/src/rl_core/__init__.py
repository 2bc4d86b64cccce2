"""Contracts, batches, weight refits and plugin discovery for RL post-training.

Every public name is here. What needs torch is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_core import errors, interfaces
from rl_core.errors import *  # noqa: F403 - all of them are public here
from rl_core.interfaces import *  # noqa: F403
from rl_core.plugins.manifest import BackendManifest, Capability, EngineRequirement

if TYPE_CHECKING:
    from rl_core.batch import (
        BatchedDataDict,
        SlicedDataDict,
        verify_right_padding,
    )
    from rl_core.create import create_generation, create_policy
    from rl_core.futures import wait
    from rl_core.weights import refit

__all__ = [
    "__version__",
    "BackendManifest",
    "BatchedDataDict",
    "Capability",
    "EngineRequirement",
    "SlicedDataDict",
    "create_generation",
    "create_policy",
    "refit",
    "verify_right_padding",
    "wait",
]
__all__ += errors.__all__
__all__ += interfaces.__all__

#: Where names are that are imported when they are first used.
_HOME = {
    "BatchedDataDict": "rl_core.batch",
    "SlicedDataDict": "rl_core.batch",
    "verify_right_padding": "rl_core.batch",
    "wait": "rl_core.futures",
    "refit": "rl_core.weights",
    "create_generation": "rl_core.create",
    "create_policy": "rl_core.create",
}

#: Version of the installed distribution.
__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        globals()[name] = version("rl-core")
        return globals()[name]
    if name not in _HOME:
        raise AttributeError(f"module 'rl_core' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
