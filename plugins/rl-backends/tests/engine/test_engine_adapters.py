"""The sink of engines that serve adapters, beside doubles of engines."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rl_backends.base_weights import BaseDigests
from rl_backends.engine import adapters
from rl_backends.engine.adapters import AdapterSink
from rl_backends.tensors import tensor_specs
from rl_core.errors import CapabilityError, ManifestMismatchError
from rl_core.interfaces import TensorSpec

_KINDS = ("float32", "bfloat16", "float16")
WEIGHT = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
A = TensorSpec("a.lora_A.weight", (2, 3), "float32")


def base_of(dtype: torch.dtype, asked: list[str]) -> Any:
    """An engine's weights: one is there only as its hook processed it, one does not compute."""
    names = "a.weight", "hooked", "tower.weight"
    tensors = {name: WEIGHT.to(dtype, copy=True) for name in names}
    return SimpleNamespace(
        model=nn.Module(),
        specs=tensor_specs(tensors),
        pieces=[],
        unused=names[2:],
        check_same=lambda: None,
        whole=lambda spec: (
            asked.append(spec.name) or (None if spec.name == "hooked" else tensors[spec.name])
        ),
    )


class Served(AdapterSink):
    """Keeps each adapter by its number. ``unload`` raises while ``stuck`` is set."""

    def __init__(self, workers: int = 1, base: Any = None) -> None:
        super().__init__({A.name: ("a", A)}, workers=workers, base=lambda: base or unknown_base())
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


def unknown_base() -> Any:
    raise CapabilityError("the checkpoint is quantised")


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


@pytest.mark.parametrize(
    ("theirs", "ours"), [("float32", one) for one in _KINDS] + [("bfloat16", "float32")]
)
def test_other_base_weights_are_refused_by_name_and_equal_ones_are_read_once(theirs, ours, caplog):
    layer = nn.Linear(3, 4, bias=False, dtype=getattr(torch, theirs))
    layer.weight.data.copy_(WEIGHT)
    model, asked = nn.ModuleDict({"a": layer}), list[str]()
    digests = BaseDigests(SimpleNamespace(get_base_model=lambda: model))
    sink = Served(base=base_of(getattr(torch, ours), asked))
    for version in (1, 2):
        sink.expect_base(digests.now())
        refit(sink, version)
    assert digests.now() is digests.now()
    assert asked == ["a.weight", "hooked"]
    assert "not compared with the trainer's (1): hooked" in caplog.text
    with torch.no_grad():
        layer.weight[1, 1] += 0.1
    sink.expect_base(digests.now())
    with pytest.raises(ManifestMismatchError, match=r"1 of 1 tensors differ.* a\.weight"):
        refit(sink, 3)
    assert sink.version == 2


def test_base_weights_that_cannot_be_followed_are_not_compared(caplog):
    sink = Served()
    sink.expect_base({"a.weight": {"float32": "other"}})
    refit(sink, 1)
    assert "will not be compared with a trainer's: the checkpoint is quantised" in caplog.text
