"""What a plan costs: bytes of each rank and link, and the seconds that it takes at least."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_cli.planning.moves import ITEMSIZES, Devices, Shard, elements, moves_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rl_cli.planning.models import Model
    from rl_cli.planning.shapes import Shape

__all__ = ["Links", "Prediction", "Traffic", "predict"]

#: Ranks and links that are named.
_HOTTEST = 5


class Links(NamedTuple):
    """What each device has, in each of two directions that do not disturb each other.

    Attributes:
        within: GB/s (10^9 bytes) to the other devices of its host.
        between: GB/s to other hosts.
    """

    within: float = 450.0
    between: float = 50.0


class Traffic(NamedTuple):
    """Bytes that a rank sends or receives, by how far they go.

    Attributes:
        device: To or from its own device; they take no link and no time here.
        within: Within its host.
        between: Between hosts.
    """

    device: int
    within: int
    between: int

    def seconds(self, links: Links) -> float:
        """How long the links are busy; both are at the same time."""
        return max(self.within / links.within, self.between / links.between) / 1e9


@dataclass(frozen=True)
class Prediction:
    """Bytes and least seconds of a plan.

    The seconds are those of the busiest rank: its bytes over the rate of its own link. Nothing that
    has to be measured is in them: messages, copies in memory, casts, switches that ranks share.

    Attributes:
        links: What was assumed.
        kept: Bytes that each engine rank keeps.
        sent: By each trainer rank.
        received: By each engine rank.
        pairs: Bytes from each trainer rank to each engine rank, one trainer rank after another.
        moves: How many the plan has.
        gathered: What rank 0 of the trainer receives if it gathers all tensors.
        broadcast: What each engine rank receives if rank 0 sends it all tensors: all on the way
            that is the longest one from there.
        broadcast_between: Bytes that leave a host then, if each other host gets them once.
    """

    links: Links
    kept: Sequence[int]
    sent: Sequence[Traffic]
    received: Sequence[Traffic]
    pairs: Sequence[int]
    moves: int
    gathered: Traffic
    broadcast: Traffic
    broadcast_between: int

    @property
    def busiest(self) -> tuple[float, str, int]:
        """The least seconds of the plan, and the side and number of the rank that needs them."""
        sides = (("trainer", self.sent), ("engine", self.received))
        return max(
            (
                (each.seconds(self.links), side, n)
                for side, all_ in sides
                for n, each in enumerate(all_)
            ),
            key=lambda found: found[0],
        )

    def facts(self) -> dict[str, Any]:
        """All figures: bytes, seconds and ratios."""
        width, kept = len(self.kept), sum(self.kept)
        seconds, side, rank = self.busiest
        slowest = max(self.gathered.seconds(self.links), self.broadcast.seconds(self.links))
        sent, received = [sum(each) for each in self.sent], [sum(each) for each in self.received]
        used = {divmod(n, width): nbytes for n, nbytes in enumerate(self.pairs) if nbytes}
        return {
            "moves": self.moves,
            "bytes": sum(received),
            "bytes_between_hosts": sum(each.between for each in self.received),
            "received_over_kept": sum(received) / kept,
            "kept_per_engine_rank": _spread(self.kept),
            "received_per_engine_rank": _spread(received),
            "sent_per_trainer_rank": _spread(sent),
            "links": len(used),
            "bytes_per_link": _spread(used.values()),
            "hottest_trainer_ranks": [
                {"trainer": n, "bytes": nbytes} for n, nbytes in _hottest(enumerate(sent))
            ],
            "hottest_links": [
                {"trainer": source, "engine": sink, "bytes": nbytes}
                for (source, sink), nbytes in _hottest(used.items())
            ],
            "lower_bound_s": seconds,
            "busiest": {"side": side, "rank": rank},
            "gather_and_broadcast": {
                "bytes_between_hosts": self.broadcast_between,
                "received_over_kept": sum(self.broadcast) * width / kept,
                "lower_bound_s": slowest,
            },
        }


def predict(
    model: Model, trainer: Shape, engine: Shape, devices: Devices, links: Links
) -> Prediction:
    """Plans a refit of a model and counts its bytes.

    Args:
        model: What is sent.
        trainer: How the trainer has it.
        engine: How the engines have it.
        devices: Of all ranks of both.
        links: Of each device.

    Raises:
        ConfigError: A shape does not fit the model.
    """
    has, wanted = [*trainer.stacks(model)], [*engine.stacks(model)]
    width, moves = engine.ranks, 0
    kept, pairs = [0] * width, array("q", bytes(8 * trainer.ranks * width))
    for stack in wanted:
        for box, ranks in stack.shards:
            nbytes = elements(box) * ITEMSIZES[stack.dtype]
            for rank in ranks:
                kept[rank] += nbytes
    for move in moves_of(has, wanted, devices):
        moves += 1
        for sink in move.sinks:
            pairs[move.source * width + sink] += move.nbytes
    # All tensors on rank 0 are a plan, too.
    alone = Devices(devices.trainer, devices.trainer[:1], devices.per_host)
    whole = [each._replace(shards=[Shard(box, (0,)) for box, _ in each.shards]) for each in has]
    gathered = [0, 0, 0]
    for move in moves_of(has, whole, alone):
        gathered[alone.distance(move.source, 0)] += move.nbytes
    hosts = {device // devices.per_host for device in devices.engine}
    others = len(hosts - {devices.trainer[0] // devices.per_host})
    sent, received = [[[0, 0, 0] for _ in range(ranks)] for ranks in (trainer.ranks, width)]
    for number, nbytes in enumerate(pairs):
        if nbytes:
            source, sink = divmod(number, width)
            distance = devices.distance(source, sink)
            sent[source][distance] += nbytes
            received[sink][distance] += nbytes
    return Prediction(
        links,
        kept,
        [Traffic(*each) for each in sent],
        [Traffic(*each) for each in received],
        pairs,
        moves,
        Traffic(*gathered),
        Traffic(0, 0, model.nbytes) if others else Traffic(0, model.nbytes, 0),
        gathered[2] + others * model.nbytes,
    )


def _spread(nbytes: Collection[int]) -> dict[str, float]:
    return {"min": min(nbytes), "mean": sum(nbytes) / len(nbytes), "max": max(nbytes)}


def _hottest(nbytes: Iterable[tuple[Any, int]]) -> list[tuple[Any, int]]:
    return nlargest(_HOTTEST, nbytes, key=lambda each: each[1])
