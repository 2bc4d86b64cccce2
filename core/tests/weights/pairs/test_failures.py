"""Refits that fail within a process: what each side says, and that the next one succeeds."""

from __future__ import annotations

import msgspec
import pytest
import torch
from simple_pair import (
    SOON,
    Engine,
    Gate,
    InPlaceSink,
    Trainer,
    begin,
    blank,
    fails,
    go,
    same,
    until,
)

from rl_core.errors import (
    CapabilityError,
    LifecycleError,
    ManifestMismatchError,
    RefitAborted,
    RefitError,
    RefitPeerError,
    RefitProtocolError,
    WeightsTornError,
)
from rl_core.futures import spawn, wait
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.protocol.messages import Prepare


@pytest.mark.parametrize("call", ["begin", "write", "finish", "commit"])
def test_a_sink_that_raises_fails_both_sides_and_the_next_refit_recovers(pair, call):
    trainer, engine = pair
    go(trainer, engine)
    trainer.source.tensor["big"].mul_(2)
    engine.sink.on[call] = lambda: 1 / 0
    sender, receiver = fails(trainer, engine)
    assert isinstance(receiver, RefitError)
    assert isinstance(receiver.__cause__, ZeroDivisionError)
    assert isinstance(sender, RefitPeerError)
    assert "ZeroDivisionError" in str(sender)
    assert "receiver 0" in sender.peer
    assert engine.receiver.version == 1
    assert engine.receiver.torn == (call != "begin")
    assert ("fail" in engine.sink.calls) == (call != "begin")
    engine.sink.on.clear()
    go(trainer, engine)
    engine.receiver.check()
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_a_receiver_that_derives_another_plan_refuses_before_it_is_written_to(pair, monkeypatch):
    trainer, engine = pair
    encode = Channel.encode

    def another(channel: Channel, message: object) -> bytes:
        if isinstance(message, Prepare):
            lane = msgspec.structs.replace(message.lanes[0], plan="another")
            message = msgspec.structs.replace(message, lanes={0: lane})
        return encode(channel, message)

    monkeypatch.setattr(Channel, "encode", another)
    sender, receiver = fails(trainer, engine)
    assert isinstance(sender, RefitProtocolError)
    assert "different plans" in str(receiver)
    assert (engine.sink.calls, engine.receiver.torn) == ([], False)


def test_a_version_counts_for_the_trainer_once_every_engine_was_sealed(pair):
    trainer, engine = pair
    engine.sink.on["commit"] = lambda: 1 / 0
    fails(trainer, engine)
    assert (trainer.sender.version, engine.receiver.version) == (1, 0)
    engine.sink.on.clear()
    assert go(trainer, engine).version == 2


def test_a_source_that_raises_fails_both_sides_and_the_next_refit_recovers(pair):
    trainer, engine = pair
    trainer.source.before = lambda name: 1 / 0 if name == "flags" else None
    sender, receiver = fails(trainer, engine)
    assert isinstance(sender.__cause__, ZeroDivisionError)
    assert isinstance(receiver, WeightsTornError)
    assert receiver.phase == "TRANSFER"
    with pytest.raises(WeightsTornError, match="refit again"):
        engine.receiver.check()
    trainer.source.before = lambda name: None
    go(trainer, engine)
    engine.receiver.check()


def test_a_source_that_yields_another_shape_than_declared_is_named(pair):
    trainer, engine = pair
    declared = trainer.source.specs()
    trainer.source.specs = lambda: declared
    trainer.source.tensor["counts"] = torch.zeros(8, dtype=torch.int64)
    sender, _ = fails(trainer, engine)
    assert isinstance(sender, ManifestMismatchError)
    assert "counts" in str(sender)


@pytest.mark.parametrize("kind", ["packed", "direct"])
def test_weights_that_change_while_they_are_sent_are_never_committed(keep, kind):
    tensors = {"w": torch.randn(900), "v": torch.randn(900)}
    trainer = keep(Trainer(tensors, at_home=kind == "direct"))
    engine = keep(Engine(blank(tensors)))

    def changed() -> None:
        raise LifecycleError("the optimizer stepped meanwhile")

    trainer.source.on["confirm"] = changed
    sender, receiver = fails(trainer, engine)
    assert isinstance(sender, LifecycleError)
    assert isinstance(receiver, WeightsTornError)
    assert "the optimizer stepped meanwhile" in str(receiver)
    assert "finish" not in engine.sink.calls
    assert (trainer.sender.version, engine.receiver.version) == (0, 0)
    with pytest.raises(WeightsTornError):
        engine.receiver.check()


