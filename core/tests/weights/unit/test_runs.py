"""Runs of elements of tensors of any strides."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.weights.data.runs import copy_run, write_run


@given(data=st.data())
def test_a_run_is_copied_in_logical_order_whatever_the_strides(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    source = torch.arange(2 * torch.Size(shape).numel()).view(*shape, 2)[..., 1].permute(*order)
    offset = data.draw(st.integers(0, source.numel() - 1))
    count = data.draw(st.integers(1, source.numel() - offset))
    target = torch.empty(count, dtype=source.dtype)
    copy_run(target, source, offset)
    assert torch.equal(target, source.reshape(-1)[offset : offset + count])


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
