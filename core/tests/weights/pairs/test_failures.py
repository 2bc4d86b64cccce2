"""Refits that fail within a process: what each side says, and that the next one succeeds."""

from __future__ import annotations

import msgspec
import pytest
import torch
from simple_pair import (
    SOON,
    begin,
    fails,
    go,
    until,
)

from rl_core.errors import (
    LifecycleError,
    ManifestMismatchError,
    RefitAborted,
    RefitProtocolError,
)
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.protocol.messages import Prepare


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"plan": "another"}, "different plans"), ({"skip": b"\1"}, "masks do not fit")],
)
def test_a_receiver_that_derives_another_plan_refuses_before_it_is_written_to(
    pair, monkeypatch, changed, said
):
    trainer, engine = pair
    encode = Channel.encode

    def another(channel: Channel, message: object) -> bytes:
        if isinstance(message, Prepare):
            lane = msgspec.structs.replace(message.lanes[0], **changed)
            message = msgspec.structs.replace(message, lanes={0: lane})
        return encode(channel, message)

    monkeypatch.setattr(Channel, "encode", another)
    sender, receiver = fails(trainer, engine)
    assert isinstance(sender, RefitProtocolError)
    assert said in str(receiver)
    assert (engine.sink.calls, engine.receiver.torn) == ([], False)


def test_a_source_that_yields_another_shape_than_declared_is_named(pair):
    trainer, engine = pair
    declared = trainer.source.specs()
    trainer.source.specs = lambda: declared
    trainer.source.tensor["counts"] = torch.zeros(8, dtype=torch.int64)
    sender, _ = fails(trainer, engine)
    assert isinstance(sender, ManifestMismatchError)
    assert "counts" in str(sender)


# -- generation -----------------------------------------------------------------------------------


def test_a_deadline_while_the_engine_generates_is_an_error_on_both_sides(pair):
    trainer, engine = pair
    with engine.lock:
        sending, receiving = begin(trainer, engine)
        until(engine.held_up)
        trainer.clock.ahead_s = engine.clock.ahead_s = SOON - 0.5  # it is told before that
        sender, receiver = sending.exception(SOON), receiving.exception(SOON)
    for error in (sender, receiver):
        assert isinstance(error, RefitAborted)
        assert error.phase == "PREPARE"
        assert "generation did not end" in str(error)
    assert receiver.peer == "generation"
    engine.receiver.check()
    go(trainer, engine)


# -- the end --------------------------------------------------------------------------------------


def test_a_closed_endpoint_refuses_and_closes_twice(pair):
    trainer, engine = pair
    go(trainer, engine)
    for endpoint in (trainer.sender, engine.receiver):
        endpoint.close()
        endpoint.close()
    for refused in (trainer.sender.prepare, trainer.sender.send, trainer.sender.names):
        with pytest.raises(LifecycleError):
            refused()
    with pytest.raises(LifecycleError):
        engine.receiver.receive()
