"""A trainer and an engine over plain dictionaries of tensors, for the tests of the refit."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from rl_core.interfaces import TensorSpec, WeightSink, WeightSource
from rl_core.refit import RefitReceiver, RefitSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Tensors = dict[str, torch.Tensor]


def describe(tensors: Tensors, ties: Mapping[str, str] | None = None) -> list[TensorSpec]:
    ties = ties or {}
    return [
        TensorSpec(
            name, tuple(t.shape), str(t.dtype).removeprefix("torch."), alias_of=ties.get(name)
        )
        for name, t in tensors.items()
    ]


class DictSource(WeightSource):
    def __init__(self, tensors: Tensors, ties: Mapping[str, str] | None = None) -> None:
        self.tensor, self.ties = tensors, ties
        self.before: Callable[[str], Any] = lambda name: None

    def specs(self) -> Sequence[TensorSpec]:
        return describe(self.tensor, self.ties)

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            self.before(name)
            yield name, self.tensor[name]


class DictSink(WeightSink):
    """Records its calls; ``on[call]`` runs at the start of that call."""

    def __init__(self, tensors: Tensors, ties: Mapping[str, str] | None = None) -> None:
        self.tensor, self.ties = tensors, ties
        self.calls: list[str] = []
        self.on: dict[str, Callable[[], Any]] = {}

    def _called(self, call: str) -> None:
        self.calls.append(call)
        self.on.get(call, lambda: None)()

    def specs(self) -> Sequence[TensorSpec]:
        return describe(self.tensor, self.ties)

    def begin(self, version: int) -> None:
        self._called("begin")

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        self._called("write")
        flat = self.tensor[name].view(-1)
        flat[offset : offset + data.numel()].copy_(data)

    def finish(self, version: int) -> None:
        self._called("finish")

    def fail(self) -> None:
        self._called("fail")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self.tensor[name]


class Trainer:
    def __init__(self, tensors: Tensors, ties: Mapping[str, str] | None = None) -> None:
        self.source = DictSource(tensors, ties)
        self.sender = RefitSender(lambda: self.source, name="trainer")

    def prepare_refit_info(self) -> dict[str, Any]:
        return self.sender.prepare()

    def stream_weights_via_ipc_zmq(self, **options: Any) -> list[Any]:
        return [self.sender.stream_ipc(**options)]


class Engine:
    receiver_count = 1

    def __init__(self, tensors: Tensors, ties: Mapping[str, str] | None = None) -> None:
        self.sink = DictSink(tensors, ties)
        self.lock = threading.RLock()
        self.receiver = RefitReceiver(
            lambda: self.sink,
            name="engine",
            lock=self.lock,
            on_commit=lambda version: self.sink._called("commit"),
        )

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        self.receiver.prepare(info)

    def update_weights_via_ipc_zmq(self, **options: Any) -> list[Any]:
        return [self.receiver.receive_ipc(**options)]


def make_tensors(seed: int = 0) -> Tensors:
    """Every awkward kind: larger than a bucket, 0-d, empty, strided, many dtypes."""
    torch.manual_seed(seed)
    return {
        "big": torch.randn(50, 41),
        "scalar": torch.randn(()),
        "empty": torch.empty(0, 3),
        "strided": torch.randn(30, 44).t(),
        "sliced": torch.randn(8, 10, 3)[:, ::2],
        "half": torch.randn(33).bfloat16(),
        "counts": torch.randint(0, 9, (7,)),
        "flags": torch.rand(13) > 0.5,
        "bytes": torch.randint(0, 256, (5,), dtype=torch.uint8),
    }


def blank(tensors: Tensors) -> Tensors:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}


def same(left: Tensors, right: Tensors) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def engine_process(connection: Any, tensors: Tensors, stall: str | None) -> None:
    """Serves ``(method, arguments)`` until None comes; says "stalled" and hangs at ``stall``."""
    engine = Engine(blank(tensors))

    def hang() -> None:
        connection.send("stalled")
        threading.Event().wait(600)

    if stall:
        engine.sink.on[stall] = hang
    commands: dict[str, Callable[..., Any]] = {
        "prepare": engine.prepare_refit_info,
        "receive": lambda s: engine.receiver.receive_ipc(deadline_s=s).result(),
        "handles": engine.receiver.load_handles,
        "installed": lambda: (engine.receiver.version, engine.receiver.torn, engine.sink.tensor),
    }
    while (command := connection.recv()) is not None:
        try:
            connection.send((True, commands[command[0]](*command[1:])))
        except Exception as error:
            connection.send((False, error))
    engine.receiver.close()


def trainer_process(connection: Any, tensors: Tensors, stall: str) -> None:
    """Sends its description, then streams one refit and hangs before the tensor ``stall``."""
    trainer = Trainer(tensors)

    def before(name: str) -> None:
        if name == stall:
            connection.send("stalled")
            threading.Event().wait(600)

    trainer.source.before = before
    connection.send(trainer.prepare_refit_info())
    trainer.sender.stream_ipc(bucket_bytes=1024, deadline_s=60).result()
