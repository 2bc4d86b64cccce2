"""Generation and refits take turns at an engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rl_core.errors import DeadlineError
from rl_core.weights.protocol.timing import TICK_S

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["EngineLock", "Lock", "exclusively"]


class Lock(Protocol):
    """What a refit needs of an engine: an :class:`EngineLock`, or a lock of :mod:`threading`."""

    def acquire(self, *, timeout: float = ...) -> bool:
        """Whether it was had in time."""

    def release(self) -> None:
        """Gives it back."""


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


class EngineLock:
    """A lock that threads get in the order of their requests.

    Generation holds it while rows are decoded, a refit while it changes the weights. A thread that
    has it may take it again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[int] = deque()  # threads, in line
        self._holder: int | None = None
        self._depth = 0

    @property
    def refit_waiting(self) -> bool:
        """Whether a refit, or what else changes the engine, waits for the thread that generates."""
        return bool(self._waiting)

    @property
    def held_by_this_thread(self) -> bool:
        """Whether the calling thread has it."""
        return self._holder == threading.get_ident()

    def acquire(self, timeout: float = -1) -> bool:
        """Whether the lock was had in time; for ever if ``timeout`` is negative."""
        had = self.acquire_keeping_place(timeout)
        if not had:
            self.cancel_acquire()
        return had

    def acquire_keeping_place(self, timeout: float = -1) -> bool:
        """As :meth:`acquire`; a thread that did not get it stays in line.

        Call it again, or :meth:`cancel_acquire`: nobody who came later gets the lock before.
        """
        me = threading.get_ident()
        with self._changed:
            if self._holder != me:
                if me not in self._waiting:
                    self._waiting.append(me)
                try:
                    had = self._changed.wait_for(
                        lambda: self._holder is None and self._waiting[0] == me,
                        None if timeout < 0 else timeout,
                    )
                except BaseException:  # a signal: the others must not wait for this thread
                    self.cancel_acquire()
                    raise
                if not had:
                    return False
                self._waiting.popleft()
                self._holder = me
            self._depth += 1
            return True

    def cancel_acquire(self) -> None:
        """Gives up the calling thread's place in line, if it has one."""
        with self._changed:
            if (me := threading.get_ident()) in self._waiting:
                self._waiting.remove(me)
                self._changed.notify_all()

    def release(self) -> None:
        """Gives the lock back.

        Raises:
            RuntimeError: The calling thread does not have it.
        """
        with self._changed:
            if not self.held_by_this_thread:
                raise RuntimeError("only the thread that acquired an EngineLock may release it")
            self._depth -= 1
            if not self._depth:
                self._holder = None
                self._changed.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()
