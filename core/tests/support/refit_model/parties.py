"""A trainer and engines with two tensors of 64 bytes, one for each bucket."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from refit_model.tasks import WORLD, Lock, point
from rl_core.errors import LifecycleError
from rl_core.interfaces import TensorSpec, WeightSink, WeightSource
from rl_core.refit import RefitReceiver, RefitSender

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        self._step = trainer.step

    def specs(self) -> Sequence[TensorSpec]:
        return SPECS

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self._trainer.tensor[name]

    def persistent(self) -> Mapping[str, torch.Tensor]:
        return self._trainer.tensor

    def confirm(self) -> None:
        point("confirm")
        if self._step != self._trainer.step:
            raise LifecycleError("trained meanwhile", fix="refit again")


class Trainer:
    """A process that trains. ``number`` tells those apart that took each other's place."""

    def __init__(self, number: int, weights: Weights) -> None:
        self.number = number
        self.step = 0
        self.tensor = {name: torch.full((16,), weights[name]) for name in NAMES}
        self.sender = RefitSender(lambda: Source(self), name="T", runtime=WORLD)
        self.sender.turn = Lock()  # type: ignore[assignment]

    def train(self, weights: Weights) -> None:
        self.step += 1
        for name, value in weights.items():
            self.tensor[name].fill_(value)

    @property
    def weights(self) -> Weights:
        return {name: value_of(tensor) for name, tensor in self.tensor.items()}


class Sink(WeightSink):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def specs(self) -> Sequence[TensorSpec]:
        return SPECS

    def targets(self) -> Mapping[str, torch.Tensor] | None:
        return self._engine.tensor if self._engine.in_place else None

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        self._engine.tensor[name].view(-1)[offset : offset + data.numel()].copy_(data)
        point("written")

    def finish(self, version: int) -> None:
        point("finish")

    def fail(self) -> None:
        point("fail")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self._engine.tensor[name]


class Engine:
    """A process that generates.

    Attributes:
        own: Weights that it loaded by itself, if it serves those.
        asked: The last refit that it was asked to take.
        committed: Versions that it committed.
    """

    def __init__(self, world: World, name: str, *, in_place: bool) -> None:
        self.name = name
        self.in_place = in_place
        self.tensor = {name: torch.zeros(16) for name in NAMES}
        self.own: Weights | None = None
        self.asked = 0
        self.committed: list[int] = []
        self.lock = Lock()
        self._world = world
        self.receiver = RefitReceiver(
            lambda: Sink(self),
            name=name,
            lock=self.lock,
            on_commit=self._commits,
            runtime=WORLD,
        )
        self.receiver.turn = Lock()  # type: ignore[assignment]

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

    def _commits(self, version: int) -> None:
        point("commit")
        self._world.commits(self, version)
