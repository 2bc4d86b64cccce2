"""What of every parameter a rank steps on, as megatron-core's distributed optimizer splits it.

Copies of a model have the same parameters. Megatron-core lays them out in buffers, and each copy
gets an equal part of the summed gradients: it alone has the moments of that part and, of bfloat16
weights, the float32 ones, takes the step, and gives the others its part of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from rl_backends.torch.optimizer import Optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_megatron.engine import DistributedDataParallel

__all__ = ["Share", "make_optimizer", "memory_users", "shares_of"]


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of one parameter.

    Attributes:
        parameter: Of the model.
        elements: Of the flattened parameter; there may be none.
        group: The ranks that have the parameter, of which each has a part.
    """

    parameter: nn.Parameter
    elements: slice
    group: Any

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the parameter's shape: a view of one dimension."""
        return tensor.view(-1)[self.elements]

    def whole(self, part: torch.Tensor | None) -> torch.Tensor:
        """All ranks' parts of a float32 state, bit for bit; all of the group call it.

        Args:
            part: This rank's, or None if it has none.
        """
        device = self.parameter.device
        # Sums of bits: adding 0.0 would change the sign of -0.0.
        bits = torch.zeros(self.parameter.numel(), dtype=torch.int32, device=device)
        if part is not None:
            bits[self.elements] = part.to(device).view(torch.int32)
        if self.group.size() > 1:
            dist.all_reduce(bits, group=self.group)
        return bits.view(torch.float32).view(self.parameter.shape)


def shares_of(model: DistributedDataParallel) -> dict[str, Share]:
    """This rank's part of every parameter, by name; in one order on all ranks of a group."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    shares = {}
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for parameter, (start, _, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            each = bucket.grad_data.numel() // group.size()
            first = bucket.offset + each * group.rank() - start
            begin, end = (min(max(0, edge), parameter.numel()) for edge in (first, first + each))
            shares[names[parameter]] = Share(parameter, slice(begin, end), group)
    return shares


def memory_users(model: DistributedDataParallel, optimizer: Optimizer | None) -> list[torch.Tensor]:
    """The parameters, and what megatron-core and the optimizer have in the same memory."""
    found: list[Any] = [*model.module.parameters()]
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        found += [buffer.param_data, *(bucket.param_data for bucket in buffer.buckets)]
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        found += [part for parts in group.cached_param_buffer_shard_list for part in parts or ()]
    if optimizer is not None:
        found += optimizer.parameters.values()
    return [tensor for tensor in found if tensor is not None]


def make_optimizer(shares: Mapping[str, Share], settings: Mapping[str, Any]) -> Optimizer:
    """Of this rank's parts; their gradients are set before each step.

    Args:
        shares: Of all parameters; those that require no gradient get no step.
        settings: The key ``optimizer`` of a checked configuration.
    """
    stepped = {
        name: share
        for name, share in shares.items()
        if share.elements.start < share.elements.stop and share.parameter.requires_grad
    }
    return Optimizer(
        {name: nn.Parameter(share.of(share.parameter.data)) for name, share in stepped.items()},
        settings,
        collects=False,
        undecayed={name for name, share in stepped.items() if share.parameter.dim() <= 1},
    )
