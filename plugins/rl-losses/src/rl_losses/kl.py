"""The KL divergence from the reference policy, estimated at sampled tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_LOG_RATIO", "kl_penalty"]

#: Log-ratios beyond this are cut off, so that their exponential stays finite.
MAX_LOG_RATIO = 20.0


def kl_penalty(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimates ``KL(policy || reference)`` from the log-probs of sampled tokens.

    With ``d = reference - policy``: k1 is ``-d`` (unbiased, may be negative; as a penalty its
    gradient has mean zero on samples of the policy itself, so it is for measuring), k2 is
    ``d^2 / 2`` (biased; its gradient is that of the KL on samples of the policy itself), k3 is
    ``exp(d) - 1 - d`` (unbiased, never negative; d is cut off at +-20). Source: Schulman 2020,
    "Approximating KL Divergence".

    To subtract the KL from the rewards instead of adding it to the loss, write
    ``advantages[:, None] - coefficient * kl_penalty(prev_logprobs, reference_logprobs)``.

    Args:
        logprobs: Of the policy, any shape.
        reference_logprobs: Of the reference, same shape.
        estimator: Which of the three.
        input_clamp: d is cut off at plus and minus this, and has no gradient beyond.
        output_clamp: The (weighted) estimate is cut off at plus and minus this.
        weight: Factor on the estimate, same shape. Where ``input_clamp`` cuts d off, its
            gradient is cut off too.

    Returns:
        Estimates of the same shape.
    """
    difference = reference_logprobs - logprobs
    bound = math.inf if input_clamp is None else input_clamp
    if estimator == "k3":
        bound = min(bound, MAX_LOG_RATIO)
    clamped = difference.clamp(-bound, bound)
    estimate = _ESTIMATORS[estimator](clamped)
    if weight is not None:
        estimate = estimate * torch.where(difference == clamped, weight, weight.detach())
    if output_clamp is not None:
        estimate = estimate.clamp(-output_clamp, output_clamp)
    return estimate


_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: torch.expm1(d) - d,
}
