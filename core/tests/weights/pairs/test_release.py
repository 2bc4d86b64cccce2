"""A trainer that gives its device away takes its tensors out of what engines read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from simple_pair import (
    DictSink,
    Engine,
    InPlaceSink,
    Trainer,
    blank,
    fails,
    go,
    make_persistent,
    same,
)

from rl_core.weights.protocol.frames import Channel
from rl_core.weights.protocol.messages import Done
from rl_core.weights.receiving.loading import ReceiverLanes
from rl_core.weights.transports.memory import SharedRegion


@pytest.fixture
def trainer(keep: Callable[[Any], Any]) -> Trainer:
    return keep(Trainer(make_persistent(), at_home=True))


@pytest.fixture
def engine(keep: Callable[[Any], Any], trainer: Trainer) -> Engine:
    return keep(Engine(blank(trainer.source.tensor)))


def test_memory_that_the_tensors_left_is_let_go_of(monkeypatch, trainer, engine):
    regions: list[Any] = []
    create = SharedRegion.create.__func__  # type: ignore[attr-defined]

    def remembered(cls: type[SharedRegion], *args: Any, **options: bool) -> SharedRegion:
        region = create(cls, *args, **options)
        regions.append(weakref.ref(region))
        return region

    monkeypatch.setattr(SharedRegion, "create", classmethod(remembered))
    go(trainer, engine)
    for tensor in trainer.source.tensor.values():
        tensor.data = tensor.data.clone()
    trainer.sender.release_weights()
    gc.collect()
    assert [region() for region in regions] == [None]


@pytest.mark.parametrize("kind", [DictSink, InPlaceSink])
def test_an_engine_that_sleeps_during_a_refit_is_held_by_nothing(keep, trainer, kind):
    engine = keep(Engine(blank(trainer.source.tensor), kind=kind))
    engine.sink.on["begin"] = engine.receiver.release_weights
    fails(trainer, engine)
    tensors = [weakref.ref(tensor) for tensor in engine.idle().sink.tensor.values()]
    engine.sink.tensor = {}
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)


def test_an_engine_may_fall_asleep_while_a_lane_is_closed(monkeypatch, trainer, engine):
    go(trainer, engine)
    detach = ReceiverLanes.detach

    def asleep(route: ReceiverLanes) -> None:
        detach(route)
        engine.receiver.release_weights()  # as another thread may at any time

    monkeypatch.setattr(ReceiverLanes, "detach", asleep)
    engine.receiver.connections.close("ipc")
    monkeypatch.undo()
    go(trainer, engine)
    assert same(make_persistent(), engine.sink.tensor)


@pytest.mark.parametrize("verify", ["wire", "installed"])
def test_memory_that_cannot_be_freed_otherwise_is_given_back_before_the_commit_is_told(
    monkeypatch, trainer, engine, verify
):
    attached: list[Any] = []
    attach = SharedRegion.attach.__func__  # type: ignore[attr-defined]

    def remembered(cls: type[SharedRegion], ref: Any) -> SharedRegion:
        region = attach(cls, ref)
        attached.append(weakref.ref(region.data))
        return region

    seen: list[bool] = []

    def done(channel: Channel, message: Any) -> bytes:
        if isinstance(message, Done):
            gc.collect()
            seen.append(attached[-1]() is None)
        return encode(channel, message)

    monkeypatch.setattr(SharedRegion, "attach", classmethod(remembered))
    monkeypatch.setattr(SharedRegion, "unmap_after_each_refit", True)
    encode = Channel.encode
    monkeypatch.setattr(Channel, "encode", done)
    for seed in (1, 2):
        for name, tensor in make_persistent(seed).items():
            trainer.source.tensor[name].copy_(tensor)
        assert go(trainer, engine, verify=verify).mode == "direct"
        assert same(make_persistent(seed), engine.sink.tensor)
    assert seen == [True, True]
    assert len(attached) == 2
