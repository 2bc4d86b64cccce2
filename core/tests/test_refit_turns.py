"""Refits that meet each other, generation, or an endpoint that closes."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refit_doubles import Engine, Trainer, blank, make_tensors, same

from rl_core.errors import RefitAborted, RefitError
from rl_core.futures import spawn, wait
from rl_core.refit import refit

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = 1024
SOON = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[Trainer, Engine]]:
    tensors = make_tensors()
    trainer, engine = Trainer(tensors), Engine(blank(tensors))
    yield trainer, engine
    trainer.sender.close()
    engine.receiver.close()


def go(trainer: Trainer, engine: Engine, **options: Any) -> Any:
    return refit(trainer, engine, **{"bucket_bytes": BUCKET, "deadline_s": SOON} | options)


class Gate:
    """Holds whoever passes until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.reached.set()
        assert self.opened.wait(SOON)


def test_handles_that_a_streamed_refit_overtook_are_refused(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    first, second, *_ = trainer.sender.groups(BUCKET)
    engine.receiver.load_handles(trainer.sender.handles(first))
    go(trainer, engine)
    late = trainer.sender.handles(second)
    with pytest.raises(RefitAborted, match="over"):
        engine.receiver.load_handles(late)
    engine.receiver.check()
    assert engine.sink.calls.count("begin") == engine.sink.calls.count("fail") + 1


def test_handles_that_are_loaded_twice_after_the_commit_are_refused(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    for keys in trainer.sender.groups(BUCKET):
        last = trainer.sender.handles(keys)
        engine.receiver.load_handles(last)
    with pytest.raises(RefitAborted, match="over"):
        engine.receiver.load_handles(last)
    engine.receiver.check()


def test_refits_asked_for_at_once_take_turns_and_have_versions_of_their_own(pair):
    trainer, engine = pair
    gate = engine.sink.on["write"] = Gate()
    first = spawn("first", lambda: go(trainer, engine))
    assert gate.reached.wait(SOON)
    second = spawn("second", lambda: go(trainer, engine))
    while min(len(trainer.sender.jobs), len(engine.receiver.jobs)) < 2:
        assert not second.done(), second.exception()
        gate.opened.wait(0.01)
    gate.opened.set()
    assert [report.version for report in wait([first, second], SOON)] == [1, 2]
    assert engine.receiver.version == trainer.sender.version == 2


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_closing_ends_the_running_refit_and_those_that_wait_behind_it(pair, side):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    gate = engine.sink.on["write"] = Gate()
    sending = [trainer.sender.stream_ipc(bucket_bytes=BUCKET, deadline_s=600)]
    receiving = [engine.receiver.receive_ipc(deadline_s=600)]
    assert gate.reached.wait(SOON)
    sending.append(trainer.sender.stream_ipc(bucket_bytes=BUCKET, deadline_s=600))
    receiving.append(engine.receiver.receive_ipc(deadline_s=600))
    close = trainer.sender.close if side == "trainer" else engine.receiver.close
    closing = spawn("closing", close)
    while not (trainer.sender.closed or engine.receiver.closed):
        gate.reached.wait(0.01)
    gate.opened.set()
    closing.result(SOON)
    for future in sending if side == "trainer" else receiving:
        assert isinstance(future.exception(SOON), Exception)


def test_an_engine_prepared_for_another_trainer_finishes_the_running_refit_first(pair):
    trainer, engine = pair
    gate = engine.sink.on["write"] = Gate()
    running = spawn("running", lambda: go(trainer, engine))
    assert gate.reached.wait(SOON)
    other = Trainer(make_tensors(1))
    taking_over = spawn("other", lambda: go(other, engine, version=9))
    while len(engine.receiver.jobs) < 2:
        assert not taking_over.done(), taking_over.exception()
        gate.opened.wait(0.01)
    gate.opened.set()
    assert running.result(SOON).version == 1
    assert taking_over.result(SOON).version == 9
    assert same(other.source.tensor, engine.sink.tensor)
    other.sender.close()


def test_one_trainer_brings_two_engines_to_its_weights_in_turn(pair):
    trainer, engine = pair
    other = Engine(blank(trainer.source.tensor))
    assert [go(trainer, e).version for e in (engine, other, engine)] == [1, 2, 3]
    assert (engine.receiver.version, other.receiver.version) == (3, 2)
    assert same(trainer.source.tensor, other.sink.tensor)
    other.receiver.close()


def test_a_sink_whose_fail_raises_leaves_no_socket_behind(pair):
    trainer, engine = pair
    go(trainer, engine)

    def boom() -> None:
        raise OSError("the disk is gone")

    engine.sink.on |= {"write": boom, "fail": boom}
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((RefitError, OSError)):
        go(trainer, engine)
    engine.receiver.close()  # waits for its thread
    gc.disable()
    try:
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
def test_an_engine_that_is_told_to_stop_tells_the_sender(pair, stop):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())

    def exit_now() -> None:
        raise stop("enough")

    engine.sink.on["write"] = exit_now
    sending = trainer.sender.stream_ipc(bucket_bytes=BUCKET, deadline_s=600)
    receiving = engine.receiver.receive_ipc(deadline_s=600)
    assert stop.__name__ in str(sending.exception(SOON))
    assert isinstance(receiving.exception(SOON), RefitError)
    assert engine.receiver.torn


def test_an_engine_that_generates_without_pause_is_refitted_all_the_same(pair):
    trainer, engine = pair
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            with engine.lock:
                torch.zeros(200, 200) @ torch.zeros(200, 200)

    generating = spawn("generate", generate)
    try:
        for _ in range(5):
            go(trainer, engine)
    finally:
        stop.set()
    generating.result(SOON)


def test_a_version_may_go_back_with_the_weights(pair):
    trainer, engine = pair
    go(trainer, engine, version=5)
    assert go(trainer, engine, version=3).version == engine.receiver.version == 3
    assert go(trainer, engine).version == 4


def test_a_refit_that_gave_way_is_named_so(pair):
    trainer, engine = pair
    waiting = trainer.sender.stream_ipc(deadline_s=600)
    go(trainer, engine)
    assert isinstance(waiting.exception(SOON), RefitAborted)
