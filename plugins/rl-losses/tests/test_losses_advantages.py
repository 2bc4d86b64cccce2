from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from rl_core.errors import ConfigError, DataError
from rl_losses import (
    gdpo_advantages,
    groups_without_spread,
    grpo_advantages,
    opo_advantages,
    overlong_penalty,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
)

REWARDS = tensor([1.0, 0.0, 0.0, 3.0, 7.0, 2.0])


def test_plain_advantages_are_rewards_less_the_groups_mean() -> None:
    advantages = grpo_advantages(REWARDS, group_size=3, normalize_std=False)
    assert advantages.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, -1.0, 3.0, -2.0])


def test_normalised_advantages_are_over_the_samples_deviation() -> None:
    advantages = grpo_advantages(REWARDS, group_size=3)
    deviation = math.sqrt((1 + 9 + 4) / 2)
    assert advantages[3:].tolist() == pytest.approx(
        [-1 / deviation, 3 / deviation, -2 / deviation], rel=1e-5
    )


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others() -> None:
    advantages = grpo_advantages(
        REWARDS, group_size=3, leave_one_out_baseline=True, normalize_std=False
    )
    assert advantages[3:].tolist() == pytest.approx([3 - 4.5, 7 - 2.5, 2 - 5.0])


def test_groups_by_prompt_number_need_not_be_neighbours() -> None:
    order = [0, 3, 1, 4, 5, 2]
    advantages = grpo_advantages(REWARDS[order], prompt_ids=tensor([9, 4, 9, 4, 4, 9]))
    torch.testing.assert_close(advantages, grpo_advantages(REWARDS, group_size=3)[order])


def test_groups_by_prompt_tokens() -> None:
    prompts = tensor([[5, 6], [5, 6], [5, 6], [5, 7], [5, 7], [5, 7]])
    torch.testing.assert_close(
        grpo_advantages(REWARDS, prompt_ids=prompts), grpo_advantages(REWARDS, group_size=3)
    )


def test_a_masked_row_is_not_part_of_its_group() -> None:
    rewards = tensor([1.0, math.nan, 3.0])
    advantages = grpo_advantages(
        rewards, group_size=3, sample_mask=tensor([1, 0, 1]), normalize_std=False
    )
    assert advantages.tolist() == [-1.0, 0.0, 1.0]


@given(
    rewards=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    data=st.data(),
    options=st.fixed_dictionaries(
        {"normalize_std": st.booleans(), "leave_one_out_baseline": st.booleans()}
    ),
)
def test_advantages_of_a_group_sum_to_zero(
    rewards: list[float], data: st.DataObject, options: dict[str, Any]
) -> None:
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    prompt_ids = tensor(groups)
    advantages = grpo_advantages(tensor(rewards), prompt_ids=prompt_ids, **options)
    sums = torch.zeros(4).index_add(0, prompt_ids, advantages)
    torch.testing.assert_close(sums, torch.zeros(4), atol=1e-3, rtol=0)


@pytest.mark.parametrize("groups", [{}, {"group_size": 2, "prompt_ids": torch.zeros(6)}])
def test_groups_are_given_in_exactly_one_way(groups: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one of 'group_size' and 'prompt_ids'"):
        grpo_advantages(REWARDS, **groups)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": torch.zeros(6, 1), "group_size": 2}, "'rewards' has shape"),
        ({"rewards": REWARDS, "group_size": 4}, "is not a multiple of the group size 4"),
        ({"rewards": REWARDS, "prompt_ids": torch.zeros(5)}, "'prompt_ids' has shape"),
        ({"rewards": REWARDS, "group_size": 2, "sample_mask": torch.ones(2)}, "'sample_mask' has"),
        ({"rewards": tensor([1.0, math.nan]), "group_size": 2}, "reward of row 1 is nan"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        grpo_advantages(**arguments)


def test_rewards_may_be_a_list_or_an_array():
    expected = grpo_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), group_size=2)
    for rewards in ([1, 0, 0, 1], [True, False, False, True], np.array([1.0, 0.0, 0.0, 1.0])):
        assert torch.equal(grpo_advantages(rewards, group_size=2), expected)
        assert torch.equal(grpo_advantages(rewards, prompt_ids=[5, 5, 7, 7]), expected)
    assert grpo_advantages([1, 0], group_size=2, sample_mask=[1, 0]).tolist() == [0, 0]
    with pytest.raises(DataError, match="cannot be read as numbers"):
        grpo_advantages(["good", "bad"], group_size=2)  # type: ignore[list-item]


