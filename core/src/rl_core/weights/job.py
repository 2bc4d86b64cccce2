"""What both endpoints share: refits that take turns, each in its own thread."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from rl_core.errors import LifecycleError, RefitAborted
from rl_core.futures import spawn
from rl_core.weights.engine_lock import exclusively
from rl_core.weights.options import DEFAULT_DEADLINE_S
from rl_core.weights.protocol.session import IN_STEP_AGAIN, Phase, Session
from rl_core.weights.protocol.timing import BUSY_S, EXIT_GRACE_S, TICK_S
from rl_core.weights.transports import find_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from rl_core.weights.protocol.session import Effect
    from rl_core.weights.transports.base import Transport

_BEFORE_TRANSFER = (Phase.DISCOVER, Phase.PREPARE)
_FAILED_THERE = "the refit failed on the other side, or was cancelled"

S = TypeVar("S", bound=Session)
J = TypeVar("J", bound="Job[Any]")


class Endpoint(ABC, Generic[J]):
    """One side of every refit of a trainer or an engine.

    Attributes:
        closed: True once nothing more is taken on.
        name: How errors on the other side call this one.
        runtime: What its refits take from outside of them.
        number: Of the last refit that was requested here, or cancelled before that. An engine
            counts on from what its trainer gives it (``prepare_refit_info``).
        turn: Held by the refit that runs.
        asking: Held while a refit is requested, so that of two at once one sees the other.
    """

    def __init__(self, name: str, runtime: Runtime | None = None) -> None:
        self.closed = False
        self.name = name
        self.number = 0
        self.runtime = runtime or Runtime()
        self.turn = threading.Lock()
        self.asking = threading.RLock()
        self.jobs: list[J] = []
        _endpoints.add(self)

    def next_number(self, given: int | None) -> int:
        """The number of the refit that is requested now: the one given, or else the next."""
        if given is not None and given <= self.number:
            raise RefitAborted(
                f"{self.name}: refit {given} was already requested or cancelled here; the last one "
                f"was refit {self.number}",
                fix=IN_STEP_AGAIN,
            )
        return given or self.number + 1

    def start(self, job: J) -> concurrent.futures.Future[dict[str, Any]]:
        """Lets a refit begin as soon as the one that runs has ended; those that wait end."""
        waiting = self.waiting()
        self.jobs.append(job)
        try:
            job.future = self.runtime.spawn(f"refit-{self.name}", job.run, job.cancel)
        except BaseException:
            self.jobs.remove(job)
            job.release_resources()
            raise
        for older in waiting:
            older.superseded = "a newer refit was requested"
        return job.future

    def cancel(self, number: int) -> bool:
        """Ends a refit that failed on the other side; one that is yet to be requested never begins.

        A refit with bytes on their way goes on: its two sides tell each other how it ends.

        Returns:
            Whether it was requested here, and has not ended.
        """
        with self.asking:
            found = [job for job in list(self.jobs) if job.number == number]
            for job in found:
                job.cancel()
            if not found:
                self.number = max(self.number, number)
            return bool(found)

    @contextmanager
    def between_refits(self) -> Generator[bool]:
        """Keeps refits from beginning; gives False, and keeps nothing, if one is going on."""
        idle = self.turn.acquire(blocking=False)
        try:
            yield idle
        finally:
            if idle:
                self.turn.release()

    def waiting(self) -> list[J]:
        """The refits in which nothing was sent yet."""
        return [job for job in list(self.jobs) if job.session.phase in _BEFORE_TRANSFER]

    def close(self) -> None:
        """Ends every refit and closes sockets and shared memory. Idempotent."""
        self.closed = True
        for job in list(self.jobs):
            job.cancelled = "it was shut down"
        with exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: a running refit"):
            self.release_resources()

    @abstractmethod
    def release_resources(self) -> None:
        """Frees what is held between refits."""

    def check_open(self) -> None:
        """Raises LifecycleError once closed."""
        if self.closed:
            raise LifecycleError(f"{self.name} was shut down", fix="build a new backend")


class Job(ABC, Generic[S]):
    """One refit: performs a session's effects until it ends, in its own thread.

    :meth:`drive` is the loop: :meth:`pump` hands messages to the session, :meth:`perform` performs
    the effects it answers with, :meth:`look` looks for what no message tells. Nothing runs beside
    it, so a receiver that waits for generation to end pumps and looks within that effect. Its
    session may therefore have ended, or moved on, when the performance of the effect returns. Two
    rules keep that sound. A session that has ended takes nothing and answers nothing. And an effect
    that pumped looks at the phase before it goes on. Nothing else pumps within an effect, so that
    no peer decides how deep the calls go.

    Attributes:
        cancelled: Why it has to end, whatever it is doing.
        superseded: Why it is not wanted any more; it ends unless bytes are on their way, because an
            engine would be torn for nothing.
        heard: When this side last looked at its messages, or found that it had none to look at.
    """

    def __init__(
        self, session: S, endpoint: Endpoint[Any], number: int, device: torch.device
    ) -> None:
        self.session = session
        self.endpoint = endpoint
        self.number = number
        self.cancelled: str | None = None
        self.superseded: str | None = None
        self.future: concurrent.futures.Future[dict[str, Any]] | None = None
        self.heard = time.monotonic()
        # A thread begins with GPU 0 as the current one, whichever its maker used.
        cuda = device.type == "cuda"
        self._on_gpu = torch.cuda.device(device) if cuda else nullcontext()

    def run(self) -> dict[str, Any]:
        """Waits for its turn, then refits."""
        endpoint, left = self.endpoint, self.session.remaining_s
        before = f"{endpoint.name}: the refit before this one"
        try:
            with self._on_gpu, exclusively(endpoint.turn, left, before, self._check_wanted):
                self._check_wanted()
                endpoint.check_open()
                return self.refit()
        finally:
            endpoint.jobs.remove(self)
            self.release_resources()  # an error that is kept holds this frame, and with it the job

    def cancel(self) -> None:
        """Ends it, unless bytes are on their way, because its other side failed."""
        self.superseded = _FAILED_THERE

    @property
    def given_up(self) -> str | None:
        """Why it ends now, if it does."""
        waits = self.session.phase in _BEFORE_TRANSFER
        return self.cancelled or (self.superseded if waits else None)

    @abstractmethod
    def refit(self) -> dict[str, Any]:
        """Opens what is needed, drives the session, and tells what it did."""

    @abstractmethod
    def release_resources(self) -> None:
        """Drops what it holds of buffers and tensors, once it is over."""

    @abstractmethod
    def pump(self, timeout_s: float) -> None:
        """Hands what arrives within the timeout to the session."""

    @abstractmethod
    def lost_peers(self) -> list[Effect]:
        """Tells the session which peers were lost."""

    @abstractmethod
    def do(self, effect: Effect) -> list[Effect]:
        """Performs one effect; what follows from it."""

    def drive(self) -> None:
        """Runs the session to its end."""
        looked = 0.0
        while not self.session.phase.terminal:
            try:
                self.heard = time.monotonic()
                self.pump(TICK_S)
                if self.given_up or time.monotonic() - looked > TICK_S:
                    self.look()
                    looked = time.monotonic()
            except BaseException as error:  # of the transport; it tells the peers if it can
                self.perform(self.session.fail(error))

    def look(self) -> None:
        """Notices cancellation, dead peers and deadlines.

        What the others sent while this side was busy is not read yet, so they are not called late.
        """
        try:
            busy = time.monotonic() - self.heard > BUSY_S
            if not (effects := self.session.overdue() if busy else []):
                self._check_wanted()
                effects = self.lost_peers() or ([] if busy else self.session.tick())
        except RefitAborted as error:
            effects = self.session.fail(error)
        self.perform(effects)

    def _check_wanted(self) -> None:
        """Raises RefitAborted if it is given up."""
        if why := self.given_up:
            echo = {"cause": RefitAborted.__name__} if why == _FAILED_THERE else {}
            fix = "build a new backend" if self.endpoint.closed else "call refit again"
            raise RefitAborted(f"{self.endpoint.name}: {why}", fix=fix, **echo)

    def perform(self, effects: Iterable[Effect]) -> None:
        """Performs effects and whatever follows from them."""
        for effect in effects:
            try:
                following = self.do(effect)
            except BaseException as error:  # the session tells the peers, and ends with it
                following = self.session.fail(error)
            self.perform(following)


@dataclass(frozen=True)
class Runtime:
    """What refits take from outside of them; hosts and tests may replace it.

    Attributes:
        clock: Monotonic seconds, by which deadlines pass and phases are measured.
        spawn: Runs a named function in a new thread; see :func:`rl_core.futures.spawn`.
        transport: The transport of a name.
        drive: Runs the session of a job to its end, in that job's thread.
    """

    clock: Callable[[], float] = time.monotonic
    spawn: Callable[..., concurrent.futures.Future[Any]] = spawn
    transport: Callable[[str], Transport] = find_transport
    drive: Callable[[Job[Any]], None] = Job.drive


_endpoints: weakref.WeakSet[Endpoint[Any]] = weakref.WeakSet()
_owner = os.getpid()


@atexit.register
def _end_refits() -> None:
    """Ends refits before the interpreter does.

    A thread that comes back from a copy while the interpreter is being torn down is unwound
    through torch's C++ code, which ends the process with SIGABRT.
    """
    if os.getpid() != _owner:  # a forked child, in which no thread goes on
        return
    jobs = [job for endpoint in list(_endpoints) for job in list(endpoint.jobs)]
    for job in jobs:
        job.cancelled = "the process ends"
    concurrent.futures.wait([job.future for job in jobs if job.future is not None], EXIT_GRACE_S)
