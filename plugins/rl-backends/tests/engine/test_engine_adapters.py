"""The sink of engines that serve adapters, beside doubles of engines."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from rl_backends.engine import adapters
from rl_backends.engine.adapters import AdapterSink
from rl_core.interfaces import TensorSpec

A = TensorSpec("a.lora_A.weight", (2, 3), "float32")


class Served(AdapterSink):
    """Keeps each adapter by its number. ``unload`` raises while ``stuck`` is set."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__({A.name: ("a", A)}, workers=workers)
        self.adapters: dict[int, dict[str, torch.Tensor]] = {}
        self.stuck = False

    def load(self, adapter: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.adapters[adapter] = {name: one.clone() for name, one in tensors.items()}

    def unload(self, adapter: int) -> None:
        if self.stuck:
            raise RuntimeError("cannot be unloaded")
        self.adapters.pop(adapter, None)

    def kept(self, name: str) -> torch.Tensor:
        return torch.arange(A.numel)

    def held(self, adapter: int, name: str) -> torch.Tensor:
        return self.adapters[adapter][name].flatten()


def refit(sink: AdapterSink, version: int) -> None:
    sink.begin(version)
    sink.write(A.name, 0, torch.full((A.numel,), float(version)), of=A)
    sink.finish(version)


def test_an_adapter_that_cannot_be_unloaded_does_not_serve():
    sink = Served()
    refit(sink, 1)
    refit(sink, 2)
    sink.stuck = True
    with pytest.raises(RuntimeError, match="cannot be unloaded"):
        sink.fail()
    assert (sink.serving, sink.version) == (1, 1)


def test_workers_of_which_only_some_heard_of_a_commit_serve_one_adapter_again(monkeypatch):
    sinks, serving = [Served(workers=2), Served(workers=2)], [0, 0]

    def highest(tensor: torch.Tensor, *_: object, **__: object) -> None:
        if tensor.numel() == 2:  # what serves on the two
            tensor.copy_(torch.tensor([max(serving), -min(serving)]))

    monkeypatch.setattr(adapters.dist, "all_reduce", highest)
    monkeypatch.setattr(adapters, "workers_group", lambda workers: None)
    for version in (1, 2):
        serving[:] = [sink.serving for sink in sinks]
        for sink in sinks:
            refit(sink, version)
    sinks[1].fail()  # the trainer died between its two messages
    serving[:] = [sink.serving for sink in sinks]
    assert serving == [2, 1]
    for sink in sinks:
        refit(sink, 3)
    assert [sink.serving for sink in sinks] == [1, 1]
