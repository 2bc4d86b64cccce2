"""The SGLang backends: SGLang in processes of its own, or an SGLang server that runs already.

The classes are imported when they are first used, so that the manifest stays light. Nothing here
imports SGLang: only the engine's own processes do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_sglang.config import SglangConfig
    from rl_sglang.generation import SglangGeneration
    from rl_sglang.server import SglangServerGeneration

__all__ = ["SglangConfig", "SglangGeneration", "SglangServerGeneration"]

_HOME = {
    "SglangConfig": "rl_sglang.config",
    "SglangGeneration": "rl_sglang.generation",
    "SglangServerGeneration": "rl_sglang.server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
