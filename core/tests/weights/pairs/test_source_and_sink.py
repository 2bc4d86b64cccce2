"""A source and a sink are made once for each refit, and a source is closed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from simple_pair import (
    BUCKET,
    SOON,
    DictSink,
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
from rl_core.errors import ConfigError, RefitAborted, RefitError, RefitProtocolError
from rl_core.futures import wait
from rl_core.interfaces import Piece
from rl_core.weights.receiving.loading import check_apart

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


class PartlyInPlace(DictSink):
    """Some of its tensors are written directly, the others by calls."""

    def pieces(self) -> Sequence[Piece]:
        return [
            Piece(name, Piece.whole(name, t).box, t if name == "scalar" else None)
            for name, t in self.tensor.items()
        ]


def test_every_sink_writes_what_it_is_given(keep):
    trainer, sinks = keep(Trainer(make_tensors())), []

    def new_sink() -> PartlyInPlace:
        sinks.append(PartlyInPlace(engine.tensors))
        return sinks[-1]

    engine = keep(doubles.Engine(blank(make_tensors()), sink=new_sink))
    for number in (1, 2, 3):
        trainer.source.tensor["big"].add_(1)
        go(trainer, engine)
        assert len(sinks) == number
        assert "write" in sinks[-1].calls


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


def test_a_source_that_fails_is_closed(trainer, engine):
    trainer.before = lambda name: 1 / 0 if name == "strided" else None
    with pytest.raises(RefitError, match="division"):
        go(trainer, engine)
    trainer.before = lambda name: None
    go(trainer, engine)
    assert counts(trainer) == [1, 1]


def test_a_refit_that_an_engine_ends_closes_the_source(trainer, engine, monkeypatch):
    monkeypatch.setattr(InPlaceSink, "finish", lambda self, version: 1 / 0)
    with pytest.raises(RefitError):
        go(trainer, engine)
    assert counts(trainer) == [1]


def test_a_refit_that_another_one_follows_closes_its_source(trainer, engine):
    engine.prepare_refit_info(trainer.prepare_refit_info())
    first = trainer.sender.send(deadline_s=SOON)
    second = trainer.sender.send(deadline_s=SOON)
    with pytest.raises(RefitAborted, match="newer"):
        first.result(SOON)
    wait([second, engine.receiver.receive(number=2, deadline_s=SOON)], SOON)
    assert counts(trainer) == [1, 1, 1]  # that of the description, too


def test_one_that_waits_for_its_turn_and_is_closed_was_never_opened(trainer, engine):
    with trainer.sender.turn:
        future = trainer.sender.send(deadline_s=0.2)
        assert future.exception(SOON) is not None
    [source] = trainer.made
    assert (source.opened, source.closed) == ([], 1)


def test_a_description_that_no_refit_follows_is_closed_with_the_next(trainer):
    trainer.sender.prepare()
    assert counts(trainer) == [0]
    trainer.sender.prepare()
    assert counts(trainer) == [1, 0]
    trainer.close()
    assert counts(trainer) == [1, 1]


def test_a_refit_of_its_own_name_has_a_source_of_its_own(trainer, engine):
    engine.prepare_refit_info(trainer.prepare_refit_info())
    sending = trainer.sender.send(bucket_bytes=BUCKET, deadline_s=SOON)
    engine.receiver.receive(deadline_s=SOON).result(SOON)
    sending.result(SOON)
    assert counts(trainer) == [1, 1]
    assert [source.opened for source in trainer.made] == [[], [1]]


@pytest.mark.parametrize("wrong", [{"verify": "no"}, {"delta": 1}], ids=str)
def test_a_refit_that_is_refused_makes_no_source(trainer, wrong):
    with pytest.raises(ConfigError):
        trainer.sender.send(**wrong)
    assert trainer.made == []


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


def test_targets_may_be_views_of_one_tensor_that_lie_side_by_side(keep):
    fused = torch.zeros(40, 30)
    parts = {"bottom": fused[20:], "top": fused[:20]}
    engine = keep(Engine(parts, kind=InPlaceSink))
    weights = {name: torch.randn(20, 30) for name in parts}
    go(keep(Trainer(weights)), engine)
    assert torch.equal(fused, torch.cat([weights["top"], weights["bottom"]]))
    check_apart([("odd", "odd", fused[:, 1::2]), ("even", "even", fused[:, ::2])])
