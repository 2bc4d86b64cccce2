"""Refits of an engine that keeps what arrives beside what it serves: none of them tears it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from simple_pair import DictSink, Engine, Trainer, blank, fails, go, make_tensors, same

from rl_backends.tensors import whole_pieces
from rl_core.errors import RefitError
from rl_core.interfaces import Piece


class BesideSink(DictSink):
    """Serves a copy, which ``finish`` replaces and ``fail`` gives back."""

    double_buffered = True

    def __init__(self, tensors: dict[str, torch.Tensor], ties: Any = None) -> None:
        super().__init__(tensors, ties)
        self.served: list[dict[str, torch.Tensor]] = [{}]

    def begin(self, version: int) -> None:
        super().begin(version)
        self.served = self.served[-1:]

    def finish(self, version: int) -> None:
        super().finish(version)
        self.served.append({name: tensor.clone() for name, tensor in self.tensor.items()})

    def fail(self) -> None:
        super().fail()
        self.served = self.served[:1]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        self.on.get("read", lambda: None)()
        return ((name, self.served[-1][name]) for name in names)


class BesideInPlaceSink(BesideSink):
    """The same, whose buffers are written directly."""

    def pieces(self) -> Sequence[Piece]:
        super().pieces()
        return whole_pieces(self.tensor)


@pytest.fixture(params=[BesideSink, BesideInPlaceSink])
def pair(keep: Callable[[Any], Any], request: Any) -> tuple[Trainer, Engine]:
    """A trainer of the second version, and an engine that serves the first one."""
    tensors = make_tensors(0)
    trainer = keep(Trainer(tensors))
    engine = keep(Engine(blank(tensors), kind=request.param))
    go(trainer, engine)
    trainer.source.tensor = make_tensors(1)
    return trainer, engine


def serves(engine: Engine, seed: int) -> bool:
    whole = {name: tensor.contiguous() for name, tensor in make_tensors(seed).items()}
    return same(whole, engine.sink.served[-1])


@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
@pytest.mark.parametrize("call", ["begin", "finish", "read", "commit"])
def test_the_old_weights_serve_after_a_failure_at_any_point(pair, call, isolation):
    trainer, engine = pair
    how = {"isolation": isolation, "verify": "installed"}
    seen: list[bool] = []

    def fail() -> None:
        seen.append(engine.receiver.torn)
        raise ZeroDivisionError

    engine.sink.on[call] = fail
    _, receiver = fails(trainer, engine, **how)
    assert isinstance(receiver, RefitError)
    engine.sink.on.clear()
    assert serves(engine.idle(), seed=0)
    assert engine.receiver.version == 1
    assert seen == [call == "commit"]  # the caches may be of either version then
    if call != "commit":
        engine.receiver.check()
    go(trainer, engine, delta=True, **how)
    engine.receiver.check()
    assert serves(engine, seed=1)
