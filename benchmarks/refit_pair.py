# ruff: noqa: D102
"""Two processes, a clock and a comparison of bytes: what every figure of a refit is taken with.

A :class:`Method` says what a trainer's process and an engine's process do; :class:`Contender` runs
it. The clock runs from "the trainer has new weights" until "the engine's tensors hold them all".
Both sides are processes of their own with one torch thread; what a method sets up once
(connections, buffers, pages) is there before the clock starts. After the last round the engine's
bytes are compared with the trainer's.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.multiprocessing as mp

__all__ = [
    "CONTEXT",
    "ENGINE",
    "TRAINER",
    "Case",
    "Contender",
    "ContenderFailed",
    "Engine",
    "Link",
    "LocalLink",
    "Method",
    "Tensors",
    "WrongBytes",
    "fill",
    "run",
]

Tensors = dict[str, torch.Tensor]

CONTEXT = mp.get_context("spawn")
SHARED_MEMORY = Path("/dev/shm")
TRAINER, ENGINE = 0, 1
GRACE_S = 20
BITS = {"float32": torch.int32, "bfloat16": torch.int16}


class ContenderFailed(RuntimeError):
    """A method could not move the tensors at all; the message says how it failed."""


class WrongBytes(AssertionError):
    """The engine's tensors are not the trainer's."""


@dataclass(frozen=True)
class Case:
    """What is moved, and how often it is timed."""

    nbytes: int
    count: int
    dtype: str
    repeats: int

    @property
    def total(self) -> int:
        """Bytes of all tensors: ``nbytes`` less the rounding."""
        return self.count * self._each() * BITS[self.dtype].itemsize

    def _each(self) -> int:
        return max(1, self.nbytes // self.count // BITS[self.dtype].itemsize)

    def tensors(self, make: Callable[..., torch.Tensor]) -> Tensors:
        """Named tensors of equal size, each with a storage of its own."""
        dtype = getattr(torch, self.dtype)
        return {
            f"model.layers.{i}.weight": make(self._each(), dtype=dtype) for i in range(self.count)
        }

    def change(self, tensors: Tensors) -> None:
        """New weights: every element changes, as after a step of an optimizer."""
        for tensor in tensors.values():
            tensor.view(BITS[self.dtype]).add_(1)


def digest(tensors: Tensors) -> str:
    """Of all names and bytes, in order."""
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        state.update(name.encode())
        state.update(tensor.view(torch.uint8).numpy())
    return state.hexdigest()


class Method(ABC):
    """One way to bring tensors to another process; travels to both of them.

    Attributes:
        folder: In memory, for the files and sockets of this run.
        starts_engine: :meth:`connect` makes the engine; otherwise it is a process beside.
    """

    starts_engine: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def warmups(self, case: Case) -> int:
        """Rounds until all pages are touched."""
        return 2

    def join(self, side: int) -> None:
        """What this side sets up once."""

    def leave(self) -> None:
        """What this side takes down at the end."""

    def connect(self, pipe: Any, case: Case) -> Link:
        """The trainer's link to the engine; makes the engine if ``starts_engine``."""
        return PipeLink(pipe)

    def prepare(self, tensors: Tensors) -> Tensors:
        """The trainer's new weights as this method is given them, off the clock."""
        return tensors

    @abstractmethod
    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> Any:
        """Trainer: gives all; what is returned is kept until the engine holds it all."""

    @abstractmethod
    def load(self, told: Any, targets: Tensors) -> Any:
        """Engine: fills the targets; what is returned is freed off the clock."""


class Engine:
    """The engine's side: tensors that stay where they are."""

    def __init__(self, method: Method, case: Case) -> None:
        torch.set_num_threads(1)
        self.method = method
        self.targets = case.tensors(torch.ones)
        self.kept: Any = None
        method.join(ENGINE)

    def load(self, told: Any) -> None:
        self.kept = self.method.load(told, self.targets)

    def drop(self) -> None:
        self.kept = None

    def digest(self) -> str:
        return digest(self.targets)


class Link(ABC):
    """How the trainer calls the engine."""

    @abstractmethod
    def start(self, call: str, *args: Any) -> None: ...

    @abstractmethod
    def answer(self) -> Any: ...

    def call(self, name: str, *args: Any) -> Any:
        self.start(name, *args)
        return self.answer()

    def close(self) -> None:
        """The engine is not needed any more."""


class PipeLink(Link):
    """To an engine in :func:`serve`."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def start(self, call: str, *args: Any) -> None:
        self.pipe.send((call, args))

    def answer(self) -> Any:
        failure, value = self.pipe.recv()
        if failure:
            raise ContenderFailed(f"the engine failed:\n{failure}")
        return value

    def close(self) -> None:
        # Said, not left to the end of the pipe: helpers of torch inherit and keep it open.
        with suppress(BrokenPipeError):  # it may have died
            self.pipe.send(None)


class LocalLink(Link):
    """To an engine in this very process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def start(self, call: str, *args: Any) -> None:
        self.value = getattr(self.engine, call)(*args)

    def answer(self) -> Any:
        return self.value


def fill(targets: Tensors, given: Tensors) -> Tensors:
    """Copies each given tensor into its target; returns the given."""
    for name, tensor in given.items():
        targets[name].copy_(tensor)
    return given


