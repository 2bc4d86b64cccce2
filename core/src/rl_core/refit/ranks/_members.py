"""The ranks of one trainer, as its refits know them."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

from rl_core.refit.ranks._following import Follower
from rl_core.refit.ranks._hands import Hands
from rl_core.refit.ranks._leading import Leader
from rl_core.refit.ranks._peers import Peer, exchange
from rl_core.refit.transports.control import ControlServer

__all__ = ["RefitRanks"]


class RefitRanks:
    """One for each rank, made by all of them at the same time, for the trainer's whole life.

    Args:
        group: A process group of torch over all ranks that takes tensors of the CPU (gloo). It is
            used here, to meet, and never again.
        address: Of rank 0, at which the others reach it. Between hosts, one of a private network.

    Attributes:
        rank: This one; rank 0 speaks.
        size: How many there are.
        hands: What computes for refits on this rank.

    Raises:
        ConfigError: The group takes no tensors of the CPU.
        RefitError: The address is not this host's.
    """

    def __init__(self, group: Any, *, address: str = "127.0.0.1") -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.hands = Hands()
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        if self.rank == 0:
            host = f"[{address}]" if ":" in address else address
            server = ControlServer(f"tcp://{host}:*", encrypted=True)
            mine = Peer.here(0, self.size, server.endpoint, server.key)
            self._leader = Leader(server, exchange(group, mine), self.hands)
        else:
            peers = exchange(group, Peer.here(self.rank, self.size))
            self._follower = Follower(peers, self.rank, self.hands)
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
            self.hands.close()


_alive: weakref.WeakSet[RefitRanks] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before sockets are destroyed under the threads that use them."""
    for ranks in list(_alive):
        ranks.close()
