"""Backends in workers, on whatever launches them.

Launchers are distributions of their own, such as rl-ray and rl-hosting. Names are imported when
they are first used: who only wants :mod:`rl_core.cluster.remote_error` waits for no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_core.errors import MissingEngineError

if TYPE_CHECKING:
    from rl_core.cluster.generation import RemoteGeneration
    from rl_core.cluster.launcher import Cluster, Workers
    from rl_core.cluster.policy import RemotePolicy
    from rl_core.cluster.remote_error import worker_error

__all__ = [
    "Cluster",
    "RemoteGeneration",
    "RemotePolicy",
    "Workers",
    "worker_error",
]

_HOME = {
    "Cluster": "rl_core.cluster.launcher",
    "RemoteGeneration": "rl_core.cluster.generation",
    "RemotePolicy": "rl_core.cluster.policy",
    "Workers": "rl_core.cluster.launcher",
    "worker_error": "rl_core.cluster.remote_error",
}


def __getattr__(name: str) -> Any:
    if name in ("RayVirtualCluster", "WorkerGroup"):
        raise MissingEngineError(
            f"{name} is in a distribution of its own, rl-ray: from rl_ray import {name}",
            fix="pip install ./plugins/rl-ray",
            engine="ray",
        )
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
