"""Whether an engine samples from the distribution that a policy scores."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from rl_core.errors import LoopWarning

__all__ = ["warn_of_temperatures"]

#: Engines of which it was said.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_of_temperatures(policy: Any, generation: Any) -> None:
    """Warns, once for each engine, of temperatures that differ; one that is greedy has none.

    Both are known wherever the two run: a backend on a cluster has its configuration here.
    """
    sampling = getattr(generation, "sampling", None)
    theirs = None if sampling is None or sampling.greedy else sampling.temperature
    ours = float(getattr(policy, "config", {}).get("temperature", 1.0))
    if theirs is None or theirs == ours or generation in _told:
        return
    _told.add(generation)
    warnings.warn(
        f"the engine samples at temperature {theirs:g}, the policy scores and trains at "
        f"temperature {ours:g}: their log-probs are of different distributions. "
        'Set "temperature" to the same value in both configurations. An engine that is for '
        "evaluation alone may differ; ignore rl_core.LoopWarning for it.",
        LoopWarning,
        stacklevel=4,
    )
