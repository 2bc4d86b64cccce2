"""Named test doubles: plain tensors as a trainer and an engine, and several engines as one."""

from __future__ import annotations

import concurrent.futures
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from rl_core.weights import RefitReceiver, RefitSender
from rl_core.weights.spellings import SendsWeights, TakesWeights
from rl_core.weights.tensors import NamedTensorSink, NamedTensorSource

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

__all__ = ["SeveralEngines", "TensorEngine", "TensorPolicy", "broken_tensor"]


class TensorPolicy(SendsWeights):
    """Named tensors as the trainer's side of a refit."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._sender = RefitSender(lambda: NamedTensorSource(self.tensors), name="tensors")
        self.sender = self._sender

    def close(self) -> None:
        """Removes sockets and shared memory."""
        self.sender.close()


class TensorEngine(TakesWeights):
    """Named tensors as the engine's side of a refit.

    Args:
        tensors: What is installed.
        name: How the trainer's errors call it.
        sink: Writes into them.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        name: str = "tensors",
        sink: type[NamedTensorSink] = NamedTensorSink,
    ) -> None:
        self.tensors = tensors
        self._receiver = RefitReceiver(
            lambda: sink(self.tensors), name=name, lock=threading.RLock()
        )
        self.receiver = self._receiver

    def close(self) -> None:
        """Lets go of sockets and shared memory."""
        self.receiver.close()


@contextmanager
def broken_tensor(engine: TensorEngine, name: str) -> Generator[None]:
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


class SeveralEngines(TakesWeights):
    """Several engines that take one refit together."""

    def __init__(self, *engines: Any) -> None:
        self.engines = engines
        self.receiver_count = len(engines)

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        """Prepares each of them."""
        for engine in self.engines:
            engine.prepare_refit_info(info)

    def init_collective(self, *meeting: Any, **options: Any) -> list[Any]:
        """Their futures, one after another."""
        return [f for e in self.engines for f in e.init_collective(*meeting, **options)]

    def receive_weights(self, **options: Any) -> list[Any]:
        """Their futures, one after another."""
        return [f for e in self.engines for f in e.receive_weights(**options)]

    def update_weights_from_collective(self, *info: Any, **options: Any) -> list[Any]:
        """Their futures, one after another; it is their method that is under test."""
        return [f for e in self.engines for f in e.update_weights_from_collective(*info, **options)]
