"""Refits of an engine that keeps only what it computes of some tensors, all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from simple_pair import DictSink, Engine, Trainer, blank, fails, go, make_tensors

from rl_core.errors import RefitCorrupted, RefitError

pytestmark = pytest.mark.usefixtures("either_device")

#: What the engine adds up, and drops.
PARTS = ("scalar", "half", "flags")
OTHERS = 5


class AddingSink(DictSink):
    """Serves the sum of :data:`PARTS`; what arrived of them is there until ``finish``."""

    always_sent = PARTS

    def __init__(self, tensors: dict[str, torch.Tensor], ties: Any = None) -> None:
        super().__init__(tensors, ties)
        self.total = torch.zeros(())
        self.wanted = self.total.clone()
        self.before: torch.Tensor | None = None
        self.arrived: set[str] = set()

    def begin(self, version: int) -> None:
        super().begin(version)
        self.arrived, self.before = set(), None

    def write(self, name: str, offset: int, data: torch.Tensor, **given: Any) -> None:
        super().write(name, offset, data, **given)
        self.arrived.add(name)

    def finish(self, version: int) -> None:
        if self.arrived >= set(PARTS):
            self.wanted = sum_of(self.tensor)
            self.total.copy_(self.wanted)
            self._drop()
        super().finish(version)

    def fail(self) -> None:
        super().fail()
        if self.before is not None:
            self.total.copy_(self.before)
        self._drop()

    def _drop(self) -> None:
        for name in PARTS:
            self.tensor[name].zero_()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        if self.calls[-1:] == ["finish"] and not torch.equal(self.total, self.wanted):
            raise RefitCorrupted("the sum is wrong", fix="add again")
        if not self.arrived:
            self.before = self.total.clone()
        return ((name, None if name in PARTS else self.tensor[name]) for name in names)


def sum_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensors[name].double().sum() for name in PARTS]).sum().float()


@pytest.fixture
def pair(keep: Callable[[Any], Any], either_device: None) -> tuple[Trainer, Engine]:
    tensors = make_tensors(0)
    return keep(Trainer(tensors)), keep(Engine(blank(tensors), kind=AddingSink))


def serves(engine: Engine, tensors: dict[str, torch.Tensor]) -> bool:
    sink: Any = engine.sink
    others = (n for n in tensors if n not in PARTS)
    return bool(torch.equal(sink.total, sum_of(tensors))) and all(
        torch.equal(sink.tensor[name], tensors[name]) for name in others
    )


@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
def test_a_delta_sends_them_although_nothing_changed(pair, isolation):
    trainer, engine = pair
    go(trainer, engine, isolation=isolation, verify="installed")
    report = go(trainer, engine, isolation=isolation, verify="installed", delta=True)
    assert (report.tensors, report.skipped) == (len(PARTS), OTHERS)
    assert serves(engine, trainer.source.tensor)


def test_a_retry_sends_them_again(pair):
    trainer, engine = pair
    names = list(trainer.source.tensor)
    engine.sink.on["finish"] = lambda: 1 / 0
    fails(trainer, engine)
    engine.sink.on.clear()
    report = go(trainer, engine, delta=True)
    assert report.skipped == len(names) - len(PARTS) - 1  # one is empty
    assert serves(engine, trainer.source.tensor)


def test_the_sink_compares_them(pair):
    trainer, engine = pair
    sink: Any = engine.sink
    sink.on["finish"] = lambda: sink.total.add_(1)
    with pytest.raises(RefitCorrupted, match="the sum is wrong"):
        go(trainer, engine, verify="installed")


def test_a_staged_refit_that_fails_leaves_what_the_engine_had(pair):
    trainer, engine = pair
    go(trainer, engine)
    before = trainer.source.tensor
    trainer.source.tensor = make_tensors(1)
    left = [None]

    def fail_once() -> None:
        if left:
            left.pop()
            raise RefitError("the engine failed")

    engine.sink.on["finish"] = fail_once
    fails(trainer, engine, isolation="staged")
    engine.idle().receiver.check()
    assert serves(engine, before)
    go(trainer, engine, isolation="staged", verify="installed")
    assert serves(engine, trainer.source.tensor)
