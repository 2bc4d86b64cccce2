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
    Replicas,
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
#: Tensors of ``make_tensors`` that are sent: all but the empty one.
SENT = 8


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


@pytest.mark.parametrize("verify", ["wire", "installed"])
def test_nothing_is_sent_if_nothing_changed_and_the_version_moves(pair, verify):
    trainer, engine = pair
    report = go(trainer, engine, verify=verify, **DELTA)
    assert (report.bytes, report.tensors, report.buckets) == (0, 0, 0)
    assert report.skipped == report.unchanged == SENT
    assert engine.receiver.version == trainer.sender.version == 2
    assert engine.sink.calls[-3:] == ["begin", "finish", "commit"]
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_only_the_tensor_that_changed_is_sent(pair):
    trainer, engine = pair
    trainer.source.tensor["half"].add_(1)
    report = go(trainer, engine, verify="installed", **DELTA)
    assert (report.bytes, report.tensors, report.skipped) == (33 * 2, 1, SENT - 1)
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_a_tensor_larger_than_a_bucket_is_sent_whole_if_one_element_changed(pair):
    trainer, engine = pair
    trainer.source.tensor["big"][49, 40] = 7.0
    report = go(trainer, engine, verify="installed", **DELTA)
    assert (report.bytes, report.tensors) == (50 * 41 * 4, 1)
    assert report.buckets > report.bytes // BUCKET
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_a_change_of_sign_of_zero_is_a_change(pair):
    trainer, engine = pair
    trainer.source.tensor["scalar"].zero_()
    go(trainer, engine, **DELTA)
    trainer.source.tensor["scalar"].neg_()
    assert go(trainer, engine, **DELTA).tensors == 1
    assert engine.sink.tensor["scalar"].signbit()


def test_deltas_follow_each_other(pair):
    trainer, engine = pair
    for version, name in enumerate(["big", "flags", "strided", "counts", "flags"], start=2):
        changed = trainer.source.tensor[name]
        changed.copy_(~changed if changed.dtype == torch.bool else changed + 1)
        report = go(trainer, engine, **DELTA)
        assert (report.version, report.tensors) == (version, 1)
        assert same(trainer.source.tensor, engine.sink.tensor)


def test_weights_that_went_back_are_sent_again(pair):
    trainer, engine = pair
    for amount in (1, -1):
        trainer.source.tensor["counts"].add_(amount)
        assert go(trainer, engine, **DELTA).tensors == 1
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_without_delta_everything_is_sent(pair):
    trainer, engine = pair
    report = go(trainer, engine)
    assert (report.bytes, report.skipped) == (all_bytes(trainer), 0)
    assert report.unchanged == SENT


def test_the_first_delta_is_full(keep):
    tensors = make_tensors()
    trainer, engine = keep(Trainer(tensors)), keep(Engine(blank(tensors)))
    assert go(trainer, engine, **DELTA).bytes == all_bytes(trainer)


def test_a_delta_to_a_trainer_that_took_over_sends_what_differs(request, keep, pair):
    """All of it where blocks are hashed with the trainer's secret, as they are on a GPU."""
    _, engine = pair
    successor = keep(Trainer(make_tensors() | {"half": torch.ones(33).bfloat16()}))
    keyed = "GPU" in request.node.name
    with pytest.warns(LoopWarning, match="had version"):
        assert go(successor, engine, **DELTA).tensors == (8 if keyed else 1)
    assert same(successor.source.tensor, engine.sink.tensor)


