"""Backends in workers are in rl-hosting, and workers as Ray actors in rl-ray."""

from __future__ import annotations

from typing import Any

from rl_core._elsewhere import fetch

_HOSTING = ("rl_hosting.cluster", "./plugins/rl-hosting")
_RAY = ("rl_ray", "./plugins/rl-hosting ./plugins/rl-ray")
_HOME = {
    "Cluster": _HOSTING,
    "RayVirtualCluster": _RAY,
    "RemoteGeneration": _HOSTING,
    "RemotePolicy": _HOSTING,
    "WorkerGroup": _RAY,
    "Workers": _HOSTING,
    "worker_error": _HOSTING,
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return fetch(name, *_HOME[name])
