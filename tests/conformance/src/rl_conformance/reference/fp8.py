"""Keys and values as an FP8 cache keeps them, seen at the projections that make them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

__all__ = ["E4M3_MAX", "observed", "rounded"]

#: Largest finite value of float8_e4m3fn.
E4M3_MAX = 448.0


@contextmanager
def observed(model: nn.Module, kinds: str) -> Generator[dict[tuple[int, str], list[torch.Tensor]]]:
    """Magnitudes by layer and kind of all that passes in the meantime, as a cache would hold it."""
    seen: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)

    def look(attention: Any, given: Any, named: dict[str, Any]) -> None:
        hidden, rotation = named["hidden_states"], named["position_embeddings"]
        for kind in kinds:
            made = getattr(attention, f"{kind}_proj")(hidden)
            heads = made.view(*hidden.shape[:-1], -1, attention.head_dim)
            if kind != "v":
                normalized = getattr(attention, f"{kind}_norm", nn.Identity())(heads)
                heads = _rotated(normalized, *rotation)
            seen[attention.layer_idx, kind].append(heads.abs().flatten().float())

    layers = [m for name, m in model.named_modules() if name.endswith(".self_attn")]
    hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``[b, tokens, heads, head_dim]`` turned by the angles of their positions."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return heads * cos[:, :, None] + turned * sin[:, :, None]


def rounded(model: nn.Module, scales: Mapping[str, float]) -> None:
    """From now on keys and values go through float8, divided by the scale they have there.

    Args:
        model: Changed in place.
        scales: By names such as ``"layer_0.k_scale"``, looked at in every pass; 1 where missing.
    """

    def through(name: str) -> Any:
        def hook(module: nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
            scale = scales.get(name, 1.0)
            stored = (made / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            return stored.to(made.dtype) * scale

        return hook

    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1] in ("k_proj", "v_proj") and "self_attn" in parts:
            kind = parts[-1][0]
            module.register_forward_hook(through(f"layer_{parts[-3]}.{kind}_scale"))
