"""What both endpoints share: refits in threads of their own that take turns."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from rl_core.errors import LifecycleError, RefitAborted
from rl_core.futures import spawn
from rl_core.refit.options import DEFAULT_DEADLINE_S
from rl_core.refit.session import Phase, Session
from rl_core.refit.timing import GOODBYE_S, TICK_S
from rl_core.refit.transports import find_transport
from rl_core.refit.turns import exclusively

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from rl_core.refit.session import Effect
    from rl_core.refit.transports.base import Transport

#: Refits that are over and whose ids are known, so that whoever comes late is told.
_REMEMBERED = 64
_BEFORE_TRANSFER = (Phase.DISCOVER, Phase.PREPARE)

S = TypeVar("S", bound=Session)
J = TypeVar("J", bound="Job[Any]")
K = TypeVar("K")
V = TypeVar("V")


def keep_two(kept: dict[K, V], key: K, value: V) -> V:
    """Puts ``value`` last, and drops all but the last two: refits mostly repeat one of these."""
    kept.pop(key, None)
    kept[key] = value
    for oldest in list(kept)[:-2]:
        del kept[oldest]
    return value


class Endpoint(ABC, Generic[J]):
    """One side of every refit of a trainer or an engine.

    Attributes:
        closed: True once nothing more is taken on.
        name: How errors on the other side call this one.
        runtime: What its refits take from outside of them.
    """

    def __init__(self, name: str, runtime: Runtime | None = None) -> None:
        self.closed = False
        self.name = name
        self.runtime = runtime or Runtime()
        self.turn = threading.Lock()
        self.jobs: list[J] = []
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        _endpoints.add(self)

    def start(self, job: J) -> concurrent.futures.Future[dict[str, Any]]:
        """Lets a refit begin as soon as those before it have ended."""
        self.jobs.append(job)
        job.future = self.runtime.spawn(f"refit-{self.name}", job.run)
        return job.future

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

    def is_over(self, refit: str) -> bool:
        """Whether a refit, by its id, has ended or will not begin any more."""
        return refit in self._over

    def ended(self, refit: str) -> None:
        """Remembers that a refit is over."""
        if refit and refit not in self._over:
            self._over.append(refit)

    def close(self) -> None:
        """Ends every refit and closes sockets and shared memory. Idempotent.

        Raises:
            DeadlineError: A refit hangs in the backend's code.
        """
        self.closed = True
        for job in list(self.jobs):
            job.cancelled = "closed"
        with exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: a running refit"):
            self.release_resources()

    @abstractmethod
    def release_resources(self) -> None:
        """Frees what is held between refits."""

    def check_open(self) -> None:
        """Raises LifecycleError once closed."""
        if self.closed:
            raise LifecycleError(f"{self.name}: closed for refits", fix="build a new backend")


class Job(ABC, Generic[S]):
    """One refit: performs a session's effects until it ends, in a thread of its own.

    :meth:`drive` is the loop: :meth:`pump` hands messages to the session, :meth:`perform` performs
    the effects it answers with, :meth:`look` looks for what no message tells. Nothing runs beside
    it, so what must go on while an effect waits is called from within that effect: a receiver that
    waits for generation to end pumps and looks, and a sender that cannot send pumps, because why
    the peer went may be there already. A session may therefore have ended, or gone on, when the
    performance of an effect comes back. Three rules keep that sound. A session that has ended takes
    nothing and answers nothing. Whoever pumped within an effect looks at the phase before it goes
    on. And what :meth:`pump` has not handed over yet lies in the job (frames, loads), so that the
    inner call goes on where the outer one was, and the outer one finds it done.

    Args:
        session: The state machine; its deadline has begun.
        endpoint: Whose refit it is.
        refit_id: What both sides call it; empty if they were told nothing.
        device: Where this side's tensors are.

    Attributes:
        cancelled: Why it has to end, whatever it is doing.
        superseded: Why it is not wanted any more; it ends unless bytes are on their way.
    """

    def __init__(
        self, session: S, endpoint: Endpoint[Any], refit_id: str, device: torch.device
    ) -> None:
        self.session = session
        self.endpoint = endpoint
        self.refit_id = refit_id
        self.cancelled: str | None = None
        self.superseded: str | None = None
        self.future: concurrent.futures.Future[dict[str, Any]] | None = None
        # A thread begins with GPU 0 as the current one, whichever its maker used.
        cuda = device.type == "cuda"
        self._on_gpu = torch.cuda.device(device) if cuda else nullcontext()

    def run(self) -> dict[str, Any]:
        """Waits for its turn, then refits."""
        endpoint = self.endpoint
        before = f"{endpoint.name}: the refit before this one"
        try:
            with self._on_gpu, exclusively(endpoint.turn, self.session.remaining_s, before):
                endpoint.check_open()
                return self.refit()
        finally:
            endpoint.ended(self.refit_id)
            endpoint.jobs.remove(self)
            self.release_resources()  # an error that is kept holds this frame, and with it the job

    def supersede(self, why: str) -> None:
        """Ends it, unless bytes are on their way: an engine would be torn for nothing."""
        self.superseded = why
        if self.session.phase in _BEFORE_TRANSFER:
            self.endpoint.ended(self.refit_id)

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
        """Tells the session of peers that are gone."""

    @abstractmethod
    def do(self, effect: Effect) -> list[Effect]:
        """Performs one effect; what follows from it."""

    def drive(self) -> None:
        """Runs the session to its end."""
        looked = 0.0
        while not self.session.phase.terminal:
            try:
                self.pump(TICK_S)
                if self.given_up or time.monotonic() - looked > TICK_S:
                    self.look()
                    looked = time.monotonic()
            except BaseException as error:  # of the transport; the peers are told if it can
                self.perform(self.session.fail(error))

    def look(self) -> None:
        """Notices cancellation, dead peers and deadlines."""
        if why := self.given_up:
            cause = RefitAborted(f"{self.endpoint.name}: {why}", fix="refit again")
            effects = self.session.fail(cause)
        else:
            effects = self.lost_peers() or self.session.tick()
        self.perform(effects)

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
    """What refits take from outside of them; whoever hosts or tests them may give others.

    Attributes:
        clock: Monotonic seconds, by which deadlines pass and phases are measured.
        spawn: Runs a named function in a thread of its own.
        transport: The transport of a name.
        drive: Runs the session of a job to its end, in that job's thread.
    """

    clock: Callable[[], float] = time.monotonic
    spawn: Callable[[str, Callable[[], Any]], concurrent.futures.Future[Any]] = spawn
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
    concurrent.futures.wait([job.future for job in jobs if job.future is not None], GOODBYE_S)
