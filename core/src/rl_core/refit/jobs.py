"""The loop around a session: one refit in a thread of its own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl_core.errors import DeadlineError, RefitAborted
from rl_core.futures import spawn
from rl_core.refit.session import Session

if TYPE_CHECKING:
    import concurrent.futures
    import threading
    from collections.abc import Generator, Iterable

    from rl_core.refit.session import Effect

__all__ = ["TICK_S", "Job", "exclusively"]

#: Seconds between looks at deadlines and at whether the peers live.
TICK_S = 0.05

S = TypeVar("S", bound=Session)


@contextmanager
def exclusively(lock: Any, timeout_s: float, what: str) -> Generator[None]:
    """Holds a lock that ``what`` may keep for long.

    Raises:
        DeadlineError: The lock was not free in time.
    """
    if not lock.acquire(timeout=timeout_s):
        raise DeadlineError(
            f"{what} did not end within {timeout_s:g} s",
            fix="raise deadline_s, or find out what hangs",
            seconds=timeout_s,
        )
    try:
        yield
    finally:
        lock.release()


class Job(ABC, Generic[S]):
    """Performs a session's effects until it ends.

    Args:
        session: The state machine; its deadline has begun.
        turn: Refits of one endpoint take turns.
        name: Of the endpoint.
    """

    def __init__(self, session: S, turn: threading.Lock, name: str) -> None:
        self.session = session
        self._turn = turn
        self._name = name
        self.cancelled: str | None = None

    def start(self) -> concurrent.futures.Future[dict[str, Any]]:
        """Begins; the future ends with the session."""
        return spawn(f"refit-{self._name}", self._run)

    def cancel(self, why: str) -> None:
        """Makes the session fail at its next look."""
        self.cancelled = why

    @abstractmethod
    def refit(self) -> dict[str, Any]:
        """Opens what is needed, drives the session, and tells what it did."""

    @abstractmethod
    def pump(self, timeout_s: float) -> None:
        """Hands what arrives within the timeout to the session."""

    @abstractmethod
    def lost_peers(self) -> list[Effect]:
        """Tells the session of peers that are gone."""

    @abstractmethod
    def do(self, effect: Effect) -> list[Effect]:
        """Performs one effect; what follows from it."""

    def _run(self) -> dict[str, Any]:
        before = f"{self._name}: the refit before this one"
        with exclusively(self._turn, self.session.remaining_s, before):
            return self.refit()

    def drive(self) -> None:
        """Runs the session to its end."""
        looked = 0.0
        while not self.session.phase.terminal:
            self.pump(TICK_S)
            if self.cancelled or time.monotonic() - looked > TICK_S:
                self.look()
                looked = time.monotonic()

    def look(self) -> None:
        """Notices cancellation, dead peers and deadlines."""
        if self.cancelled:
            cause = RefitAborted(f"{self._name}: {self.cancelled}", fix="refit again")
            effects = self.session.fail(cause)
        else:
            effects = self.lost_peers() or self.session.tick()
        self.perform(effects)

    def perform(self, effects: Iterable[Effect]) -> None:
        """Performs effects and whatever follows from them."""
        for effect in effects:
            try:
                following = self.do(effect)
            except Exception as error:  # the session tells the peers, and ends with it
                following = self.session.fail(error)
            self.perform(following)
