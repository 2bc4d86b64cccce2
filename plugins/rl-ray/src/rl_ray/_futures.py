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
        error: Any = done.exception()
        if error is None:
            future.set_result(done.result())
            return
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            if isinstance(cause, RLError):
                error = cause
            else:
                error = WorkerError(
                    f"a worker failed: {cause}",
                    fix="read the worker's traceback: print(error.remote_traceback)",
                    remote_type=type(cause).__qualname__,
                    remote_traceback=str(error),
                )
        elif isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)):
            error = WorkerDiedError(
                f"a worker has ended: {error}", fix="look at its log for the cause (often memory)"
            )
        future.set_exception(error)

    reference.future().add_done_callback(end)
    return future
