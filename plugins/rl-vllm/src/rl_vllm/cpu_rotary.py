"""vLLM's CPU kernel for rotary positions takes the heads of a three-dimensional query for tokens.

It then turns each head by the position of another token, and reads positions beyond the last one.
Models that pass heads as a dimension (LFM2; attention over latents with plain positions) compute
something else. vLLM's own formula in torch does not depend on the shape.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["mixes_up_heads", "repair_rotary"]


def mixes_up_heads(turn: Callable[..., None]) -> bool:
    """Measures whether an operator gives heads as a dimension other positions than heads in a row.

    Args:
        turn: Called as vLLM calls its own: positions, query, key, size of a head, cosines and
            sines, whether the two halves of a head are turned together.
    """
    tokens, heads, size = 2, 2, 32
    # The operator may read positions beyond the two, but not beyond this tensor.
    positions = torch.zeros(64, dtype=torch.long).index_fill_(0, torch.tensor([1]), 3)[:tokens]
    angles = torch.arange(4.0)[:, None] / torch.arange(1.0, size // 2 + 1)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    values = torch.linspace(-1, 1, tokens * heads * size)
    found: list[torch.Tensor] = []
    for shape in ((tokens, heads * size), (tokens, heads, size)):
        query, key = values.clone().view(shape), values.clone().view(shape)
        turn(positions, query, key, size, table, True)
        found.append(torch.stack([query.flatten(), key.flatten()]))
    return not torch.allclose(found[0], found[1], atol=1e-5)


def repair_rotary() -> None:
    """Uses vLLM's formula in torch for such queries if its CPU kernel fails the measurement.

    For a worker's process, before it loads a model.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    compute = RotaryEmbedding.forward_cpu
    if not current_platform.is_cpu() or hasattr(compute, "__wrapped__"):
        return
    if not mixes_up_heads(_custom_ops.rotary_embedding):
        return

    @wraps(compute)
    def by_token(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        kernel = compute if query.dim() < 3 else RotaryEmbedding.forward_native
        return kernel(self, positions, query, key)

    RotaryEmbedding.forward_cpu = by_token
