"""Staged refits: the engine serves the old weights until the new ones are complete."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simple_pair import (
    DictSink,
    Engine,
    InPlaceSink,
    MuteSink,
    Trainer,
    blank,
    fails,
    go,
    make_tensors,
    same,
)

from rl_conformance import doubles
from rl_core.errors import CapabilityError, WeightsTornError
from rl_core.interfaces import Box
from rl_core.weights.data.parts import sizes_of
from rl_core.weights.receiving import staging

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


# -- failures -------------------------------------------------------------------------------------


def failing(engine: Engine, call: str, count: int = 1) -> None:
    """The call raises for the ``count``-th time it is made, and never again."""
    left = [count]

    def fail() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(f"{call} failed")

    engine.sink.on[call] = fail


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
