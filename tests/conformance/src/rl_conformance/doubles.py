"""Named test doubles: plain tensors as a trainer and an engine, and faults of every kind."""

from __future__ import annotations

import concurrent.futures
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from rl_conformance.expect import NotRun
from rl_conformance.reference.weights import DictSink, DictSource
from rl_core.refit import RefitReceiver, RefitSender

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

    from rl_core.interfaces import GenerationInterface, TensorSpec, WeightSink

__all__ = [
    "InjectedFault",
    "SeveralEngines",
    "TensorEngine",
    "TensorPolicy",
    "broken_tensor",
    "casting_down",
    "dropping",
    "failing_write",
    "misplacing",
    "sink_class",
]


class InjectedFault(Exception):
    """Raised by a double on purpose."""


class TensorPolicy:
    """Named tensors as the trainer's side of a refit."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.sender = RefitSender(lambda: DictSource(self.tensors), name="tensors")

    def prepare_refit_info(self) -> dict[str, Any]:
        """See :class:`rl_core.interfaces.ColocatablePolicyInterface`."""
        return self.sender.prepare()

    def stream_weights_via_ipc_zmq(self, **options: Any) -> list[Any]:
        """See :class:`rl_core.interfaces.ColocatablePolicyInterface`."""
        return [self.sender.stream_ipc(**options)]

    def close(self) -> None:
        """Removes sockets and shared memory."""
        self.sender.close()


class TensorEngine:
    """Named tensors as the engine's side of a refit."""

    def __init__(self, tensors: dict[str, torch.Tensor], name: str = "tensors") -> None:
        self.tensors = tensors
        self.receiver = RefitReceiver(
            lambda: DictSink(self.tensors), name=name, lock=threading.RLock()
        )

    @property
    def weights_version(self) -> int:
        """The committed version."""
        return self.receiver.version

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        self.receiver.prepare(info)

    def update_weights_via_ipc_zmq(self, **options: Any) -> list[Any]:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        return [self.receiver.receive_ipc(**options)]

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

    def update_weights_via_ipc_zmq(self, **options: Any) -> list[concurrent.futures.Future[Any]]:
        """Their futures, one after another."""
        return [f for engine in self.engines for f in engine.update_weights_via_ipc_zmq(**options)]


def sink_class(generation: GenerationInterface) -> type[WeightSink]:
    """The class that writes into the engine, for a fault to be put into it."""
    make: Any = getattr(generation, "weight_sink", None)
    if make is None:
        raise NotRun("the engine does not run in this process as a GenerationBackend")
    return type(make())


@contextmanager
def _writing(sink: type[WeightSink], write: Any) -> Generator[None]:
    original = sink.write

    def faulty(self: WeightSink, name: str, offset: int, data: torch.Tensor, **of: Any) -> None:
        write(lambda n, o, d: original(self, n, o, d, **of), name, offset, data, of["of"])

    with mock.patch.object(sink, "write", faulty):
        yield


def dropping(sink: type[WeightSink], tensor: str) -> Any:
    """Fault: the loader silently leaves one tensor out."""

    def write(go: Any, name: str, offset: int, data: torch.Tensor, of: TensorSpec) -> None:
        if name != tensor:
            go(name, offset, data)

    return _writing(sink, write)


def misplacing(sink: type[WeightSink], tensor: str) -> Any:
    """Fault: the loader writes one tensor's elements in the wrong order."""

    def write(go: Any, name: str, offset: int, data: torch.Tensor, of: TensorSpec) -> None:
        go(name, offset, data.roll(1) if name == tensor else data)

    return _writing(sink, write)


def casting_down(sink: type[WeightSink], tensor: str) -> Any:
    """Fault: the loader rounds one tensor to bfloat16 on the way in."""

    def write(go: Any, name: str, offset: int, data: torch.Tensor, of: TensorSpec) -> None:
        go(name, offset, data.bfloat16().to(data.dtype) if name == tensor else data)

    return _writing(sink, write)


def failing_write(sink: type[WeightSink], after: int) -> Any:
    """Fault: the loader raises once it has written ``after`` runs of elements."""
    count = iter(range(1 << 30))

    def write(go: Any, name: str, offset: int, data: torch.Tensor, of: TensorSpec) -> None:
        if next(count) == after:
            raise InjectedFault("the loader gave up")
        go(name, offset, data)

    return _writing(sink, write)
