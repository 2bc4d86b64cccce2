"""The engine's side of the benchmark: a model, and a process that holds one."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from rl_backends.tensors import whole_pieces
from rl_core.errors import DeadlineError
from rl_core.futures import wait
from rl_core.interfaces import Piece
from rl_core.interfaces.weights import TensorSpec, WeightSink, WeightSource
from rl_core.weights.data.digests import BlockHash, Hasher
from rl_core.weights.data.plan import SLOTS
from rl_core.weights.receiving.receiver import RefitReceiver
from rl_core.weights.transports import find_transport
from rl_core.weights.transports.base import NoLane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Semaphore

    from rl_core.weights.transports.base import Lane

__all__ = ["Engine", "Tensors", "acquire"]


class Tensors(WeightSource, WeightSink):
    """Contiguous tensors by name: a model as far as a refit is concerned."""

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        self.held = held
        self.device = str(next(iter(held.values())).device)
        self._pieces = whole_pieces(held)
        self._specs = [
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in held.items()
        ]

    @classmethod
    def filled(cls, parts: Iterable[torch.Tensor], value: float) -> Self:
        """Of flat tensors: the first is filled with a value, the next few with others."""
        return cls({f"layers.{i}.weight": p.fill_(value + i % 128) for i, p in enumerate(parts)})

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return self._specs

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        return ((name, self.held[name]) for name in names)

    def pieces(self) -> Sequence[Piece]:
        """See :meth:`WeightSource.pieces`."""
        return self._pieces

    def confirm(self) -> None:
        """Nothing changes while a refit is measured."""

    def change(self, names: Iterable[str]) -> None:
        """Makes these tensors other ones, in one element."""
        for name in names:
            self.held[name].view(-1).view(torch.uint8)[:1].add_(1)

    def digests(self) -> list[list[bytes]]:
        """Of every tensor."""
        device = next(iter(self.held.values())).device
        block_hash = BlockHash.choose(device, private=True, token="")
        runs = (tensor.view(-1).view(torch.uint8) for tensor in self.held.values())
        return [Hasher([run], block_hash).digests() for run in runs]

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        self.held[name].view(-1)[offset : offset + len(data)].copy_(data)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSink.read`."""
        return self.tensors(list(names))


class Engine:
    """One engine's process, seen from the trainer's."""

    def __init__(self, each: int, count: int, device: str, deadline_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, self._theirs = context.Pipe()
        self.free, self.full = context.Semaphore(SLOTS), context.Semaphore(0)
        self._deadline = deadline_s
        turns = _Turns(self.free, self.full, deadline_s)
        self._process = context.Process(
            target=_serve, args=(self._theirs, turns, each, count, device), daemon=True
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid or 0

    def start(self) -> None:
        """Starts it."""
        self._process.start()
        self._theirs.close()

    def say(self, command: str, argument: Any = None) -> None:
        """Sends a command."""
        self.connection.send((command, argument))

    def hear(self) -> Any:
        """The answer to a command.

        Raises:
            DeadlineError: It did not come in time.
        """
        if not self.connection.poll(self._deadline):
            raise _late(self._deadline)
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """Ends it."""
        if self._process.is_alive():
            self.connection.close()
            self._process.join(10)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()


def acquire(turn: Semaphore, deadline_s: float) -> None:
    """Waits for a turn, but not for ever."""
    if not turn.acquire(timeout=deadline_s):
        raise _late(deadline_s)


def _late(seconds: float) -> DeadlineError:
    return DeadlineError(
        f"refit bench: the other side did not answer within {seconds:g} s",
        fix="give it more time: --deadline",
        seconds=seconds,
    )


class _Turns(NamedTuple):
    """Who may use a slot."""

    free: Semaphore
    full: Semaphore
    deadline_s: float


def _serve(connection: Connection, turns: _Turns, each: int, count: int, device: str) -> None:
    """An engine's process: does what it is told until the trainer is gone."""
    torch.set_num_threads(1)
    flat = torch.empty(each * count, dtype=torch.bfloat16, device=device)
    tensors, deadline_s = Tensors.filled(torch.split(flat, each), 0.0), turns.deadline_s
    receiver = RefitReceiver(lambda: tensors, name="engine", lock=threading.RLock())
    copier = _Copier(flat, turns)

    def receive(transport: str) -> float:
        wait(receiver.receive(transport=transport, deadline_s=deadline_s), deadline_s)
        return time.perf_counter()

    commands: dict[str, Callable[[Any], Any]] = {
        "prepare": receiver.prepare,
        "open": lambda meeting: wait(receiver.open("collective", deadline_s, meeting), deadline_s),
        "receive": receive,
        "digests": lambda _: tensors.digests(),
        "attach": lambda ref: copier.attach(receiver, ref),
        "copy": copier.copy,
        "load": copier.load,
    }
    try:
        while True:
            command, argument = connection.recv()
            try:
                answer = commands[command](argument)
            except Exception as error:  # the trainer raises it
                answer = error
            connection.send(answer)
    except (EOFError, OSError):
        receiver.close()


class _Copier:
    """Plain copies into an engine's memory."""

    def __init__(self, flat: torch.Tensor, turns: _Turns) -> None:
        self._flat = flat.view(torch.uint8)
        self._turns = turns
        self._lane: Lane = NoLane()

    def attach(self, receiver: RefitReceiver, ref: dict[str, Any] | None) -> None:
        self._lane.close()
        end = find_transport("ipc").receiver({"endpoint": "ipc://"})  # attaches without a sender
        self._lane = NoLane() if ref is None else end.attach(ref, "")

    def copy(self, way: tuple[str, int]) -> tuple[float, float]:
        (call, size), data = way, self._lane.data
        began = time.perf_counter()
        for to, part in zip(torch.split(self._flat, size), torch.split(data, size), strict=True):
            if call == "memmove":
                ctypes.memmove(to.data_ptr(), part.data_ptr(), len(to))
            else:
                to.copy_(part)
        self._lane.release()
        return began, time.perf_counter()

    def load(self, sizes: tuple[int, int]) -> float:
        size, slots = sizes
        for index, start in enumerate(range(0, len(self._flat), size)):
            part, slot = self._flat[start : start + size], index % slots * size
            acquire(self._turns.full, self._turns.deadline_s)
            part.copy_(self._lane.data[slot : slot + len(part)])
            self._lane.release()
            self._turns.free.release()
        return time.perf_counter()
