"""Backends in workers, on whatever launches them.

Names are imported when they are first used: who only wants :mod:`rl_hosting.cluster.remote_error`
waits for no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_hosting.cluster.cluster import Cluster
    from rl_hosting.cluster.generation import RemoteGeneration
    from rl_hosting.cluster.launcher import Workers
    from rl_hosting.cluster.policy import RemotePolicy
    from rl_hosting.cluster.remote_error import worker_error

__all__ = ["Cluster", "RemoteGeneration", "RemotePolicy", "Workers", "worker_error"]

_HOME = {
    "Cluster": "cluster",
    "RemoteGeneration": "generation",
    "RemotePolicy": "policy",
    "Workers": "launcher",
    "worker_error": "remote_error",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
