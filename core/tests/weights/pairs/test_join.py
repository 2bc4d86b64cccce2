"""Engines that come late are brought to the version that the others serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simple_pair import (
    SOON,
    Engine,
    Replicas,
    Trainer,
    blank,
    fails,
    go,
    make_tensors,
    same,
)

from rl_core.errors import LifecycleError, LoopWarning, RefitAborted
from rl_core.weights.transports import ipc

#: What the others have been given.
SAME = {"version": 5}


@pytest.fixture
def late(keep: Callable[[Any], Any], pair: tuple[Trainer, Engine]) -> Engine:
    """An engine that comes when the first of the pair has version 5."""
    go(*pair, version=5)
    return keep(Engine(blank(make_tensors())))


def test_a_late_engine_gets_the_committed_version_and_the_others_are_not_involved(pair, late):
    trainer, first = pair
    first.sink.calls.clear()
    with first.lock:  # it generates all the time
        report = go(trainer, late, verify="installed", **SAME)
    assert report.version == late.receiver.version == trainer.sender.version == 5
    assert same(trainer.source.tensor, late.sink.tensor)
    assert first.sink.calls == []
    assert first.receiver.version == 5


def test_what_another_hash_says_of_the_weights_is_not_compared(pair, late, monkeypatch):
    trainer, first = pair
    report = go(trainer, first, **SAME)
    assert report.unchanged == report.tensors
    for end in (ipc.IpcSender, ipc.IpcReceiver):
        monkeypatch.setattr(end, "private", False)  # as between hosts
    with pytest.raises(LifecycleError, match="hashed with xxh3, and this refit hashes with blake3"):
        go(trainer, late, **SAME)
    assert go(trainer, first).unchanged is None


def test_an_engine_that_has_some_of_the_tensors_joins_with_a_delta(keep, pair, late):
    trainer, _ = pair
    go(keep(Trainer(make_tensors() | {"big": make_tensors(1)["big"]})), late)
    with pytest.warns(LoopWarning, match="had version"):
        report = go(trainer, late, delta=True, **SAME)
    assert (report.version, report.tensors) == (5, 1)
    assert same(trainer.source.tensor, late.sink.tensor)


# -- when it cannot be ----------------------------------------------------------------------------


def test_weights_that_went_on_are_not_given_out_under_the_old_version(pair, late):
    trainer, first = pair
    trainer.source.tensor["half"].add_(1)
    sender, receiver = fails(trainer, late, **SAME)
    assert isinstance(sender, LifecycleError)
    assert "version 5" in str(sender)
    assert isinstance(receiver, RefitAborted)
    assert late.receiver.version == 0
    late.receiver.check()
    assert trainer.sender.version == 5
    assert go(trainer, Replicas(first, late), delta=True).version == 6
    late.receiver.check()
    assert same(trainer.source.tensor, late.sink.tensor)


def test_a_version_that_another_refit_followed_meanwhile_is_not_sent_again(pair, late):
    trainer, _ = pair
    before = trainer.sender.version
    with trainer.sender.turn:  # as a refit of all that is under way has it
        sending = trainer.sender.send(version=before, deadline_s=SOON)
        trainer.sender.kept.version = before + 1
    with pytest.raises(LifecycleError, match=f"version {before + 1} was committed"):
        sending.result(SOON)
    assert trainer.sender.version == before + 1


def test_a_version_that_was_not_hashed_cannot_be_sent_again(pair, late):
    trainer, first = pair
    go(trainer, first, verify="none")
    assert trainer.sender.version == first.receiver.version == 6
    for verify in ("none", "wire"):
        with pytest.raises(LifecycleError, match="without hashes"):
            go(trainer, late, version=6, verify=verify)


def test_an_engine_of_another_dtype_or_with_other_buckets_is_refused(pair, late):
    trainer, _ = pair
    sender, _ = fails(trainer, late, bucket_bytes=512, **SAME)
    assert isinstance(sender, LifecycleError)
    assert "bucket_bytes of the others" in str(sender)
    late.sink.tensor["big"] = late.sink.tensor["big"].half()
    late.sink.casts = True
    sender, _ = fails(trainer, late, **SAME)
    assert isinstance(sender, LifecycleError)
    assert "dtypes" in str(sender)
