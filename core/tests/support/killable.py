"""Trainers and engines, here or in processes of their own, that stop where a test tells them to.

A test stops one side inside a call that the product makes (a source that does not give a tensor, a
sink that does not finish), and knows that it is there before it kills it: nothing is timed.
"""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
from remote import Remote, warm_up
from simple_pair import (
    BUCKET,
    SOON,
    Engine,
    Gate,
    Tensors,
    Trainer,
    blank,
    make_tensors,
    same,
)

from rl_core.errors import RefitPeerError, WeightsTornError
from rl_core.weights.protocol.session import Phase

#: The deadline of refits that are to fail earlier, for another reason.
LATER = 60.0
#: How long threads and sockets that are let go may take to be gone.
SETTLE_S = 60.0
#: The last tensors of ``make_tensors``: others were sent before.
FIRST, LATE = "big", "flags"


class _Party:
    """One side of refits that are begun here and end elsewhere."""

    endpoint: Any
    double: Any
    at_home: bool
    megabytes: int
    future: concurrent.futures.Future[dict[str, Any]]

    def tensors(self, seed: int) -> Tensors:
        """What a trainer with this seed has: every awkward kind, and one that is large."""
        tensors = make_tensors(seed)
        if self.at_home:
            tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        if self.megabytes:
            tensors["huge"] = torch.arange(seed, seed + (self.megabytes << 18), dtype=torch.int32)
        return tensors

    def stall(self, call: str) -> None:
        self.gate = self.double.on[call] = Gate()

    def reached(self) -> None:
        assert self.gate.reached.wait(SOON), "the refit did not come there"

    def release(self) -> None:
        self.double.on.clear()
        self.gate.opened.set()

    def outcome(self) -> dict[str, Any]:
        return self.future.result(SOON)

    def failure(self) -> BaseException | None:
        return self.future.exception(SOON)

    def phase(self) -> Phase:
        return self.endpoint.jobs[-1].session.phase

    def version(self) -> int:
        return self.endpoint.version

    def holds(self, seed: int) -> bool:
        """Whether every byte is that of the trainer with this seed."""
        return same(self.tensors(seed), self.double.tensor)

    def limit(self, kind: str, bytes_: int) -> None:
        """Lets this process have no more of ``"FSIZE"`` or ``"AS"``, -1 for no limit."""
        which = getattr(resource, f"RLIMIT_{kind}")
        resource.setrlimit(which, (bytes_, resource.getrlimit(which)[1]))

    def limit_growth(self, bytes_: int) -> None:
        """Lets this process map that much more memory than it has."""
        with open("/proc/self/statm") as statm:
            self.limit("AS", int(statm.read().split()[0]) * resource.getpagesize() + bytes_)

    def use_up_descriptors(self) -> None:
        """Opens as many files as this process may; under a limit that is soon reached."""
        hard = len(os.listdir("/proc/self/fd")) + 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.files: list[int] = []
        with suppress(OSError):
            while True:
                self.files.append(os.open(os.devnull, os.O_RDONLY))

    def free_descriptors(self) -> None:
        for file in self.files:
            os.close(file)

    def close(self) -> None:
        self.endpoint.close()


class TrainerParty(_Party):
    """A trainer whose tensors are those of ``make_tensors``, or such as can be read in place."""

    def __init__(
        self, transport: str = "ipc", *, at_home: bool = False, megabytes: int = 0
    ) -> None:
        self.at_home, self.transport, self.megabytes = at_home, transport, megabytes
        self.trainer = Trainer({}, at_home=at_home)
        self.endpoint = self.trainer.sender
        self.double = self.trainer.source
        self.load(0)

    def load(self, seed: int) -> None:
        """Trains: other values, in the same storage where that is to stay."""
        for name, tensor in self.tensors(seed).items():
            if self.at_home and name in self.double.tensor:
                self.double.tensor[name].copy_(tensor)
            else:
                self.double.tensor[name] = tensor

    def info(self) -> dict[str, Any]:
        if self.transport != "ipc" and self.transport not in self.endpoint.kept.connections:
            self.endpoint.open(self.transport, LATER, ip="127.0.0.1", port=0, receivers=1)
        return self.endpoint.prepare()

    def begin(self, **options: Any) -> None:
        defaults = {"bucket_bytes": BUCKET, "deadline_s": LATER, "transport": self.transport}
        self.future = self.endpoint.send(**defaults | options)

    def ready(self) -> int:
        """Receivers that are ready for the refit that is on offer."""
        return sum(p.ready is not None for p in self.endpoint.jobs[-1].session._peers.values())


