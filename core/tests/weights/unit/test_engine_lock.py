"""Generation and refits take turns: nobody starves, and nobody waits for himself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simple_pair import (
    SOON,
    Engine,
    Gate,
    InPlaceSink,
    Trainer,
    blank,
    go,
    make_tensors,
    same,
    until,
)

from rl_core.errors import DeadlineError, RefitAborted
from rl_core.futures import spawn, wait
from rl_core.weights.engine_lock import EngineLock, exclusively


@contextmanager
def busy(lock: EngineLock, hold_s: float) -> Iterator[None]:
    """Meanwhile four threads generate without a pause."""
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            with lock:
                time.sleep(hold_s)

    generating = [spawn("generates", generate) for _ in range(4)]
    try:
        yield
    finally:
        stop.set()
        wait(generating, SOON)


def test_who_waits_gets_its_turn_among_threads_that_never_pause():
    lock = EngineLock()
    with busy(lock, 0.01):
        for _ in range(20):
            assert lock.acquire(timeout=SOON)
            lock.release()


def test_a_thread_may_take_it_again():
    lock = EngineLock()
    with lock, lock:
        assert lock.held_by_this_thread
        assert not spawn("other", lambda: lock.held_by_this_thread).result(SOON)
    assert spawn("other", lambda: lock.acquire(timeout=SOON)).result(SOON)
    assert not lock.held_by_this_thread


def test_who_waits_in_vain_leaves_the_line():
    lock = EngineLock()
    with lock:
        with pytest.raises(DeadlineError):
            spawn("w", lambda: exclusively(lock, 0.01, "x").__enter__()).result(SOON)
        assert not lock.refit_waiting


def test_a_wait_with_looks_between_ends_by_the_clock(monkeypatch):
    """A process that was stopped for a while has waited all the same."""
    clock, looks = [0.0], []

    class Busy:
        def acquire(self, *, timeout: float) -> bool:
            clock[0] += 10
            return False

    monkeypatch.setattr("rl_core.weights.engine_lock.time.monotonic", lambda: clock[0])
    with pytest.raises(DeadlineError), exclusively(Busy(), 25, "x", lambda: looks.append(1)):
        pass
    assert len(looks) == 2


def test_who_keeps_a_place_goes_before_who_comes_later_until_it_is_given_up():
    lock, gate = EngineLock(), Gate()

    def keeps_its_place() -> bool:
        assert not lock.acquire_keeping_place(0)
        gate()
        lock.cancel_acquire()
        return lock.acquire(0.01)

    with lock:
        keeping = spawn("keeping", keeps_its_place)
        assert gate.reached.wait(SOON)
        assert lock.refit_waiting
    assert not lock.acquire(0.05)
    gate.opened.set()
    assert keeping.result(SOON)  # nobody else wants it


def test_a_place_that_was_kept_is_taken_by_asking_again():
    lock, gate = EngineLock(), Gate()

    def asks_twice() -> bool:
        assert not lock.acquire_keeping_place(0)
        gate()
        return lock.acquire_keeping_place(SOON)

    with lock:
        first = spawn("first", asks_twice)
        assert gate.reached.wait(SOON)
        second = spawn("second", lambda: lock.acquire(0.5))
        until(lambda: len(lock._waiting) == 2)
    assert not second.result(SOON)
    gate.opened.set()
    assert first.result(SOON)


def test_who_is_interrupted_leaves_the_line(monkeypatch):
    lock = EngineLock()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with lock:
        monkeypatch.setattr(lock._changed, "wait", interrupted)
        future = spawn("waits", lambda: lock.acquire(timeout=1.0))
        with pytest.raises(KeyboardInterrupt):
            future.result(SOON)
        monkeypatch.undo()
    assert not lock.refit_waiting


def test_only_who_has_it_gives_it_back():
    with pytest.raises(RuntimeError, match="acquired"):
        EngineLock().release()


@settings(max_examples=30, deadline=None)
@given(plan=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_one_at_a_time_in_the_order_of_asking_and_nobody_is_forgotten(plan):
    """Also those behind one that gave up before its turn."""
    lock, threads, got, inside = EngineLock(), {}, [], []

    def run(number: int, pause: int, gives_up: bool) -> None:
        threads[number] = threading.get_ident()
        if not lock.acquire(timeout=0.002 if gives_up else -1):
            return
        inside.append(number)
        assert inside == [number]
        got.append(number)
        time.sleep(pause / 2000)
        inside.remove(number)
        lock.release()

    futures = []
    with lock:
        for number, (pause, gives_up) in enumerate(plan):
            future = spawn("t", partial(run, number, pause, gives_up))
            while not (future.done() or threads.get(number) in list(lock._waiting)):
                time.sleep(0.0001)
            futures.append(future)
    for future in futures:
        future.result(SOON)
    assert got == sorted(got)
    assert {n for n, (_, gives_up) in enumerate(plan) if not gives_up} <= set(got)
    assert not lock.refit_waiting


@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
def test_refits_get_through_to_an_engine_that_is_kept_busy(keep, isolation):
    trainer = keep(Trainer(make_tensors()))
    engine = keep(Engine(blank(trainer.source.tensor), kind=InPlaceSink))
    lock = engine.lock = engine.receiver.lock = EngineLock()
    with busy(lock, 0.02):
        for _ in range(5):
            go(trainer, engine, isolation=isolation)
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_generation_that_does_not_end_is_named(keep):
    trainer = keep(Trainer(make_tensors()))
    engine = keep(Engine(blank(trainer.source.tensor)))
    lock = engine.receiver.lock = EngineLock()
    with lock:
        refit = spawn("refit", lambda: go(trainer, engine))
        until(engine.held_up)
        trainer.clock.ahead_s = engine.clock.ahead_s = SOON - 0.5
        with pytest.raises(RefitAborted, match="generation did not end") as error:
            refit.result(SOON)
    assert "generate_async" in str(error.value.fix)
    go(trainer, engine)
