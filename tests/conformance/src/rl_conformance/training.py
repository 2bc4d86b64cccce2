"""Losses and settings with which the checks train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import random_prompts
from rl_conformance.expect import require_fault
from rl_core.interfaces import LossFunction, LossType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.batch import BatchedDataDict

__all__ = [
    "AdvantageLoss",
    "InfiniteGradientLoss",
    "NanLoss",
    "NegativeLogLikelihood",
    "training_batch",
    "training_config",
    "without_finite_gradient",
]


def training_config() -> dict[str, Any]:
    """Settings with which every policy trains: a step big enough to see, no clipping."""
    return {
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        "scheduler": {"name": "constant"},
        "max_grad_norm": None,
        "seed": 0,
    }


def training_batch(lengths: Sequence[int], *, seed: int = 0, **extra: Any) -> BatchedDataDict[Any]:
    """Random sequences; every token but the first counts."""
    data = random_prompts(lengths, seed=seed)
    positions = torch.arange(data["input_ids"].shape[1])
    real = (positions < data["input_lengths"][:, None]) & (positions > 0)
    data["token_mask"] = real.float()
    data["sample_mask"] = torch.ones(len(lengths))
    data.update(extra)
    return data


class NegativeLogLikelihood(LossFunction):
    """Mean over valid tokens of minus the log-prob."""

    loss_type = LossType.TOKEN_LEVEL

    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        weights = _weights(inputs, data)
        loss = -(inputs * weights).sum() / global_valid_toks.clamp(min=1)
        return loss, {"conformance_tokens": float(weights.sum())}


class AdvantageLoss(LossFunction):
    """Mean over valid tokens of minus the advantage times the log-prob.

    Reads ``advantages`` ``[B]`` from the batch.
    """

    loss_type = LossType.TOKEN_LEVEL

    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        advantages = data["advantages"].to(inputs.device)[:, None]
        total = (inputs * advantages * _weights(inputs, data)).sum()
        return -total / global_valid_toks.clamp(min=1), {}


class NanLoss(NegativeLogLikelihood):
    """Fault: the loss is not a number."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        loss, metrics = super().__call__(*args, **kwargs)
        return loss * float("nan"), metrics


class InfiniteGradientLoss(NegativeLogLikelihood):
    """Fault: the loss is finite, its gradient is not."""

    def __call__(
        self, inputs: torch.Tensor, data: BatchedDataDict[Any], **counts: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        loss, metrics = super().__call__(inputs, data, **counts)
        return without_finite_gradient(loss, inputs), metrics


def without_finite_gradient(loss: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """The same loss, with the gradient of a root at 0; fails if torch makes that finite."""
    faulty = loss + (loss - loss.detach()).sqrt()
    [gradient] = torch.autograd.grad(faulty, inputs, retain_graph=True)
    finite = gradient.isfinite().all()
    require_fault(not finite, "a gradient with NaN", "torch made the gradient finite")
    return faulty


def _weights(inputs: torch.Tensor, data: BatchedDataDict[Any]) -> torch.Tensor:
    weights: torch.Tensor = data["token_mask"] * data["sample_mask"][:, None]
    weights = weights[:, : inputs.shape[1]].to(inputs.device).float()
    weights[:, 0] = 0
    return weights
