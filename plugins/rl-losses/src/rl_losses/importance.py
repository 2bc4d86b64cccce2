"""Weights for tokens that another policy sampled than the one that learns, or none for them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from rl_losses.kl import kl_penalty
from rl_losses.surrogates import exp

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_losses._shares import Shares

__all__ = ["importance_weights", "over_row", "rejected"]


def importance_weights(
    shares: Shares,
    log_ratio: torch.Tensor,
    *,
    cap: float,
    floor: float,
    outside: Literal["truncate", "mask"],
    level: Literal["token", "sequence"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratio of trainer to engine, within bounds. ``GRPOLossFn`` explains the options.

    Args:
        shares: The masks.
        log_ratio: ``[b, s]`` log-probs of the trainer less those of the engine; 0 where masked.
        cap: The greatest weight.
        floor: The least.
        outside: What becomes of a weight beyond them.
        level: A weight for each token, or for each row the product over its tokens.

    Returns:
        ``[b, s]`` weights, and ``[b, s]`` 1 where they are outside of the bounds, else 0.
    """
    weights = exp(over_row(log_ratio, level, shares.row_sum))
    beyond = (weights < floor) | (weights > cap)
    if outside == "truncate":
        weights = weights.clamp(floor, cap)
    else:
        weights = torch.where(beyond, 0.0, weights)
    return weights, beyond.to(weights.dtype)


def rejected(
    shares: Shares, log_ratio: torch.Tensor, statistic: str, low: float | None, high: float
) -> torch.Tensor:
    """``[b, s]`` bool: tokens, or all tokens of rows, where trainer and engine differ too much.

    Args:
        shares: The masks.
        log_ratio: As above.
        statistic: An estimator of :func:`~rl_losses.kl.kl_penalty`, as it is at each token, or
            summed or averaged over rows, or the greatest of a row: such as ``"seq_mean_k1"``.
        low: The least that is kept; for k1 of the ratio, which is ``exp(-k1)``, and None is the
            inverse of ``high``.
        high: The greatest that is kept.
    """
    level, _, estimator = statistic.rpartition("_")
    if estimator == "k1":
        values, least = log_ratio, 1 / high if low is None else low
        low, high = math.log(least) if least else -math.inf, math.log(high)
    else:
        # Of samples of the engine, the KL from the trainer.
        values = kl_penalty(torch.zeros_like(log_ratio), log_ratio, estimator)  # type: ignore[arg-type]
    if level != "token":
        values = _OVER_ROWS[level](shares, values)[:, None].expand_as(values)
    return (values < (low or 0.0)) | (values > high)


_OVER_ROWS: dict[str, Callable[[Shares, torch.Tensor], torch.Tensor]] = {
    "seq_sum": lambda shares, values: shares.row_sum(values),
    "seq_mean": lambda shares, values: shares.row_mean(values),
    "seq_max": lambda shares, values: shares.keep(values).amax(dim=1),
}


def over_row(
    values: torch.Tensor, level: str, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``[b, s]`` values as they are, or each row's one value where the level is the sequence."""
    return values if level == "token" else reduce(values)[:, None].expand_as(values)
