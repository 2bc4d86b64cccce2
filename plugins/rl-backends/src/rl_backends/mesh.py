"""The ranks of a module of DTensors: which they are, and how they find each other."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from rl_backends.pieces import local_part, pieces_of
from rl_backends.ranks import ConnectedRanks, RankProcess
from rl_backends.refit_ranks import listen
from rl_core.errors import CapabilityError, DeadlineError, RefitPeerError
from rl_core.futures import spawn, time_left, wait
from rl_core.ports import default_address
from rl_core.weights.options import DEFAULT_DEADLINE_S
from rl_core.weights.protocol.timing import TICK_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn


class MeshRanks(ConnectedRanks):
    """The ranks of a module's meshes: each makes one when it first refits the module.

    Rank 0 waits for nobody: it leaves its address in the store of torch.distributed, and the other
    ranks come to its refits.

    Args:
        members: The numbers that the ranks have in torch.distributed, in order; the first sends.
        place: Of the module among those of these ranks; see :func:`next_place`.
        model: Whose optimizer steps are counted; it is not kept alive.

    Attributes:
        members: As given.
        steps: How often an optimizer has stepped on this rank's tensors of the module.

    Raises:
        RefitPeerError: Rank 0 did not come within the time that its caller has.
    """

    def __init__(self, members: tuple[int, ...], place: int, model: nn.Module) -> None:
        self.members = members
        self.steps = 0
        self._changes = 0
        #: By a shard, torch's count of its changes in the last call.
        self._counted: WeakTensorKeyDictionary | None = None
        self._key = f"rl-refit/{'-'.join(map(str, members))}/{place}"
        self._store = c10d._get_default_store()
        rank, host = members.index(dist.get_rank()), os.environ.get("MASTER_ADDR", "127.0.0.1")
        server, mine = listen(rank, len(members), default_address(host))
        super().__init__(rank, self._find(mine), server, count_alike=False)
        reference = weakref.ref(model)

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (model := reference()) is not None:
                ours = {id(p) for p in model.parameters()}
                groups = optimizer.param_groups
                self.steps += any(id(p) in ours for group in groups for p in group["params"])

        self._hook = register_optimizer_step_post_hook(stepped)

    def changes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """How often this rank has changed its shards, and optimizers have stepped, by now.

        Torch counts the changes of a shard, but not those that are made through ``tensor.data``. Of
        all shards, that counts which has changed most since the last call. One that has taken the
        place of another has changed once, whatever was done to it: FSDP replaces and pads the
        shards of some ranks, and not those of others.
        """
        counted, self._counted = self._counted, WeakTensorKeyDictionary()
        most = 0
        for shard in (t._local_tensor for t in tensors if isinstance(t, DTensor)):
            self._counted[shard] = now = shard._version
            if counted is not None:
                most = max(most, now - counted.get(shard, now - 1))  # type: ignore[no-untyped-call]
        self._changes += most
        return self.steps + self._changes

    def close(self) -> None:
        """See :meth:`ConnectedRanks.close`."""
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
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    # Torch computes the ranks of a mesh anew each time, and most tensors share one mesh.
    ranks_of = {
        mesh: {*mesh.mesh.flatten().tolist()}
        for mesh in {tensor.device_mesh for tensor in sharded.values()}
    }
    every = max(ranks_of.values(), key=len, default=set[int]())
    held = set[Any]()
    for name, tensor in sharded.items():
        ranks, way = ranks_of[tensor.device_mesh], (tensor.device_mesh, tensor.placements)
        if not ranks <= every or dist.get_rank() not in ranks:
            raise CapabilityError(
                f"{kind}: {name} is on a mesh of the ranks {sorted(ranks)}, other tensors on one "
                f"of {sorted(every)}, and this is rank {dist.get_rank()}",
                fix="distribute all tensors over one mesh, or dimensions of it",
            )
        try:
            if way not in held:
                pieces_of(tensor)
        except CapabilityError as error:
            raise CapabilityError(f"{kind}: {name}: {error.message}", fix=error.fix) from error
        held.add(way)
        if (local := type(local_part(tensor))) is not torch.Tensor:
            raise CapabilityError(
                f"{kind}: the shards of {name} are {local.__name__}",
                fix="give refit a WeightSource that makes plain tensors of them",
            )
    return tuple(sorted(every))
