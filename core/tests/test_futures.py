"""One wait for futures of either kind, with a deadline."""

from __future__ import annotations

import concurrent.futures
import sys
import threading

import pytest

from rl_core.errors import ConfigError, DeadlineError, WorkerDiedError, WorkerError
from rl_core.futures import spawn, wait


def done(value: object) -> concurrent.futures.Future[object]:
    future: concurrent.futures.Future[object] = concurrent.futures.Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> concurrent.futures.Future[object]:
    future: concurrent.futures.Future[object] = concurrent.futures.Future()
    future.set_exception(error)
    return future


def test_results_come_in_the_order_of_the_futures():
    slow = spawn("slow", lambda: threading.Event().wait(0.05) or "slow")
    assert wait([slow, done("fast"), slow], 10) == ["slow", "fast", "slow"]


def test_a_single_future_and_no_future_are_fine():
    assert wait(done(1), 10) == [1]
    assert wait([], 10) == []


def test_the_first_failure_is_raised_without_waiting_for_the_rest():
    never: concurrent.futures.Future[object] = concurrent.futures.Future()
    with pytest.raises(ConfigError, match="wrong"):
        wait([never, failed(ConfigError("wrong"))], 600)


def test_a_deadline_names_what_is_pending():
    never: concurrent.futures.Future[object] = concurrent.futures.Future()
    with pytest.raises(DeadlineError) as caught:
        wait([done(1), never], 0.05)
    assert caught.value.details["pending"] == [1]


def test_something_else_than_a_future_is_a_type_error():
    with pytest.raises(TypeError, match="int"):
        wait([1], 10)


def test_an_error_in_a_spawned_thread_is_raised_by_its_future():
    with pytest.raises(ZeroDivisionError):
        spawn("fails", lambda: 1 / 0).result(10)


def test_a_spawned_thread_never_keeps_the_process_alive():
    assert spawn("daemon", lambda: threading.current_thread().daemon).result(10)


def test_waiting_does_not_import_ray():
    import subprocess

    code = (
        "import sys, rl_core.futures as f; f.wait([f.spawn('x', int)], 9); "
        "sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class TestRay:
    """What Ray makes of errors is taken off; no cluster is needed to see it."""

    @pytest.fixture
    def ray(self):
        return pytest.importorskip("ray").exceptions

    def task_error(self, ray, cause: BaseException) -> BaseException:
        return ray.RayTaskError("generate", "Traceback: there", cause, "p", 1, "127.0.0.1")

    def test_an_error_of_ours_comes_out_as_it_is(self, ray):
        cause = WorkerError("it failed", remote_traceback="there")
        for error in (
            self.task_error(ray, cause),
            self.task_error(ray, cause).as_instanceof_cause(),
        ):
            with pytest.raises(WorkerError) as caught:
                wait([failed(error)], 10)
            assert caught.value.message == "it failed"
            assert caught.value.remote_traceback == "there"

    def test_any_other_error_becomes_a_worker_error_with_its_traceback(self, ray):
        with pytest.raises(WorkerError) as caught:
            wait([failed(self.task_error(ray, KeyError("k")))], 10)
        assert caught.value.remote_type == "KeyError"
        assert "there" in caught.value.remote_traceback

    def test_a_dead_actor_is_a_worker_that_died(self, ray):
        with pytest.raises(WorkerDiedError):
            wait([failed(ray.ActorDiedError())], 10)
