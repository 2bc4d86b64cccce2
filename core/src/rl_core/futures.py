"""Waiting for results that come later, with a deadline, wherever they are computed."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from rl_core.errors import DeadlineError, RLError, WorkerDiedError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_core.interfaces.futures import Future

__all__ = ["as_concurrent", "spawn", "wait"]

T = TypeVar("T")


def wait(futures: Sequence[Future] | Future, timeout_s: float) -> list[Any]:
    """Waits for all futures, or for the first that fails.

    Args:
        futures: ``concurrent.futures.Future`` and Ray object refs, in any mixture.
        timeout_s: Seconds for all of them together.

    Returns:
        The results, in the order of the futures.

    Raises:
        DeadlineError: Some are not done in time; ``details["pending"]`` has their positions.
        WorkerError: A Ray task raised; an error of ours keeps its class.
        WorkerDiedError: The actor behind a Ray ref is gone.
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
                raise _unwrapped(error)
        if not done:
            late = [i for i, future in enumerate(waited) if future in pending]
            raise DeadlineError(
                f"{len(late)} of {len(waited)} results did not come within {timeout_s:g} s",
                fix="look at the log of the worker that hangs, or give it more time",
                seconds=timeout_s,
                pending=late,
            )
    return [future.result() for future in waited]


def spawn(name: str, function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Runs a function in a daemon thread of its own, which never keeps the process alive."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def as_concurrent(future: Any) -> concurrent.futures.Future[Any]:
    """A future that ends as the given one does, which may be a Ray object ref.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(future, concurrent.futures.Future):
        return future
    ray = sys.modules.get("ray")  # whoever holds a ref has imported it
    if ray is not None and isinstance(future, ray.ObjectRef):
        converted: concurrent.futures.Future[Any] = future.future()
        return converted
    raise TypeError(f"neither a future nor a Ray object ref: {type(future).__name__}")


def _unwrapped(error: Any) -> BaseException:
    """Ray's wrapping of an error, taken off."""
    ray = sys.modules.get("ray")
    original: BaseException = error
    if ray is None or not isinstance(error, ray.exceptions.RayError):
        return original
    if isinstance(error, ray.exceptions.RayTaskError):
        cause: BaseException = error.cause
        if isinstance(cause, RLError):
            return cause
        return WorkerError(
            f"a worker failed: {cause}",
            fix="the worker's traceback is in error.remote_traceback",
            remote_type=type(cause).__qualname__,
            remote_traceback=error.traceback_str,
        )
    if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)):
        return WorkerDiedError(
            f"a worker is gone: {error}", fix="look at its log for the cause (often memory)"
        )
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return DeadlineError(str(error), fix="give the worker more time")
    return original
