"""Ray's object refs as futures that end with the product's errors."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import ray

from rl_core.errors import RLError, WorkerDiedError, WorkerError
from rl_core.futures import as_concurrent

__all__ = ["as_future"]


@as_concurrent.register(ray.ObjectRef)
def as_future(reference: Any) -> concurrent.futures.Future[Any]:
    """A future that ends as the reference does, with Ray's wrapping of an error taken off.

    Its exceptions: a :class:`WorkerError` if a task raised, or the error itself if it is one of
    the product's; a :class:`WorkerDiedError` if the actor is gone.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def end(done: concurrent.futures.Future[Any]) -> None:
        if (error := done.exception()) is None:
            future.set_result(done.result())
        else:
            future.set_exception(_unwrapped(error))

    reference.future().add_done_callback(end)
    return future


def _unwrapped(error: BaseException) -> BaseException:
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
    return error
