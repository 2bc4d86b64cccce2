"""The ranks of one trainer, and a source of tensors of which each rank has a part."""

from __future__ import annotations

import atexit
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_core.interfaces.weights import WeightSource
from rl_core.refit.ranks._following import Follower
from rl_core.refit.ranks._leading import Leader
from rl_core.refit.ranks._processes import RankProcess, exchange
from rl_core.refit.ranks._thread import Part, RefitThread
from rl_core.refit.transports.control import ControlServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        rank: This one; rank 0 speaks.
        size: How many there are.
        thread: Computes for refits on this rank.

    Raises:
        ConfigError: The group takes no tensors of the CPU.
        RefitError: The address is not this host's.
    """

    def __init__(self, group: Any, *, address: str = "127.0.0.1") -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.thread = RefitThread()
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        if self.rank == 0:
            host = f"[{address}]" if ":" in address else address
            server = ControlServer(f"tcp://{host}:*", encrypted=True)
            mine = RankProcess.here(0, self.size, server.endpoint, server.key)
            self._leader = Leader(server, exchange(group, mine), self.thread)
        else:
            processes = exchange(group, RankProcess.here(self.rank, self.size))
            self._follower = Follower(processes, self.rank, self.thread)
        _alive.add(self)

    @property
    def leader(self) -> Leader:
        """Rank 0's side; for rank 0."""
        assert self._leader is not None, "rank 0 leads"
        return self._leader

    @property
    def follower(self) -> Follower:
        """The side of every other rank."""
        assert self._follower is not None, "rank 0 does not follow"
        return self._follower

    def close(self) -> None:
        """Ends all refits of this rank. Idempotent."""
        if self in _alive:
            _alive.discard(self)
            if self._leader is not None:
                self._leader.end()
            if self._follower is not None:
                self._follower.close()
            self.thread.close()


_alive: weakref.WeakSet[RefitRanks] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before sockets are destroyed under the threads that use them."""
    for ranks in list(_alive):
        ranks.close()


class GatheredSource(WeightSource, Part):
    """Whole tensors on rank 0, each gathered from all ranks when its turn comes.

    Every rank makes one for each refit. A subclass says what the tensors are (:meth:`specs`, on
    rank 0), how one is gathered (:meth:`gather`) and whether a rank's part is still the same
    (:meth:`confirm_part`). ``gather`` is called on every rank for the same names in the same order,
    in one thread per rank, and what all ranks have begun is ended on all of them, whatever becomes
    of the refit. Give its collectives a process group of their own: the trainer's other threads
    may use theirs meanwhile.

    Args:
        ranks: That take part; None if this process has everything.
    """

    def __init__(self, ranks: RefitRanks | None) -> None:
        self.ranks = ranks if ranks is not None and ranks.size > 1 else None
        self._rank_call_id = ""

    def open(self, rank_call_id: str, deadline_s: float) -> None:
        if self.ranks is not None:
            self.ranks.thread.check_step()
            self._rank_call_id = rank_call_id
            self.ranks.leader.open(rank_call_id, deadline_s)

    def check(self) -> None:
        """See :meth:`WeightSource.check`.

        Raises:
            RefitPeerError: A rank is gone; names it.
        """
        if self.ranks is not None:
            self.ranks.leader.look()

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`.

        Raises:
            RefitPeerError: A rank is gone, or did not do its part in time; names it.
        """
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
        """See :meth:`WeightSource.confirm`; asks every rank."""
        if self.ranks is None:
            self.confirm_part()
            return
        own = self.ranks.thread.submit(self.confirm_part)
        self.ranks.leader.wait_for(own, 0, "confirm its part")
        self.ranks.leader.confirm()

    def close(self) -> None:
        """See :meth:`WeightSource.close`; tells every rank, if the source's refit has begun."""
        if self.ranks is None:
            self.close_part()
            return
        if self._rank_call_id:
            self.ranks.leader.dismiss(self._rank_call_id)
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
