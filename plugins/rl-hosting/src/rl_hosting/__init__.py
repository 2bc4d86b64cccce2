"""Engines, and the workers of a backend, in separate processes on this host.

The author of a backend writes an :class:`Engine`, which runs in the engine's process, gives each of
its workers a :class:`WorkerRefits`, and derives a backend from :class:`HostedGeneration`, which
runs in the driver's process, or from :class:`EngineBackend`, which also reads the configuration.
Modules with names that begin with an underscore are private.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_backends.engine.derived_weights import LoadWatch
    from rl_backends.engine.weights import LoadedSink, LoadedWeights
    from rl_hosting.engine import Engine
    from rl_hosting.engine_backend import EngineBackend
    from rl_hosting.generation import HostedGeneration
    from rl_hosting.local_cluster import LocalCluster
    from rl_hosting.worker_refits import WorkerRefits

__all__ = [
    "Engine",
    "EngineBackend",
    "HostedGeneration",
    "LoadWatch",
    "LoadedSink",
    "LoadedWeights",
    "LocalCluster",
    "WorkerRefits",
]

_HOME = {
    "Engine": "rl_hosting.engine",
    "EngineBackend": "rl_hosting.engine_backend",
    "HostedGeneration": "rl_hosting.generation",
    "LoadWatch": "rl_backends.engine.derived_weights",
    "LoadedSink": "rl_backends.engine.weights",
    "LoadedWeights": "rl_backends.engine.weights",
    "LocalCluster": "rl_hosting.local_cluster",
    "WorkerRefits": "rl_hosting.worker_refits",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
