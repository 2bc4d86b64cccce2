"""Named test doubles: plain tensors as a trainer and an engine, and several engines as one."""

from __future__ import annotations

import concurrent.futures
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from rl_core.weights import DEFAULT_DEADLINE_S, RefitReceiver, RefitSender
from rl_core.weights.tensors import NamedTensorSink, NamedTensorSource

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

__all__ = ["SeveralEngines", "TensorEngine", "TensorPolicy", "broken_tensor"]


class TensorPolicy:
    """Named tensors as the trainer's side of a refit."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.sender = RefitSender(lambda: NamedTensorSource(self.tensors), name="tensors")

    def prepare_refit_info(self) -> dict[str, Any]:
        """See :class:`rl_core.interfaces.ColocatablePolicyInterface`."""
        return self.sender.prepare()

    def stream_weights_via_ipc_zmq(self, **options: Any) -> list[Any]:
        """See :class:`rl_core.interfaces.ColocatablePolicyInterface`."""
        return [self.sender.send(**options)]

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """See :class:`rl_core.interfaces.ColocatablePolicyInterface`."""
        options = {"ip": ip, "port": port, "receivers": world_size - 1}
        return [self.sender.open("collective", DEFAULT_DEADLINE_S, **options)]

    def close(self) -> None:
        """Removes sockets and shared memory."""
        self.sender.close()


class TensorEngine:
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
        self.receiver = RefitReceiver(lambda: sink(self.tensors), name=name, lock=threading.RLock())

    @property
    def weights_version(self) -> int:
        """The committed version."""
        return self.receiver.version

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        self.receiver.prepare(info)

    def update_weights_via_ipc_zmq(self, **options: Any) -> list[Any]:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        return [self.receiver.receive(**options)]

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        return [self.receiver.open("collective", DEFAULT_DEADLINE_S, {"ip": ip, "port": port})]

    def close(self) -> None:
        """Lets go of sockets and shared memory."""
        self.receiver.close()


@contextmanager
def broken_tensor(engine: TensorEngine, name: str) -> Generator[None]:
    """Fault: once the manifest is agreed, one tensor can no longer hold what comes."""
    receive = engine.update_weights_via_ipc_zmq
    whole, pending = engine.tensors, []

    def broken(**options: Any) -> list[Any]:
        engine.tensors = whole | {name: whole[name][:2, :2].clone()}
        pending.extend(receive(**options))
        return pending

    with mock.patch.object(engine, "update_weights_via_ipc_zmq", broken):
        try:
            yield
        finally:
            concurrent.futures.wait(pending, timeout=60)
            engine.tensors = whole


class SeveralEngines:
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

    def update_weights_via_ipc_zmq(self, **options: Any) -> list[Any]:
        """Their futures, one after another."""
        return [f for e in self.engines for f in e.update_weights_via_ipc_zmq(**options)]

    def update_weights_from_collective(self, *info: Any, **options: Any) -> list[Any]:
        """Their futures, one after another."""
        return [f for e in self.engines for f in e.update_weights_from_collective(*info, **options)]
