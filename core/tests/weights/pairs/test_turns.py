"""Refits that meet each other, generation, or an endpoint that closes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from simple_pair import (
    BUCKET,
    SOON,
    Gate,
    Trainer,
    begin,
    fails,
    go,
    make_tensors,
    same,
)

from rl_core.errors import DeadlineError, RefitAborted, RefitPeerError
from rl_core.futures import spawn, wait
from rl_core.weights.receiving import receiver as _receiver
from rl_core.weights.receiving.receiver import ReceiveJob


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


# -- refits that wait in vain ---------------------------------------------------------------------


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