def serve(method: Method, case: Case, pipe: Any) -> None:
    """The engine's process, until the trainer closes its link, or is gone."""
    engine = None
    with suppress(EOFError, BrokenPipeError):
        while request := pipe.recv():
            call, args = request
            try:
                engine = engine or Engine(method, case)
                pipe.send((None, getattr(engine, call)(*args)))
            except Exception:
                pipe.send((traceback.format_exc(), None))
    method.leave()


def train(method: Method, case: Case, pipe: Any, report: Any) -> None:
    """The trainer's process: reports the seconds of each round, or a failure."""
    try:
        report.send(("seconds", rounds(method, case, pipe)))
    except WrongBytes as error:
        report.send(("wrong", str(error)))
    except Exception:
        report.send(("failed", traceback.format_exc()))


def rounds(method: Method, case: Case, pipe: Any) -> list[float]:
    """Seconds of each round on the trainer's side."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tensors = case.tensors(torch.rand)
    link = method.connect(pipe, case)
    try:
        link.start("drop")
        method.join(TRAINER)
        link.answer()
        times = []
        warmups = method.warmups(case)
        for _ in range(warmups + case.repeats):
            case.change(tensors)
            given = method.prepare(tensors)
            began = time.perf_counter()
            kept = method.send(given, lambda told: link.start("load", told))
            link.answer()
            times.append(time.perf_counter() - began)
            del given, kept
            link.call("drop")
        if link.call("digest") != digest(tensors):
            raise WrongBytes(f"{type(method).__name__}: the engine holds other bytes")
        return times[warmups:]
    finally:
        link.close()
        method.leave()


def run(make: Callable[[Path, Case], Method], case: Case) -> list[float]:
    """Seconds of each timed round of one method, between two new processes.

    Raises:
        ContenderFailed: It failed, or did not end in time.
        WrongBytes: The engine holds other bytes than the trainer.
    """
    with tempfile.TemporaryDirectory(prefix="refit-", dir=SHARED_MEMORY) as folder:
        method = make(Path(folder), case)
        ours, theirs = CONTEXT.Pipe()
        results, report = CONTEXT.Pipe(duplex=False)
        processes = [CONTEXT.Process(target=train, args=(method, case, ours, report))]
        if not method.starts_engine:
            processes.append(CONTEXT.Process(target=serve, args=(method, case, theirs)))
        with ended(processes):
            for process in processes:
                process.start()
            for end in (ours, theirs, report):
                end.close()
            outcome, value = heard(results, case)
    if outcome == "wrong":
        raise WrongBytes(value)
    if outcome == "failed":
        raise ContenderFailed(value)
    return value


def heard(results: Any, case: Case) -> tuple[str, Any]:
    """What the trainer's process reports, before a generous deadline."""
    seconds = 120 + 60 * (case.repeats + 5) * case.total / 1e9
    try:
        if results.poll(seconds):
            return results.recv()
    except EOFError:
        return "failed", "the trainer's process died"
    return "failed", f"not done after {seconds:.0f} s"


@contextmanager
def ended(processes: list[Any]) -> Iterator[None]:
    """Afterwards none of the processes lives: they have a while to leave by themselves."""
    try:
        yield
    finally:
        started = [process for process in processes if process.pid is not None]
        for stop in ("", "terminate", "kill"):
            alive = [process for process in started if process.is_alive()]
            for process in alive:
                if stop:
                    getattr(process, stop)()
            deadline = time.monotonic() + GRACE_S
            # Not join: it waits for a pipe that helpers of torch inherit and keep open.
            while any(process.is_alive() for process in alive) and time.monotonic() < deadline:
                time.sleep(0.02)


@dataclass(frozen=True)
class Contender:
    """A method with the ways of using it that are tried; calling it measures the best.

    Attributes:
        name: As the tables show it.
        ways: How each way makes the method.
        note: What a reader of the figure should know.
        kind: ``"ours"``, ``"peer"`` or ``"bound"``.
        copies: How often it moves each byte, at least.
    """

    name: str
    ways: Mapping[str, Callable[[Path, Case], Method]]
    note: str = ""
    kind: str = "peer"
    copies: int = 2

    def __call__(self, case: Case) -> dict[str, Any]:
        """Measures every way.

        Returns:
            A row of a document, as README.md describes it, of the way with the best round.

        Raises:
            ContenderFailed: No way worked.
            WrongBytes: A way delivered other bytes.
        """
        times: dict[str, list[float]] = {}
        failures: dict[str, str] = {}
        for way, make in self.ways.items():
            try:
                times[way] = run(make, case)
            except ContenderFailed as failure:
                failures[way] = str(failure).strip().splitlines()[-1]
        if not times:
            raise ContenderFailed("; ".join(f"{way}: {why}" for way, why in failures.items()))
        best = min(times, key=lambda way: min(times[way]))
        return {
            "what": self.name,
            "kind": self.kind,
            "copies": self.copies,
            "seconds": min(times[best]),
            "median_seconds": statistics.median(times[best]),
            "gb_per_s": case.total / min(times[best]) / 1e9,
            "way": best,
            "note": self.note,
            "ways": {
                **{way: {"seconds": min(seconds)} for way, seconds in times.items()},
                **{way: {"failed": why} for way, why in failures.items()},
            },
        }
