"""The ranks of a module of DTensors: which they are, and how they find each other."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from rl_backends.gathering.changes import WatchedTensors, WeightChanges
from rl_backends.gathering.dtensors import GATHER_TIMEOUT_S, DTensorSource, whole_on_first
from rl_backends.gathering.processes import RankProcess
from rl_backends.gathering.source import RefitRanks
from rl_backends.pieces import local_part, pieces_of
from rl_core.errors import CapabilityError, DeadlineError, RefitPeerError
from rl_core.futures import spawn, time_left, wait
from rl_core.ports import default_address
from rl_core.weights.options import DEFAULT_DEADLINE_S
from rl_core.weights.protocol.timing import TICK_S
from rl_core.weights.tensors import NamedTensorSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


class MeshRanks(RefitRanks):
    """The ranks of a module's meshes: each makes one when it first refits the module.

    Rank 0 waits for nobody: it leaves its address in the store of torch.distributed, and the other
    ranks come to its refits. They make a process group when they first gather a tensor.

    Args:
        members: The numbers that the ranks have in torch.distributed, in order; the first sends.
        place: Of the module among those of these ranks; see :func:`next_place`.
        model: Whose optimizer steps are counted; it is not kept alive.

    Attributes:
        members: As given.
        changes: Of this rank's weights: the steps.

    Raises:
        RefitPeerError: Rank 0 did not come within the time that its caller has.
    """

    def __init__(self, members: tuple[int, ...], place: int, model: nn.Module) -> None:
        self.members = members
        self.changes = WeightChanges()
        self._key = f"rl-refit/{'-'.join(map(str, members))}/{place}"
        self._store = c10d._get_default_store()
        host = default_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        self._join(members.index(dist.get_rank()), len(members), host, self._find)
        changes, reference = self.changes, weakref.ref(model)

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (model := reference()) is not None:
                ours = {id(p) for p in model.parameters()}
                groups = optimizer.param_groups
                changes.state += any(id(p) in ours for group in groups for p in group["params"])

        self._hook = register_optimizer_step_post_hook(stepped)

    @cached_property
    def _group(self) -> Any:
        store = c10d.PrefixStore(f"{self._key}/tensors", self._store)
        timeout = timedelta(seconds=GATHER_TIMEOUT_S)
        return dist.ProcessGroupGloo(store, self.rank, self.size, timeout)

    def part(self, tensors: Mapping[str, torch.Tensor]) -> MeshPart:
        """This rank's part of a refit of the module's tensors, by name."""
        return MeshPart(self, tensors)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Puts a tensor together; see :func:`whole_on_first`."""
        return whole_on_first(tensor, self._group, self.members, torch.device("cpu"))

    def close(self) -> None:
        """See :meth:`RefitRanks.close`."""
        self._hook.remove()
        super().close()

    def _find(self, mine: RankProcess) -> list[RankProcess]:
        """Rank 0's process, and of the others nothing but their numbers."""
        seconds = time_left(DEFAULT_DEADLINE_S)
        end = time.monotonic() + 0.9 * seconds  # before it is given up below

        def look() -> bytes:
            if mine.rank == 0:
                self._store.set(self._key, msgspec.json.encode(mine).decode())
            while not self._store.check([self._key]) and time.monotonic() < end:
                time.sleep(TICK_S)
            found: bytes = self._store.get(self._key) if self._store.check([self._key]) else b""
            return found

        try:  # in a thread: a store whose process is stopped does not answer
            [text] = wait([spawn("refit-meet", look)], seconds)
            cause = "it did not call refit"
        except (DeadlineError, RuntimeError, dist.DistError) as error:
            text, cause = b"", f"the store of torch.distributed did not answer: {error}"
        if not text:
            raise RefitPeerError(
                f"{mine} did not find rank 0 (in torch.distributed rank {self.members[0]}) within "
                f"{seconds:.3g} s: {cause}",
                fix="call refit on all ranks of the module; look at the log of that rank",
                peer="rank 0",
                rank=0,
            )
        first = msgspec.json.decode(text, type=RankProcess)
        return [first, *(RankProcess(rank, mine.size) for rank in range(1, mine.size))]


class MeshPart(DTensorSource):
    """One rank's part of a refit of a module.

    Attributes:
        watched: The tensors, from when this was made.
    """

    def __init__(self, ranks: MeshRanks, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(ranks, ranks.changes, NamedTensorSource(tensors), ranks.whole)
        self.watched = WatchedTensors(tensors.values())

    def confirm_part(self) -> None:
        """See :meth:`Part.confirm_part`."""
        super().confirm_part()
        self.watched.check()

    def close_part(self) -> None:
        """See :meth:`Part.close_part`."""
        self.watched.close()


#: Modules of this process, by the ranks of their meshes.
_placed: Counter[tuple[int, ...]] = Counter()


def next_place(members: tuple[int, ...]) -> int:
    """The place of a module among those of these ranks, in the order of their first refits.

    It is the same on all of them, as each begins to refit its modules in one order.
    """
    _placed[members] += 1
    return _placed[members]


def mesh_members(kind: str, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """The ranks that have a module's DTensors, in order; none if there is no DTensor.

    A tensor on a mesh of some of these ranks has the same values on the others.

    Args:
        kind: Of the module, for errors.
        tensors: Its own, by name.

    Raises:
        CapabilityError: A tensor has no final values in shards, or is on a mesh of other ranks.
    """
    meshes = {
        name: {*tensor.device_mesh.mesh.flatten().tolist()}
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor)
    }
    every = max(meshes.values(), key=len, default=set[int]())
    for name, ranks in meshes.items():
        if not ranks <= every or dist.get_rank() not in ranks:
            raise CapabilityError(
                f"{kind}: {name} is on a mesh of the ranks {sorted(ranks)}, other tensors on one "
                f"of {sorted(every)}, and this is rank {dist.get_rank()}",
                fix="distribute all tensors over one mesh, or dimensions of it",
            )
        try:
            pieces_of(tensors[name])
        except CapabilityError as error:
            raise CapabilityError(f"{kind}: {name}: {error.message}", fix=error.fix) from error
        if type(local_part(tensors[name])) is not torch.Tensor:
            raise CapabilityError(
                f"{kind}: the shards of {name} are {type(local_part(tensors[name])).__name__}",
                fix="give refit a WeightSource that makes plain tensors of them",
            )
    return tuple(sorted(every))
