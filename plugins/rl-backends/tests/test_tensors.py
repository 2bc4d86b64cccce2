"""The two ends of a refit over a module: names, ties, runs of elements."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_backends.tensors import (
    NamedTensorSink,
    NamedTensorSource,
    module_tensors,
    same_bytes,
    tensor_specs,
)
from rl_core.errors import RefitProtocolError


class Odd(nn.Module):
    """A tied pair, a transposed parameter, a 0-d and an empty one, two kinds of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 3))
        self.second = self.first
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("derived", torch.arange(3), persistent=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_are_compared_by_their_bytes(dtype):
    one = torch.tensor([[0.0, torch.nan], [1.0, 2.0]]).to(dtype).t()  # with strides
    assert same_bytes(one, one.contiguous())
    assert not same_bytes(one, -one)
    assert not same_bytes(one[0, 0], -one[0, 0])


def source_of(module: nn.Module) -> NamedTensorSource:
    return NamedTensorSource(module_tensors(module))


def sink_of(module: nn.Module) -> NamedTensorSink:
    return NamedTensorSink(module_tensors(module))


def test_specs_name_ties_roles_and_only_persistent_buffers():
    specs = {spec.name: spec for spec in source_of(Odd()).specs()}
    assert set(specs) == {"first", "second", "transposed", "scalar", "empty", "frozen", "kept"}
    assert specs["second"].alias_of == "first"
    assert specs["first"].alias_of is None
    assert specs["kept"].role == "buffer"
    assert specs["kept"].dtype == "int64"
    assert not specs["frozen"].trainable
    assert specs["scalar"].shape == ()


def test_everything_arrives_bit_for_bit_in_runs_of_five():
    source, sink = source_of(Odd()), sink_of(target := Odd())
    before = {name: value.data_ptr() for name, value in target.named_parameters()}
    for spec in source.specs():
        if spec.alias_of is None:
            ((_, tensor),) = source.tensors([spec.name])
            flat = tensor.reshape(-1)
            for offset in range(0, flat.numel(), 5):
                sink.write(spec.name, offset, flat[offset : offset + 5], of=spec)
    for (name, sent), (_, installed) in zip(
        source.tensors(list(before)), sink.read(list(before)), strict=True
    ):
        assert torch.equal(sent, installed), name
    assert {name: value.data_ptr() for name, value in target.named_parameters()} == before
    assert target.second is target.first


def test_floats_are_cast_to_the_models_dtype():
    source, sink = source_of(Odd()), sink_of(target := Odd().bfloat16())
    (spec,) = (spec for spec in source.specs() if spec.name == "first")
    ((_, tensor),) = source.tensors(["first"])
    sink.write("first", 0, tensor.reshape(-1), of=spec)
    assert torch.equal(target.first, tensor.bfloat16())


def test_a_float_never_becomes_an_integer():
    sink = sink_of(Odd())
    (spec,) = (spec for spec in sink.specs() if spec.name == "kept")
    with pytest.raises(RefitProtocolError, match="kept"):
        sink.write("kept", 0, torch.ones(3), of=spec)


def test_a_run_past_the_end_is_refused():
    sink = sink_of(Odd())
    (spec,) = (spec for spec in sink.specs() if spec.name == "first")
    with pytest.raises(RefitProtocolError, match="first"):
        sink.write("first", 10, torch.ones(3), of=spec)


def aliases(**tensors: torch.Tensor) -> dict[str, str]:
    return {s.name: s.alias_of for s in tensor_specs(tensors) if s.alias_of is not None}


def test_the_same_view_of_the_same_memory_is_an_alias_whatever_the_object():
    weight = nn.Parameter(torch.randn(4, 4))
    assert aliases(a=weight, b=weight, c=weight.detach(), d=weight.data) == dict.fromkeys(
        "bcd", "a"
    )


def test_other_views_of_the_same_memory_are_tensors_of_their_own():
    memory = torch.randn(4, 4)
    assert aliases(a=memory, rows=memory[:2], t=memory.t(), i=memory.view(torch.int32)) == {}
    assert aliases(flat=memory.view(-1), a=memory, late=memory[2:]) == {}
    assert aliases(t=memory.t(), a=memory, again=memory.t()) == {"again": "t"}
    assert aliases(a=memory, minus=torch._neg_view(memory)) == {}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_without_memory_are_aliases_only_as_one_object(device: str):
    empty, other = torch.empty(0, 3, device=device), torch.empty(0, 3, device=device)
    meta = torch.empty(2, 2, device="meta")
    assert aliases(a=empty, b=other, c=empty) == {"c": "a"}
    assert aliases(a=meta, b=torch.empty(2, 2, device="meta"), c=meta) == {"c": "a"}


def test_a_model_without_memory_is_described_as_one_with_memory():
    with torch.device("meta"):
        bare = Odd()
    assert tensor_specs(module_tensors(bare)) == tensor_specs(module_tensors(Odd()))


def test_a_spec_knows_its_size():
    (spec,) = tensor_specs({"w": torch.zeros(3, 5, dtype=torch.bfloat16)})
    assert (spec.numel, spec.nbytes, spec.torch_dtype) == (15, 30, torch.bfloat16)
