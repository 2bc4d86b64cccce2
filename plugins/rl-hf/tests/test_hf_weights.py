"""The two ends of a refit over a module: names, ties, runs of elements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rl_core.errors import RefitProtocolError
from rl_hf.weights import ModelWeightSink, ModelWeightSource, write_run


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


def test_specs_name_ties_roles_and_only_persistent_buffers():
    specs = {spec.name: spec for spec in ModelWeightSource(Odd()).specs()}
    assert set(specs) == {"first", "second", "transposed", "scalar", "empty", "frozen", "kept"}
    assert specs["second"].alias_of == "first"
    assert specs["first"].alias_of is None
    assert specs["kept"].role == "buffer"
    assert specs["kept"].dtype == "int64"
    assert not specs["frozen"].trainable
    assert specs["scalar"].shape == ()


def test_everything_arrives_bit_for_bit_in_runs_of_five():
    source, sink = ModelWeightSource(Odd()), ModelWeightSink(target := Odd())
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
    source, sink = ModelWeightSource(Odd()), ModelWeightSink(target := Odd().bfloat16())
    (spec,) = (spec for spec in source.specs() if spec.name == "first")
    ((_, tensor),) = source.tensors(["first"])
    sink.write("first", 0, tensor.reshape(-1), of=spec)
    assert torch.equal(target.first, tensor.bfloat16())


def test_a_float_never_becomes_an_integer():
    sink = ModelWeightSink(Odd())
    (spec,) = (spec for spec in sink.specs() if spec.name == "kept")
    with pytest.raises(RefitProtocolError, match="kept"):
        sink.write("kept", 0, torch.ones(3), of=spec)


def test_a_run_past_the_end_is_refused():
    sink = ModelWeightSink(Odd())
    (spec,) = (spec for spec in sink.specs() if spec.name == "first")
    with pytest.raises(RefitProtocolError, match="first"):
        sink.write("first", 10, torch.ones(3), of=spec)


@given(data=st.data())
def test_a_run_lands_in_place_whatever_the_strides(data: st.DataObject):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    target = torch.zeros(*shape, 2)[..., 0].permute(*order)
    offset = data.draw(st.integers(0, target.numel()))
    count = data.draw(st.integers(0, target.numel() - offset))
    run = torch.arange(1.0, count + 1)
    expected = torch.zeros(target.numel())
    expected[offset : offset + count] = run
    write_run(target, offset, run)
    assert torch.equal(target.reshape(-1), expected)
