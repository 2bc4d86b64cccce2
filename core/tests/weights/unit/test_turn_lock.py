"""Generation and refits take turns: nobody starves, and nobody waits for himself."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simple_pair import SOON, Engine, InPlaceSink, Trainer, blank, go, make_tensors, same, until

from rl_core.errors import DeadlineError, RefitAborted
from rl_core.futures import spawn
from rl_core.weights.engine_lock import TurnLock, exclusively, wait_in_line


def busy(
    lock: TurnLock, stop: threading.Event, hold_s: float, threads: int
) -> list[threading.Thread]:
    """Threads that generate without a pause."""

    def generate() -> None:
        while not stop.is_set():
            with lock.reading():
                time.sleep(hold_s)

    found = [threading.Thread(target=generate) for _ in range(threads)]
    for thread in found:
        thread.start()
    return found


def test_a_writer_gets_its_turn_among_readers_that_never_pause():
    lock, stop = TurnLock(), threading.Event()
    threads = busy(lock, stop, 0.01, threads=4)
    try:
        for _ in range(20):
            assert lock.acquire(timeout=SOON)
            lock.release()
    finally:
        stop.set()
        for thread in threads:
            thread.join(SOON)


def test_readers_get_their_turn_among_writers_that_never_pause():
    lock, stop = TurnLock(), threading.Event()

    def refit() -> None:
        while not stop.is_set():
            with lock:
                time.sleep(0.01)

    writers = [threading.Thread(target=refit) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(20):
            begun = time.monotonic()
            with lock.reading():
                assert time.monotonic() - begun < SOON
    finally:
        stop.set()
        for writer in writers:
            writer.join(SOON)


def test_a_reader_that_comes_while_a_writer_waits_goes_after_it():
    lock, order = TurnLock(), []

    def write() -> None:
        with lock:
            order.append("write")

    def read() -> None:
        with lock.reading():
            order.append("read")

    with lock.reading():
        writing = spawn("writer", write)
        until(lambda: lock._writers)
        reading = spawn("reader", read)
        until(lambda: lock._waiting)
    writing.result(SOON)
    reading.result(SOON)
    assert order == ["write", "read"]


def test_readers_whom_a_writer_kept_waiting_go_before_the_next():
    lock, order = TurnLock(), []

    def write(name: str) -> None:
        with lock:
            order.append(name)

    def read() -> None:
        with lock.reading():
            order.append("read")

    lock.acquire()
    readers = [spawn("reader", read) for _ in range(2)]
    until(lambda: len(lock._waiting) == 2)
    writer = spawn("writer", lambda: write("write"))
    until(lambda: lock._writers)
    lock.release()
    for future in (*readers, writer):
        future.result(SOON)
    assert order == ["read", "read", "write"]


def test_who_comes_later_takes_no_place_of_one_who_was_kept_waiting():
    """Whichever of them the system wakes first."""
    lock, order = TurnLock(), []

    def read(name: str) -> None:
        with lock.reading():
            order.append(name)

    lock.acquire()
    kept = spawn("kept", lambda: read("kept"))
    until(lambda: lock._waiting)
    with lock._changed:  # nobody is woken before both are there
        lock.release()
        assert not lock._may_read(lock._tickets + 1)
        assert lock._may_read(lock._tickets)
    kept.result(SOON)
    read("later")
    assert order == ["kept", "later"]


def test_a_thread_may_take_it_again():
    lock = TurnLock()
    with lock, lock, lock.reading(), lock.reading():
        pass
    with lock.reading(), lock.reading(), lock:
        pass
    assert spawn("other", lambda: lock.acquire(timeout=SOON)).result(SOON)


def test_who_waits_in_vain_leaves_the_line():
    lock = TurnLock()
    with lock.reading():
        with pytest.raises(DeadlineError):
            spawn("w", lambda: exclusively(lock, 0.01, "x").__enter__()).result(SOON)
        assert not lock._writers
    with lock.reading():
        pass


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


def test_who_keeps_a_place_in_line_keeps_readers_out_until_it_is_given_up():
    lock = TurnLock()
    with lock.reading():
        assert not spawn("w", lambda: wait_in_line(lock, 0.01)).result(SOON)
        assert lock.wanted
        assert not lock._may_read(lock._tickets + 1)
        lock._writers.clear()  # what ``leave_line`` does in the thread that waited
        assert not spawn("w", lambda: lock.acquire(0.01)).result(SOON)
        assert not lock.wanted


def test_who_is_interrupted_leaves_the_line(monkeypatch):
    lock = TurnLock()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with lock.reading():
        monkeypatch.setattr(lock._changed, "wait", interrupted)
        future = spawn("writer", lambda: lock.acquire(timeout=1.0))
        with pytest.raises(KeyboardInterrupt):
            future.result(SOON)
        monkeypatch.undo()
    assert not lock._writers


def test_a_reader_that_would_wait_for_itself_is_told():
    lock = TurnLock()
    with lock.reading():
        writer = spawn("writer", lambda: lock.acquire(timeout=SOON))
        until(lambda: lock._writers)
        with pytest.raises(RuntimeError, match="waits for a writer"):
            lock.acquire(timeout=SOON)
    assert writer.result(SOON)


def test_only_who_has_it_gives_it_back():
    with pytest.raises(RuntimeError, match="acquired"):
        TurnLock().release()


@settings(max_examples=30, deadline=None)
@given(
    readers=st.integers(1, 3),
    plan=st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.booleans()), max_size=12),
)
def test_never_a_writer_with_anybody_and_never_too_many_readers(readers, plan):
    lock, inside, wrong = TurnLock(readers), [], []

    def enter(kind: str, pause: int) -> None:
        inside.append(kind)
        if ("w" in inside and len(inside) > 1) or inside.count("r") > readers:
            wrong.append(list(inside))
        time.sleep(pause / 2000)
        inside.remove(kind)

    def run(writes: bool, pause: int, gives_up: bool) -> None:
        if not writes:
            with lock.reading():
                enter("r", pause)
        elif not gives_up:
            with lock:
                enter("w", pause)
        elif lock.acquire(timeout=0.0005):
            enter("w", pause)
            lock.release()

    for future in [spawn("t", lambda step=step: run(*step)) for step in plan]:
        future.result(SOON)
    assert not wrong
    assert not lock._writers
    assert not lock._waiting


@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
def test_refits_get_through_to_an_engine_that_is_kept_busy(keep, isolation):
    trainer = keep(Trainer(make_tensors()))
    engine = keep(Engine(blank(trainer.source.tensor), kind=InPlaceSink))
    lock = engine.lock = engine.receiver.lock = TurnLock()
    stop = threading.Event()
    threads = busy(lock, stop, 0.02, threads=4)
    try:
        for _ in range(5):
            go(trainer, engine, isolation=isolation)
    finally:
        stop.set()
        for thread in threads:
            thread.join(SOON)
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_generation_that_does_not_end_is_named(keep):
    trainer = keep(Trainer(make_tensors()))
    engine = keep(Engine(blank(trainer.source.tensor)))
    lock = engine.receiver.lock = TurnLock()
    with lock.reading():
        refit = spawn("refit", lambda: go(trainer, engine))
        until(engine.held_up)
        trainer.clock.ahead_s = engine.clock.ahead_s = SOON - 0.5
        with pytest.raises(RefitAborted, match="generation did not end") as error:
            refit.result(SOON)
    assert "generate_async" in str(error.value.fix)
    go(trainer, engine)
