"""Engines in processes of their own: what every backend needs whose engine is not to share one.

An author writes an :class:`Engine`, which runs in the engine's process, and derives a backend from
:class:`HostedGeneration`, which runs in the driver's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_hosting.engine import Engine
    from rl_hosting.generation import HostedGeneration
    from rl_hosting.local_cluster import LocalCluster
    from rl_hosting.weights import LoadedWeights
    from rl_hosting.worker_refits import WorkerRefits

__all__ = ["Engine", "HostedGeneration", "LoadedWeights", "LocalCluster", "WorkerRefits"]

_HOME = {
    "Engine": "rl_hosting.engine",
    "HostedGeneration": "rl_hosting.generation",
    "LocalCluster": "rl_hosting.local_cluster",
    "LoadedWeights": "rl_hosting.weights",
    "WorkerRefits": "rl_hosting.worker_refits",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
