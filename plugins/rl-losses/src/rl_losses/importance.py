"""Weights for tokens that another policy sampled than the one that learns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from rl_losses.surrogates import exp

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_losses._shares import Shares

__all__ = ["importance_weights", "over_row"]


def importance_weights(
    shares: Shares,
    log_ratio: torch.Tensor,
    *,
    cap: float,
    floor: float,
    outside: Literal["truncate", "mask", "mask_rows"],
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
    judged = weights
    if outside == "mask_rows":
        judged = exp(over_row(log_ratio, "sequence", shares.row_mean))
    beyond = (judged < floor) | (judged > cap)
    if outside == "truncate":
        weights = weights.clamp(floor, cap)
    else:
        weights = torch.where(beyond, 0.0, weights)
    return weights, beyond.to(weights.dtype)


def over_row(
    values: torch.Tensor, level: str, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``[b, s]`` values as they are, or each row's one value where the level is the sequence."""
    return values if level == "token" else reduce(values)[:, None].expand_as(values)
