"""Advantages relative to a group: how much better than the other answers to the same prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["grpo_advantages"]


def grpo_advantages(
    rewards: torch.Tensor | Sequence[float],
    *,
    group_size: int | None = None,
    prompt_ids: torch.Tensor | Sequence[int] | None = None,
    normalize_std: bool = True,
    leave_one_out_baseline: bool = False,
    sample_mask: torch.Tensor | Sequence[float] | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rewards less their group's baseline, optionally over the group's standard deviation.

    ``A_i = (r_i - b_i) / (std + eps)``. The baseline is the group's mean (Shao et al. 2024,
    "DeepSeekMath", section 4.1.2), or the mean of the others in the group (Kool et al. 2019, "Buy
    4 REINFORCE Samples, Get a Baseline for Free!"), which does not depend on the row itself. The
    standard deviation is the sample's (divided by n - 1). Dividing by it favours prompts that are
    nearly always or nearly never solved; ``normalize_std=False`` does not (Liu et al. 2025,
    "Understanding R1-Zero-Like Training").

    Args:
        rewards: ``[B]`` one for each row; a list or an array will do, here and below.
        group_size: Rows of a group, when groups are neighbours of equal size (as
            ``repeat_interleave`` lays them out). Give this or ``prompt_ids``.
        prompt_ids: ``[B]`` any integer that is equal within a group, or ``[B, S]`` prompts: equal
            rows are a group.
        normalize_std: Divide by the standard deviation.
        leave_one_out_baseline: The baseline leaves the row itself out.
        sample_mask: ``[B]`` rows with 0 are left out of their group and get 0.
        eps: Keeps groups whose rewards are all equal at 0.

    Returns:
        ``[B]`` float32. A group with one valid row has no baseline and gets 0.

    Raises:
        ConfigError: Both or none of ``group_size`` and ``prompt_ids`` are given.
        DataError: Shapes disagree, groups do not fill the batch, or a valid reward is not finite.
    """
    rewards = _tensor("rewards", rewards)
    prompt_ids = None if prompt_ids is None else _tensor("prompt_ids", prompt_ids)
    sample_mask = None if sample_mask is None else _tensor("sample_mask", sample_mask)
    if rewards.dim() != 1:
        raise DataError(
            f"grpo_advantages: 'rewards' has shape {list(rewards.shape)}, expected [B]",
            fix="give one reward for each row",
            key="rewards",
        )
    groups = _group_numbers(rewards, group_size, prompt_ids)
    valid = torch.ones_like(rewards, dtype=torch.bool)
    if sample_mask is not None:
        if sample_mask.shape != rewards.shape:
            raise DataError(
                f"grpo_advantages: 'sample_mask' has shape {list(sample_mask.shape)}, "
                f"'rewards' {list(rewards.shape)}",
                fix="give one mask entry for each reward",
                key="sample_mask",
            )
        valid = sample_mask.to(rewards.device) != 0
    wrong = valid & ~rewards.isfinite()
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise DataError(
            f"grpo_advantages: the reward of row {row} is {rewards[row].item()}",
            fix="mask the row with 'sample_mask', or correct the reward function",
            key="rewards",
            row=row,
        )
    values = torch.where(valid, rewards.double(), 0.0)
    size = _group_sum(valid.double(), groups)
    mean = _group_sum(values, groups) / size.clamp(min=1)
    centred = torch.where(valid, values - mean, 0.0)
    # r_i less the mean of the others is (r_i - mean) n / (n - 1).
    advantages = centred * size / (size - 1).clamp(min=1) if leave_one_out_baseline else centred
    if normalize_std:
        variance = _group_sum(centred.square(), groups) / (size - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + eps)
    return advantages.float()


def _tensor(key: str, given: object) -> torch.Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"grpo_advantages: '{key}' cannot be read as numbers: {error}",
            fix="give a number for each row, in a list, a tensor or an array",
            key=key,
        ) from None


def _group_sum(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """``[B]`` the sum over each row's group."""
    return torch.zeros_like(values).index_add(0, groups, values)[groups]


def _group_numbers(
    rewards: torch.Tensor, group_size: int | None, prompt_ids: torch.Tensor | None
) -> torch.Tensor:
    """``[B]`` numbers from 0, equal within a group."""
    if (group_size is None) == (prompt_ids is None):
        raise ConfigError(
            "grpo_advantages needs one of 'group_size' and 'prompt_ids'",
            fix="give 'group_size' for neighbouring groups of equal size, else 'prompt_ids'",
            key="group_size",
        )
    rows = rewards.shape[0]
    if prompt_ids is not None:
        if prompt_ids.dim() == 0 or prompt_ids.shape[0] != rows:
            raise DataError(
                f"grpo_advantages: 'prompt_ids' has shape {list(prompt_ids.shape)}, {rows} rewards",
                fix="give one prompt for each reward",
                key="prompt_ids",
            )
        if rows == 0:
            return torch.zeros(0, dtype=torch.int64, device=rewards.device)
        numbers: torch.Tensor = torch.unique(prompt_ids, dim=0, return_inverse=True)[1]
        return numbers.to(rewards.device)
    assert group_size is not None
    if group_size < 1 or rows % group_size:
        raise DataError(
            f"grpo_advantages: {rows} rewards do not fill groups of {group_size}",
            fix="give 'prompt_ids' if groups differ in size",
            key="rewards",
        )
    return torch.arange(rows, device=rewards.device) // group_size
