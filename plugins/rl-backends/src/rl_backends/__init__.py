"""Base classes that turn an engine or a trainer into a backend with few methods."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_backends.generation.rows import (
    Completion,
    FailedRow,
    ModelFacts,
    Row,
    RowEngine,
    SamplingParams,
)

if TYPE_CHECKING:
    from rl_backends.generation.base import GenerationBackend
    from rl_backends.generation.prompts import PromptBatch
    from rl_backends.inputs import TAGS
    from rl_backends.policy.base import PolicyBackend
    from rl_backends.policy.refits import PolicyRefits
    from rl_backends.policy.rows import RowLimits
    from rl_backends.spellings import Receiver

__all__ = [
    "TAGS",
    "Completion",
    "FailedRow",
    "GenerationBackend",
    "ModelFacts",
    "PolicyBackend",
    "PolicyRefits",
    "PromptBatch",
    "Receiver",
    "Row",
    "RowEngine",
    "RowLimits",
    "SamplingParams",
]

#: Where the names are that need torch: they are imported when they are used.
_HOME = {
    "TAGS": "rl_backends.inputs",
    "GenerationBackend": "rl_backends.generation.base",
    "PolicyBackend": "rl_backends.policy.base",
    "PolicyRefits": "rl_backends.policy.refits",
    "PromptBatch": "rl_backends.generation.prompts",
    "Receiver": "rl_backends.spellings",
    "RowLimits": "rl_backends.policy.rows",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
