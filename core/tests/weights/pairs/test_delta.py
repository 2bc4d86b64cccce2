"""Deltas: only what an engine lacks is sent, and what it holds is checked all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simple_pair import (
    BUCKET,
    SOON,
    DictSink,
    Engine,
    Gate,
    InPlaceSink,
    Trainer,
    begin,
    blank,
    fails,
    go,
    make_persistent,
    make_tensors,
    same,
)

from rl_core.errors import LoopWarning, RefitCorrupted, WeightsTornError
from rl_core.futures import wait

pytestmark = pytest.mark.usefixtures("either_device")

DELTA = {"delta": True}


def all_bytes(trainer: Trainer) -> int:
    return sum(t.numel() * t.element_size() for t in trainer.source.tensor.values())


@pytest.fixture(params=["packed", "direct"])
def pair(keep: Callable[[Any], Any], request: Any, either_device: None) -> tuple[Trainer, Engine]:
    """A trainer and an engine that was brought to its weights."""
    direct = request.param == "direct"
    tensors = make_persistent() if direct else make_tensors()
    trainer = keep(Trainer(tensors, at_home=direct))
    engine = keep(Engine(blank(tensors), kind=InPlaceSink if direct else DictSink))
    assert go(trainer, engine).mode == request.param
    return trainer, engine


# -- what is sent ---------------------------------------------------------------------------------


def test_a_delta_to_a_trainer_that_took_over_sends_what_differs(request, keep, pair):
    """All of it where blocks are hashed with the trainer's secret, as they are on a GPU."""
    _, engine = pair
    successor = keep(Trainer(make_tensors() | {"half": torch.ones(33).bfloat16()}))
    keyed = "GPU" in request.node.name
    with pytest.warns(LoopWarning, match="had version"):
        assert go(successor, engine, **DELTA).tensors == (8 if keyed else 1)
    assert same(successor.source.tensor, engine.sink.tensor)


def test_a_cast_tensor_is_compared_in_the_engines_dtype(keep):
    tensors = {"w": torch.ones(900), "v": torch.ones(9)}
    trainer, engine = keep(Trainer(tensors)), keep(Engine(blank(tensors)))
    engine.sink.tensor["w"] = torch.zeros(900).bfloat16()
    engine.sink.casts = True
    go(trainer, engine)
    tensors["w"].add_(1e-4)  # is lost in the rounding
    assert go(trainer, engine, verify="installed", **DELTA).bytes == 0
    tensors["w"].add_(1)
    report = go(trainer, engine, verify="installed", **DELTA)
    assert (report.bytes, report.cast) == (1800, 1)
    assert torch.equal(engine.sink.tensor["w"], tensors["w"].bfloat16())


# -- inventories that are wrong -------------------------------------------------------------------


def test_an_inventory_that_is_not_the_trainers_is_noticed_before_the_commit(pair):
    trainer, engine = pair
    known = engine.receiver.known
    engine.prepare_refit_info(trainer.prepare_refit_info())
    with trainer.sender.turn:
        sending = trainer.sender.send(bucket_bytes=BUCKET, deadline_s=SOON, **DELTA)
        receiving = engine.receiver.receive(deadline_s=SOON)
        trainer.source.on["confirm"] = lambda: known.update(half=bytes(16))
    assert isinstance(receiving.exception(SOON), RefitCorrupted)
    assert isinstance(sending.exception(SOON), RefitCorrupted)
    assert go(trainer, engine, **DELTA).bytes == all_bytes(trainer)


def test_a_delta_that_was_asked_for_early_counts_what_came_before_it(pair):
    trainer, engine = pair
    trainer.source.tensor["half"].add_(1)
    gate = engine.sink.on["finish"] = Gate()
    futures = [*begin(trainer, engine)]
    assert gate.reached.wait(SOON)
    futures += begin(trainer, engine, **DELTA)
    gate.opened.set()
    *_, report, _ = wait(futures, SOON)
    assert report["bytes"] == 0
    assert same(trainer.source.tensor, engine.sink.tensor)


# -- after a failure ------------------------------------------------------------------------------


def test_after_a_transfer_that_broke_off_only_what_is_missing_is_sent(keep):
    tensors = {name: torch.randn(BUCKET // 4) for name in "abcdef"}  # a bucket each
    trainer, engine = keep(Trainer(tensors)), keep(Engine(blank(tensors)))
    go(trainer, engine)
    for tensor in tensors.values():
        tensor.add_(1)
    trainer.source.before = lambda name: 1 / 0 if name == "d" else None
    fails(trainer, engine, verify="wire")
    with pytest.raises(WeightsTornError):
        engine.receiver.check()
    trainer.source.before = lambda name: None
    here = {name for name in tensors if torch.equal(tensors[name], engine.sink.tensor[name])}
    assert here
    assert here <= {"a", "b", "c"}
    report = go(trainer, engine, verify="installed", **DELTA)
    assert report.buckets == report.tensors == len(tensors) - len(here)
    engine.receiver.check()
    assert same(tensors, engine.sink.tensor)