class EngineParty(_Party):
    """An engine that begins with zeros."""

    def __init__(
        self, transport: str = "ipc", *, at_home: bool = False, megabytes: int = 0
    ) -> None:
        self.at_home, self.transport, self.megabytes = at_home, transport, megabytes
        self.engine = Engine(blank(self.tensors(0)))
        self.endpoint = self.engine.receiver
        self.double = self.engine.sink

    def meet(self, info: dict[str, Any]) -> None:
        self.endpoint.prepare(info)
        if self.transport != "ipc":
            address = info["addresses"][self.transport]
            self.endpoint.open(self.transport, SOON, address).result(SOON)

    def begin(self, deadline_s: float = LATER) -> None:
        self.future = self.endpoint.receive(transport=self.transport, deadline_s=deadline_s)

    def generate(self) -> None:
        """Begins to generate, in this thread: refits wait."""
        assert self.engine.lock.acquire(timeout=SOON)

    def end_generation(self) -> None:
        self.engine.lock.release()

    def torn(self) -> bool:
        return self.endpoint.torn

    def check(self) -> None:
        self.endpoint.check()


class Cast:
    """Trainer and engines of one test; closed or killed at its end."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self.stack, self.options = stack, options

    def here(self, kind: type[Any]) -> Any:
        party = kind(**self.options)
        self.stack.callback(party.close)
        return party

    def elsewhere(self, kind: type[Any]) -> Any:
        return self.stack.enter_context(Remote(kind, **self.options))


def introduce(trainer: Any, *engines: Any) -> None:
    info = trainer.info()
    for engine in engines:
        engine.meet(info)


def begin(trainer: Any, *engines: Any, **options: Any) -> None:
    trainer.begin(**{"receivers": len(engines)} | options)
    for engine in engines:
        engine.begin()


def refit(trainer: Any, *engines: Any, seed: int) -> None:
    """A refit that succeeds, and is exact."""
    trainer.load(seed)
    introduce(trainer, *engines)
    begin(trainer, *engines)
    report = trainer.outcome()
    for engine in engines:
        assert engine.outcome()["version"] == report["version"]
        engine.check()
        assert engine.holds(seed)


def assert_whole_unless(torn: bool, engine: Any, *, old: int) -> None:
    """``check`` refuses if the weights are torn, and only then; else they are the old ones."""
    assert engine.torn() == torn
    if torn:
        with pytest.raises(WeightsTornError, match="refit again"):
            engine.check()
    else:
        engine.check()
        assert engine.holds(old)


def assert_names_the_sender(error: BaseException | None, phase: str) -> None:
    assert isinstance(error, RefitPeerError)
    assert error.phase == phase
    assert "sender" in error.peer


def assert_names(victim: Remote, error: BaseException | None, phase: str) -> None:
    assert isinstance(error, RefitPeerError)
    assert error.phase == phase
    assert f"pid {victim.pid}" in error.peer


def census() -> Counter[str]:
    """All that this process could leave behind: what it holds, and what lies in common places."""
    gc.collect()
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found["descriptor of " + os.readlink(f"/proc/self/fd/{entry}").split(":")[0]] += 1
    with open("/proc/self/maps") as maps:
        found["mapped"] = sum("memfd:rl-refit" in line for line in maps)
    found.update(f"thread {thread.name}" for thread in threading.enumerate())
    found.update(f"file {name}" for name in os.listdir(tempfile.gettempdir()))
    found.update(f"shared {name}" for name in os.listdir("/dev/shm") if "rl-" in name)
    found.update(f"process {process.pid}" for process in multiprocessing.active_children())
    return found


def gained(before: Counter[str]) -> Counter[str]:
    """What is here and was not before, once all has ended that is about to."""
    ends = time.monotonic() + SETTLE_S
    while (more := census() - before) and time.monotonic() < ends:
        time.sleep(0.01)
    return more


@contextmanager
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever happens within: once all is closed, nothing is here that was not here before.

    Temporary files go to a place of this test alone.
    """
    warm_up()
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = census()
        yield
        left = gained(before)
        assert not left, f"this was left: {dict(left)}"
