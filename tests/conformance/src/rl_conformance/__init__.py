"""The conformance suite that every backend must pass.

Derive a test class, run ``pytest --rl-backend NAME``, or run ``rl conformance run NAME``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_conformance.suite import (
        AgreementConformance,
        Conformance,
        GenerationConformance,
        PolicyConformance,
        RefitConformance,
    )

__all__ = [
    "AgreementConformance",
    "Conformance",
    "GenerationConformance",
    "PolicyConformance",
    "RefitConformance",
]


def __getattr__(name: str) -> Any:
    # The pytest plugin lives in this package and must not cost an unrelated run a torch import.
    if name in __all__:
        return getattr(import_module("rl_conformance.suite"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
