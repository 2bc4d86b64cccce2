"""Which elements of a tensor this rank has: boxes of a DTensor, and where they are in memory."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl_backends.tensors import NamedTensorSource
from rl_core.errors import CapabilityError
from rl_core.interfaces import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.distributed.tensor.placement_types import Placement

    from rl_core.interfaces import Box

__all__ = [
    "DTensorSource",
    "copy_to_pieces",
    "held_boxes",
    "index_of",
    "local_part",
    "pieces_of",
]


class DTensorSource(NamedTensorSource):
    """A rank's pieces of DTensors, and on the first rank the tensors that each rank has whole.

    The ranks of a module may have other values in these, such as statistics of their own rows.

    Args:
        tensors: See :class:`NamedTensorSource`.
        model: Whose tensors they are.
        first: This is the first rank.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], model: nn.Module, *, first: bool
    ) -> None:
        super().__init__(tensors)
        self._model = model
        self._first = first

    def pieces(self) -> Sequence[Piece]:
        """See :meth:`WeightSource.pieces`."""
        return [
            Piece(name, box, view)
            for name, tensor in self.tensors_by_name.items()
            if self._first or isinstance(tensor, DTensor)
            for box, view in pieces_of(tensor)
        ]

    def memory_users(self) -> list[torch.Tensor]:
        """See :meth:`WeightSource.memory_users`; FSDP2 looks at its shards through other tensors.

        A version of torch that keeps these elsewhere has users that are not known here.
        """
        tensors = self.tensors_by_name.values()
        found = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
        for part in self._model.modules():
            if isinstance(part, FSDPModule):
                for group in getattr(part._get_fsdp_state(), "_fsdp_param_groups", ()):
                    found += [shard._sharded_param_data for shard in group.fsdp_params]
        return found

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`; of tensors that are all here."""
        for name in names:
            yield name, local_part(self.tensors_by_name[name])


def pieces_of(tensor: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """What this rank has of a tensor; nothing is communicated.

    Args:
        tensor: A DTensor on any mesh, or a tensor that is wholly here.

    Returns:
        Boxes that do not overlap, without empty ones, each with a view of exactly its elements: in
        the shape of the box, with any strides, sharing the tensor's memory. Ranks that replicate
        each other have the same boxes; those of all ranks cover the tensor. One box, except for
        some strided shards. None if this rank is not in the mesh.

    Raises:
        CapabilityError: Its values are spread in another way than by shards, such as partial sums.
    """
    if not isinstance(tensor, DTensor):
        whole = tuple((0, size) for size in tensor.shape)
        return [(whole, tensor.detach())] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    local = local_part(tensor)
    found = held_boxes(tensor.shape, tensor.placements, tensor.device_mesh.shape, coordinate)
    return [(box, local[index_of(place)]) for box, place in found]


def held_boxes(
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> list[tuple[Box, Box]]:
    """The boxes of a tensor that one rank of a mesh has.

    A shard is one of the chunks that ``torch.chunk`` cuts, the last of which may be smaller or
    empty. A strided shard has one of the chunks of each of ``split_factor`` chunks; FSDP makes it
    of a dimension that tensor parallelism shards as well.

    Args:
        shape: Of the whole tensor.
        placements: For each dimension of the mesh.
        sizes: Of the mesh, for each of its dimensions.
        coordinate: Of the rank.

    Returns:
        For each box its place in the rank's local tensor, which is a box, too. No empty ones.

    Raises:
        CapabilityError: A placement is neither a shard nor a replica.
    """
    shards: list[_Shard] = []
    last: list[_Shard] = []
    for placement, size, number in zip(placements, sizes, coordinate, strict=True):
        kind = type(placement).__name__
        if kind in ("Shard", "_StridedShard"):
            split = getattr(placement, "split_factor", 1)
            shards.append(_Shard(placement.dim, size, number, split))  # type: ignore[attr-defined]
        elif kind != "Replicate":
            raise CapabilityError(
                f"a tensor of shape {list(shape)} has the placement {placement} ({kind}), of which "
                "no rank has final values in a box",
                fix="redistribute it to Shard or Replicate",
            )
    for at, shard in reversed([*enumerate(shards)]):
        later = prod(other.size for other in shards[at + 1 :] if other.dim == shard.dim)
        # FSDP cuts what tensor parallelism, to the right of it in the mesh, has left of the tensor.
        # Where that is uneven, chunks of chunks are something else.
        if shard.split == later > 1:
            last.insert(0, shards.pop(at)._replace(split=1))
    held = [[(0, size)] for size in shape]
    for dim, size, number, split in (*shards, *last):
        chunks = _chunks(held[dim], split)
        held[dim] = [interval for chunk in chunks for interval in _chunks(chunk, size)[number]]
    places = []
    for intervals in held:
        joined = _joined(intervals)
        ends = [0]
        for first, after in joined:
            ends.append(ends[-1] + after - first)
        places.append(list(zip(joined, pairwise(ends), strict=True)))
    return [
        (tuple(box for box, _ in both), tuple(place for _, place in both))
        for both in product(*places)
    ]


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor: that of its shard, or all of it."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def index_of(box: Box) -> tuple[slice, ...]:
    """What selects a box of a tensor."""
    return tuple(slice(first, after) for first, after in box)


@torch.no_grad()
def copy_to_pieces(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Writes what this rank has of a tensor, in place; reads no more of ``whole`` than that.

    Args:
        target: See :func:`pieces_of`.
        whole: Of the same shape; any dtype and device.
    """
    for box, view in pieces_of(target):
        view.copy_(whole[index_of(box)])


class _Shard(NamedTuple):
    dim: int
    size: int
    number: int
    split: int


def _chunks(intervals: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """Cuts intervals, laid end to end, into as many chunks, as ``torch.chunk`` does."""
    total = sum(after - first for first, after in intervals)
    size = max(1, -(-total // count))
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    at = 0
    for begin, after in intervals:
        first = begin
        while first < after:
            number, used = divmod(at, size)
            end = min(after, first + size - used)
            chunks[number].append((first, end))
            at += end - first
            first = end
    return chunks


def _joined(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals, of which those that follow each other are one."""
    joined: list[tuple[int, int]] = []
    for first, after in intervals:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], after)
        else:
            joined.append((first, after))
    return joined
