"""A launcher that runs the workers of a backend as Ray actors, on any number of hosts.

Importing it lets :func:`rl_core.wait` take Ray's object refs.
"""

from __future__ import annotations

from rl_ray._virtual_cluster import RayVirtualCluster
from rl_ray._worker_group import WorkerGroup

__all__ = ["RayVirtualCluster", "WorkerGroup"]
