"""A source of tensors that lie on several ranks, each of which has a part."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING

from rl_core.interfaces.weights import WeightSource
from rl_core.refit.manifest import nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from rl_core.refit.ranks._members import RefitRanks

__all__ = ["GatheredSource"]

#: Bytes of tensors that are gathered for one question; a larger tensor comes alone.
_BATCH_BYTES = 4 << 20


class GatheredSource(WeightSource):
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

    @abstractmethod
    def gather(self, name: str) -> torch.Tensor | None:
        """Gathers one tensor; what ranks other than 0 return does not matter.

        If it raises on any rank, what the ranks exchange next may not belong together, so that all
        later refits are refused.
        """

    @abstractmethod
    def confirm_part(self) -> None:
        """As :meth:`WeightSource.confirm`, for this rank's part; called on every rank."""

    def close_part(self) -> None:
        """As :meth:`WeightSource.close`; called on every rank once nothing is gathered any more."""

    def open(self, refit: str, deadline_s: float) -> None:
        """See :meth:`WeightSource.open`."""
        if self.ranks is not None:
            self.ranks.hands.check_step()
            self.ranks.leader.open(refit, deadline_s)

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
        leader, hands = self.ranks.leader, self.ranks.hands
        for batch in self._batches(names):
            number = leader.gather(batch)
            futures = [hands.submit(partial(hands.gather, self, name)) for name in batch]
            for name in batch:
                yield name, _given(leader.wait_for(futures.pop(0), number, name))

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`; asks every rank."""
        if self.ranks is None:
            self.confirm_part()
            return
        own = self.ranks.hands.submit(self.confirm_part)
        self.ranks.leader.wait_for(own, 0, "a confirmation")
        self.ranks.leader.confirm()

    def close(self) -> None:
        """See :meth:`WeightSource.close`; tells every rank."""
        if self.ranks is None:
            self.close_part()
            return
        self.ranks.leader.close()
        self.ranks.hands.finish(self.close_part)

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        """The names in their order, a few at a time: a question takes a while to be answered."""
        sizes = {spec.name: nbytes(spec) for spec in self.specs()}
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
