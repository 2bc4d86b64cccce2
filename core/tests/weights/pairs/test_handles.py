"""Refits by handles, the older interface: one group of tensors at a time."""

from __future__ import annotations

import pytest
import torch
from simple_pair import (
    BUCKET,
    DictSink,
    Engine,
    InPlaceSink,
    Trainer,
    blank,
    go,
    make_tensors,
    same,
)

from rl_core.errors import (
    ConfigError,
    LifecycleError,
    RefitAborted,
    RefitCorrupted,
    RefitProtocolError,
    WeightsTornError,
)
from rl_core.weights import DEFAULT_BUCKET_BYTES
from rl_core.weights import handles as _handles


def hand_over(trainer: Trainer, engine: Engine) -> None:
    engine.prepare_refit_info(trainer.prepare_refit_info())
    for keys in trainer.sender.groups(BUCKET):
        assert engine.receiver.load_handles(trainer.sender.handles(keys)) is True


def hand_over_one(trainer: Trainer, engine: Engine) -> list[list[str]]:
    """Hands the first group over; those that are left."""
    engine.prepare_refit_info(trainer.prepare_refit_info())
    first, *others = trainer.sender.groups(BUCKET)
    engine.receiver.load_handles(trainer.sender.handles(first))
    return others


@pytest.mark.parametrize("end", ["release_weights", "close"])
def test_a_set_that_is_not_complete_ends_with_the_weights(pair, end):
    """Its sink is told, and the trainer's memory for it is let go of."""
    trainer, engine = pair
    assert hand_over_one(trainer, engine)
    assert engine.sink.calls[-1] == "write"
    lanes = list(engine.receiver._lanes.values())
    assert lanes
    getattr(engine.receiver, end)()
    assert engine.sink.calls[-1] == "fail"
    assert engine.receiver._lanes == {}
    assert [lane.data.numel() for lane in lanes] == [0]


def test_what_a_set_wrote_is_there_before_its_version(pair, monkeypatch):
    trainer, engine = pair
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(
        _handles, "settle", lambda sink: seen.append((sink.calls[-1], engine.receiver.version))
    )
    hand_over(trainer, engine)
    assert seen == [("finish", 0)]


def test_handles_bring_every_tensor_and_move_the_version_once(pair):
    trainer, engine = pair
    for version in (1, 2):
        hand_over(trainer, engine)
        assert same(trainer.source.tensor, engine.sink.tensor)
        assert engine.receiver.version == trainer.sender.version == version
    assert go(trainer, engine).version == 3


def test_handles_write_in_place_where_that_is_possible(keep, pair):
    trainer, _ = pair
    engine = keep(Engine(blank(trainer.source.tensor), kind=InPlaceSink))
    hand_over(trainer, engine)
    assert same(trainer.source.tensor, engine.sink.tensor)
    assert engine.sink.calls == ["begin", "finish", "commit"]


def test_groups_hold_a_bucket_or_one_larger_tensor_and_each_name_once(pair):
    trainer, _ = pair
    groups = trainer.sender.groups(BUCKET)
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(set(trainer.source.tensor) - {"empty"})
    assert ["big"] in groups
    for group in groups:
        size = sum(trainer.source.tensor[name].nbytes for name in group)
        assert size <= BUCKET or len(group) == 1


@pytest.mark.parametrize("kind", [DictSink, InPlaceSink])
def test_handles_are_rounded_by_an_engine_that_casts(keep, kind):
    trainer = keep(Trainer({"w": torch.randn(30), "x": torch.randn(70)}))
    engine = keep(
        Engine({"w": torch.zeros(30).bfloat16(), "x": torch.zeros(70).bfloat16()}, kind=kind)
    )
    engine.sink.casts = True
    hand_over(trainer, engine)
    for name, tensor in trainer.source.tensor.items():
        assert torch.equal(engine.sink.tensor[name], tensor.bfloat16())
    assert go(trainer, engine, delta=True, verify="installed").version == 2


def test_a_tied_tensor_is_handed_over_once(keep):
    weight = torch.randn(30, 20)
    trainer = keep(Trainer({"embed": weight, "head": weight}, {"head": "embed"}))
    engine = keep(Engine({"embed": torch.zeros(30, 20), "head": torch.zeros(30, 20)}))
    assert trainer.sender.groups(BUCKET) == [["embed"]]
    hand_over(trainer, engine)
    assert torch.equal(engine.sink.tensor["head"], weight)


def test_what_handles_brought_a_delta_does_not_send(pair):
    trainer, engine = pair
    hand_over(trainer, engine)
    trainer.source.tensor["half"].add_(1)
    report = go(trainer, engine, delta=True, verify="installed", bucket_bytes=DEFAULT_BUCKET_BYTES)
    assert report.tensors == 1
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_between_two_handles_the_engine_is_torn(pair):
    trainer, engine = pair
    hand_over_one(trainer, engine)
    with pytest.raises(WeightsTornError):
        engine.receiver.check()
    assert engine.receiver.version == 0
    hand_over(trainer, engine)
    engine.receiver.check()


