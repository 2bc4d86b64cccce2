"""Who a worker is among its peers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WorkerContext"]


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Handed to a backend that runs as one of several workers.

    Generation workers are independent replicas. Policy workers are data-parallel: each gets its
    own rows (as many as its peers) of every scoring call and of every global batch, in order of
    the steps. ``gbs`` (an argument, or the configuration's) counts the rows of the whole group
    and is then a multiple of ``world_size``; rows that even the parts out have ``sample_mask`` 0.
    The workers sum counts, losses, metrics and gradients over the group, so that all return the
    same result. ``save_checkpoint`` is called on every rank with one path.

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
