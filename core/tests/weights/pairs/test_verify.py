"""What the levels of verification notice."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from second_preimage import second_preimage
from simple_pair import (
    BUCKET,
    SOON,
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
from torch.multiprocessing.reductions import StorageWeakRef

from rl_conformance import doubles
from rl_core.errors import (
    CapabilityError,
    LoopWarning,
    RefitCorrupted,
    TrainingError,
)
from rl_core.futures import wait


class CopyingSink(InPlaceSink):
    """Shows copies of what it has."""

    shown: ClassVar[list[StorageWeakRef]] = []

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().read(names):
            copy = tensor.clone()
            self.shown.append(StorageWeakRef(copy.untyped_storage()))
            yield name, copy


@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
def test_copies_that_an_engine_shows_are_not_kept(keep, isolation):
    trainer = keep(Trainer(make_tensors()))
    engine = keep(Engine(blank(make_tensors()), kind=CopyingSink))
    CopyingSink.shown.clear()
    for _ in range(3):
        go(trainer, engine, verify="installed", isolation=isolation)
    gc.collect()
    assert CopyingSink.shown
    assert all(storage.expired() for storage in CopyingSink.shown)


@pytest.mark.parametrize("wrong", ["of another dtype", "not shown"])
def test_installed_catches_a_tensor_that_is_not_as_it_was_agreed_on(pair, wrong):
    trainer, engine = pair
    read, tensors = engine.sink.read, engine.sink.tensor
    if wrong == "not shown":
        engine.sink.read = lambda names: read(name for name in names if name != "half")
    else:
        engine.sink.on["finish"] = lambda: tensors.update(half=tensors["half"].double())
    _, receiver = fails(trainer, engine, verify="installed")
    assert isinstance(receiver, RefitCorrupted)
    assert receiver.details["tensors"] == ["half"]


def test_installed_of_an_engine_that_cannot_read_is_a_capability_error(keep, pair):
    trainer, _ = pair
    engine = keep(Engine(blank(trainer.source.tensor), kind=MuteSink))
    sender, receiver = fails(trainer, engine, verify="installed")
    assert isinstance(sender, CapabilityError)
    assert isinstance(receiver, CapabilityError)
    engine.receiver.check()  # nothing was written


def send_between_hosts(trainer: Trainer, engine: Engine) -> list[BaseException | None]:
    """A refit over the collective transport, as `fails`."""
    options = {"transport": "collective", "deadline_s": SOON}
    futures = [
        trainer.sender.send(bucket_bytes=BUCKET, **options),
        engine.receiver.receive(**options),
    ]
    return [future.exception(SOON) for future in futures]


@pytest.fixture
def meeting(keep: Callable[[Any], Any]) -> tuple[Trainer, Engine]:
    """A trainer and an engine that met, and had one refit."""
    tensors = {"w": torch.arange(700).to(torch.uint8)}
    trainer, engine = keep(Trainer(tensors)), keep(Engine(blank(tensors), kind=InPlaceSink))
    opening = trainer.sender.open("collective", SOON, ip="127.0.0.1", port=0, receivers=1)
    info = trainer.prepare_refit_info()
    wait(engine.receiver.open("collective", SOON, info["addresses"]["collective"]), SOON)
    wait(opening, SOON)
    engine.prepare_refit_info(info)
    assert send_between_hosts(trainer, engine) == [None, None]
    assert same(tensors, engine.sink.tensor)
    return trainer, engine


def test_bytes_that_somebody_forged_between_hosts_are_noticed(meeting):
    """They have the XXH3 of the right ones, which anybody can bring about."""
    trainer, engine = meeting
    [lane] = trainer.sender.kept.connections["collective"].lanes.values()
    publish = lane.publish

    def forge(start: int, stop: int, runs: Any) -> None:
        content = bytes(lane.data[start:stop].tolist())
        forged = second_preimage(content[:512], 666, 777) + content[512:]
        assert xxhash.xxh3_128_digest(forged) == xxhash.xxh3_128_digest(content) != b""
        lane.data[start:stop] = torch.tensor(list(forged), dtype=torch.uint8)
        publish(start, stop, runs)

    lane.publish = forge
    errors = send_between_hosts(trainer, engine)
    assert [type(error) for error in errors] == [RefitCorrupted, RefitCorrupted]
    assert engine.receiver.version == 1


@pytest.mark.parametrize("call", ["finish", "commit"])
def test_a_refit_between_hosts_works_after_one_that_failed_as_it_ended(meeting, call):
    """Also where the version counts: the engine has left the group."""
    trainer, engine = meeting
    engine.sink.on[call] = lambda: 1 / 0
    assert all(send_between_hosts(trainer, engine))
    engine.sink.on.clear()
    assert send_between_hosts(trainer, engine) == [None, None]
    assert same(trainer.source.tensor, engine.sink.tensor)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([3, 1 << 10, 200 << 10, 300 << 10, 5 << 20]), max_size=8),
    in_place=st.booleans(),
    bucket_bytes=st.sampled_from([1 << 20, 8 << 20]),
    mode=st.sampled_from(["direct", "packed"]),
)
@example([1 << 10, 300 << 10, 1 << 10], True, 8 << 20, "direct")
def test_tensors_of_every_size_in_any_order_are_verified(sizes, in_place, bucket_bytes, mode):
    tensors = {f"t{i}": (torch.arange(n) * (i + 7)).to(torch.uint8) for i, n in enumerate(sizes)}
    tensors["last"] = torch.ones(5)
    trainer = Trainer(tensors, at_home=True)
    engine = Engine(blank(tensors), kind=InPlaceSink if in_place else DictSink)
    try:
        go(trainer, engine, verify="installed", mode=mode, bucket_bytes=bucket_bytes)
        assert same(tensors, engine.sink.tensor)
    finally:
        trainer.close()
        engine.close()


@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_a_trainer_looks_for_what_is_not_finite_before_it_sends(keep, mode):
    tensors = make_tensors() | {"large": torch.full((9,), 6e4).half()}  # their sum is infinite
    kind = Trainer if mode == "packed" else doubles.Trainer  # which has pieces
    trainer, engine = keep(kind(tensors)), keep(Engine(blank(tensors)))
    go(trainer, engine, mode=mode, check_finite="refuse")
    tensors["big"][0, :2] = torch.tensor([torch.nan, -torch.inf])
    old = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    with pytest.raises(TrainingError, match=r"version 2 .*: big \(2\)\n"):
        go(trainer, engine, mode=mode, check_finite="refuse", retries=1)
    assert same(engine.tensors, old)
    with pytest.warns(LoopWarning, match=r"version 2 .*: big \(2\)$"):
        go(trainer, engine, mode=mode, check_finite="warn")
