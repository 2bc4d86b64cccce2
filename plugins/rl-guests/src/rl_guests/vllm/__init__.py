"""The backend ``rl_core`` of vLLM's weight-transfer API."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_guests.vllm.trainer import TrainerInitInfo

__all__ = ["TrainerInitInfo"]


def __getattr__(name: str) -> Any:
    if name != "TrainerInitInfo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.trainer").TrainerInitInfo
