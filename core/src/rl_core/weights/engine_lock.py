"""Generation and refits take turns at an engine."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rl_core.errors import DeadlineError
from rl_core.weights.protocol.timing import TICK_S

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["Lock", "TurnLock", "exclusively", "leave_line", "wait_in_line"]


class Lock(Protocol):
    """What a refit needs of an engine's lock: a :class:`TurnLock`, or one of :mod:`threading`."""

    def acquire(self, *, timeout: float = ...) -> bool:
        """Whether it was had in time."""

    def release(self) -> None:
        """Gives it back."""


def wait_in_line(lock: Lock, timeout_s: float) -> bool:
    """Whether the lock was had in time; a :class:`TurnLock` keeps the place in line if not.

    Call it again, or :func:`leave_line`.
    """
    if isinstance(lock, TurnLock):
        return lock.acquire(timeout_s, keep_place=True)
    return lock.acquire(timeout=timeout_s)


def leave_line(lock: Lock) -> None:
    """Gives up the place that :func:`wait_in_line` kept."""
    if isinstance(lock, TurnLock):
        lock.withdraw()


@contextmanager
def exclusively(
    lock: Any, timeout_s: float, what: str, check: Callable[[], None] | None = None
) -> Generator[None]:
    """Holds a lock that ``what`` may keep for long.

    Args:
        lock: To be held.
        timeout_s: Seconds to wait for it.
        what: Who has it, for the error.
        check: Called every moment of the wait, which ends with what it raises.

    Raises:
        DeadlineError: The lock was not free in time.
    """
    end = time.monotonic() + timeout_s
    while not lock.acquire(timeout=min(timeout_s, TICK_S) if check else timeout_s):
        if check is None or time.monotonic() >= end:
            raise DeadlineError(
                f"{what} did not end within {timeout_s:g} s",
                fix="raise deadline_s, or find out what hangs",
                seconds=timeout_s,
            )
        check()
    try:
        yield
    finally:
        lock.release()


class TurnLock:
    """A lock with readers, who generate, and writers, who change the engine; fair both ways.

    A writer that waits keeps new readers out, so that running ones end and it gets its turn.
    Readers that a writer kept waiting go before the next writer does. A thread that has the lock
    may take it again, a writer also as a reader.

    Args:
        readers: How many may read at once.
    """

    def __init__(self, readers: int = 1) -> None:
        self._most = readers
        self._changed = threading.Condition()
        self._writer: int | None = None
        self._depth = 0
        self._reading: dict[int, int] = {}  # by thread, how often
        self._writers: list[int] = []  # threads that wait to write, in line
        self._tickets = 0  # readers get one each, numbered in the order in which they come
        self._waiting: list[int] = []  # tickets of readers that wait
        self._first = 0  # tickets up to this one go before the next writer, who kept them out

    @property
    def wanted(self) -> bool:
        """Whether somebody waits to write."""
        return bool(self._writers)

    @property
    def held_here(self) -> bool:
        """Whether this thread writes."""
        return self._writer == threading.get_ident()

    @contextmanager
    def reading(self) -> Generator[None]:
        """Holds it for a reader."""
        me = threading.get_ident()
        with self._changed:
            mine = me in self._reading or self._writer == me
            if not mine:
                self._tickets += 1
                ticket = self._tickets
                self._waiting.append(ticket)
                try:
                    self._changed.wait_for(lambda: self._may_read(ticket))
                finally:
                    self._waiting.remove(ticket)
                    self._changed.notify_all()  # whoever waited for this one
            self._reading[me] = self._reading.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._reading[me] -= 1
                if not self._reading[me]:
                    del self._reading[me]
                self._changed.notify_all()

    def acquire(self, timeout: float = -1, *, keep_place: bool = False) -> bool:
        """Holds it for a writer, if it can be had in time.

        Args:
            timeout: Seconds; for ever if negative.
            keep_place: A thread that did not get it stays in line, and keeps readers out, until it
                asks again or withdraws.

        Returns:
            Whether this thread has it.

        Raises:
            RuntimeError: It reads, and another writer waits for it to end.
        """
        me = threading.get_ident()
        with self._changed:
            if self._writer != me:
                if me in self._reading and set(self._writers) - {me}:
                    raise RuntimeError("a thread that reads waits for a writer that waits for it")
                if me not in self._writers:
                    self._writers.append(me)
                wait_s = None if timeout < 0 else timeout
                try:
                    had = self._changed.wait_for(lambda: self._may_write(me), wait_s)
                except BaseException:  # a signal: who is gone must not keep readers out
                    self.withdraw()
                    raise
                if not had:
                    if not keep_place:
                        self.withdraw()
                    return False
                self._writers.remove(me)
                self._writer = me
            self._depth += 1
            return True

    def withdraw(self) -> None:
        """Leaves the line of the writers."""
        me = threading.get_ident()
        with self._changed:
            if me in self._writers:
                self._writers.remove(me)
                self._changed.notify_all()

    def release(self) -> None:
        """Gives a writer's hold back.

        Raises:
            RuntimeError: This thread does not have it.
        """
        with self._changed:
            if self._writer != threading.get_ident():
                raise RuntimeError("a TurnLock is released by the thread that acquired it")
            self._depth -= 1
            if not self._depth:
                self._writer = None
                self._first = self._tickets
                self._changed.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _may_read(self, ticket: int) -> bool:
        room = self._writer is None and len(self._reading) < self._most
        return room and (ticket <= self._first or not (self._writers or self._readers_go_first()))

    def _may_write(self, me: int) -> bool:
        free = self._writer is None and not self._reading.keys() - {me}
        return free and self._writers[0] == me and not self._readers_go_first()

    def _readers_go_first(self) -> bool:
        """Whether readers wait whom the last writer kept out."""
        return any(ticket <= self._first for ticket in self._waiting)
