"""Staged refits: the engine serves the old weights until the new ones are complete."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simple_pair import (
    SOON,
    DictSink,
    Engine,
    Gate,
    InPlaceSink,
    MuteSink,
    Replicas,
    Trainer,
    begin,
    blank,
    fails,
    go,
    make_tensors,
    same,
)

from rl_conformance import doubles
from rl_core.errors import CapabilityError, LifecycleError, RefitError, WeightsTornError
from rl_core.interfaces import Box
from rl_core.weights.data.parts import sizes_of
from rl_core.weights.receiving import staging
from rl_core.weights.receiving.staging import StagedSink

pytestmark = pytest.mark.usefixtures("either_device")

STAGED = {"isolation": "staged"}
KINDS = [DictSink, InPlaceSink]


@pytest.fixture(params=KINDS)
def pair(keep: Callable[[Any], Any], request: Any, either_device: None) -> tuple[Trainer, Engine]:
    """A trainer of the second version, and an engine that has the first one."""
    tensors = make_tensors(0)
    trainer = keep(Trainer(tensors))
    engine = keep(Engine(blank(tensors), kind=request.param))
    go(trainer, engine)
    trainer.source.tensor = make_tensors(1)
    engine.sink.calls.clear()
    return trainer, engine


def assert_serves(engine: Engine, seed: int, version: int) -> None:
    engine.idle().receiver.check()
    assert engine.receiver.version == version
    assert engine.may_generate()
    assert same({n: t.contiguous() for n, t in make_tensors(seed).items()}, engine.sink.tensor)


@pytest.mark.parametrize("verify", ["none", "wire", "installed"])
def test_every_tensor_arrives_bit_for_bit(pair, verify):
    trainer, engine = pair
    report = go(trainer, engine, verify=verify, **STAGED)
    assert report.isolation == "staged"
    assert_serves(engine, seed=1, version=2)
    assert engine.sink.calls[0] == "begin"
    assert engine.sink.calls[-2:] == ["finish", "commit"]


def test_a_second_copy_is_where_the_engines_tensors_are():
    """What is written there is waited for on that device."""
    sink = DictSink(make_tensors(0))
    sink.device = "cuda:3"
    assert StagedSink(sink, [], 0, {}, lambda: None).device == "cuda:3"


@pytest.mark.parametrize("isolation", ["staged", "quiesced"])
def test_nothing_keeps_a_sink_after_its_refit(keep, isolation):
    """It may hold a copy of what the engine had."""
    trainer, sinks = keep(Trainer(make_tensors(1))), []

    def make() -> DictSink:
        sink = DictSink(blank(make_tensors()))
        sinks.append(weakref.ref(sink))
        return sink

    engine = keep(doubles.Engine({}, sink=make))
    for _ in range(2):
        go(trainer, engine, isolation=isolation)
        with engine.receiver.turn:
            gc.collect()
        assert not any(sink() for sink in sinks)


def test_a_second_copy_that_does_not_fit_leaves_no_part_of_it(pair, monkeypatch):
    trainer, engine = pair
    left = iter(range(2))

    def scarce(box: Box) -> tuple[int, ...]:
        if next(left, None) is None:
            raise RuntimeError("not enough memory")
        return sizes_of(box)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "sizes_of", scarce)
        _, error = fails(trainer, engine, **STAGED)
    assert "not enough memory" in str(error)
    assert engine.receiver.second_copy == {}
    go(trainer, engine, **STAGED)
    assert_serves(engine, seed=1, version=2)


def test_refits_may_alternate_between_staged_and_in_place(pair):
    trainer, engine = pair
    for seed, isolation in enumerate(["staged", "quiesced", "staged", "staged"]):
        trainer.source.tensor = make_tensors(seed)
        report = go(trainer, engine, isolation=isolation, verify="installed")
        assert_serves(engine, seed=seed, version=report.version)


def test_the_engine_generates_with_the_old_weights_during_the_transfer(pair):
    trainer, engine = pair
    seen: list[bool] = []

    def look(name: str) -> None:
        if name == "flags":  # others were sent before
            seen.append(engine.may_generate())
            engine.receiver.check()
            assert same(old, engine.snapshot())

    old = engine.snapshot()
    trainer.source.before = look
    engine.sink.on["finish"] = lambda: seen.append(engine.may_generate())
    go(trainer, engine, **STAGED)
    assert seen == [True, False]


def test_a_staged_refit_waits_for_generation_only_to_exchange_the_weights(pair):
    trainer, engine = pair
    sealed = threading.Event()
    trainer.source.on["confirm"] = sealed.set
    with engine.lock:
        sending, receiving = begin(trainer, engine, **STAGED)
        assert sealed.wait(SOON)
        assert not sending.done()
        assert engine.sink.calls == []
    receiving.result(SOON)
    assert_serves(engine, seed=1, version=2)


# -- failures -------------------------------------------------------------------------------------


def failing(engine: Engine, call: str, count: int = 1) -> None:
    """The call raises for the ``count``-th time it is made, and never again."""
    left = [count]

    def fail() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(f"{call} failed")

    engine.sink.on[call] = fail


@pytest.mark.parametrize("call", ["begin", "finish", "commit"])
def test_a_call_that_fails_leaves_the_old_weights_serving_until_the_next_refit(pair, call):
    trainer, engine = pair
    failing(engine, call)
    sender, receiver = fails(trainer, engine, **STAGED)
    assert isinstance(receiver, RefitError)
    assert f"{call} failed" in str(sender)
    assert_serves(engine, seed=0, version=1)
    report = go(trainer, engine, verify="installed", delta=True, **STAGED)
    assert_serves(engine, seed=1, version=report.version)


@pytest.mark.parametrize("pair", [DictSink], indirect=True)
@pytest.mark.parametrize("count", [1, 3])
def test_a_write_that_fails_half_way_through_the_exchange_is_undone(pair, count):
    trainer, engine = pair
    failing(engine, "write", count)
    fails(trainer, engine, **STAGED)
    assert_serves(engine, seed=0, version=1)


def test_tensors_that_overlap_are_taken_back(keep):
    weights = torch.randn(2, 40, 30)
    trainer = keep(Trainer({"fused": weights[0], "rows": weights[0][:20]}))
    installed = torch.zeros(40, 30)
    engine = keep(Engine({"fused": installed, "rows": installed[:20]}, kind=DictSink))
    go(trainer, engine)
    trainer.source.tensor = {"fused": weights[1], "rows": weights[1][:20]}
    failing(engine, "finish")
    fails(trainer, engine, **STAGED)
    engine.idle().receiver.check()
    assert torch.equal(installed, weights[0])


def test_tensors_that_are_not_installed_are_taken_back(pair):
    trainer, engine = pair
    damage = [lambda: engine.sink.tensor["big"].view(-1)[7].add_(1)]
    engine.sink.on["finish"] = lambda: damage.pop()() if damage else None
    fails(trainer, engine, verify="installed", **STAGED)
    assert_serves(engine, seed=0, version=1)


@pytest.mark.parametrize("reason", ["source", "confirm"])
def test_a_trainer_that_fails_leaves_the_old_weights_serving(pair, reason):
    trainer, engine = pair

    def changed(*_: object) -> None:
        raise LifecycleError("the weights changed")

    if reason == "confirm":
        trainer.source.on["confirm"] = changed
    else:
        trainer.source.before = lambda name: changed() if name == "flags" else None
    fails(trainer, engine, **STAGED)
    assert_serves(engine, seed=0, version=1)
    assert engine.sink.calls == []


def test_another_engine_that_fails_leaves_the_old_weights_serving(keep, pair):
    trainer, engine = pair
    bad = keep(Engine(blank(engine.sink.tensor)))
    failing(bad, "finish")
    with pytest.raises(RefitError, match="finish failed"):
        go(trainer, Replicas(engine, bad), **STAGED)
    assert_serves(engine, seed=0, version=1)


def test_an_engine_that_cannot_take_its_old_weights_back_is_torn(pair):
    trainer, engine = pair
    engine.sink.on["finish"] = lambda: 1 / 0
    _, receiver = fails(trainer, engine, **STAGED)
    assert isinstance(receiver, WeightsTornError)
    with pytest.raises(WeightsTornError):
        engine.receiver.check()
    assert engine.may_generate()
    engine.sink.on.clear()
    go(trainer, engine, **STAGED)
    assert_serves(engine, seed=1, version=2)


# -- engines that are torn already ----------------------------------------------------------------


@pytest.mark.parametrize("when", ["begin", "finish", "source"])
def test_a_torn_engine_stays_torn_until_a_staged_refit_succeeds(pair, when):
    trainer, engine = pair
    engine.sink.on["finish"] = lambda: 1 / 0
    fails(trainer, engine)
    assert engine.receiver.torn
    engine.sink.on.clear()
    if when == "source":
        trainer.source.before = lambda name: 1 / 0
    else:
        failing(engine, when)
    fails(trainer, engine, **STAGED)
    with pytest.raises(WeightsTornError):
        engine.receiver.check()
    assert engine.receiver.version == 1
    trainer.source.before = lambda name: None
    go(trainer, engine, **STAGED)
    assert_serves(engine, seed=1, version=2)


def test_an_engine_torn_while_a_staged_refit_waited_its_turn_stays_torn(pair):
    trainer, engine = pair
    gate = Gate()
    engine.sink.on["finish"] = lambda: gate() or 1 / 0
    first = begin(trainer, engine)
    assert gate.reached.wait(SOON)
    trainer.source.before = lambda name: 1 / 0
    second = begin(trainer, engine, **STAGED)
    gate.opened.set()
    for future in (*first, *second):
        assert future.exception(SOON) is not None
    assert engine.receiver.torn


# -- refused --------------------------------------------------------------------------------------


def test_a_sink_that_cannot_read_is_refused_before_anything_is_touched(keep, pair):
    trainer, _ = pair
    engine = keep(Engine(blank(make_tensors()), kind=MuteSink))
    sender, receiver = fails(trainer, engine, **STAGED)
    for error in (sender, receiver):
        assert isinstance(error, CapabilityError)
        assert "MuteSink" in str(error)
    assert engine.sink.calls == []
    engine.receiver.check()


def test_scales_do_not_travel_with_a_staged_refit(keep, pair):
    trainer, _ = pair

    class ScaledSink(DictSink):
        def scale_kv(self, scales: dict[str, float]) -> None:
            self._called("scale_kv")

    engine = keep(Engine(blank(make_tensors()), kind=ScaledSink))
    sender, receiver = fails(trainer, engine, kv_scales={"k": 1.0}, **STAGED)
    assert isinstance(sender, CapabilityError)
    assert isinstance(receiver, CapabilityError)
    assert engine.sink.calls == []
    engine.receiver.check()


# -- with other options ---------------------------------------------------------------------------


def test_a_staged_delta_sends_and_exchanges_only_what_changed(pair):
    trainer, engine = pair
    go(trainer, engine)
    engine.sink.calls.clear()
    trainer.source.tensor["scalar"].add_(1)
    report = go(trainer, engine, delta=True, verify="installed", **STAGED)
    assert (report.tensors, report.bytes) == (1, 4)
    assert engine.sink.calls.count("write") <= 1
    assert engine.sink.tensor["scalar"] == trainer.source.tensor["scalar"]


def test_a_staged_delta_from_a_wrong_inventory_fails_once(pair):
    trainer, engine = pair
    go(trainer, engine)
    engine.sink.tensor["half"].zero_()
    options = {"delta": True, "verify": "installed", **STAGED}
    fails(trainer, engine, **options)
    go(trainer, engine, **options)
    assert_serves(engine, seed=1, version=engine.receiver.version)


def test_a_staged_refit_rounds_for_an_engine_that_casts(keep):
    trainer = keep(Trainer({"w": torch.randn(900)}))
    engine = keep(Engine({"w": torch.zeros(900).bfloat16()}))
    engine.sink.casts = True
    go(trainer, engine, verify="installed", **STAGED)
    assert torch.equal(engine.sink.tensor["w"], trainer.source.tensor["w"].bfloat16())
