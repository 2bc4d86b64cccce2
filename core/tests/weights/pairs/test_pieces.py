"""Engines that keep pieces of tensors: each gets those elements and no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from simple_pair import SOON, DictSink, Engine, Replicas, Tensors, Trainer, go

from rl_backends.tensors import tensor_specs
from rl_core.errors import ManifestMismatchError, RefitAborted, RefitCorrupted
from rl_core.interfaces import Box, Piece, TensorSpec
from rl_core.weights.data.runs import write_run

SHAPES = {"rows": (12, 8), "columns": (6, 32), "norm": (16,), "scalar": (), "experts": (4, 6, 5)}


def make() -> Tensors:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def boxes(rank: int, ranks: int) -> dict[str, list[Box]]:
    """As tensor parallelism cuts, with experts spread; one whole tensor goes through calls."""

    def part(size: int) -> tuple[int, int]:
        return size * rank // ranks, size * (rank + 1) // ranks

    return {
        "rows": [(part(12), (0, 8))],
        "columns": [((0, 6), part(32))],
        "norm": [((0, 16),)],
        "scalar": [()],
        "experts": [((n, n + 1), (0, 6), (0, 5)) for n in range(4) if n % ranks == rank],
    }


class PieceSink(DictSink):
    """Keeps pieces: strided ones in a larger parameter, and ``norm`` by calls."""

    def __init__(self, rank: int, ranks: int, *, strided: bool) -> None:
        super().__init__({})
        self.kept: list[Piece] = []
        self.called: list[int] = []
        for name, found in boxes(rank, ranks).items():
            for box in found:
                sizes = [after - first for first, after in box]
                wider = torch.zeros(*sizes[:-1], sizes[-1] + 3 * strided) if sizes else None
                tensor = torch.zeros(()) if wider is None else wider[..., : sizes[-1]]
                self.kept.append(Piece(name, box, tensor))
        self.norm = torch.zeros(16)
        self.lose = ""

    def specs(self) -> Sequence[TensorSpec]:
        return tensor_specs({name: torch.empty(shape) for name, shape in SHAPES.items()})

    def pieces(self) -> Sequence[Piece]:
        return [p._replace(tensor=None) if p.name == "norm" else p for p in self.kept]

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        assert name == "norm"
        self.called.append(len(data))
        write_run(self.norm, offset, data)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            for piece in self.kept:
                if piece.name == name:
                    tensor = self.norm if name == "norm" else piece.tensor
                    yield name, torch.zeros_like(tensor) if name == self.lose else tensor


def engines(keep: Any, ranks: int, *, strided: bool = False) -> list[Engine]:
    made = []
    for rank in range(ranks):
        engine = keep(Engine({}))
        engine.sink = PieceSink(rank, ranks, strided=strided)
        made.append(engine)
    return made


def right(trainer: Trainer, engine: Engine) -> bool:
    whole = trainer.source.tensor
    pieces = [
        (engine.sink.norm if p.name == "norm" else p.tensor, whole[p.name], p.box)
        for p in engine.sink.kept
    ]
    return all(
        torch.equal(tensor, of[tuple(slice(*ends) for ends in box)]) for tensor, of, box in pieces
    )


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("verify", ["none", "wire", "installed"])
@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_engine_gets_what_it_keeps(keep, ranks, isolation, verify, at_home, strided):
    trainer = keep(Trainer(make(), at_home=at_home))
    parts = engines(keep, ranks, strided=strided)
    for _ in range(2):
        for tensor in trainer.source.tensor.values():
            tensor.add_(1)
        report = go(trainer, Replicas(*parts), isolation=isolation, verify=verify, bucket_bytes=256)
        assert report.mode == ("direct" if at_home else "packed")
        assert all(right(trainer, engine) for engine in parts)


def exchange(first: Engine, second: Engine) -> None:
    """Each keeps what the other one kept, in its own memory."""
    kept, other = first.sink.kept, second.sink.kept
    first.sink.kept = [p._replace(box=o.box) for p, o in zip(kept, other, strict=True)]
    second.sink.kept = [o._replace(box=p.box) for p, o in zip(kept, other, strict=True)]


@pytest.mark.parametrize("at_home", [False, True])
def test_a_delta_relies_on_nothing_that_was_kept_before_other_pieces(keep, at_home):
    trainer, parts = keep(Trainer(make(), at_home=at_home)), engines(keep, 2)
    go(trainer, Replicas(*parts))
    for _ in range(2):
        exchange(*parts)
        go(trainer, Replicas(*parts), delta=True)
        assert all(right(trainer, engine) for engine in parts)


@pytest.mark.parametrize("delta", [False, True])
def test_an_engine_that_kept_its_pieces_before_must_be_prepared_for_them_again(keep, delta):
    trainer, parts = keep(Trainer(make())), engines(keep, 2)
    for sink in (engine.sink for engine in parts):
        sink.pieces = lambda its=sink: its.kept  # with what else is written by calls
    go(trainer, Replicas(*parts))
    exchange(*parts)
    go(trainer, Replicas(*parts))
    exchange(*parts)
    sending = trainer.sender.send(receivers=2, deadline_s=SOON, delta=delta)
    for engine in parts:
        engine.receiver.receive(deadline_s=SOON)
    with pytest.raises(RefitAborted, match="keeps other pieces than it did when it was prepared"):
        sending.result(SOON)
    assert not any(engine.idle().receiver.torn for engine in parts)


def test_what_is_not_kept_is_not_between_two_that_lie_together(keep):
    tensors = {name: torch.full((16,), float(at)) for at, name in enumerate("abc", 1)}
    trainer, parts = keep(Trainer(tensors, at_home=True)), engines(keep, 2)
    trainer.source.pieces = lambda: [Piece(name, ((0, 16),), tensors[name]) for name in "acb"]
    for engine, names in zip(parts, ("ac", "b"), strict=True):
        engine.sink.specs = trainer.source.specs
        engine.sink.kept = [Piece(name, ((0, 16),), torch.zeros(16)) for name in names]
    assert go(trainer, Replicas(*parts)).mode == "direct"
    assert all(right(trainer, engine) for engine in parts)


@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_pieces_that_change_between_refits_are_read_and_written_where_they_are(
    keep, delta, at_home
):
    """What was agreed on before is not used for other boxes, or for memory that was left."""
    trainer, parts = keep(Trainer(make(), at_home=at_home)), engines(keep, 2)
    tensors, whole = trainer.source.tensor, trainer.source.pieces
    for number in range(6):
        tensors["rows"][number] += 1
        if number % 3 == 1:
            for engine in parts:
                left, engine.sink.kept = (
                    engine.sink.kept,
                    [piece._replace(tensor=piece.tensor.clone()) for piece in engine.sink.kept],
                )
                for piece in left:
                    piece.tensor.fill_(-1)
        if number % 3 == 2:
            tensors["columns"].data = tensors["columns"].clone()
        trainer.source.pieces = whole
        if at_home and number % 2:
            ends = [(0, 5 + number), (5 + number, 12)]
            halves = [Piece("rows", (end, (0, 8)), tensors["rows"][slice(*end)]) for end in ends]
            others = [piece for piece in whole() if piece.name != "rows"]
            trainer.source.pieces = lambda given=[*others, *halves]: given
        go(trainer, Replicas(*parts), delta=delta, verify="installed")
        assert all(right(trainer, engine) for engine in parts)


def test_a_piece_that_is_not_installed_is_named(keep):
    trainer, parts = keep(Trainer(make())), engines(keep, 2)
    parts[1].sink.lose = "columns"
    with pytest.raises(RefitCorrupted, match=r"not installed as they arrived \(1\): columns"):
        go(trainer, Replicas(*parts), verify="installed")


class TwoPieces(PieceSink):
    """Keeps one tensor in the given boxes, in pieces of the given dtype."""

    def __init__(self, shape: tuple[int, ...], found: Sequence[Box], dtype: torch.dtype) -> None:
        DictSink.__init__(self, {})
        self.shape, self.norm, self.lose = shape, torch.zeros(0), ""
        sizes = [[after - first for first, after in box] for box in found]
        both = zip(found, sizes, strict=True)
        self.kept = [Piece("w", box, torch.zeros(size, dtype=dtype)) for box, size in both]

    def specs(self) -> Sequence[TensorSpec]:
        return tensor_specs({"w": torch.empty(self.shape)})


def engine_of(keep: Any, *found: Box, dtype: torch.dtype = torch.float32) -> Engine:
    engine = keep(Engine({}))
    engine.sink = TwoPieces((8, 4), found, dtype)
    return engine


TOP, BOTTOM, ALL = ((0, 4), (0, 4)), ((4, 8), (0, 4)), ((0, 8), (0, 4))


@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_a_staged_delta_leaves_what_it_does_not_send(keep, at_home, apart):
    trainer = keep(Trainer({"w": torch.randn(8, 4)}, at_home=at_home))
    given = [(TOP,), (BOTTOM,)] if apart else [(TOP, BOTTOM)]
    parts = [engine_of(keep, *boxes) for boxes in given]
    go(trainer, Replicas(*parts), isolation="staged")
    for row in (5, 1):
        trainer.source.tensor["w"][row].add_(1)
        go(trainer, Replicas(*parts), isolation="staged", delta=True, verify="wire")
        assert all(right(trainer, engine) for engine in parts)


def test_what_no_engine_keeps_is_a_mismatch(keep):
    trainer, engine = keep(Trainer({"w": torch.randn(8, 4)})), engine_of(keep, TOP)
    sending = trainer.sender
    Replicas(engine).prepare_refit_info(trainer.prepare_refit_info())
    done = sending.send(receivers=1, deadline_s=SOON), engine.receiver.receive(deadline_s=SOON)
    with pytest.raises(ManifestMismatchError, match="no engine keeps w\\[4:8,0:4\\]"):
        done[0].result(SOON)
    assert done[1].exception(SOON) is not None
    assert not engine.sink.kept[0].tensor.any()


def test_a_piece_of_another_dtype_than_its_engine_describes_is_a_mismatch(keep):
    trainer = keep(Trainer({"w": torch.randn(8, 4)}))
    engine = engine_of(keep, ALL, dtype=torch.float16)
    with pytest.raises(ManifestMismatchError, match="w: the engine describes it as float32"):
        go(trainer, engine)


def test_a_wide_dtype_after_a_cut_piece_of_a_narrow_one(keep):
    tensors = {"a": torch.randn(5, 3).bfloat16(), "b": torch.randn(3)}
    trainer, engine = keep(Trainer(tensors, at_home=True)), keep(Engine({}))
    engine.sink = TwoPieces((5, 3), (), torch.float32)
    engine.sink.specs = lambda: tensor_specs(tensors)
    engine.sink.kept = [
        Piece("a", ((0, 1), (0, 3)), torch.zeros(1, 3).bfloat16()),
        Piece("a", ((1, 5), (0, 3)), torch.zeros(4, 6).bfloat16()[:, ::2]),
        Piece.whole("b", torch.zeros(6)[::2]),
    ]
    report = go(trainer, engine, verify="wire")
    assert report.mode == "direct"
    assert right(trainer, engine)
