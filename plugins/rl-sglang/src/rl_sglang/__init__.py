"""The SGLang backend: generation by SGLang, in processes of its own.

The classes are imported when they are first used, so that the manifest stays light. Nothing here
imports SGLang: only the engine's own processes do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_sglang.config import SglangConfig
    from rl_sglang.generation import SglangGeneration

__all__ = ["SglangConfig", "SglangGeneration"]

_HOME = {
    "SglangConfig": "rl_sglang.config",
    "SglangGeneration": "rl_sglang.generation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
