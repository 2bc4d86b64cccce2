"""The trainer's tensors in memory that engines read: ``direct`` refits."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from rl_core.weights.data.manifest import dtype_of, nbytes, numel
from rl_core.weights.data.plan import direct_places

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.transports.base import Lane

#: Who uses a tensor's storage, as torch counts: the tensor, and Python's object for the storage.
_OWN_USERS = 2


class SharedTensors:
    """The tensors that were moved into a lane, so that they are examined and moved only once."""

    def __init__(self) -> None:
        self._lane: Lane | None = None
        self._manifest: WeightManifest | None = None
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._no_memory: tuple[WeightManifest, str] | None = None

    def no_memory_for(self, manifest: WeightManifest) -> str | None:
        """Why there was no memory for these tensors when they were to be moved; None if there was.

        It is remembered, so that not every refit moves a part of a large model in vain.
        """
        lacking = self._no_memory
        return lacking[1] if lacking is not None and lacking[0] is manifest else None

    def remember_no_memory(self, manifest: WeightManifest, why: str) -> None:
        """There was no memory to move them all."""
        self._no_memory = (manifest, why)

    def reason_not_shareable(
        self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> str | None:
        """Why these tensors cannot be moved; None if they can, or were."""
        if self._is_shared(manifest, tensors):
            return None
        owners: dict[int, str] = {}
        for spec in manifest.tensors:
            tensor = tensors.get(spec.name)
            if spec.alias_of is not None:
                if tensor is not None and tensor is not tensors.get(spec.alias_of):
                    return f"{spec.name} and {spec.alias_of} are two tensor objects of one memory"
                continue
            if not numel(spec):
                continue
            if tensor is None:
                return f"the weight source has no tensor {spec.name} in memory"
            if tensor.device != device:
                return f"{spec.name} is on {tensor.device}, which engines cannot read"
            if tensor.shape != spec.shape or tensor.dtype != dtype_of(spec):
                return f"{spec.name} has another shape or dtype than its spec declares"
            if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != nbytes(spec):
                return f"{spec.name} is a view of a larger storage, or not contiguous"
            if (owner := owners.setdefault(tensor.data_ptr(), spec.name)) != spec.name:
                return f"{spec.name} shares memory with {owner}, but is not declared as its alias"
        for name in owners.values():
            # If a detached twin were moved, what is trained would stay behind.
            if torch._C._storage_Use_Count(tensors[name].untyped_storage()._cdata) > _OWN_USERS:
                return (
                    f"{name} shares memory with a tensor outside of the weight source, such as one "
                    "of a kept state_dict(), a view, or a loss whose graph is kept"
                )
        return None

    def _is_shared(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the tensors that were moved, and are where they were moved to."""
        if manifest is not self._manifest:
            return False
        given = tensors.values()
        same = len(given) == len(self._tensors) and all(map(operator.is_, given, self._tensors))
        return same and [tensor.data_ptr() for tensor in given] == self._addresses

    @torch.no_grad()
    def move(
        self, lane: Lane, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Moves tensors into a lane, each to its place; those that are there stay.

        One tensor is moved at a time. Where the lane's memory grows with them, memory for one more
        is enough. If it lacks, tensors that were moved are whole, and those that were not, too.
        """
        if self._lane is lane and self._is_shared(manifest, tensors):
            return
        base = lane.data.data_ptr()
        here = range(base, base + lane.data.numel())
        moves = [
            (tensors[spec.name], spec, place)
            for spec, place in zip(manifest.owned, direct_places(manifest.owned)[0], strict=True)
            if tensors[spec.name].data_ptr() != base + place
        ]
        for tensor, _, _ in moves:
            if tensor.data_ptr() in here:  # in the place of another one, which comes back to it
                tensor.data = tensor.clone()
        for tensor, spec, place in moves:
            moved = lane.allocate_view(place, place + nbytes(spec))
            moved = moved.view(dtype_of(spec)).view(spec.shape)
            moved.copy_(tensor)
            tensor.data = moved
        if moves:
            lane.free_old_memory()
        self._lane, self._manifest, self._tensors = lane, manifest, list(tensors.values())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._no_memory = None
