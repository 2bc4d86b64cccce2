"""Who a worker is among its peers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WorkerContext"]


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Handed to a backend that runs as one of several workers.

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
