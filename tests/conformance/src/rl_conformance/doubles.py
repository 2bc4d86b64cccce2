"""Trainers and engines over named tensors: for tests of a driver, a loop or a transport.

They take the place of backends. A hook makes something happen during a refit::

    trainer, engine = Trainer({"w": torch.ones(3)}), Engine({"w": torch.zeros(3)})
    engine.on["finish"] = lambda: 1 / 0
    refit(trainer, engine)  # raises RefitError; the engine is torn until the next refit
"""

from __future__ import annotations

import concurrent.futures
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from rl_backends.spellings import SendsWeights, TakesWeights
from rl_backends.tensors import NamedTensorSink, NamedTensorSource
from rl_core.weights import RefitReceiver, RefitSender

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import torch

    from rl_core.interfaces import Piece, TensorSpec, WeightSink, WeightSource

__all__ = ["Engine", "Engines", "Hooks", "Sink", "Source", "Tensors", "Trainer", "broken_tensor"]

Tensors = dict[str, "torch.Tensor"]
Hooks = dict[str, "Callable[[], object]"]


class Source(NamedTensorSource):
    """Tensors, with a hook before each that is given, by its name, and ``"confirm"``."""

    def __init__(self, tensors: Tensors, on: Hooks) -> None:
        super().__init__(tensors)
        self.on = on

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            _run(self.on, name)
            yield from super().tensors([name])

    def pieces(self) -> Sequence[Piece] | None:
        """None while there are hooks: engines that read the tensors themselves run none."""
        return None if self.on else super().pieces()

    def confirm(self) -> None:
        _run(self.on, "confirm")


class Sink(NamedTensorSink):
    """Tensors, with hooks: ``"begin"``, each tensor's name and ``"finish"``."""

    def __init__(self, tensors: Tensors, on: Hooks) -> None:
        super().__init__(tensors)
        self.on = on

    def begin(self, version: int) -> None:
        _run(self.on, "begin")

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        _run(self.on, name)
        super().write(name, offset, data, of=of)

    def pieces(self) -> Sequence[Piece] | None:
        """None while there are hooks: what core writes itself runs none."""
        return None if self.on else super().pieces()

    def finish(self, version: int) -> None:
        _run(self.on, "finish")


class Trainer(SendsWeights):
    """The trainer's side of a refit.

    Args:
        tensors: What is sent.
        source: Makes a source of another kind for each refit.

    Attributes:
        on: Hooks of :class:`Source`.
    """

    def __init__(self, tensors: Tensors, source: Callable[[], WeightSource] | None = None) -> None:
        self.tensors = tensors
        self.on: Hooks = {}
        source = source or (lambda: Source(self.tensors, self.on))
        self.sender = self._sender = RefitSender(source, name="trainer")

    def close(self) -> None:
        """Ends every refit, and removes sockets and shared memory."""
        self.sender.close()


class Engine(TakesWeights):
    """An engine's side of a refit.

    Args:
        tensors: What is installed.
        name: How the trainer's errors call it.
        sink: Makes a sink of another kind for each refit.

    Attributes:
        lock: Held by a refit while it writes, and by a test that generates.
        on: Hooks of :class:`Sink`, and ``"commit"``.
    """

    def __init__(
        self, tensors: Tensors, name: str = "engine", sink: Callable[[], WeightSink] | None = None
    ) -> None:
        self.tensors = tensors
        self.on: Hooks = {}
        self.lock = threading.RLock()
        self.receiver = self._receiver = RefitReceiver(
            sink or (lambda: Sink(self.tensors, self.on)),
            name=name,
            lock=self.lock,
            on_commit=lambda version: _run(self.on, "commit"),
        )

    def close(self) -> None:
        """Ends every refit, and lets go of sockets and shared memory."""
        self.receiver.close()


class Engines(TakesWeights):
    """Several engines, of any kind, that take one refit together."""

    def __init__(self, *engines: Any) -> None:
        self.engines = engines
        self.receiver_count = len(engines)

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.prepare_refit_info(info)

    def receive_weights(self, **options: Any) -> list[Any]:
        return [f for engine in self.engines for f in engine.receive_weights(**options)]

    def cancel_refit(self, number: int) -> None:
        for engine in self.engines:
            engine.cancel_refit(number)

    def init_collective(self, *group: Any, **options: Any) -> list[Any]:
        return [f for e in self.engines for f in e.init_collective(*group, **options)]

    def update_weights_from_collective(self, *info: Any, **options: Any) -> list[Any]:
        # Their own method, which a test may be about.
        return [f for e in self.engines for f in e.update_weights_from_collective(*info, **options)]


@contextmanager
def broken_tensor(engine: Engine, name: str) -> Generator[None]:
    """Fault: once the manifest is agreed, one tensor can no longer hold what comes."""
    receive = engine.receive_weights
    whole, pending = engine.tensors, []

    def broken(**options: Any) -> list[Any]:
        engine.tensors = whole | {name: whole[name][:2, :2].clone()}
        pending.extend(receive(**options))
        return pending

    with mock.patch.object(engine, "receive_weights", broken):
        try:
            yield
        finally:
            concurrent.futures.wait(pending, timeout=60)
            engine.tensors = whole


def _run(on: Hooks, moment: str) -> None:
    on.get(moment, lambda: None)()
