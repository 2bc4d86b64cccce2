"""Measures operations of an engine's model that have no weights against those of transformers.

A refit brings every weight, bit for bit, and the engine may still compute something else with them:
it has an activation by another formula. Such a model is refused when the engine is built. What an
engine names or fuses in its own way is not compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_activations"]

#: Largest difference of two activations, computed in float32; formulas of GELU differ by 5e-4.
_TOLERANCE = 5e-5


@torch.no_grad()
def check_activations(
    model: nn.Module, reference: nn.Module, *, engine: str, without_refits: str
) -> None:
    """Makes sure that the engine's activations are those of transformers.

    Args:
        model: The engine's.
        reference: The same model of transformers; its weights are not needed.
        engine: The engine's name, for errors.
        without_refits: How to build an engine that takes no refits.

    Raises:
        CapabilityError: Names an activation with another result.
    """
    modules = dict(model.named_modules())
    device = next(model.parameters()).device
    seen = set()
    for name, theirs in reference.named_modules():
        ours = modules.get(name)
        if ours is None or _has_state(ours) or _has_state(theirs):
            continue
        if (kind := (type(ours), type(theirs), repr(ours), repr(theirs))) in seen:
            continue
        seen.add(kind)
        x = torch.linspace(-4, 4, 256, device=device)[None]
        found, wanted = _activate(ours, x), _apply(theirs, x)
        if found is None or wanted is None or wanted.shape != x.shape:
            continue
        if not torch.allclose(found, wanted, rtol=0, atol=_TOLERANCE):
            difference = float((found - wanted).abs().max())
            raise CapabilityError(
                f"the activation {name} of {engine}'s {type(model).__name__} "
                f"({type(ours).__name__}) differs from that of transformers "
                f"({type(theirs).__name__}) by up to {difference:.1g}, so that the engine "
                "computes other log-probs with the same weights",
                fix=f"use another model or engine; to generate without refits, {without_refits}",
                capability="refit",
            )


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _activate(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """An engine's activation; of a gated one, which takes two halves, with a gate of ones."""
    found = _apply(module, x)
    if found is not None and found.shape[-1] == x.shape[-1] // 2:
        found = _apply(module, torch.cat([x, torch.ones_like(x)], dim=-1))
    return found if found is not None and found.shape == x.shape else None


def _apply(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    """What a module makes of a tensor; None if it is for something else."""
    try:
        found = module(x.clone())
    except Exception:  # a module that is no function of one tensor may raise anything
        return None
    return found if isinstance(found, torch.Tensor) else None
