"""Backends in workers, on whatever launches them.

:class:`RayVirtualCluster` needs the extra ``ray``, which is imported when one is made.
"""

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
