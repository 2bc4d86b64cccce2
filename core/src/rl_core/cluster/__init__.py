"""Backends in workers, on whatever launches them.

:class:`RayVirtualCluster` needs the extra ``ray``, which is imported when one is made. Names are
imported when they are first used: who only wants :mod:`rl_core.cluster.remote_error` waits for no
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.cluster.generation import RemoteGeneration
    from rl_core.cluster.launcher import Cluster, Workers
    from rl_core.cluster.policy import RemotePolicy
    from rl_core.cluster.remote_error import worker_error
    from rl_core.cluster.virtual_cluster import RayVirtualCluster
    from rl_core.cluster.worker_group import WorkerGroup

__all__ = [
    "Cluster",
    "RayVirtualCluster",
    "RemoteGeneration",
    "RemotePolicy",
    "WorkerGroup",
    "Workers",
    "worker_error",
]

_HOME = {
    "Cluster": "rl_core.cluster.launcher",
    "RayVirtualCluster": "rl_core.cluster.virtual_cluster",
    "RemoteGeneration": "rl_core.cluster.generation",
    "RemotePolicy": "rl_core.cluster.policy",
    "WorkerGroup": "rl_core.cluster.worker_group",
    "Workers": "rl_core.cluster.launcher",
    "worker_error": "rl_core.cluster.remote_error",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
