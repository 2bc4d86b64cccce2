"""Ends of a transport with one lane, as a test has them in other processes."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from simple_pair import SOON

from rl_collective.collective import COLLECTIVE
from rl_core.weights.transports.ipc import IPC

TRANSPORTS = {"ipc": IPC, "collective": COLLECTIVE}


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

    def attach(self, ref: Mapping[str, Any], within_s: float = SOON) -> None:
        self.lane = self.end.attach(ref, self.name)
        self.lane.ends = time.monotonic() + within_s

    def expect(self, start: int, stop: int, runs: Any = None) -> None:
        self.lane.expect(start, stop, runs)

    def take(self, start: int, stop: int) -> list[int]:
        """Waits for what was expected first; the distinct values of the bytes there."""
        await_arrival(self.lane)
        values, left = [], self.lane.data[start:stop]
        while left.numel():  # which is sooner done than to sort them
            values.append(int(left[0]))
            left = left[left != values[-1]]
        self.lane.release()
        return sorted(values)

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
        time.sleep(0.0002)  # the thread that brings it needs the core
