"""Keys and values as an FP8 cache keeps them, seen at the projections that make them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from torch import nn

__all__ = ["E4M3_MAX", "observed", "rounded"]

#: Largest finite value of float8_e4m3fn.
E4M3_MAX = 448.0


def _projections(model: nn.Module, kinds: str) -> Iterator[tuple[int, str, nn.Module]]:
    """Layer and kind (``"q"``, ``"k"`` or ``"v"``) of each projection of these kinds."""
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1].endswith("_proj") and parts[-1][0] in kinds and "self_attn" in parts:
            yield int(parts[-3]), parts[-1][0], module


@contextmanager
def observed(model: nn.Module, kinds: str) -> Generator[dict[tuple[int, str], float]]:
    """The largest magnitude by layer and kind, of all that passes in the meantime."""
    largest: dict[tuple[int, str], float] = defaultdict(float)

    def look(layer: int, kind: str) -> Any:
        def hook(module: nn.Module, given: Any, made: torch.Tensor) -> None:
            largest[layer, kind] = max(largest[layer, kind], float(made.abs().max()))

        return hook

    hooks = [m.register_forward_hook(look(n, kind)) for n, kind, m in _projections(model, kinds)]
    try:
        yield largest
    finally:
        for handle in hooks:
            handle.remove()


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

    for layer, kind, module in _projections(model, "kv"):
        module.register_forward_hook(through(f"layer_{layer}.{kind}_scale"))
