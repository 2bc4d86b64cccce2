"""What one pair of answers costs: the preference losses of ``DPOLossFn``.

Each takes ``[n]`` log-ratios of the policy to the reference, of chosen and rejected answers, and
``beta`` and the label smoothing, and returns ``[n]`` costs. The names are those of TRL.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid, relu

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PREFERENCES", "SMOOTHED"]

T = torch.Tensor


def sigmoid(chosen: T, rejected: T, beta: float, smoothing: float) -> T:
    """Rafailov et al. 2023, "Direct Preference Optimization", eq. 7; smoothed, Mitchell 2023."""
    margin = beta * (chosen - rejected)
    return -((1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin))


def robust(chosen: T, rejected: T, beta: float, smoothing: float) -> T:
    """Chowdhury et al. 2024, "Provably Robust DPO", eq. 12: unbiased under flipped labels."""
    margin = beta * (chosen - rejected)
    kept, flipped = (1 - smoothing) * logsigmoid(margin), smoothing * logsigmoid(-margin)
    return (flipped - kept) / (1 - 2 * smoothing)


def exo_pair(chosen: T, rejected: T, beta: float, smoothing: float) -> T:
    """Ji et al. 2024, "Towards Efficient Exact Optimization", eq. 16: a reverse KL."""
    margin = beta * (chosen - rejected)
    won = margin.sigmoid() * (logsigmoid(margin) - math.log1p(-smoothing))
    return won + (-margin).sigmoid() * (logsigmoid(-margin) - math.log(smoothing))


def hinge(chosen: T, rejected: T, beta: float, _: float) -> T:
    """Liu et al. 2023, "RSO", eq. 9: no cost beyond a margin of 1."""
    return relu(1 - beta * (chosen - rejected))


def ipo(chosen: T, rejected: T, beta: float, _: float) -> T:
    """Azar et al. 2023, "A General Theoretical Paradigm", eq. 17: a margin of ``1 / (2 beta)``."""
    return (chosen - rejected - 1 / (2 * beta)).square()


def nca_pair(chosen: T, rejected: T, beta: float, _: float) -> T:
    """Chen et al. 2024, "Noise Contrastive Alignment", of a pair: absolute likelihoods count."""
    chosen, rejected = beta * chosen, beta * rejected
    return -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))


def bco_pair(chosen: T, rejected: T, beta: float, _: float) -> T:
    """Jung et al. 2024, "Binary Classifier Optimization", of a pair and without its shift."""
    return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)


def sppo_hard(chosen: T, rejected: T, beta: float, _: float) -> T:
    """Wu et al. 2024, "Self-Play Preference Optimization", eq. 4.7 with certain preferences."""
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero(chosen: T, rejected: T, beta: float, _: float) -> T:
    """D'Oosterlinck et al. 2024, "APO", eq. 7: the chosen answers are better than the policy's."""
    return 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()


def apo_down(chosen: T, rejected: T, beta: float, _: float) -> T:
    """The same, eq. 8: the chosen answers are worse than the policy's, and the rejected more so."""
    return (beta * chosen).sigmoid() + 1 - (beta * (chosen - rejected)).sigmoid()


def discopop(chosen: T, rejected: T, beta: float, _: float) -> T:
    """Lu et al. 2024, "Discovering Preference Optimization Algorithms", eq. 5, with tau 0.05."""
    margin = beta * (chosen - rejected)
    share = (margin / 0.05).sigmoid()
    return -(1 - share) * logsigmoid(margin) + share * (-margin).exp()


PREFERENCES: dict[str, Callable[[T, T, float, float], T]] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "exo_pair": exo_pair,
    "hinge": hinge,
    "ipo": ipo,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
}
#: Those that know a label smoothing.
SMOOTHED = ("sigmoid", "robust", "exo_pair")
