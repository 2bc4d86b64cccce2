"""A trainer and engines with two tensors of 64 bytes, one for each bucket."""

from __future__ import annotations

import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from refit_model.tasks import WORLD, point, running, world
from rl_backends.tensors import whole_pieces
from rl_core.errors import LifecycleError, RefitPeerError
from rl_core.interfaces import Piece, TensorSpec, WeightSink, WeightSource
from rl_core.weights import RefitReceiver, RefitSender
from rl_core.weights.engine_lock import EngineLock

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from refit_model.world import World

NAMES = ("a", "b")
SPECS = tuple(TensorSpec(name, (16,), "float32") for name in NAMES)
BUCKET_BYTES = 64
#: What an engine has after it dropped its weights, or loaded others by itself.
GARBAGE, FOREIGN = 1001.0, 1002.0

Weights = dict[str, float]


def value_of(tensor: torch.Tensor) -> float:
    """What all elements of a tensor are; nan if they are not the same."""
    words = tensor.numpy().tobytes()
    first = words[:4]
    return struct.unpack("f", first)[0] if words == first * 16 else float("nan")


class Source(WeightSource):
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.state = self._step = trainer.step
        trainer.open.append(self)

    def specs(self) -> Sequence[TensorSpec]:
        return SPECS

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        assert set(names) <= set(self._trainer.gives)
        for name in names:
            self.check()
            yield name, self._trainer.tensor[name]

    def check(self) -> None:
        if self._trainer.lost_rank:
            raise RefitPeerError("rank 1 died", peer="rank 1", rank=1)

    def pieces(self) -> Sequence[Piece]:
        return whole_pieces({name: self._trainer.tensor[name] for name in self._trainer.gives})

    def confirm(self) -> None:
        point("confirm")
        self.check()
        if self._step != self._trainer.step:
            raise LifecycleError("trained meanwhile", fix="refit again")
        if (task := running()) is not None:
            world().confirmed.add((task.party, *world().request_of(task.job)))

    def close(self) -> None:
        if self not in self._trainer.open:
            world().fails(f"{self._trainer.name} closes a source twice")
        self._trainer.open.remove(self)


class Trainer:
    """A process that trains, or one of its two ranks.

    Attributes:
        number: Tells those apart that took each other's place.
        gives: The tensors that it gives.
        other: The other rank, which gives the rest, if this is rank 0 of two.
        open: Its sources that were not closed.
        lost_rank: Another rank of it, without which nothing is gathered, has died.
    """

    def __init__(
        self, name: str, number: int, weights: Weights, gives: Sequence[str] = NAMES
    ) -> None:
        self.name = name
        self.number = number
        self.gives = gives
        self.other: Trainer | None = None
        self.step = 0
        self.open: list[Source] = []
        self.lost_rank = False
        self.tensor = {name: torch.full((16,), weights[name]) for name in NAMES}
        self.sender = RefitSender(lambda: Source(self), name=name, runtime=WORLD)

    def train(self, weights: Weights) -> None:
        self.step += 1
        for name, value in weights.items():
            self.tensor[name].fill_(value)
        if self.other is not None:
            self.other.train(weights)

    @property
    def whole(self) -> bool:
        """Its ranks live, have trained alike, and have the same copies."""
        other, scenario = self.other, world().scenario
        apart = scenario.ranks and (other is None or other.step != self.step)
        if scenario.copies and other is not None:
            apart |= other.weights != self.weights
        return not (self.lost_rank or apart)

    @property
    def weights(self) -> Weights:
        """Of each tensor what the rank has that gives it."""
        theirs = {} if self.other is None else self.other.tensor
        return {
            name: value_of(tensor if name in self.gives else theirs.get(name, tensor))
            for name, tensor in self.tensor.items()
        }


class Sink(WeightSink):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def specs(self) -> Sequence[TensorSpec]:
        return SPECS

    def pieces(self) -> Sequence[Piece] | None:
        return whole_pieces(self._engine.tensor) if self._engine.in_place else None

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        self._engine.half_written = True
        self._engine.tensor[name].view(-1)[offset : offset + data.numel()].copy_(data)
        point("written")

    def finish(self, version: int) -> None:
        point("finish")
        self._engine.half_written = False

    def fail(self) -> None:
        point("fail")
        self._engine.half_written = False

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self._engine.tensor[name]


class CountedLock(EngineLock):
    """The product's own lock, which counts how often somebody wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    @property
    def held(self) -> bool:
        return self._holder is not None

    def acquire_keeping_place(self, timeout: float = -1) -> bool:
        had = super().acquire_keeping_place(timeout)
        self.writes += had
        return had

    @contextmanager
    def reading(self) -> Generator[None]:
        with self:
            self.writes -= 1
            yield


class Engine:
    """A process that generates.

    Attributes:
        half_written: A sink has written, and has not ended.
        rows: How many it decodes.
        own: Weights that it loaded by itself, if it serves those.
    """

    def __init__(self, world: World, name: str, *, in_place: bool) -> None:
        self.name = name
        self.in_place = in_place
        self.tensor = {name: torch.zeros(16) for name in NAMES}
        self.own: Weights | None = None
        self.half_written = False
        self.rows = 0
        self.lock = CountedLock()
        self._world = world
        self.receiver = self.new_receiver()

    def new_receiver(self) -> RefitReceiver:
        return RefitReceiver(
            lambda: Sink(self),
            name=self.name,
            lock=self.lock,
            on_commit=self.commits,
            runtime=WORLD,
        )

    @property
    def front(self) -> Any:
        """The receiver that drivers ask, and generation."""
        return self.receiver

    @property
    def weights(self) -> Weights:
        return {name: value_of(tensor) for name, tensor in self.tensor.items()}

    def drop(self) -> None:
        """Goes to a sleep in which the weights are lost, as ``sleep_level=2`` of vLLM."""
        self._overwrite(GARBAGE)
        self.own = None
        self.receiver.dropped()

    def load_own(self) -> None:
        """Loads other weights by itself, and serves them."""
        self._overwrite(FOREIGN)
        self.own = self.weights
        self.receiver.forget()

    def _overwrite(self, value: float) -> None:
        for tensor in self.tensor.values():
            tensor.fill_(value)

    def decodes(self, version: int) -> None:
        """One step of a reader that began with a version."""
        expected, weights = self._world.offered[version], self.weights
        if self.half_written or self.front.version != version or weights != expected:
            half = ", half written" if self.half_written else ""
            self._world.fails(
                f"{self.name} decodes with {weights}{half}, as version {version} of {expected}"
            )

    def check_label(self) -> None:
        """What a server tells every client of its weights is true, also while a driver refits."""

    def commits(self, version: int) -> None:
        point("commit")
        self._world.commits(self, version)
