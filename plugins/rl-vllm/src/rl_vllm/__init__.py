"""The vLLM backends: vLLM in a process of its own, or a vLLM server that already runs.

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
    from rl_vllm.server import VllmServerGeneration

__all__ = ["VllmConfig", "VllmGeneration", "VllmGenerationWorker", "VllmServerGeneration"]

_HOME = {
    "VllmConfig": "rl_vllm.config",
    "VllmGeneration": "rl_vllm.generation",
    "VllmGenerationWorker": "rl_vllm.actor",
    "VllmServerGeneration": "rl_vllm.server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
