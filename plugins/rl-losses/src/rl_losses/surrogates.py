"""What one token costs, from its ratio and its advantage: the surrogates of ``GRPOLossFn``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_losses.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_losses._shares import Shares

__all__ = ["SURROGATES", "Step", "exp"]


def exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """The ratio of any shape, with log-ratios cut off at +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True, kw_only=True)
class Step:
    """The rows of a call, and the bounds of the step that the policy may take.

    Attributes:
        shares: The masks.
        logprobs: ``[b, s]`` of the policy; 0 where masked.
        previous: ``[b, s]`` of the policy that the step starts from; 0 where masked.
        log_ratio: ``[b, s]`` of token or sequence, as ``importance_ratio`` chooses.
        ratio: ``[b, s]`` its exponential.
        advantages: ``[b, s]``; 0 where masked.
        low: ``ratio_clip_min``.
        high: ``ratio_clip_max``.
        most: ``ratio_clip_c``.
        temperatures: Of SAPO, for advantages above 0 and for the others.
    """

    shares: Shares
    logprobs: torch.Tensor
    previous: torch.Tensor
    log_ratio: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    low: float
    high: float
    most: float | None
    temperatures: tuple[float, float]


#: ``[b, s]`` costs, and ``[b, s]`` bool: the tokens that a bound changes.
Costs = tuple[torch.Tensor, torch.Tensor]


def clip(step: Step) -> Costs:
    """``max(-r A, -clip(r) A)``, where A < 0 at most ``c |A|``. Schulman 2017, eq. 7; Ye 2020."""
    plain = -step.advantages * step.ratio
    clipped = step.ratio.clamp(1 - step.low, 1 + step.high)
    cost = torch.maximum(plain, -step.advantages * clipped)
    if step.most is not None:
        bounded = torch.minimum(cost, -step.most * step.advantages)
        cost = torch.where(step.advantages < 0, bounded, cost)
    return cost, cost != plain


def cispo(step: Step) -> Costs:
    """``-sg(clip(r)) A log pi``: every token learns, with a clipped weight. MiniMax-M1, eq. 4."""
    weight = step.ratio.detach().clamp(1 - step.low, 1 + step.high)
    return -weight * step.advantages * step.logprobs, weight != step.ratio


def sapo(step: Step) -> Costs:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``: a gate in place of the clip. Gao et al. 2025, SAPO."""
    positive, negative = step.temperatures
    tau = torch.where(step.advantages > 0, positive, negative).to(step.ratio)
    cost = -(4 / tau) * torch.sigmoid(tau * (step.ratio - 1)) * step.advantages
    return cost, torch.zeros_like(cost, dtype=torch.bool)


def gmpo(step: Step) -> Costs:
    """``-A exp(mean_t(clipped log r_t))``, one ratio for a row. Zhao et al. 2025, GMPO, eq. 4."""
    sign = step.advantages.sign()
    clipped = step.log_ratio.clamp(-step.low, step.high)
    kept = sign * torch.minimum(sign * step.log_ratio, sign * clipped)
    ratio = exp(step.shares.row_mean(kept))[:, None]
    return -step.advantages * ratio, (sign != 0) & (kept != step.log_ratio)


def dppo(step: Step) -> Costs:
    """``-sg(min(r, c)) A log pi``, unless the probability moved beyond a bound. DPPO-Binary-TV."""
    moved = step.logprobs.detach().exp() - step.previous.exp()
    kept = torch.where(step.advantages > 0, moved <= step.high, moved >= -step.low)
    weight = step.ratio.detach().clamp(max=step.most)
    return torch.where(kept, -weight * step.advantages * step.logprobs, 0.0), ~kept


SURROGATES: dict[str, Callable[[Step], Costs]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
}
