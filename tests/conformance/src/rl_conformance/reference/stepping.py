"""How large a step is: the learning rate by step, and which tensors decay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = ["make_optimizer", "rate_of"]


def make_optimizer(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.AdamW:
    """AdamW with an :class:`~rl_core.interfaces.OptimizerConfig`; biases and norms do not decay."""
    options = {"lr": 1e-5, "weight_decay": 0.01} | dict(config)
    options.pop("name", None)
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **options)


def rate_of(step: int, peak: float, schedule: Mapping[str, Any]) -> float:
    """The learning rate of a step, counted from 0.

    Args:
        step: Steps taken before.
        peak: The full rate.
        schedule: A :class:`~rl_core.interfaces.SchedulerConfig`.
    """
    warmup, name = schedule.get("warmup_steps", 0), schedule.get("name", "constant")
    if step < warmup:
        return float(peak * (step + 1) / warmup)
    if name == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, schedule["total_steps"] - warmup))
    left = 1 - done if name == "linear" else (1 + math.cos(math.pi * done)) / 2
    lowest: float = schedule.get("min_lr_ratio", 0.0)
    return float(peak * (lowest + (1 - lowest) * left))