def test_handles_that_a_streamed_refit_overtook_are_refused(pair):
    trainer, engine = pair
    second, *_ = hand_over_one(trainer, engine)
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


def test_a_group_that_is_loaded_twice_before_the_end_is_refused(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    handles = trainer.sender.handles(trainer.sender.groups(BUCKET)[0])
    engine.receiver.load_handles(handles)
    with pytest.raises(RefitProtocolError, match="once"):
        engine.receiver.load_handles(handles)
    assert engine.sink.calls[-1] == "fail"
    with pytest.raises(WeightsTornError):
        engine.receiver.check()


def test_handles_that_were_overwritten_are_noticed(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    first, second, *_ = trainer.sender.groups(BUCKET)
    stale = trainer.sender.handles(first)
    trainer.sender.handles(second)
    with pytest.raises(RefitCorrupted):
        engine.receiver.load_handles(stale)


@pytest.mark.parametrize("order", [1, -1])
def test_wrong_bytes_in_the_group_that_comes_first_leave_the_engine_serving(keep, pair, order):
    trainer, _ = pair
    engine = keep(Engine(blank(trainer.source.tensor), kind=InPlaceSink))
    engine.prepare_refit_info(trainer.prepare_refit_info())
    first, second, *_ = trainer.sender.groups(BUCKET)[::order]
    stale = trainer.sender.handles(first)
    trainer.sender.handles(second)
    with pytest.raises(RefitCorrupted):
        engine.receiver.load_handles(stale)
    engine.receiver.check()
    assert same(blank(trainer.source.tensor), engine.sink.tensor)


def test_handles_of_a_trainer_that_changed_are_refused_before_anything_is_touched(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    trainer.source.tensor = make_tensors() | {"late": torch.ones(1)}
    handles = trainer.sender.handles(trainer.sender.groups(BUCKET)[0])
    with pytest.raises(RefitAborted, match="prepare_refit_info"):
        engine.receiver.load_handles(handles)
    assert engine.sink.calls == []
    engine.receiver.check()


@pytest.mark.parametrize("call", ["begin", "write", "finish", "commit"])
def test_a_sink_that_raises_ends_the_refit_and_the_next_one_recovers(pair, call):
    trainer, engine = pair
    engine.sink.on[call] = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        hand_over(trainer, engine)
    assert engine.receiver.version == 0
    assert engine.receiver.torn == (call != "begin")
    engine.sink.on.clear()
    hand_over(trainer, engine)
    engine.receiver.check()
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_handles_are_asked_for_by_group(pair):
    trainer, _ = pair
    with pytest.raises(LifecycleError, match="prepare_weights_for_ipc"):
        trainer.sender.handles(["big"])
    first, *_ = trainer.sender.groups(BUCKET)
    with pytest.raises(ConfigError, match="typo"):
        trainer.sender.handles(["typo"])
    trainer.sender.handles(first)
    with pytest.raises(ConfigError, match=first[0]):
        trainer.sender.handles(first)


def test_keys_that_are_part_of_a_group_are_answered_with_those_that_are_missing(pair):
    trainer, _ = pair
    groups = trainer.sender.groups(BUCKET)
    one, *others = next(group for group in groups if len(group) > 1)
    with pytest.raises(ConfigError, match=f"{others[0]}.* missing") as error:
        trainer.sender.handles([one])
    assert error.value.details["missing"] == others
    with pytest.raises(ConfigError, match="several groups"):
        trainer.sender.handles([*groups[0], *groups[1]])


def test_a_model_of_empty_tensors_alone_moves_its_version_by_handles(keep):
    trainer = keep(Trainer({"none": torch.empty(0, 3)}))
    engine = keep(Engine({"none": torch.empty(0, 3)}))
    for version in (1, 2):
        assert trainer.sender.groups(BUCKET) == [[]]
        hand_over(trainer, engine)
        assert engine.receiver.version == trainer.sender.version == version
        engine.receiver.check()
    assert engine.sink.calls == ["begin", "finish", "commit"] * 2


def test_forged_handles_are_refused(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    handles = trainer.sender.handles(trainer.sender.groups(BUCKET)[0])
    handles["frame"] = handles["frame"][:-1] + bytes([handles["frame"][-1] ^ 1])
    with pytest.raises(RefitProtocolError):
        engine.receiver.load_handles(handles)
    with pytest.raises(RefitProtocolError):
        engine.receiver.load_handles({"w": b"not handles"})
    assert engine.sink.calls == []
