"""Modules that are nobody's backend, for the tests of refits from and into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_backends.modules import ModuleReceiver
from rl_core.futures import wait


class Model(nn.Module):
    """Tied weights, buffers, an empty and a 0-d tensor, and one whose strides are not its own."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype)  # buffers, one of them 0-d and integer
        self.odd = nn.Parameter(torch.randn(6, 4, dtype=dtype).t())
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.head = nn.Linear(8, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.randn(3, dtype=dtype), persistent=False)
        self.norm.num_batches_tracked += seed
        self.norm.running_mean += torch.randn(8, dtype=dtype)


class OwnEngine:
    """A loop that generates with a module, in a process of its own."""

    def __init__(self, seed: int) -> None:
        self.model = Model(seed)
        self.receiver = ModuleReceiver(self.model)

    def refit(self, info: dict[str, Any], options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.receiver.prepare_refit_info(info)
        wait(self.receiver.receive_weights(**options), 60)
        state = {name: tensor.tolist() for name, tensor in self.model.state_dict().items()}
        return self.receiver.weights_version, state
