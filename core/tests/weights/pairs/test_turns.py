"""Refits that meet each other, generation, or an endpoint that closes."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
from simple_pair import (
    BUCKET,
    SOON,
    Engine,
    Gate,
    Trainer,
    begin,
    blank,
    fails,
    go,
    make_tensors,
    same,
)

from rl_core.errors import DeadlineError, LoopWarning, RefitAborted, RefitError, RefitPeerError
from rl_core.futures import spawn, wait
from rl_core.weights.receiving import receiver as _receiver
from rl_core.weights.receiving.receiver import ReceiveJob


def test_refits_asked_for_at_once_take_turns_and_have_versions_of_their_own(pair):
    trainer, engine = pair
    gate = engine.sink.on["write"] = Gate()
    first = spawn("first", lambda: go(trainer, engine))
    assert gate.reached.wait(SOON)
    others = [spawn("other", lambda: go(trainer, engine)) for _ in range(2)]
    with pytest.raises(DeadlineError, match="another call of refit did not end"):
        go(trainer, engine, deadline_s=0.1)
    gate.opened.set()
    reports = wait([first, *others], SOON)
    assert sorted(report.version for report in reports) == [1, 2, 3]
    assert engine.receiver.version == trainer.sender.version == 3


def test_calls_of_both_sides_take_turns_with_the_refit_that_runs(pair):
    trainer, engine = pair
    gate = engine.sink.on["write"] = Gate()
    running = begin(trainer, engine)
    assert gate.reached.wait(SOON)
    waiting = begin(trainer, engine)
    gate.opened.set()
    for refit, version in ((running, 1), (waiting, 2)):
        assert [each["version"] for each in wait(refit, SOON)] == [version, version]


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_closing_ends_the_running_refit_and_those_that_wait_behind_it(pair, side):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    gate = engine.sink.on["write"] = Gate()
    sending = [trainer.sender.send(bucket_bytes=BUCKET, deadline_s=600)]
    receiving = [engine.receiver.receive(deadline_s=600)]
    assert gate.reached.wait(SOON)
    sending.append(trainer.sender.send(bucket_bytes=BUCKET, deadline_s=600))
    receiving.append(engine.receiver.receive(deadline_s=600))
    close = trainer.sender.close if side == "trainer" else engine.receiver.close
    closing = spawn("closing", close)
    while not (trainer.sender.closed or engine.receiver.closed):
        gate.reached.wait(0.01)
    gate.opened.set()
    closing.result(SOON)
    for future in sending if side == "trainer" else receiving:
        assert isinstance(future.exception(SOON), Exception)


@pytest.mark.filterwarnings("ignore:engine had version 1:rl_core.LoopWarning")
def test_an_engine_prepared_for_another_trainer_finishes_the_running_refit_first(keep, pair):
    trainer, engine = pair
    gate = engine.sink.on["write"] = Gate()
    running = begin(trainer, engine)
    assert gate.reached.wait(SOON)
    other = keep(Trainer(make_tensors(1)))
    taking_over = spawn("other", lambda: go(other, engine, version=9))
    while len(engine.receiver.jobs) < 2:
        assert not taking_over.done(), taking_over.exception()
        gate.opened.wait(0.01)
    gate.opened.set()
    assert [each["version"] for each in wait(running, SOON)] == [1, 1]
    assert taking_over.result(SOON).version == 9
    assert same(other.source.tensor, engine.sink.tensor)


def test_one_trainer_brings_two_engines_to_its_weights_in_turn(keep, pair):
    trainer, engine = pair
    other = keep(Engine(blank(trainer.source.tensor)))
    assert [go(trainer, e).version for e in (engine, other, engine)] == [1, 2, 3]
    assert (engine.receiver.version, other.receiver.version) == (3, 2)
    assert same(trainer.source.tensor, other.sink.tensor)


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
    sending = trainer.sender.send(bucket_bytes=BUCKET, deadline_s=600)
    receiving = engine.receiver.receive(deadline_s=600)
    assert stop.__name__ in str(sending.exception(SOON))
    assert isinstance(receiving.exception(SOON), RefitError)
    assert engine.receiver.torn


def test_a_version_may_go_back_with_the_weights(pair):
    trainer, engine = pair
    go(trainer, engine, version=5)
    assert go(trainer, engine, version=3).version == engine.receiver.version == 3
    assert go(trainer, engine).version == 4


# -- refits that wait in vain ---------------------------------------------------------------------


def test_a_refit_that_waits_in_vain_gives_way_to_the_next(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    waiting = trainer.sender.send(deadline_s=600)
    go(trainer, engine)
    error = waiting.exception(SOON)
    assert isinstance(error, RefitAborted)
    assert "a newer refit" in str(error)
    assert engine.receiver.version == 1


def test_a_receiver_that_waits_gives_way_to_the_next_call(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    waiting = engine.receiver.receive(deadline_s=600)
    newer = engine.receiver.receive(deadline_s=SOON)
    assert "a newer refit" in str(waiting.exception(SOON))
    trainer.sender.send(deadline_s=SOON)
    assert trainer.sender.send(deadline_s=SOON).result(SOON)["version"] == 1
    assert newer.result(SOON)["version"] == 1


@pytest.mark.parametrize("whose", ["this trainer", "another"])
def test_a_receiver_that_waits_gives_way_once_it_is_prepared_again(keep, pair, whose):
    trainer, engine = pair
    awaited = trainer if whose == "this trainer" else keep(Trainer(make_tensors()))
    engine.prepare_refit_info(awaited.prepare_refit_info())
    waiting = engine.receiver.receive(deadline_s=600)
    assert go(trainer, engine).version == engine.receiver.version == 1
    assert isinstance(waiting.exception(SOON), RefitAborted)


def test_two_drivers_with_a_trainer_each_take_turns_at_an_engine(keep, pair):
    trainer, engine = pair
    other = keep(Trainer(make_tensors(1)))
    each = [spawn("refit", lambda t=t: go(t, engine)) for t in (trainer, other)]
    with pytest.warns(LoopWarning, match="had version 1 of origin"):
        assert [report.version for report in wait(each, SOON)] == [1, 1]


def test_an_engine_that_counts_fewer_calls_is_refused_until_it_is_prepared_again(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    lost = trainer.sender.send(deadline_s=600)
    sending = trainer.sender.send(deadline_s=600)
    assert isinstance(lost.exception(SOON), RefitAborted)
    with pytest.raises(RefitAborted, match="is at refit 1 and the trainer at refit 2") as error:
        engine.receiver.receive(deadline_s=600).result(SOON)
    assert "prepare_refit_info() to every engine again" in str(error.value)
    engine.prepare_refit_info(trainer.prepare_refit_info())
    assert not sending.done()
    assert go(trainer, engine).version == 1


def test_an_engine_that_counts_more_calls_waits_for_the_trainers_next(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    engine.receiver.receive(deadline_s=0.1).exception(SOON)
    receiving = engine.receiver.receive(deadline_s=SOON)
    error = trainer.sender.send(deadline_s=1).exception(SOON)
    assert "is at refit 2 and the trainer at refit 1" in str(error)
    sending = trainer.sender.send(deadline_s=SOON)
    assert [each["version"] for each in wait([sending, receiving], SOON)] == [1, 1]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_closing_one_side_ends_a_running_refit_on_both(pair, side):
    trainer, engine = pair
    with engine.lock:
        sending, receiving = begin(trainer, engine, deadline_s=600)
        while trainer.sender.jobs[0].session.phase != "PREPARE":
            assert not sending.done()
        (trainer.sender if side == "sender" else engine.receiver).close()
        assert isinstance(sending.exception(SOON), RefitError)
        assert isinstance(receiving.exception(SOON), RefitError)


def test_a_receiver_that_was_prepared_for_another_trainer_before_its_turn_keeps_to_its_own(
    keep, pair
):
    trainer, engine = pair
    other = keep(Trainer(make_tensors(1)))
    gate = engine.sink.on["write"] = Gate()
    first = begin(trainer, engine)
    assert gate.reached.wait(SOON)
    second = begin(trainer, engine)  # waits for its turn
    engine.prepare_refit_info(other.prepare_refit_info())
    third = other.sender.send(version=9, deadline_s=SOON), engine.receiver.receive(deadline_s=SOON)
    gate.opened.set()
    wait(first, SOON)
    # It gives way, unless its bytes were on their way before it was told to.
    if not isinstance(second[1].exception(SOON), RefitAborted):
        assert second[1].result()["version"] == 2
    assert [each["version"] for each in wait(third, SOON)] == [9, 9]
    assert engine.receiver.version == 9
    assert same(other.source.tensor, engine.sink.tensor)


def test_a_refit_of_one_trainer_is_not_taken_for_that_of_another(keep, pair, monkeypatch):
    trainer, engine = pair
    other = keep(Trainer(make_tensors(1)))
    gate = engine.sink.on["write"] = Gate()
    first = begin(trainer, engine)
    assert gate.reached.wait(SOON)
    second = begin(trainer, engine)
    # As if its bytes were on their way by the time that it was told.
    never = property(lambda job: None, lambda job, why: None)
    monkeypatch.setattr(ReceiveJob, "superseded", never, raising=False)
    engine.prepare_refit_info(other.prepare_refit_info())
    # Refits that wait have no order among them: the second one begins before the third waits.
    during = Gate()
    engine.sink.on["write"] = lambda: during() if engine.receiver.version == 1 else None
    gate.opened.set()
    assert during.reached.wait(SOON)
    third = other.sender.send(version=9, deadline_s=SOON), engine.receiver.receive(deadline_s=SOON)
    during.opened.set()
    for refit, version in ((first, 1), (second, 2), (third, 9)):
        assert [each["version"] for each in wait(refit, SOON)] == [version, version]
    assert same(other.source.tensor, engine.sink.tensor)


@pytest.mark.parametrize(
    ("ends_by", "error"),
    [
        ("close", RefitAborted),
        ("another sender", RefitAborted),
        ("deadline", (RefitPeerError, DeadlineError)),
    ],
)
def test_an_engine_whose_collective_sender_does_not_come_gives_up(keep, pair, ends_by, error):
    trainer, engine = pair
    info = trainer.prepare_refit_info()
    info["addresses"]["collective"] = {"ip": "127.0.0.1", "port": 1}  # nobody listens
    engine.prepare_refit_info(info)
    seconds = 0.3 if ends_by == "deadline" else 600.0
    receiving = engine.receiver.receive(transport="collective", deadline_s=seconds)
    if ends_by == "close":
        engine.close()
    elif ends_by == "another sender":
        go(keep(Trainer(make_tensors())), engine)
    assert isinstance(receiving.exception(SOON), error)


def test_a_receiver_that_attaches_after_the_sender_gave_up_says_why_it_did(pair):
    """The sender's memory is gone by then, which is not what happened."""
    trainer, engine = pair
    honest, asked = engine.sink.specs, []

    def specs() -> Any:
        asked.append(threading.current_thread())
        if len(asked) == 2:  # the lane is attached next
            later = trainer.sender.send(bucket_bytes=BUCKET, deadline_s=SOON)
            assert not later.done()
            assert isinstance(sending.exception(SOON), RefitAborted)
        return honest()

    engine.sink.specs = specs
    sending, receiving = begin(trainer, engine)
    error = receiving.exception(SOON)
    assert isinstance(error, RefitAborted), error
    assert "a newer refit was requested" in str(error)


def test_a_refit_runs_on_the_gpu_of_the_tensors(pair, monkeypatch):
    """A thread begins with GPU 0 as the current one."""
    trainer, engine = pair
    entered: list[tuple[str, Any]] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append((threading.current_thread().name, self.device))

        def __exit__(self, *exception: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(_receiver, "visible_gpus", lambda device: ())
    trainer.source.device = engine.sink.device = "cuda:1"  # there is none
    fails(trainer, engine)
    where = torch.device("cuda:1")
    assert sorted(entered) == [("refit-engine", where), ("refit-trainer", where)]