LENGTHS = tensor([1.0, 2.0, 3.0, 4.0, 1.0, 5.0])


def test_the_deviation_may_be_the_batchs() -> None:
    advantages = grpo_advantages(REWARDS, group_size=3, std_over="batch", eps=1e-4)
    centred = grpo_advantages(REWARDS, group_size=3, normalize_std=False)
    torch.testing.assert_close(advantages, centred / (REWARDS.std() + 1e-4))


def test_opo_weighs_the_baseline_by_length() -> None:
    advantages = opo_advantages(REWARDS, LENGTHS, group_size=3)
    baselines = [1 / 6] * 3 + [(4 * 3 + 7 + 5 * 2) / 10] * 3
    torch.testing.assert_close(advantages, REWARDS - tensor(baselines))


def test_pass_at_k_rewards_the_lead_of_the_best() -> None:
    plain = pass_at_k_advantages(REWARDS, group_size=3, normalize_std=False)
    assert plain.tolist() == [1.0, 0, 0, 0, 4.0, 0]
    scaled = pass_at_k_advantages(REWARDS, group_size=3)
    assert scaled[4].item() == pytest.approx(4 / (REWARDS[3:].std().item() + 1e-6))
    assert pass_at_k_advantages([2.0, 2.0], group_size=2).tolist() == [0, 0]
    assert pass_at_k_advantages([2.0, 5.0], group_size=1).tolist() == [0, 0]


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_reinforce_plus_plus_is_whitened_over_the_tokens(lengths: torch.Tensor | None) -> None:
    repeats = torch.ones(6, dtype=torch.int64) if lengths is None else lengths.long()
    centred = grpo_advantages(REWARDS, group_size=3, normalize_std=False)
    tokens = centred.repeat_interleave(repeats)
    expected = (centred - tokens.mean()) / tokens.std(correction=0)
    advantages = reinforce_plus_plus_advantages(REWARDS, group_size=3, lengths=lengths)
    torch.testing.assert_close(advantages, expected)


def test_gdpo_wants_a_weight_for_each_reward() -> None:
    rewards = torch.stack([REWARDS, REWARDS], dim=1)
    with pytest.raises(DataError, match="'weights' has 1 entries, but each row has 2 rewards"):
        gdpo_advantages(rewards, weights=[1.0], group_size=3)


def test_groups_without_spread_are_marked() -> None:
    rewards = tensor([0.1, 0.1, 1.0, 0.0, 5.0, math.nan, math.nan, math.nan])
    marked = groups_without_spread(rewards, group_size=2, ignore_nan=True)
    assert marked.tolist() == [True, True, False, False, True, True, True, True]
    mask = tensor([1, 1, 1, 0])
    assert groups_without_spread(rewards[:4], group_size=2, sample_mask=mask).all()
    assert groups_without_spread([], group_size=2).shape == (0,)


def test_overlong_answers_are_punished_softly() -> None:
    penalty = overlong_penalty([10, 80, 90, 100, 120], max_length=100, buffer=20, penalty=0.5)
    assert penalty.tolist() == pytest.approx([0, 0, -0.25, -0.5, -0.5])


GROUPED = [
    grpo_advantages,
    lambda rewards, **how: opo_advantages(rewards, torch.arange(1, len(rewards) + 1), **how),
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    lambda rewards, **how: gdpo_advantages(rewards[:, None], **how),
]


@pytest.mark.parametrize("advantages", GROUPED)
def test_masked_rows_have_no_influence_on_any_advantage(advantages: Any) -> None:
    rewards = tensor([1.0, math.nan, 3.0, 4.0, 0.0, math.inf])
    mask = tensor([1, 0, 1, 1, 1, 0])
    found = advantages(rewards, group_size=3, sample_mask=mask)
    other = advantages(torch.where(mask == 1, rewards, 7.0), group_size=3, sample_mask=mask)
    assert torch.equal(found, other)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert (found[mask == 0] == 0).all()
    assert advantages(torch.zeros(0), group_size=3).shape == (0,)
