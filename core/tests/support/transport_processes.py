"""Other processes for the tests of the transports: each serves calls until it is killed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Self

import torch
from simple_pair import SOON

from rl_core.refit.transports.collective import COLLECTIVE
from rl_core.refit.transports.ipc import IPC

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TRANSPORTS = {"ipc": IPC, "collective": COLLECTIVE}


class Remote:
    """A process that runs ``target(pipe, ...)``; calls of it come back as results or raise."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=target, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()

    def start(self, name: str, *arguments: Any) -> None:
        self.pipe.send((name, arguments))

    def result(self) -> Any:
        assert self.pipe.poll(60), "the process says nothing"
        ok, result = self.pipe.recv()
        if not ok:
            raise result
        return result

    def ask(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.result()

    def stop(self) -> None:
        """Makes it hang; it can be killed still."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SOON)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.pipe.close()


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class ReceivingProcess:
    """A receiver's end, and one lane."""

    def __init__(self, transport: str, address: Mapping[str, Any], name: str) -> None:
        self.end = TRANSPORTS[transport].receiver(address)
        self.address = address
        self.name = name
        self.end.rendezvous(SOON)

    def attach(self, ref: Mapping[str, Any]) -> None:
        self.lane = self.end.attach(ref, self.name)

    def expect(self, start: int, stop: int) -> None:
        self.lane.expect(start, stop)

    def take(self, start: int, stop: int) -> list[int]:
        """Waits for what was expected first; the distinct values of the bytes there."""
        await_arrival(self.lane)
        values = torch.unique(self.lane.data[start:stop]).tolist()
        self.lane.release()
        return values

    def held(self) -> tuple[int, int]:
        return held()

    def try_to_take(self) -> None:
        self.lane.expect(0, self.lane.data.numel())
        await_arrival(self.lane)

    def greet(self, frame: bytes) -> bytes | None:
        """Connects, says something, and returns the answer."""
        self.end.connect(self.address)
        self.end.send(frame)
        return self.end.receive(SOON)

    def end_of_sender(self) -> float:
        """Seconds until the sender was found lost."""
        begun = time.monotonic()
        while not self.end.lost():
            assert time.monotonic() - begun < SOON, "the sender is there still"
            self.end.receive(0.05)
        return time.monotonic() - begun

    def disconnect(self) -> None:
        self.end.disconnect()

    def close(self) -> float:
        begun = time.monotonic()
        self.lane.close()
        return time.monotonic() - begun


class SendingProcess:
    """A sender's end, and one lane."""

    def __init__(self, transport: str, options: Mapping[str, Any]) -> None:
        self.end = TRANSPORTS[transport].sender(**options)

    def address(self) -> Mapping[str, Any]:
        return self.end.address

    def lane(self, nbytes: int, receivers: list[str]) -> Mapping[str, Any]:
        self.lane_ = self.end.lane(nbytes, torch.device("cpu"), receivers)
        return self.lane_.ref

    def publish(self, start: int, stop: int, value: int) -> None:
        self.lane_.data[start:stop] = value
        self.lane_.publish(start, stop)

    def answer(self, frame: bytes) -> bytes:
        """The first frame that comes, once it was answered."""
        ((key, received),) = self.end.receive(SOON)
        assert self.end.send(key, frame)
        return received


def await_arrival(lane: Any) -> None:
    begun = time.monotonic()
    while not lane.arrived():
        assert time.monotonic() - begun < SOON, "nothing comes"


def receiving(pipe: Any, *arguments: Any) -> None:
    serve(pipe, ReceivingProcess(*arguments))


def sending(pipe: Any, *arguments: Any) -> None:
    serve(pipe, SendingProcess(*arguments))


def serve(pipe: Any, subject: Any) -> None:
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send((True, getattr(subject, name)(*arguments)))
        except Exception as error:
            pipe.send((False, error))
