"""The Megatron backend: a policy on megatron-core.

The class is imported when it is first used, so that the manifest stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_megatron.policy import MegatronPolicy

__all__ = ["MegatronPolicy"]

_HOME = {"MegatronPolicy": "rl_megatron.policy"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
