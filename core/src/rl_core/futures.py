"""Waiting for results that come later, with a deadline, wherever they are computed."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from rl_core.errors import DeadlineError, RefitError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rl_core.interfaces.worker import Future

__all__ = ["as_concurrent", "spawn", "time_left", "wait", "within"]

T = TypeVar("T")

_until: ContextVar[float] = ContextVar("until", default=math.inf)


@contextmanager
def within(seconds: float) -> Generator[None]:
    """Limits how long calls of workers in its body are waited for, all of them together."""
    token = _until.set(min(_until.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _until.reset(token)


def time_left(seconds: float) -> float:
    """The given seconds, or what :func:`within` leaves of its own if that is less."""
    return max(0.0, min(seconds, _until.get() - time.monotonic()))


def wait(futures: Sequence[Future] | Future, timeout_s: float) -> list[Any]:
    """Waits for all futures, or for the first that fails.

    Args:
        futures: What :func:`as_concurrent` takes, in any mixture.
        timeout_s: Seconds for all of them together.

    Returns:
        The results, in the order of the futures.

    Raises:
        DeadlineError: Some are not done in time; ``details["pending"]`` has their positions.
        WorkerError: A call of a worker raised; an error of ours keeps its class.
        WorkerDiedError: The worker ended.
    """
    given = list(futures) if isinstance(futures, (list, tuple)) else [futures]
    waited = [as_concurrent(future) for future in given]
    end = time.monotonic() + timeout_s
    pending = set(waited)
    while pending:
        done, pending = concurrent.futures.wait(
            pending,
            timeout=max(0.0, end - time.monotonic()),
            return_when=concurrent.futures.FIRST_COMPLETED,
        )
        for future in waited:  # of several failures, the first one's
            if future in done and (error := future.exception()):
                raise error
        if not done:
            late = [i for i, future in enumerate(waited) if future in pending]
            raise DeadlineError(
                f"{len(late)} of {len(waited)} results did not arrive within {timeout_s:g} s",
                fix="look at the log of the worker that hangs, or raise timeout_s or deadline_s",
                seconds=timeout_s,
                pending=late,
            )
    return [future.result() for future in waited]


class _Running(concurrent.futures.Future[T]):
    """The future of a function that has a thread and can be stopped."""

    def __init__(self, stop: Callable[[], None] | None) -> None:
        super().__init__()
        self._stop = stop
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Asks the function to end, where it can; False: it runs until it has."""
        if self._stop is not None and not self.done():
            self._stop()
        return super().cancel()


def spawn(
    name: str, function: Callable[[], T], stop: Callable[[], None] | None = None
) -> concurrent.futures.Future[T]:
    """Runs a function in a new daemon thread, which never keeps the process alive.

    Args:
        name: Of the thread.
        function: Its result, or error, is the future's.
        stop: Asks the function to end; what the future's ``cancel`` does.

    Raises:
        RefitError: No thread can be started; nothing runs.
    """
    future = _Running[T](stop)

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # raised to the caller that reads the result
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise RefitError(
            f"process {os.getpid()} cannot start the thread {name}: {error}",
            fix="raise its limits (ulimit -u, ulimit -v), or end other threads",
        ) from error
    return future


@functools.singledispatch
def as_concurrent(future: Any) -> concurrent.futures.Future[Any]:
    """A future that ends as the given one does.

    A package with futures of another class registers a conversion (``as_concurrent.register``):
    rl-ray does so for Ray's object refs.

    Raises:
        TypeError: Nobody did.
    """
    if isinstance(future, concurrent.futures.Future):
        return future
    raise TypeError(
        f"cannot wait for a {type(future).__name__}: it is not a future (to wait for Ray's object "
        "refs, import rl_ray first)"
    )
