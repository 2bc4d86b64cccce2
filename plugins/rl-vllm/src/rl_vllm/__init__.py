"""The vLLM backend: generation by vLLM, in a process of its own.

The classes are imported when they are first used, so that the manifest stays light. Nothing here
imports vLLM: only the engine's own processes do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_vllm.actor import VllmGenerationWorker
    from rl_vllm.config import VllmConfig
    from rl_vllm.generation import VllmGeneration

__all__ = ["VllmConfig", "VllmGeneration", "VllmGenerationWorker"]

_HOME = {
    "VllmConfig": "rl_vllm.config",
    "VllmGeneration": "rl_vllm.generation",
    "VllmGenerationWorker": "rl_vllm.actor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
