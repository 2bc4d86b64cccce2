"""Advantages relative to a group: how much better than the other answers to the same prompt.

All take rewards ``[B]`` as a tensor, list or array, and the groups in one of two ways:
``group_size``, when groups are neighbours of equal size (as ``repeat_interleave`` lays them out),
or ``prompt_ids``, ``[B]`` integers that are equal within a group, or ``[B, S]`` prompts of which
equal rows are a group. Rows whose ``sample_mask`` ``[B]`` is 0 are left out of their group and get
0, and with ``ignore_nan=True`` so are rows whose reward is NaN. All return ``[B]`` float32; a group
with one valid row has no baseline and gets 0. All raise ``ConfigError`` where both or none of
``group_size`` and ``prompt_ids`` are given, and ``DataError`` where shapes disagree, groups do not
fill the batch, or a valid reward is not finite. To bound advantages, clamp what is returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import torch

from rl_core.errors import DataError
from rl_losses._groups import Groups, read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_losses._groups import Numbers

__all__ = [
    "Grouping",
    "gdpo_advantages",
    "groups_without_spread",
    "grpo_advantages",
    "opo_advantages",
    "overlong_penalty",
    "pass_at_k_advantages",
    "reinforce_plus_plus_advantages",
]


class Grouping(TypedDict, total=False):
    """Which rows are a group, and which count.

    Attributes:
        group_size: Rows of a group. Give this or ``prompt_ids``.
        prompt_ids: ``[B]`` or ``[B, S]``.
        sample_mask: ``[B]`` rows that count.
        ignore_nan: Rows of which a reward is NaN do not count.
    """

    group_size: int | None
    prompt_ids: Numbers | None
    sample_mask: Numbers | None
    ignore_nan: bool


def grpo_advantages(
    rewards: Numbers,
    *,
    group_size: int | None = None,
    prompt_ids: Numbers | None = None,
    normalize_std: bool = True,
    std_over: Literal["group", "batch"] = "group",
    leave_one_out_baseline: bool = False,
    sample_mask: Numbers | None = None,
    ignore_nan: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rewards less their group's baseline, optionally over a standard deviation.

    ``A_i = (r_i - b_i) / (std + eps)``. The baseline is the group's mean (Shao et al. 2024,
    "DeepSeekMath", section 4.1.2), or the mean of the others in the group (RLOO; Kool et al. 2019,
    "Buy 4 REINFORCE Samples, Get a Baseline for Free!"), which does not depend on the row itself.
    The standard deviation is the sample's (divided by n - 1). Dividing by it favours prompts that
    are nearly always or nearly never solved; ``normalize_std=False`` does not (Dr.GRPO; Liu et al.
    2025, "Understanding R1-Zero-Like Training").

    Args:
        rewards: ``[B]`` one for each row.
        group_size: Rows of a group. Give this or ``prompt_ids``.
        prompt_ids: ``[B]`` or ``[B, S]``.
        normalize_std: Divide by the standard deviation.
        std_over: Of the rewards of the group, or of the whole batch.
        leave_one_out_baseline: The baseline leaves the row itself out.
        sample_mask: ``[B]`` rows that count.
        ignore_nan: Rows whose reward is NaN do not count.
        eps: Keeps groups whose rewards are all equal at 0. TRL has 1e-4.

    Returns:
        ``[B]`` float32. A group with one valid row has no baseline and gets 0.

    Raises:
        ConfigError: Both or none of ``group_size`` and ``prompt_ids`` are given.
        DataError: Shapes disagree, groups do not fill the batch, or a valid reward is not finite.
    """
    groups = Groups.read(
        rewards,
        group_size=group_size,
        prompt_ids=prompt_ids,
        sample_mask=sample_mask,
        ignore_nan=ignore_nan,
        caller="grpo_advantages",
    )
    advantages = groups.centred(groups.rewards)
    if leave_one_out_baseline:
        # r_i less the mean of the others is (r_i - mean) n / (n - 1).
        advantages = advantages * groups.size / (groups.size - 1).clamp(min=1)
    if normalize_std:
        whole = Groups(
            rewards=groups.rewards,
            numbers=torch.zeros_like(groups.numbers),
            valid=groups.valid,
        )
        deviation = {"group": groups, "batch": whole}[std_over].std(groups.rewards)
        advantages = advantages / (deviation + eps)
    return advantages.float()


