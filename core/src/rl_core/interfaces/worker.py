"""Workers: where they run, who one is among its peers, and what their methods return."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["Cluster", "DataParallelRank", "Future", "WorkerContext"]

#: What a method returns when its result comes later: a ``concurrent.futures.Future``, or what a
#: launcher has instead, such as one of Ray's object refs. :func:`rl_core.wait` takes both.
Future: TypeAlias = concurrent.futures.Future[Any] | Any


class Cluster(Protocol):
    """Places for workers, such as rl-hosting's ``LocalCluster`` or rl-ray's ``RayVirtualCluster``.

    Authors of others derive from ``rl_hosting.cluster.Cluster``, which implements this.
    """

    def remote_backend(self, manifest: BackendManifest, kind: Kind, config: dict[str, Any]) -> Any:
        """Starts workers that have a backend each, and returns one that stands for all of them.

        That is a :class:`~rl_core.interfaces.GenerationInterface` or a
        :class:`~rl_core.interfaces.ColocatablePolicyInterface`, by ``kind``; ``config`` is checked.
        """


@dataclass(frozen=True, slots=True)
class DataParallelRank:
    """Which rows a policy worker gets, and whether its results are those of its rows.

    A backend that splits one model over several workers (tensor or pipeline parallel) reports one
    for each as its attribute ``data_parallel``: workers of one rank get the same rows, and one of
    them reports.

    Attributes:
        rank: Of this worker's rows.
        size: How many parts rows are dealt into.
        reports: The results of these rows are taken from this worker.
    """

    rank: int = 0
    size: int = 1
    reports: bool = True


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Handed to a backend that runs as one of several workers.

    Generation workers are independent replicas. Policy workers are data-parallel unless they state
    otherwise (:class:`DataParallelRank`): each gets its own rows (as many as its peers) of every
    scoring call and of every global batch, in order of the steps. ``gbs`` (an argument, or the
    configuration's) counts the rows of the whole group and is then a multiple of the data-parallel
    size; rows that even the parts out have ``sample_mask`` 0. The workers sum counts, losses,
    metrics and gradients over the group, so that all return the same result.

    Every other method is called on every worker with the same arguments: ``save_checkpoint`` with
    one path, ``generate`` and ``calibrate_qkv_fp8_scales`` with all rows (the first worker's result
    counts), and those of a refit, which rank 0 sends.

    Attributes:
        rank: This worker's rank among the group.
        world_size: Size of the group.
        local_rank: Index among the group's workers on this node.
        master_addr: Address of rank 0, for a rendezvous.
        master_port: A TCP port that is free there.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
