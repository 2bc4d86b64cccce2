"""The ranks of one trainer, and a source of tensors of which each rank has a part."""

from __future__ import annotations

import atexit
import weakref
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from rl_backends.gathering.changes import WeightChanges
from rl_backends.gathering.follower import Follower
from rl_backends.gathering.leader import Leader
from rl_backends.gathering.processes import RankProcess, exchange
from rl_backends.gathering.thread import Part, RefitThread
from rl_core.interfaces.weights import WeightSource
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.transports.control import ControlServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

#: Bytes of tensors that are gathered for one question; a larger tensor comes alone.
_BATCH_BYTES = 4 << 20


class RefitRanks:
    """One for each rank, made by all of them at the same time, for the trainer's whole life.

    Args:
        group: A process group of torch over all ranks that takes tensors of the CPU (gloo). It is
            used here, to meet, and never again.
        address: Of rank 0, at which the others reach it. Between hosts, one of a private network.

    Attributes:
        rank: This one; rank 0 sends.
        size: How many there are.
        thread: Computes for refits on this rank.
        leader: Rank 0's side, on rank 0 alone.
        follower: That of every other rank.

    Raises:
        ConfigError: The group takes no tensors of the CPU.
        RefitError: The address is not this host's.
    """

    def __init__(self, group: Any, *, address: str = "127.0.0.1") -> None:
        self._join(group.rank(), group.size(), address, partial(exchange, group))

    def _join(
        self, rank: int, size: int, address: str, meet: Callable[[RankProcess], list[RankProcess]]
    ) -> None:
        """Makes this rank's side, with the processes of all ranks for its own."""
        self.rank, self.size = rank, size
        if rank == 0:
            host = f"[{address}]" if ":" in address else address
            server = ControlServer(f"tcp://{host}:*", encrypted=True)
            processes = meet(RankProcess.here(0, size, server.endpoint, server.key))
            self.thread = RefitThread()
            self.leader = Leader(server, processes, self.thread)
        else:
            mine = RankProcess.here(rank, size)
            processes = meet(mine)
            self.thread = RefitThread()
            self.follower = Follower(processes[0], mine, self.thread)
        _alive.add(self)

    def close(self) -> None:
        """Ends all refits of this rank. Idempotent."""
        if self in _alive:
            _alive.discard(self)
            if self.rank == 0:
                self.leader.end()
            else:
                self.follower.close()
            self.thread.close()


_alive: weakref.WeakSet[RefitRanks] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before sockets are destroyed under the threads that use them."""
    for ranks in list(_alive):
        ranks.close()


class GatheredSource(WeightSource, Part):
    """Whole tensors on rank 0, each gathered from all ranks when its turn comes.

    Every rank makes one for each refit. A subclass defines the tensors (:meth:`specs`, of
    whole ones, the same on every rank) and how one is gathered (:meth:`gather`). ``gather`` is
    called on every rank for the same names in the same order, in one thread per rank, and what all
    ranks have begun is ended on all of them, whatever becomes of the refit. Give its collectives a
    separate process group: the trainer's other threads may use its groups meanwhile.

    Args:
        ranks: That take part; None if this process has everything.
        changes: Of this rank's weights. Before the first tensor and before the commit rank 0
            compares their states, because the tensors themselves do not show their step. Without
            it, only a subclass's :meth:`confirm_part` can check that.

    Raises:
        LifecycleError: A change of the weights failed midway.
    """

    def __init__(self, ranks: RefitRanks | None, changes: WeightChanges | None = None) -> None:
        changes = changes or WeightChanges()
        self.ranks = ranks if ranks is not None and ranks.size > 1 else None
        self._number = 0  # of the refit that reads it, once it has begun
        self._changes = changes
        self._unchanged = changes.watch()
        self._first_state = changes.state

    @property
    def part_state(self) -> int:
        """See :attr:`Part.part_state`."""
        return self._changes.state

    @cached_property
    def part_specs(self) -> str:
        """See :attr:`Part.part_specs`."""
        return WeightManifest.of(self.specs()).digest

    def open(self, number: int, deadline_s: float) -> None:
        if self.ranks is not None:
            self.ranks.thread.check_in_sync()
            self._number = number
            self.ranks.leader.open(number, deadline_s, self._first_state, self.part_specs)

    def check(self) -> None:
        """See :meth:`WeightSource.check`.

        Raises:
            RefitPeerError: A rank was lost; names it.
        """
        if self.ranks is not None:
            self.ranks.leader.look()

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`.

        Raises:
            RefitPeerError: A rank was lost, or did not do its part in time; names it.
            ManifestMismatchError: A rank has other tensors than this one; names it.
            LifecycleError: A rank's weights are of another state, or changed meanwhile.
        """
        self._unchanged()
        if self.ranks is None:
            yield from ((name, _given(self.gather(name))) for name in names)
            return
        leader, thread = self.ranks.leader, self.ranks.thread
        for batch in self._batches(names):
            number = leader.gather(batch)
            futures = [thread.submit(partial(thread.gather, self, name)) for name in batch]
            for name in batch:
                yield name, _given(leader.wait_for(futures.pop(0), number, f"gather {name}"))

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`; every rank confirms its part."""
        if self.ranks is None:
            self.confirm_part()
            return
        own = self.ranks.thread.submit(self.confirm_part)
        self.ranks.leader.wait_for(own, 0, "confirm its part")
        self.ranks.leader.confirm()

    def confirm_part(self) -> None:
        """See :meth:`Part.confirm_part`."""
        self._unchanged()

    def close(self) -> None:
        """See :meth:`WeightSource.close`; ends all ranks' parts, if their refit has begun."""
        if self.ranks is None:
            self.close_part()
            return
        if self._number and self._number != self.ranks.leader.sending:
            self.ranks.leader.dismiss(self._number)
        self.ranks.thread.finish(self.close_part)

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        """The names in their order, a few at a time: a question takes a while to be answered."""
        sizes = {spec.name: spec.nbytes for spec in self.specs()}
        batch: list[str] = []
        room = _BATCH_BYTES
        for name in names:
            size = sizes[name]
            if batch and size > room:
                yield batch
                batch, room = [], _BATCH_BYTES
            batch.append(name)
            room -= size
        if batch:
            yield batch


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "gather returns the tensor on rank 0"
    return tensor
