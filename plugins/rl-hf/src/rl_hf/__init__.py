"""The Hugging Face backend: policy and generation on transformers.

The two classes are imported when they are first used, so that the manifest stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_hf.generation import HuggingFaceGeneration
    from rl_hf.policy import HuggingFacePolicy

__all__ = ["HuggingFaceGeneration", "HuggingFacePolicy"]

_HOME = {"HuggingFaceGeneration": "rl_hf.generation", "HuggingFacePolicy": "rl_hf.policy"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
