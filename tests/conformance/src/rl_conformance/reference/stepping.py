"""Which tensors decay in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = ["make_optimizer"]


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
