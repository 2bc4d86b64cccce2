"""Tensors of which each rank has shards (DTensors), put together on the first rank."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from rl_backends.gathering.source import GatheredSource
from rl_backends.pieces import held_boxes, index_of, local_part, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_backends.gathering.changes import WeightChanges
    from rl_backends.gathering.source import RefitRanks
    from rl_core.interfaces import TensorSpec, WeightSource

    #: Makes a tensor whole on rank 0; None elsewhere.
    Whole = Callable[[torch.Tensor], torch.Tensor | None]

#: Longest wait for a rank in a gather of a refit: what hangs because a rank has died ends then.
GATHER_TIMEOUT_S = 60.0


class DTensorSource(GatheredSource):
    """The tensors of a sharded model, each put together on rank 0 when its turn comes.

    Args:
        ranks: That take part.
        changes: Of this rank's weights.
        source: Makes each tensor; of shards, or wholly on rank 0.
        whole: Calls :func:`whole_on_first`, over a group that refits alone use.
    """

    def __init__(
        self,
        ranks: RefitRanks | None,
        changes: WeightChanges,
        source: WeightSource,
        whole: Whole,
    ) -> None:
        super().__init__(ranks, changes)
        self.device = source.device
        self._source = source
        self._whole = whole

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return self._source.specs()

    def gather(self, name: str) -> torch.Tensor | None:
        """See :meth:`GatheredSource.gather`."""
        [(_, tensor)] = self._source.tensors([name])
        return self._whole(tensor)


def whole_on_first(
    tensor: torch.Tensor, group: Any, members: Sequence[int], device: torch.device
) -> torch.Tensor | None:
    """Puts a tensor together on the first rank of a group; called on all of them in one order.

    Of ranks that replicate each other, one sends.

    Args:
        tensor: A DTensor, on a mesh of these ranks or of some of them. Where the mesh has not the
            first rank, other ranks have the same values. A tensor without shards is as it is.
        group: A process group of torch that sends and receives tensors of the device.
        members: The ranks of the group, by their numbers in the mesh.
        device: On which tensors travel.

    Returns:
        The whole tensor, where the first rank has its shard of it; None on the other ranks.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, placements = tensor.device_mesh, tensor.placements
    places = product(*map(range, mesh.shape))
    place_of = dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))
    first = place_of.get(members[0])
    if first is None:
        return None
    senders = {
        rank: place
        for rank, place in enumerate(map(place_of.get, members))
        if rank
        and place is not None
        and all(
            mine == theirs or not placement.is_replicate()
            for placement, mine, theirs in zip(placements, first, place, strict=True)
        )
    }
    if group.rank():
        if group.rank() in senders:
            for _, view in pieces_of(tensor):
                group.send([view.to(device).contiguous()], 0, 0).wait()
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local_part(tensor).device)
    for box, view in pieces_of(tensor):
        whole[index_of(box)] = view
    for rank, place in senders.items():
        for box, _ in held_boxes(tensor.shape, placements, mesh.shape, place):
            target = whole[index_of(box)]
            landed = torch.empty(target.shape, dtype=target.dtype, device=device)
            group.recv([landed], rank, 0).wait()
            target.copy_(landed)
    return whole
