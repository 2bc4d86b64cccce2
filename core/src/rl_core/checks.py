"""Diagnostics that users run on a model are in rl-conformance."""

from __future__ import annotations

from typing import Any

from rl_core._elsewhere import fetch

_AGREEMENT = "rl_conformance.diagnostics.agreement"
_ENGINE = "rl_conformance.diagnostics.engine"
_HOME = {
    "Agreement": _AGREEMENT,
    "GenerationConsistency": _ENGINE,
    "LogprobConsistency": _AGREEMENT,
    "MaxModelLen": _ENGINE,
    "measure_log_probability_consistency": _AGREEMENT,
    "random_prompts": _ENGINE,
    "test_generation_consistency": _ENGINE,
    "test_max_model_len_respected": _ENGINE,
    "validate_log_probability_consistency": _AGREEMENT,
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return fetch(name, _HOME[name], "./tests/conformance")
