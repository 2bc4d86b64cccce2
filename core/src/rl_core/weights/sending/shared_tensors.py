"""The trainer's tensors in memory that engines read: ``direct`` refits."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rl_core.weights.data.parts import LanePlaces, lying
from rl_core.weights.data.plan import ALIGN
from rl_core.weights.transports.base import NoLane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Self

    from rl_core.interfaces.weights import Piece
    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.data.parts import Partition
    from rl_core.weights.transports.base import Lane


class Memory:
    """A storage of torch, and the tensors that use it.

    Attributes:
        storage: All of its bytes.
        users: The tensors that are known, by ``id``.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.users: dict[int, torch.Tensor] = {}

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> dict[int, Self]:
        """The storages of tensors, by torch's address of each."""
        found: dict[int, Self] = {}
        for tensor in tensors:
            for user in (tensor, tensor._base):
                if user is not None:
                    storage = user.untyped_storage()
                    memory = found.setdefault(storage._cdata, cls(storage))
                    memory.users[id(user)] = user
        return found

    @torch.no_grad()
    def move(self, data: torch.Tensor) -> None:
        """Copies all bytes to ``data``, which the known tensors use from now on.

        Args:
            data: uint8, as many as the storage has.
        """
        data.copy_(torch.empty(0, dtype=torch.uint8, device=data.device).set_(self.storage))
        for user in self.users.values():
            elements = data[: len(data) // user.itemsize * user.itemsize].view(user.dtype)
            first = elements.storage_offset() + user.storage_offset()
            user.data = elements.as_strided(user.size(), user.stride(), first)
        self.storage = data.untyped_storage()


class SharedTensors:
    """The pieces whose storages were moved into a lane, so that they are moved only once.

    Attributes:
        lane: Where they are.
        lacked: The tensors for which there was no memory when they were to be moved, and why: not
            every refit moves a part of a large model in vain.
    """

    def __init__(self) -> None:
        self.lane: Lane = NoLane()
        self.lacked: tuple[WeightManifest | None, str] = (None, "")
        self._manifest: WeightManifest | None = None
        self._moved: list[torch.UntypedStorage] = []  # to the lane
        self._lying: list[Any] = []
        self._places: tuple[Partition, LanePlaces] | None = None

    def lie_there(self, manifest: WeightManifest, now: list[Any]) -> bool:
        """Whether :func:`lying` returns now what it returned after the move."""
        return self._manifest is manifest and self._lying == now

    def move(
        self,
        manifest: WeightManifest,
        pieces: Sequence[Piece],
        others: Iterable[torch.Tensor],
        device: torch.device,
        lane_of: Callable[[int, bool], Lane],
    ) -> str:
        """Moves all storages of pieces into a lane, one after another; those that are there stay.

        One storage is moved at a time. Where the lane's memory grows with them, memory for one more
        is enough. If it lacks, what was moved is whole, and what was not, too.

        Args:
            manifest: The source's.
            pieces: Some.
            others: See :meth:`WeightSource.memory_users`.
            device: Which engines can read.
            lane_of: Gives a lane of so many bytes; another one than before, if so wanted.

        Returns:
            Why they cannot be moved; empty if they were.
        """
        known = manifest.by_name
        tensors = [t for name, _, t in pieces if t is not None and t.numel() and name in known]
        every = Memory.of([*tensors, *others])
        memories = {key: every[key] for key in Memory.of(tensors)}
        reason = _reason_not_shareable(manifest, pieces, memories, device)
        if reason or not memories:
            return reason
        places, end = [], 0
        for memory in memories.values():
            places.append((memory, end))
            end = -(-(end + memory.storage.nbytes()) // ALIGN) * ALIGN
        # What was moved before and has left the weights may still be used, such as by a backup.
        kept = [storage for storage in self._moved if storage._cdata not in memories]
        lane = lane_of(end, any(map(_users, kept)))
        self._moved = self._moved if lane is self.lane else []
        self.lane, self._manifest = lane, None
        base = lane.data.data_ptr()
        moves = [(m, place) for m, place in places if m.storage.data_ptr() != base + place]
        for memory, _ in moves:
            # In the place of another one, which comes back to it.
            if memory.storage.data_ptr() in range(base, base + end):
                memory.move(torch.empty_like(lane.data[: memory.storage.nbytes()]))
        for memory, place in moves:
            data = lane.allocate_view(place, place + memory.storage.nbytes())
            self._moved.append(data.untyped_storage())
            memory.move(data)
        if moves:
            lane.free_old_memory()
        self._moved = [storage for storage in self._moved if _users(storage)]
        self._manifest, self._lying = manifest, lying(pieces)
        self._places, self.lacked = None, (None, "")
        return ""

    def places(self, parts: Partition, pieces: Sequence[Piece]) -> LanePlaces:
        """Where the parts are in the lane, of pieces that lie there."""
        if not pieces:
            return LanePlaces.of(parts, (), 0)
        if self._places is None or self._places[0] is not parts:
            self._places = parts, LanePlaces.of(parts, pieces, self.lane.data.data_ptr())
        return self._places[1]


def _users(storage: torch.UntypedStorage) -> int:
    """How many tensors use it, as torch counts them."""
    return torch._C._storage_Use_Count(storage._cdata) - 1  # Python's object does, too


def _reason_not_shareable(
    manifest: WeightManifest,
    pieces: Sequence[Piece],
    memories: Mapping[int, Memory],
    device: torch.device,
) -> str:
    """Why these pieces cannot be moved with all of their storages; empty if they can."""
    first: dict[int, str] = {}  # piece in each storage
    for name, _, tensor in pieces:
        if (spec := manifest.by_name.get(name)) is None or not spec.numel:
            continue
        if tensor is None:
            return f"the weight source has no tensor {name} in memory"
        if tensor.device != device:
            return f"{name} is on {tensor.device}, which engines cannot read"
        if tensor.dtype != spec.torch_dtype:
            return f"{name} has another dtype than its spec declares"
        if not tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
            return f"{name} is computed from what is in memory"
        first.setdefault(tensor.untyped_storage()._cdata, name)
    for memory, name in ((memories[key], name) for key, name in first.items()):
        # If a detached twin were moved, what is trained would stay behind.
        if _users(memory.storage) > len(memory.users):
            return (
                f"{name} shares memory with a tensor outside of the weight source, such as one "
                "of a kept state_dict(), a view, or a loss whose graph is kept"
            )
        if memory.storage.device.type == "cpu" and memory.storage.is_shared():
            return f"{name} is in memory that other processes may use (share_memory)"
        if any(user.is_inference() for user in memory.users.values()):
            return f"{name} was made in inference mode"
    starts = sorted((memories[key].storage.data_ptr(), key) for key in first)
    for (start, one), (other_start, other) in pairwise(starts):
        if start + memories[one].storage.nbytes() > other_start:
            return f"{first[one]} and {first[other]} are two storages of one memory"
    return ""
