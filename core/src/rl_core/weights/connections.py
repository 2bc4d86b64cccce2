"""What an endpoint keeps of its connections from refit to refit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Mapping

    from rl_core.weights.data.plan import DataMode
    from rl_core.weights.transports.base import Lane, RankEnd, ReceiverEnd


class Views(Protocol):
    """The buckets of a plan in a lane."""

    def detach(self) -> None:
        """Drops all views of the lane, so that its memory is unmapped."""


E = TypeVar("E", bound="RankEnd | ReceiverEnd")
B = TypeVar("B", bound=Views)
K = TypeVar("K")
V = TypeVar("V")


def keep_two(kept: dict[K, V], key: K, value: V) -> V:
    """Puts ``value`` last, and drops all but the last two: refits mostly repeat one of these."""
    kept.pop(key, None)
    kept[key] = value
    for oldest in list(kept)[:-2]:
        del kept[oldest]
    return value


@dataclass(eq=False)
class Connection(Generic[E]):
    """One side's end of a transport, and what was made on it.

    Attributes:
        end: Of the transport.
        address: Where the sender is, on the receiver's side.
        found: Done when the receiver has found the sender there.
        lanes: Memory for the bytes, by how they are read and the rank of the trainer.
    """

    end: E
    address: Mapping[str, Any] = field(default_factory=dict)
    found: concurrent.futures.Future[None] | None = None
    lanes: dict[tuple[DataMode, int], Lane] = field(default_factory=dict)


class Connections(dict[str, Connection[E]], Generic[E, B]):
    """The connections of an endpoint by transport, one of each.

    Attributes:
        buckets: Those of the last two kinds of refit, with views of the lanes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buckets: dict[object, B] = {}

    def close(self, transport: str) -> None:
        """Closes the connection of a transport, if there is one."""
        if (connection := self.get(transport)) is not None:
            lanes = list(connection.lanes.values())
            self.close_lanes(lambda _, lane: lane in lanes)
            del self[transport]
            connection.end.close()

    def close_lanes(self, which: Callable[[DataMode, Lane], bool]) -> bool:
        """Closes the lanes that ``which`` chooses, and drops all views; whether there were any."""
        chosen = [
            (connection.lanes, key)
            for connection in list(self.values())  # another thread may add one
            for key, lane in connection.lanes.items()
            if which(key[0], lane)
        ]
        if chosen:
            for buckets in self.buckets.values():
                buckets.detach()
            self.buckets.clear()
        for lanes, key in chosen:
            lanes.pop(key).close()
        return bool(chosen)
