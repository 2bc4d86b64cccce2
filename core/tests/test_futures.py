"""One wait for futures of any kind, with a deadline."""

from __future__ import annotations

import concurrent.futures
import sys
import threading

import pytest

from rl_core.errors import ConfigError, DeadlineError
from rl_core.futures import as_concurrent, spawn, time_left, wait, within


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


def test_the_shortest_time_that_was_said_is_left_and_ends_with_its_block():
    assert time_left(7) == 7
    with within(5), within(60):
        assert 4 < time_left(7) <= 5
        assert time_left(2) == 2
        with within(0):
            assert time_left(7) == 0
        assert spawn("beside", lambda: time_left(7)).result(10) == 7
    assert time_left(7) == 7


def test_something_else_than_a_future_is_a_type_error():
    with pytest.raises(TypeError, match="int"):
        wait([1], 10)


def test_an_error_in_a_spawned_thread_is_raised_by_its_future():
    with pytest.raises(ZeroDivisionError):
        spawn("fails", lambda: 1 / 0).result(10)


def test_a_spawned_thread_never_keeps_the_process_alive():
    assert spawn("daemon", lambda: threading.current_thread().daemon).result(10)


def test_a_registered_class_of_futures_can_be_waited_for():
    class Promise:
        pass

    as_concurrent.register(Promise, lambda _: done("kept"))
    assert wait([Promise(), done(1)], 10) == ["kept", 1]


def test_waiting_imports_neither_ray_nor_torch():
    import subprocess

    code = (
        "import sys, rl_core.futures as f; f.wait([f.spawn('x', int)], 9); "
        "sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=280).returncode == 0
