"""What Ray makes of errors is taken off; no cluster is needed to see it."""

from __future__ import annotations

import concurrent.futures

import pytest
from ray import exceptions

from rl_core.errors import WorkerDiedError, WorkerError
from rl_core.futures import wait
from rl_ray._futures import as_future


class Reference:
    """A named test double of an object ref whose task failed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def future(self) -> concurrent.futures.Future[object]:
        failed: concurrent.futures.Future[object] = concurrent.futures.Future()
        failed.set_exception(self.error)
        return failed


def raised_for(error: BaseException) -> None:
    wait([as_future(Reference(error))], 10)


def task_error(cause: BaseException) -> exceptions.RayTaskError:
    return exceptions.RayTaskError("generate", "Traceback: there", cause, "p", 1, "127.0.0.1")


def test_an_error_of_ours_comes_out_as_it_is() -> None:
    cause = WorkerError("it failed", remote_traceback="there")
    for error in (task_error(cause), task_error(cause).as_instanceof_cause()):
        with pytest.raises(WorkerError) as caught:
            raised_for(error)
        assert caught.value.message == "it failed"
        assert caught.value.remote_traceback == "there"


def test_any_other_error_becomes_a_worker_error_with_its_traceback() -> None:
    plain = task_error(KeyError("k"))
    for error in (plain, plain.as_instanceof_cause()):  # Ray raises the second
        with pytest.raises(WorkerError) as caught:
            raised_for(error)
        assert caught.value.remote_type == "KeyError"
        assert "there" in caught.value.remote_traceback


def test_a_dead_actor_is_a_worker_that_died() -> None:
    with pytest.raises(WorkerDiedError):
        raised_for(exceptions.ActorDiedError())
