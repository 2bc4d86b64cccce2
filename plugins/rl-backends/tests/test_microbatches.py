"""Plans of one batch: every row once, whole groups, no microbatch above its bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_backends.policy.microbatches import plan_microbatches
from rl_core.batch.packing import ALGORITHMS
from rl_core.errors import ConfigError, DataError


def covered(parts: list[torch.Tensor]) -> list[int]:
    return sorted(torch.cat(parts).tolist()) if parts else []


def in_whole_groups(parts: list[torch.Tensor], group_size: int) -> bool:
    return all(
        torch.equal(
            part,
            part[::group_size].repeat_interleave(group_size)
            + torch.arange(group_size).repeat(len(part) // group_size),
        )
        for part in parts
    )


@given(
    groups=st.lists(st.integers(0, 12), max_size=20),
    group_size=st.integers(1, 3),
    micro_batch_size=st.integers(1, 9),
)
def test_fixed_plan_covers_all_rows_in_order_in_whole_groups(groups, group_size, micro_batch_size):
    lengths = torch.ones(len(groups) * group_size, dtype=torch.int64)
    parts = plan_microbatches(lengths, micro_batch_size=micro_batch_size, group_size=group_size)
    assert [row for part in parts for row in part.tolist()] == list(range(len(lengths)))
    assert all(len(part) <= max(micro_batch_size, group_size) for part in parts)
    assert in_whole_groups(parts, group_size)


@pytest.mark.parametrize("way", ["dynamic", *sorted(ALGORITHMS)])
@given(data=st.data(), group_size=st.integers(1, 3), rounding=st.integers(1, 5))
def test_planned_groups_stay_together_under_the_bound(way, data, group_size, rounding):
    count = data.draw(st.integers(0, 12)) * group_size
    values = data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    args = {"max_tokens_per_microbatch": 48}
    if way == "dynamic":
        how = {"dynamic_batching_args": args | {"sequence_length_round": rounding}}
    else:
        args |= {"sequence_length_pad_multiple": rounding, "algorithm": way}
        how = {"sequence_packing_args": args}
    lengths = torch.tensor(values, dtype=torch.int64)
    parts = plan_microbatches(lengths, **how, group_size=group_size)
    assert covered(parts) == list(range(count))
    assert in_whole_groups(parts, group_size)
    for part in parts:
        padded = [-(-max(values[row], 1) // rounding) * rounding for row in part.tolist()]
        assert (len(part) * max(padded) if way == "dynamic" else sum(padded)) <= 48


def test_dynamic_plan_puts_as_many_rows_together_as_fit():
    parts = plan_microbatches(
        torch.tensor([1, 9, 1, 1, 2, 8]), dynamic_batching_args={"max_tokens_per_microbatch": 18}
    )
    assert [part.tolist() for part in parts] == [[0, 2, 3, 4], [5, 1]]


def test_rounding_up_stops_at_the_width_of_the_batch():
    args = {"max_tokens_per_microbatch": 10, "sequence_length_round": 8}
    lengths = torch.tensor([9, 10])
    assert len(plan_microbatches(lengths, dynamic_batching_args=args, width=10)) == 2
    with pytest.raises(DataError, match="row 0 takes 16 tokens"):
        plan_microbatches(lengths, dynamic_batching_args=args)


def test_a_plan_needs_exactly_one_way():
    with pytest.raises(ConfigError, match="one of micro_batch_size"):
        plan_microbatches(torch.tensor([1]))


@pytest.mark.parametrize(
    ("name", "least"), [("micro_batch_size", 1), ("group_size", 1), ("width", 0)]
)
def test_what_is_no_whole_number_or_too_small_is_refused_by_name(name, least):
    for number in (least - 1, True, 1.5, "2"):
        with pytest.raises(ConfigError, match=f"^{name} must be a whole number, got "):
            plan_microbatches(torch.tensor([1]), **{"micro_batch_size": 2, name: number})


def test_a_negative_length_is_named_by_its_row():
    with pytest.raises(DataError, match="row 1 has the length -2"):
        plan_microbatches(
            torch.tensor([1, -2]), dynamic_batching_args={"max_tokens_per_microbatch": 9}
        )


def test_rows_that_are_not_whole_groups_are_refused():
    with pytest.raises(DataError, match="number of rows, 3, is not a multiple of the group size 2"):
        plan_microbatches(torch.tensor([1, 1, 1]), micro_batch_size=2, group_size=2)


def test_a_group_above_the_bound_is_named_by_its_first_row():
    with pytest.raises(DataError, match="group that starts with row 2 takes 12 tokens"):
        plan_microbatches(
            torch.tensor([1, 1, 6, 6]),
            sequence_packing_args={"max_tokens_per_microbatch": 10},
            group_size=2,
        )


@pytest.mark.parametrize(
    "lengths",
    [
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor([1.5, 2.0]),
        torch.tensor(3),
        torch.tensor([True, True]),
        torch.tensor([1j]),
        [1, 2],
        None,
    ],
)
@pytest.mark.parametrize(
    "way",
    [
        {"micro_batch_size": 2},
        {"dynamic_batching_args": {"max_tokens_per_microbatch": 8}},
        {"sequence_packing_args": {"max_tokens_per_microbatch": 8}},
    ],
)
def test_lengths_must_be_integers_one_for_each_row(lengths, way):
    with pytest.raises(DataError, match=r"integers of shape \[rows\]"):
        plan_microbatches(lengths, **way)
