"""The trainer's tensors in memory that engines read: ``direct`` refits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.weights.data.parts import KnownPieces
from rl_core.weights.data.plan import ALIGN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.interfaces.weights import Box, Piece
    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.transports.base import Lane

#: Who uses a tensor's storage, as torch counts: the tensor, and Python's object for the storage.
_OWN_USERS = 2


class SharedTensors:
    """The tensors that were moved into a lane, so that they are examined and moved only once."""

    def __init__(self) -> None:
        self._lane: Lane | None = None
        self._manifest: WeightManifest | None = None
        self._moved = KnownPieces(())
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
        self, manifest: WeightManifest, pieces: Sequence[Piece], device: torch.device
    ) -> str | None:
        """Why these pieces cannot be moved; None if they can, or were."""
        if self._is_shared(manifest, pieces):
            return None
        owners: dict[int, str] = {}
        tensors: dict[tuple[str, Box], torch.Tensor] = {}
        for name, box, tensor in pieces:
            if (spec := manifest.by_name.get(name)) is None or not spec.numel:
                continue
            if tensor is None:
                return f"the weight source has no tensor {name} in memory"
            tensors[name, box] = tensor
        for (name, box), tensor in tensors.items():
            alias_of = manifest.by_name[name].alias_of
            if alias_of is not None and tensor is not tensors.get((alias_of, box)):
                return f"{name} and {alias_of} are two tensor objects of one memory"
        for (name, _), tensor in tensors.items():
            spec = manifest.by_name[name]
            if spec.alias_of is not None:
                continue
            if tensor.device != device:
                return f"{name} is on {tensor.device}, which engines cannot read"
            if tensor.dtype != spec.torch_dtype:
                return f"{name} has another dtype than its spec declares"
            if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
                return f"{name} is a view of a larger storage, or not contiguous"
            if (owner := owners.setdefault(tensor.data_ptr(), name)) != name:
                return f"{name} shares memory with {owner}, but is not declared as its alias"
            # If a detached twin were moved, what is trained would stay behind.
            if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _OWN_USERS:
                return (
                    f"{name} shares memory with a tensor outside of the weight source, such as one "
                    "of a kept state_dict(), a view, or a loss whose graph is kept"
                )
        return None

    def _is_shared(self, manifest: WeightManifest, pieces: Sequence[Piece]) -> bool:
        """Whether these are the tensors that were moved, and are where they were moved to."""
        return manifest is self._manifest and self._moved.are(pieces)

    @torch.no_grad()
    def move(self, lane: Lane, manifest: WeightManifest, pieces: Sequence[Piece]) -> None:
        """Moves pieces into a lane, one after another; those that are there stay.

        One tensor is moved at a time. Where the lane's memory grows with them, memory for one more
        is enough. If it lacks, tensors that were moved are whole, and those that were not, too.
        """
        if self._lane is lane and self._is_shared(manifest, pieces):
            return
        base = lane.data.data_ptr()
        here = range(base, base + lane.data.numel())
        of: dict[str, list[torch.Tensor]] = {}
        for piece in pieces:
            if piece.tensor is not None:
                of.setdefault(piece.name, []).append(piece.tensor)
        moves, place = [], 0
        for tensor in (tensor for spec in manifest.owned for tensor in of.get(spec.name, ())):
            if tensor.data_ptr() != base + place:
                moves.append((tensor, place))
            place = -(-(place + tensor.nbytes) // ALIGN) * ALIGN
        for tensor, _ in moves:
            if tensor.data_ptr() in here:  # in the place of another one, which comes back to it
                tensor.data = tensor.clone()
        for tensor, place in moves:
            moved = lane.allocate_view(place, place + tensor.nbytes)
            moved = moved.view(tensor.dtype).view(tensor.shape)
            moved.copy_(tensor)
            tensor.data = moved
        if moves:
            lane.free_old_memory()
        self._lane, self._manifest = lane, manifest
        self._moved = KnownPieces(pieces)
        self._no_memory = None