@pytest.mark.parametrize("buckets", [BUCKET // 2, BUCKET * 3])
def test_a_delta_with_buckets_of_another_size_is_exact(pair, buckets):
    trainer, engine = pair
    trainer.source.tensor["half"].add_(1)
    go(trainer, engine, bucket_bytes=buckets, verify="installed", **DELTA)
    assert same(trainer.source.tensor, engine.sink.tensor)
    assert go(trainer, engine, bucket_bytes=buckets, **DELTA).bytes == 0


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


def test_a_tied_tensor_that_changed_reaches_every_storage_of_the_engine(keep):
    weight = torch.randn(30, 20)
    trainer = keep(Trainer({"embed": weight, "head": weight}, {"head": "embed"}))
    engine = keep(Engine({"embed": torch.zeros(30, 20), "head": torch.zeros(30, 20)}))
    go(trainer, engine)
    assert go(trainer, engine, verify="installed", **DELTA).bytes == 0
    weight.add_(1)
    go(trainer, engine, verify="installed", **DELTA)
    assert torch.equal(engine.sink.tensor["head"], weight)


# -- several receivers ----------------------------------------------------------------------------


def test_what_any_engine_lacks_is_sent_to_all(keep, pair):
    trainer, first = pair
    second = keep(Engine(blank(trainer.source.tensor)))
    go(trainer, second)
    trainer.source.tensor["half"].add_(1)
    go(trainer, first, **DELTA)
    trainer.source.tensor["counts"].add_(1)
    report = go(trainer, Replicas(first, second), **DELTA)
    assert report.tensors == 2  # the first lacks counts, the second half as well
    for engine in (first, second):
        assert same(trainer.source.tensor, engine.sink.tensor)


def test_a_new_engine_among_others_makes_a_delta_full(keep, pair):
    trainer, first = pair
    second = keep(Engine(blank(trainer.source.tensor)))
    assert go(trainer, Replicas(first, second), **DELTA).bytes == all_bytes(trainer)
    assert same(trainer.source.tensor, second.sink.tensor)


# -- inventories that are wrong -------------------------------------------------------------------


@pytest.mark.parametrize("again", [DELTA, {}])
def test_weights_changed_behind_the_engines_back_are_noticed_once(pair, again):
    trainer, engine = pair
    engine.sink.tensor["half"].zero_()
    trainer.source.tensor["scalar"].add_(1)
    sender, receiver = fails(trainer, engine, verify="installed", **DELTA)
    assert isinstance(sender, RefitCorrupted)
    assert isinstance(receiver, RefitCorrupted)
    assert receiver.details["tensors"] == ["half"]
    assert engine.receiver.version == 1
    assert go(trainer, engine, verify="installed", **again).bytes == all_bytes(trainer)
    assert same(trainer.source.tensor, engine.sink.tensor)


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


def test_after_forget_a_delta_is_full(pair):
    trainer, engine = pair
    engine.sink.tensor["half"].zero_()
    engine.receiver.forget()
    assert go(trainer, engine, **DELTA).bytes == all_bytes(trainer)
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_an_engine_that_forgets_while_it_waits_gets_everything(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    receiving = engine.receiver.receive(deadline_s=SOON)
    engine.sink.tensor["half"].zero_()
    engine.receiver.forget()
    sending = trainer.sender.send(bucket_bytes=BUCKET, deadline_s=SOON, **DELTA)
    report, _ = wait([sending, receiving], SOON)
    assert report["bytes"] == all_bytes(trainer)
    assert same(trainer.source.tensor, engine.sink.tensor)


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


def test_after_a_refit_without_hashes_a_delta_is_full(pair):
    trainer, engine = pair
    go(trainer, engine, verify="none")
    assert go(trainer, engine, **DELTA).bytes == all_bytes(trainer)
    assert go(trainer, engine, **DELTA).bytes == 0


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


def test_a_tensor_that_was_cut_off_is_sent_again_from_its_start(keep):
    tensors = {"w": torch.randn(2 * BUCKET)}  # eight buckets
    trainer, engine = keep(Trainer(tensors)), keep(Engine(blank(tensors)))
    writes = [0]

    def fail_late() -> None:
        writes[0] += 1
        if writes[0] == 5:
            raise OSError("the fifth piece")

    engine.sink.on["write"] = fail_late
    fails(trainer, engine)
    assert engine.sink.tensor["w"].any()
    engine.sink.on.clear()
    assert go(trainer, engine, verify="installed", **DELTA).buckets == 8
    assert same(tensors, engine.sink.tensor)


def test_after_a_failure_at_the_end_nothing_is_sent_again(pair):
    trainer, engine = pair
    trainer.source.tensor["big"].add_(1)
    engine.sink.on["finish"] = lambda: 1 / 0
    fails(trainer, engine)
    engine.sink.on.clear()
    assert go(trainer, engine, verify="installed", **DELTA).bytes == 0
    engine.receiver.check()
    assert same(trainer.source.tensor, engine.sink.tensor)
