"""What the product waits with, by which the scheduler has its threads: locks, events, futures.

A wait ends when its reason is there or its time is over. Waits of a tick are looks at what else may
have happened: they end as soon as something has, for no time passes while somebody can do anything.
"""

from __future__ import annotations

import concurrent.futures
import math
import sys
import threading
import types
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

from refit_model import tasks
from rl_core.weights.protocol.timing import TICK_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def wait_until(at: str, reached: Callable[[], bool], timeout: float | None) -> bool:
    """Stops the task that runs this; whether what it waits for was there in time."""
    world, task = tasks.world(), tasks.running()
    begun = world.now
    end = math.inf if timeout is None or timeout < 0 else begun + timeout
    while not reached():
        if task is None or task.killed or world.now >= end:
            return False
        if end - begun <= TICK_S:
            task.stop(at, lambda: reached() or task.has_news() or world.now != begun)
            return reached()
        task.stop(at, lambda: reached() or world.now >= end)
    return True


class Lock:
    """See :class:`threading.Lock`."""

    def __init__(self) -> None:
        self.held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        limit = (None if timeout < 0 else timeout) if blocking else 0.0
        had = wait_until("lock", lambda: not self.held, limit)
        self.held |= had
        return had or tasks.dead()

    def release(self) -> None:
        self.held = False

    def locked(self) -> bool:
        return self.held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class RLock(Lock):
    """See :class:`threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._depth and self._owner == get_ident():
            self._depth += 1
            return True
        had = super().acquire(blocking, timeout)
        if had:
            self._owner, self._depth = get_ident(), 1
        return had

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            super().release()


class Condition:
    """See :class:`threading.Condition`: who waits wakes when it is notified, not when it could."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[list[bool]] = []  # one for each that waits: whether it was notified

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        mine = [False]
        self._waiting.append(mine)
        self._lock.release()
        try:
            return wait_until("condition", lambda: mine[0], timeout)
        finally:
            self._waiting = [one for one in self._waiting if one is not mine]
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else tasks.world().now + timeout
        while not (result := predicate()):
            left = None if end is None else end - tasks.world().now
            if not self.wait(left) or tasks.dead():
                return predicate()
        return result

    def notify_all(self) -> None:
        for waiting in self._waiting:
            waiting[0] = True

    def notify(self, n: int = 1) -> None:
        for waiting in [one for one in self._waiting if not one[0]][:n]:
            waiting[0] = True


class Event:
    """See :class:`threading.Event`."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return wait_until("event", lambda: self._set, timeout)


def get_ident() -> Any:
    task = tasks.running()
    return threading.get_ident() if task is None else task.ident


def wait(
    futures: Iterable[concurrent.futures.Future[Any]],
    timeout: float | None = None,
    return_when: str = concurrent.futures.ALL_COMPLETED,
) -> tuple[set[Any], set[Any]]:
    """See :func:`concurrent.futures.wait`."""
    waited = set(futures)
    enough = all if return_when == concurrent.futures.ALL_COMPLETED else any

    def reached() -> bool:
        return enough(future.done() for future in waited)

    if (task := tasks.running()) is not None:
        task.succeeds = lambda: all(f.done() and f.exception() is None for f in waited)
    wait_until("wait", reached, timeout)
    done = {future for future in waited if future.done()}
    return done, waited - done


class _Futures(types.SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        return getattr(concurrent.futures, name)


class _Threading(types.SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


_THREADING = _Threading(
    Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, get_ident=get_ident
)
_CONCURRENT = types.SimpleNamespace(futures=_Futures(wait=wait))
_TIME = types.SimpleNamespace(
    monotonic=lambda: tasks.world().now, sleep=lambda seconds: None, time=lambda: tasks.world().now
)


def threads_in_hand(modules: Sequence[str], *, with_clock: Sequence[str]) -> ExitStack:
    """Gives modules the scheduler's threads in the place of Python's.

    Args:
        modules: Those that wait with locks and events, by name.
        with_clock: Those that look at the clock and wait for futures besides.
    """
    stack = ExitStack()

    def enter(module: str, name: Literal["threading", "concurrent", "time"], value: object) -> None:
        if hasattr(sys.modules[module], name):
            stack.enter_context(patch.object(sys.modules[module], name, value))

    for module in [*modules, *with_clock]:
        enter(module, "threading", _THREADING)
    for module in with_clock:
        enter(module, "concurrent", _CONCURRENT)
        enter(module, "time", _TIME)
    return stack
