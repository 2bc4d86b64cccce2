"""Backends as Ray actors. Needs the extra ``ray``; Ray is imported when a cluster is made."""

from rl_core.cluster.generation import RemoteGeneration
from rl_core.cluster.policy import RemotePolicy
from rl_core.cluster.remote_error import worker_error
from rl_core.cluster.virtual_cluster import RayVirtualCluster
from rl_core.cluster.worker_group import WorkerGroup

__all__ = ["RayVirtualCluster", "RemoteGeneration", "RemotePolicy", "WorkerGroup", "worker_error"]
