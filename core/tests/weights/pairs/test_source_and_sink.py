"""A source and a sink are made once for each refit, and a source is closed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from simple_pair import (
    DictSource,
    Engine,
    InPlaceSink,
    Trainer,
    blank,
    fails,
    go,
    make_tensors,
)

from rl_conformance import doubles
from rl_core.errors import RefitError, RefitProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Counted(DictSource):
    """Notes what is asked of it; ``reading`` is whether its iterator is open."""

    def __init__(self, trainer: CountingTrainer, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.before = trainer.before
        self.opened: list[int] = []
        self.reading = False
        self.closed = 0

    def open(self, number: int, deadline_s: float) -> None:
        assert not self.closed
        assert deadline_s > 0
        self.opened.append(number)

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.opened
        self.reading = True
        try:
            yield from super().tensors(names)
        finally:
            self.reading = False

    def close(self) -> None:
        assert not self.reading
        self.closed += 1


class CountingTrainer(doubles.Trainer):
    def __init__(self) -> None:
        super().__init__(make_tensors(), source=self.make)
        self.before: Any = lambda name: None
        self.made: list[Counted] = []

    def make(self) -> Counted:
        self.made.append(Counted(self, self.tensors))
        return self.made[-1]


def test_a_receiver_verifies_in_one_buffer_whatever_the_sizes(keep, monkeypatch):
    tensors = {f"w{size}": torch.ones(size << 10, dtype=torch.uint8) for size in (550, 750, 950)}
    trainer, engine = keep(Trainer(tensors)), keep(Engine(blank(tensors)))
    made: list[int] = []
    new_empty = torch.Tensor.new_empty

    def counted(tensor: torch.Tensor, size: int) -> torch.Tensor:
        made.append(size)
        return new_empty(tensor, size)

    monkeypatch.setattr(torch.Tensor, "new_empty", counted, raising=False)
    go(trainer, engine, bucket_bytes=1 << 20)
    assert 0 < sum(made) <= 1 << 20


class CountingEngine(doubles.Engine):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors, sink=self.make)
        self.made = 0

    def make(self) -> InPlaceSink:
        self.made += 1
        return InPlaceSink(self.tensors)


@pytest.fixture
def trainer(keep) -> CountingTrainer:
    return keep(CountingTrainer())


@pytest.fixture
def engine(keep, trainer) -> CountingEngine:
    return keep(CountingEngine(blank(trainer.tensors)))


def counts(trainer: CountingTrainer) -> list[int]:
    """How often each source was closed, once no refit is going on."""
    with trainer.sender.turn:
        pass
    return [source.closed for source in trainer.made]


@pytest.mark.parametrize("options", [{}, {"delta": True}, {"isolation": "staged"}], ids=str)
def test_every_refit_has_one_source_and_one_sink(trainer, engine, options):
    go(trainer, engine)
    for _ in range(3):
        go(trainer, engine, **options)
    assert counts(trainer) == [1] * 4
    assert len({source.opened[0] for source in trainer.made}) == 4
    assert engine.made == 4


def test_what_cannot_be_closed_is_said_and_the_version_counts(trainer, engine, monkeypatch):
    monkeypatch.setattr(Counted, "close", lambda self: 1 / 0)
    with pytest.raises(RefitError, match="could not be closed: ZeroDivisionError"):
        go(trainer, engine)
    assert trainer.sender.version == 1
    trainer.before = lambda name: {}[name]
    with pytest.raises(RefitError, match="KeyError") as caught:
        go(trainer, engine)
    assert "could not be closed" in caught.value.__notes__[0]
    monkeypatch.undo()


@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
@pytest.mark.parametrize("overlap", [slice(0, 20), slice(39, 40), slice(None)])
def test_targets_that_overlap_and_are_not_tied_are_refused_before_a_byte_is_written(
    keep, isolation, overlap
):
    installed = torch.zeros(40, 30)
    engine = keep(Engine({"fused": installed, "rows": installed[overlap]}, kind=InPlaceSink))
    rows = torch.ones(40, 30)[overlap]
    trainer = keep(Trainer({"fused": torch.ones(40, 30), "rows": rows}))
    _, refused = fails(trainer, engine, isolation=isolation)
    assert isinstance(refused, RefitProtocolError)
    assert "fused and rows overlap" in str(refused) or "rows and fused overlap" in str(refused)
    assert not installed.any()
    engine.idle().receiver.check()
