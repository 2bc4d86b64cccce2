"""Ray's own start and end: started here if nobody did, ended here if started here."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["acquire_ray", "release_ray"]

_QUIET: dict[str, Any] = {
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
}
_lock = threading.Lock()
_users = 0  # clusters that need the Ray that was started here


def acquire_ray(num_cpus: int, options: Mapping[str, Any]) -> bool:
    """Starts Ray unless it runs already.

    Args:
        num_cpus: CPUs that the caller will ask for. A Ray started here has at least as many;
            they are a number to count with, not cores.
        options: Passed on to ``ray.init``, on top of quiet defaults. With ``address`` (or the
            variable ``RAY_ADDRESS``) a running Ray is joined.

    Returns:
        True if the caller must call :func:`release_ray` when it is done.
    """
    global _users
    with _lock:
        if ray.is_initialized():
            _users += bool(_users)
            return _users > 0
        chosen = {**_QUIET, **options}
        if not (os.environ.get("RAY_ADDRESS") or "address" in options):
            chosen["address"] = "local"
            chosen.setdefault("num_cpus", max(num_cpus, os.cpu_count() or 1))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(**chosen)
        _users = 1
        return True


def release_ray() -> None:
    """Ends the Ray that was started here with the last cluster that uses it."""
    global _users
    with _lock:
        _users -= 1
        if not _users:
            ray.shutdown()