# -- generation -----------------------------------------------------------------------------------


def test_a_refit_waits_for_generation_to_end_and_generation_for_the_refit(pair):
    trainer, engine = pair
    gate, free = Gate(), []

    def generate() -> None:
        with engine.lock:
            gate()
            assert "begin" not in engine.sink.calls

    generation = spawn("generation", generate)
    assert gate.reached.wait(SOON)
    engine.sink.on["finish"] = lambda: free.append(engine.may_generate())
    futures = begin(trainer, engine)
    with pytest.raises(TimeoutError):
        futures[0].result(0.3)
    gate.opened.set()
    wait([*futures, generation], SOON)
    assert free == [False]
    assert engine.may_generate()


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


# -- deadlines ------------------------------------------------------------------------------------


def test_without_a_receiver_the_sender_gives_up_at_its_deadline(pair):
    error = pair[0].sender.send(deadline_s=0.2).exception(SOON)
    assert isinstance(error, RefitPeerError)
    assert "1 of 1 receivers" in str(error)


def test_without_a_sender_the_receiver_gives_up_at_its_deadline(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    error = engine.receiver.receive(deadline_s=0.2).exception(SOON)
    assert isinstance(error, RefitPeerError)
    assert error.phase == "DISCOVER"


def test_a_receiver_whose_sender_closed_is_told_at_once(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    trainer.sender.close()
    error = engine.receiver.receive(deadline_s=600).exception(SOON)
    assert isinstance(error, RefitPeerError)
    engine.receiver.check()


# -- scales of a key/value cache ------------------------------------------------------------------


class ScaledSink(InPlaceSink):
    """Has a cache that is scaled."""

    cache = True

    def scale_kv(self, scales: dict[str, float]) -> None:
        self._called("scale_kv")
        if not self.cache:
            raise CapabilityError("no such cache", fix="make one", capability="kv_scales")
        self.scales = dict(scales)


def test_scales_arrive_before_the_sink_is_finished_if_there_are_any(keep, pair):
    trainer, _ = pair
    engine = keep(Engine(blank(trainer.source.tensor), kind=ScaledSink))
    go(trainer, engine, kv_scales={"layer.0.k": 0.5, "layer.0.v": 2.0})
    assert engine.sink.scales == {"layer.0.k": 0.5, "layer.0.v": 2.0}
    assert engine.sink.calls == ["scale_kv", "begin", "scale_kv", "finish", "commit"]
    engine.sink.calls.clear()
    go(trainer, engine)
    assert engine.sink.calls == ["begin", "finish", "commit"]
    engine.sink.cache = False
    fails(trainer, engine, kv_scales={"layer.0.k": 0.5})
    engine.receiver.check()  # nothing was written


def test_scales_for_an_engine_without_them_are_a_capability_error_on_both_sides(pair):
    trainer, engine = pair
    sender, receiver = fails(trainer, engine, kv_scales={"layer.0.k": 0.5})
    for error in (sender, receiver):
        assert isinstance(error, CapabilityError)
        assert "DictSink takes no key/value scales" in str(error)
    assert (trainer.sender.version, engine.receiver.version) == (0, 0)


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


def test_a_frame_that_was_damaged_ends_the_refit_of_its_sender_alone(pair):
    trainer, engine = pair
    info = trainer.prepare_refit_info()
    engine.prepare_refit_info(info)
    end = engine.receiver.connection("ipc", engine.receiver._trainer).end
    send = end.send
    end.send = lambda frame: send(frame[:-1] + bytes([frame[-1] ^ 1]))
    sending = trainer.sender.send(deadline_s=SOON)
    error = engine.receiver.receive(deadline_s=SOON).exception(SOON)
    assert isinstance(error, RefitProtocolError)
    del end.send
    engine.prepare_refit_info(info)  # it counts from there again
    engine.receiver.receive(deadline_s=SOON).result(SOON)
    assert sending.result(SOON)["version"] == 1
