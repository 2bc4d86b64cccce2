"""What one token costs, from its ratio and its advantage: the surrogates of ``GRPOLossFn``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_losses.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_losses._shares import Shares

__all__ = ["SURROGATES", "Step", "exp"]

#: Probabilities and weights below this count as this where their logarithm is taken.
_LEAST = 1e-8


def exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """The ratio of any shape, with log-ratios cut off at +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True, kw_only=True)
class Step:
    """The rows of a call, and the options that bound the step which the policy may take.

    Attributes:
        options: The :class:`rl_losses.grpo.GRPOLossFn`, which knows this module.
        shares: The masks.
        logprobs: ``[b, s]`` of the policy; 0 where masked.
        previous: ``[b, s]`` of the policy that the step starts from; 0 where masked.
        log_ratio: ``[b, s]`` of token or sequence, as ``importance_ratio`` chooses.
        ratio: ``[b, s]`` its exponential.
        advantages: ``[b, s]``; 0 where masked.
        weights: ``[b, s]`` importance weights of the engine's tokens, or None.
    """

    options: Any
    shares: Shares
    logprobs: torch.Tensor
    previous: torch.Tensor
    log_ratio: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor | None

    @property
    def clipped(self) -> torch.Tensor:
        """``[b, s]`` the ratio within its bounds."""
        return self.ratio.clamp(1 - self.options.ratio_clip_min, 1 + self.options.ratio_clip_max)


#: ``[b, s]`` costs, and ``[b, s]`` bool: the tokens that a bound changes.
Costs = tuple[torch.Tensor, torch.Tensor]


def clip(step: Step) -> Costs:
    """``max(-r A, -clip(r) A)``, where A < 0 at most ``c |A|``. Schulman 2017, eq. 7; Ye 2020."""
    plain = -step.advantages * step.ratio
    cost = torch.maximum(plain, -step.advantages * step.clipped)
    if step.options.ratio_clip_c is not None:
        bounded = torch.minimum(cost, -step.options.ratio_clip_c * step.advantages)
        cost = torch.where(step.advantages < 0, bounded, cost)
    return cost, cost != plain


def cispo(step: Step) -> Costs:
    """``-sg(clip(r)) A log pi``: every token learns, with a clipped weight. MiniMax-M1, eq. 4."""
    weight = step.clipped.detach()
    return -weight * step.advantages * step.logprobs, weight != step.ratio


def sapo(step: Step) -> Costs:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``: a gate in place of the clip. Gao et al. 2025, SAPO."""
    options = step.options
    taus = (options.sapo_temperature_pos, options.sapo_temperature_neg)
    tau = torch.where(step.advantages > 0, *taus).to(step.ratio)
    cost = -(4 / tau) * torch.sigmoid(tau * (step.ratio - 1)) * step.advantages
    return cost, _none(step)


def gmpo(step: Step) -> Costs:
    """``-A exp(mean_t(clipped log r_t))``, one ratio for a row. Zhao et al. 2025, GMPO, eq. 4."""
    sign = step.advantages.sign()
    clipped = step.log_ratio.clamp(-step.options.ratio_clip_min, step.options.ratio_clip_max)
    kept = sign * torch.minimum(sign * step.log_ratio, sign * clipped)
    ratio = exp(step.shares.row_mean(kept))[:, None]
    return -step.advantages * ratio, (sign != 0) & (kept != step.log_ratio)


def vespo(step: Step) -> Costs:
    """``-sg(phi(w)) A log pi`` with one w for a row. 2026, "VESPO", arXiv 2602.10693; TRL 1.16.

    ``phi(w) = exp(lambda (1 - w)) w^k``, and w is the product over a row of ratios and importance
    weights, which therefore are not multiplied to the cost again.
    """
    log_w = step.shares.row_sum(step.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if step.weights is not None:
        log_w = log_w + step.shares.row_sum(step.weights.clamp(min=_LEAST).log())
    log_w = log_w.clamp(math.log(_LEAST), MAX_LOG_RATIO)[:, None]
    pairs = zip(step.options.vespo_pos, step.options.vespo_neg, strict=True)
    k, decay = (torch.where(step.advantages >= 0, pos, neg) for pos, neg in pairs)
    phi = (decay * (1 - log_w.exp()) + k * log_w).exp()
    return -phi * step.advantages * step.logprobs, _none(step)


def reinforce(step: Step) -> Costs:
    """``-A log pi``, without a ratio. Williams 1992, "Simple Statistical Gradient-Following"."""
    return -step.advantages * step.logprobs, _none(step)


def dppo(step: Step) -> Costs:
    """``-sg(min(r, c)) A log pi``, unless the probability moved beyond a bound. DPPO-Binary-TV."""
    moved = step.logprobs.detach().exp() - step.previous.exp()
    low, high = step.options.ratio_clip_min, step.options.ratio_clip_max
    return _trusted(step, torch.where(step.advantages > 0, moved <= high, moved >= -low))


def dppo_kl(step: Step) -> Costs:
    """The same with bounds of the KL between taking a token or another: DPPO-Binary-KL."""
    now, before = step.logprobs.detach(), step.previous
    p, q = now.exp(), before.exp()
    kl = q * (before - now) + (1 - q) * ((1 - q + _LEAST) / (1 - p + _LEAST)).log()
    gained = (kl <= step.options.ratio_clip_max) | (p <= q)
    lost = (kl <= step.options.ratio_clip_min) | (p >= q)
    return _trusted(step, torch.where(step.advantages > 0, gained, lost))


def _trusted(step: Step, kept: torch.Tensor) -> Costs:
    weight = step.ratio.detach().clamp(max=step.options.ratio_clip_c or math.inf)
    return torch.where(kept, -weight * step.advantages * step.logprobs, 0.0), ~kept


def _none(step: Step) -> torch.Tensor:
    return torch.zeros_like(step.shares.tokens)


SURROGATES: dict[str, Callable[[Step], Costs]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "dppo_kl": dppo_kl,
    "vespo": vespo,
    "reinforce": reinforce,
}