def opo_advantages(
    rewards: Numbers,
    lengths: Numbers,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Rewards less the group's mean weighted by length, the baseline of least variance.

    ``A_i = r_i - sum_j l_j r_j / sum_j l_j``. Source: Hao et al. 2025, "On-Policy RL with Optimal
    Reward Baseline", eq. 7.

    Args:
        rewards: ``[B]``.
        lengths: ``[B]`` tokens of each answer.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` float32.
    """
    groups = Groups.read(
        rewards,
        **grouping,
        caller="opo_advantages",
    )
    tokens = read_rows("lengths", lengths, groups.rewards, "opo_advantages").double()
    return groups.centred(groups.rewards, groups.keep(tokens)).float()


def pass_at_k_advantages(
    rewards: Numbers,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """The best row of a group gets its lead over the second best, all others 0.

    What is maximised is the best of k answers. Where several rows are best, the lead is 0. Source:
    Tang et al. 2025, arXiv 2503.19595.

    Args:
        rewards: ``[B]``.
        normalize_std: Divide by the group's standard deviation.
        eps: Is added to the standard deviation.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` float32.
    """
    groups = Groups.read(
        rewards,
        **grouping,
        caller="pass_at_k_advantages",
    )
    same = groups.numbers[:, None] == groups.numbers
    others = same & groups.valid & ~torch.eye(len(same), dtype=torch.bool, device=same.device)
    second = torch.where(others, groups.rewards, -torch.inf)
    lead = torch.zeros_like(groups.rewards)
    if len(same):
        lead = groups.rewards - second.amax(dim=1)
    lead = torch.where(lead.isfinite() & (groups.size > 1), groups.keep(lead).clamp(min=0), 0.0)
    if normalize_std:
        lead = lead / (groups.std(groups.rewards) + eps)
    return lead.float()


def reinforce_plus_plus_advantages(
    rewards: Numbers,
    *,
    lengths: Numbers | None = None,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Rewards less their group's mean, then whitened over the batch.

    ``A_i = (c_i - mean(c)) / std(c)`` with ``c_i = r_i - mean_group(r)``, mean and variance over
    all tokens of the batch. With one group it is without a baseline. Source: Hu et al. 2025,
    "REINFORCE++".

    Args:
        rewards: ``[B]``.
        lengths: ``[B]`` tokens of each answer; without them all rows weigh the same.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` float32.
    """
    caller = "reinforce_plus_plus_advantages"
    groups = Groups.read(
        rewards,
        **grouping,
        caller=caller,
    )
    weights = groups.valid.double()
    if lengths is not None:
        weights = groups.keep(read_rows("lengths", lengths, groups.rewards, caller).double())
    total = weights.sum().clamp(min=1)
    centred = groups.centred(groups.rewards)
    centred = groups.keep(centred - (centred * weights).sum() / total)
    variance = (centred.square() * weights).sum() / total
    return (centred * variance.clamp(min=1e-8).rsqrt()).float()


def gdpo_advantages(
    rewards: torch.Tensor | Sequence[Sequence[float]],
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Several rewards, each normalised within its group before they are added up.

    ``S_i = sum_k w_k (r_ik - mean_group(r_k)) / (std_group(r_k) + eps)``, and
    ``A_i = (S_i - mean(S)) / (std(S) + eps)`` over the batch: no component drowns out the others.
    Source: 2026, "GDPO", arXiv 2601.05242. It is TRL's ``normalize_then_sum``.

    Args:
        rewards: ``[B, K]`` one for each row and component.
        weights: K factors; 1 each by default.
        eps: Is added to standard deviations. TRL has 1e-4.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` float32.

    Raises:
        DataError: There are not K weights.
    """
    groups = Groups.read(
        rewards,
        **grouping,
        caller="gdpo_advantages",
        dims=2,
    )
    components = groups.rewards.unbind(dim=1)
    factors = [1.0] * len(components) if weights is None else list(weights)
    if len(factors) != len(components):
        raise DataError(
            f"gdpo_advantages: {len(factors)} weights for {len(components)} rewards of a row",
            fix="give one weight for each component",
            key="weights",
        )
    summed = torch.zeros_like(groups.rewards[:, 0])
    for factor, one in zip(factors, components, strict=True):
        summed = summed + factor * groups.centred(one) / (groups.std(one) + eps)
    whole = Groups(rewards=summed, numbers=torch.zeros_like(groups.numbers), valid=groups.valid)
    return (whole.centred(summed) / (whole.std(summed) + eps)).float()


def groups_without_spread(
    rewards: Numbers,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Marks rows of groups whose rewards are all equal: they teach a policy nothing.

    Dynamic sampling (Yu et al. 2025, "DAPO", section 3.2) leaves them out and samples other
    prompts: ``rows = (~groups_without_spread(rewards, group_size=n)).nonzero()[:, 0]``.

    Args:
        rewards: ``[B]``, before any shaping by length.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` bool; True for all rows of a group with one reward, with one valid row or without.
    """
    groups = Groups.read(
        rewards,
        **grouping,
        caller="groups_without_spread",
    )
    _, first = torch.unique(groups.rewards, return_inverse=True)
    count = int(groups.numbers.max()) + 1 if len(first) else 0
    least = torch.full((count,), len(first), device=first.device)
    most = torch.full((count,), -1, device=first.device)
    least.scatter_reduce_(0, groups.numbers[groups.valid], first[groups.valid], "amin")
    most.scatter_reduce_(0, groups.numbers[groups.valid], first[groups.valid], "amax")
    return (least >= most)[groups.numbers]


def overlong_penalty(
    lengths: Numbers, *, max_length: int, buffer: int, penalty: float = 1.0
) -> torch.Tensor:
    """What DAPO adds to the rewards of answers that get too long.

    0 up to ``max_length - buffer`` tokens, from there down to ``-penalty`` at ``max_length``, and
    no further. Source: Yu et al. 2025, "DAPO", eq. 13.

    Args:
        lengths: ``[B]`` tokens of each answer.
        max_length: Tokens an answer may have.
        buffer: Tokens over which the penalty grows, at least 1.
        penalty: The greatest penalty.

    Returns:
        ``[B]`` float32, at most 0.
    """
    excess = torch.as_tensor(lengths).double() - (max_length - buffer)
    return (-penalty * (excess / buffer).clamp(0, 1)).float()
