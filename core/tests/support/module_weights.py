"""What a module holds, to be compared later with what it holds then."""

from __future__ import annotations

import torch


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all that its state dict names."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
