"""Advantages and choices of single tokens, which need all tokens of a batch at once.

Compute them before a batch is split: a loss gets microbatches, and its value may not depend on
which rows are in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch

from rl_losses._base import read_tensor
from rl_losses._groups import Groups

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_losses._groups import Grouping, Numbers

__all__ = ["high_covariance", "optimal_token_baseline_advantages", "whiten"]


def whiten(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Values less their weighted mean, divided by their weighted standard deviation.

    With the KL in the reward: ``whiten(grpo_advantages(...)[:, None] - coefficient *
    kl_penalty(...), token_mask)``, which is NeMo RL's Reinforce++ with ``use_kl_in_reward``.

    Args:
        values: Of any shape, such as ``[B, S]`` advantages of tokens.
        weights: Of the same shape, such as 1 where a token counts; where 0, a value may be NaN.

    Returns:
        Of the same shape and type; 0 where the weight is 0.
    """
    counted = weights.to(values) > 0
    kept = torch.where(counted, values, 0.0)
    total = weights.to(values).sum().clamp(min=1)
    centred = torch.where(counted, kept - (kept * weights).sum() / total, 0.0)
    variance = (centred.square() * weights).sum() / total
    return centred * variance.clamp(min=1e-8).rsqrt()


def optimal_token_baseline_advantages(
    rewards: Numbers,
    *,
    token_mask: torch.Tensor,
    logprobs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    zero_tail: bool = True,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Rewards less a baseline of each token, which weighs a group's rows by their gradients.

    ``b_t = sum_i W_it r_i / sum_i W_it``, where ``W_it`` adds up ``1 - 2 pi + sum_v pi_v^2`` over
    the first t tokens of answer i. Source: verl 0.9.1, ``optimal_token_baseline`` and, for tokens
    that are no neighbours, ``tir_optimal_token_baseline``.

    ``policy.get_topk_logits(data, k)["topk_logits"].softmax(-1).square().sum(-1)``, with a column
    of zeros before it, is ``sum_pi_squared`` but for the probabilities beyond the k greatest.

    Args:
        rewards: ``[B]``.
        token_mask: ``[B, S]`` 1 on the answers.
        logprobs: ``[B, S]`` of the tokens, from the policy that generated them.
        sum_pi_squared: ``[B, S]`` sums of the squared probabilities of all tokens at each place.
        importance_weights: ``[B, S]`` of trainer to engine; None is 1.
        zero_tail: Where only one answer of a group is as long, the baseline is 0, and not its own
            reward.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B, S]`` float32; 0 where ``token_mask`` is 0.
    """
    groups = Groups.read(rewards, **grouping, caller="optimal_token_baseline_advantages")
    mask = token_mask.bool() & groups.valid[:, None]
    energy = 1 - 2 * logprobs.double().exp() + sum_pi_squared
    if importance_weights is not None:
        energy = energy * importance_weights.square()
    energy = torch.where(mask, energy, 0.0).cumsum(dim=1)
    # Column t of these is the answer's token t.
    lengths = mask.sum(dim=1, keepdim=True)
    inside = torch.arange(mask.shape[1], device=mask.device) < lengths
    of_answers = torch.zeros_like(energy).masked_scatter(inside, energy[mask])
    reward = groups.rewards[:, None]
    baseline = groups.sum(of_answers * reward) / (groups.sum(of_answers) + 1e-8)
    if zero_tail:
        baseline = torch.where(groups.sum(inside.double()) > 1, baseline, 0.0)
    advantages = torch.where(groups.size[:, None] > 1, reward - baseline, 0.0)
    return torch.zeros_like(energy).masked_scatter(mask, advantages[inside]).float()


def high_covariance(
    data: Mapping[str, Any],
    *,
    fraction: float = 2e-4,
    bounds: tuple[float, float] | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Tokens of which log-prob and advantage vary together, which lowers the entropy most.

    Without ``bounds`` these are the tokens of KL-Cov, for ``GRPOLossFn(kl_cov_penalty=...)``:
    ``data["high_covariance"] = high_covariance(data)``. With ``bounds`` they are those of Clip-Cov,
    which do not train: ``advantages[high_covariance(data, bounds=(1, 5))] = 0``. Source: Cui et al.
    2025, "The Entropy Mechanism of RL for Reasoning Language Models"; the defaults are verl's.

    Args:
        data: ``advantages`` ``[B]`` or ``[B, S]``, ``prev_logprobs`` and ``token_mask`` ``[B, S]``,
            ``sample_mask`` ``[B]`` of the whole batch.
        fraction: Of the tokens that count, how many are chosen; at least one is.
        bounds: Choose at random among tokens with a covariance between the two, instead of the
            tokens with the greatest.
        generator: For the random choice.

    Returns:
        ``[B, S]`` bool.
    """
    name = "high_covariance"
    tokens = read_tensor(data, "token_mask", [(-1, -1)], needed_by=name)
    rows, width = tokens.shape
    mask = (
        tokens.bool() & read_tensor(data, "sample_mask", [(rows,)], needed_by=name)[:, None].bool()
    )
    logprobs = read_tensor(data, "prev_logprobs", [(rows, width)], needed_by=name)[mask].double()
    advantages = read_tensor(data, "advantages", [(rows,), (rows, width)], needed_by=name).double()
    advantages = (advantages if advantages.dim() == 2 else advantages[:, None]).expand(mask.shape)[
        mask
    ]
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    count = min(max(int(fraction * len(covariance)), 1), len(covariance))
    if bounds is None:
        chosen = covariance.topk(count).indices
    else:
        between = ((covariance > bounds[0]) & (covariance < bounds[1])).nonzero()[:, 0]
        chosen = between[torch.randperm(len(between), generator=generator)[:count]]
    marked = torch.zeros_like(covariance, dtype=torch.bool)
    marked[chosen] = True
    return torch.zeros_like(mask).masked_scatter(mask, marked)
