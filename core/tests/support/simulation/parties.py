"""A trainer and engines for the tests of the protocol: small weights, and calls that can fail."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from rl_backends.tensors import whole_pieces
from rl_core.errors import LifecycleError
from rl_core.interfaces import Piece, TensorSpec, WeightSink, WeightSource
from rl_core.weights import RefitReceiver, RefitSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rl_core.weights.job import Runtime
    from rl_core.weights.receiving.receiver import ReceiveJob
    from rl_core.weights.sending.send_job import SendJob
    from simulation.wire import EngineEnd, TrainerEnd

DEADLINE_S = 60.0
#: One tensor of every kind: split, small, odd sizes, 0-d, empty, tied, of several dtypes.
SPECS = (
    TensorSpec("a", (6, 4), "float32"),
    TensorSpec("b", (7,), "bfloat16"),
    TensorSpec("head", (6, 4), "float32", alias_of="a"),
    TensorSpec("c", (5, 10), "float32"),
    TensorSpec("empty", (0, 3), "float32"),
    TensorSpec("d", (3,), "int64", role="buffer"),
    TensorSpec("scalar", (), "float32"),
)
NAMES = [spec.name for spec in SPECS if spec.alias_of is None]
Weights = dict[str, bytes]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


class Clock:
    """Seconds that pass when a test says so, and a little at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class BackendFault(Exception):
    """What a backend may raise: nothing that core knows of."""


class Faults:
    """Calls of a backend that will raise, once each."""

    def __init__(self) -> None:
        self.armed: set[str] = set()

    def reached(self, call: str) -> None:
        if call in self.armed:
            self.armed.remove(call)
            raise BackendFault(f"{call} failed")


class Source(WeightSource):
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._step = trainer.step

    def specs(self) -> Sequence[TensorSpec]:
        return SPECS

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            self._trainer.faults.reached("tensors")
            yield name, self._trainer.tensor[name]

    def pieces(self) -> Sequence[Piece]:
        return whole_pieces(self._trainer.tensor)

    def confirm(self) -> None:
        self._trainer.faults.reached("confirm")
        if self._step != self._trainer.step:
            raise LifecycleError("trained meanwhile", fix="refit again")


class Trainer:
    def __init__(self, number: int, before: Trainer | None, runtime: Runtime) -> None:
        self.number = number
        self.faults = Faults()
        self.step = 0 if before is None else before.step
        self.tensor = {
            s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype))
            if before is None
            else before.tensor[s.name].clone()
            for s in SPECS
            if s.alias_of is None
        }
        self.end: TrainerEnd
        self.sender = RefitSender(lambda: Source(self), name="trainer", runtime=runtime)
        self.job: SendJob | None = None

    def train(self, names: Iterable[str], *, back: int = 0) -> None:
        """Values of the next step for some tensors, or those of a step before it again."""
        self.step += 1
        for name in names:
            tensor = self.tensor[name]
            seed = max(1, self.step - back) * 13 + NAMES.index(name)
            values = torch.arange(tensor.numel()) * 7 + seed
            tensor.copy_(values.remainder(251).view(tensor.shape))


class Sink(WeightSink):
    def __init__(self, engine: Engine) -> None:
        self.casts = engine.kind.casts
        self._engine = engine

    def specs(self) -> Sequence[TensorSpec]:
        return self._engine.kind.specs

    def begin(self, version: int) -> None:
        self._engine.faults.reached("begin")

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        self._engine.faults.reached("write")
        if "lose a write" in self._engine.faults.armed:
            self._engine.faults.armed.remove("lose a write")
            return
        self._engine.tensor[name].view(-1)[offset : offset + data.numel()].copy_(data)

    def pieces(self) -> Sequence[Piece] | None:
        return whole_pieces(self._engine.tensor) if self._engine.kind.in_place else None

    def finish(self, version: int) -> None:
        self._engine.faults.reached("finish")

    def fail(self) -> None:
        self._engine.faults.reached("fail")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        tied = {s.name: s.alias_of for s in self._engine.kind.specs if s.alias_of}
        for name in names:
            self._engine.faults.reached("read")
            yield name, self._engine.tensor[tied.get(name, name)]


class GenerationLock:
    """The engine's lock: a refit waits for as many looks as generation goes on."""

    def __init__(self, clock: Clock) -> None:
        self.held = False
        self.looks = 0
        self._clock = clock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.looks:
            self.looks -= 1
            self._clock.now += DEADLINE_S / 4
            return False
        assert not self.held
        self.held = True
        return True

    def release(self) -> None:
        assert self.held
        self.held = False


@dataclass(frozen=True)
class Kind:
    """What all engines of a network are like.

    Attributes:
        casts: They keep one tensor in another dtype than the trainer.
        ties: They tie what the trainer ties.
        in_place: They let core write to their tensors.
    """

    casts: bool = False
    ties: bool = True
    in_place: bool = False

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        dtypes = {"c": "bfloat16"} if self.casts else {}
        return tuple(
            TensorSpec(
                s.name,
                s.shape,
                dtypes.get(s.name, s.dtype),
                s.role,
                s.alias_of if self.ties else None,
            )
            for s in SPECS
        )

    def blank(self) -> dict[str, torch.Tensor]:
        return {
            s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype))
            for s in self.specs
            if s.alias_of is None
        }


class Engine:
    def __init__(
        self,
        number: int,
        kind: Kind,
        clock: Clock,
        published: Callable[[str, ReceiveJob], None],
        runtime: Runtime,
    ) -> None:
        self.kind = kind
        self.number = number
        self.faults = Faults()
        self.tensor = self.kind.blank()
        self.lock = GenerationLock(clock)
        self.end: EngineEnd
        self.job: ReceiveJob | None = None
        self.before: tuple[Weights, bool] = ({}, False)
        self._published = published
        self.receiver = RefitReceiver(
            lambda: Sink(self),
            name=f"engine {number}",
            lock=self.lock,  # type: ignore[arg-type]
            on_commit=self._committed,
            runtime=runtime,
        )

    @property
    def weights(self) -> Weights:
        return {name: bytes_of(tensor) for name, tensor in self.tensor.items()}

    def _committed(self, version: int) -> None:
        self.faults.reached("commit")
        assert self.job is not None
        self._published(self.receiver.id, self.job)
