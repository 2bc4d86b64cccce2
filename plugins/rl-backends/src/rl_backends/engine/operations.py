"""Compares what an engine's model computes besides its weights with what transformers computes.

A refit brings every weight, bit for bit, and the engine may still compute something else with them:
it has an activation by another formula, or leaves out what a key of ``config.json`` asks for. Such
a model is refused when the engine is built. What an engine names or fuses in its own way is not
compared.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["check_operations", "left_out_settings"]

#: Largest difference of two activations, computed in float32; formulas of GELU differ by 5e-4.
_TOLERANCE = 5e-5
#: Keys of ``config.json`` that change what a model computes, and the values with which it computes
#: what engines do whose code of the model does not have the key.
_LEFT_OUT: dict[str, Any] = {
    "clip_qkv": None,  # OLMoE
    "norm_topk_prob": False,  # OLMoE
    "rope_interleave": True,  # DeepSeek V3 and what is made of its code
    "scale_attn_weights": True,  # GPT-2 and GPT-BigCode
}


def left_out_settings(model: Any, reference: Any) -> Iterator[str]:
    """What the trainer's model is asked for that the engine's code of the model never looks at.

    Args:
        model: The engine's.
        reference: The same model of transformers, with its configuration.

    Yields:
        A key of ``config.json`` with its value, in words.
    """
    config = reference.config.get_text_config()
    values = {key: getattr(config, key, None) for key in _LEFT_OUT}
    asked = {key: v for key, v in values.items() if v is not None and v != _LEFT_OUT[key]}
    try:
        unseen = asked.keys() & _code(reference) - _code(model) if asked else ()
    except (OSError, TypeError):  # code that comes without its source is not compared
        return
    yield from (f"it leaves out {key}={asked[key]!r} of config.json" for key in sorted(unseen))


def _code(model: nn.Module) -> set[str]:
    """The words of the code that a model's parts are written in."""
    classes = {kind for part in model.modules() for kind in type(part).__mro__}
    modules = {kind.__module__ for kind in classes} - {"builtins"}
    files = [sys.modules[name] for name in modules if not name.startswith("torch.")]
    return {word for file in files for word in re.findall(r"\w+", inspect.getsource(file))}


@torch.no_grad()
def check_operations(
    model: nn.Module, reference: nn.Module, *, engine: str, without_refits: str
) -> None:
    """Makes sure that the engine computes what transformers computes, as far as it is compared.

    Args:
        model: The engine's.
        reference: The same model of transformers; its weights are not needed.
        engine: The engine's name, for errors.
        without_refits: How to build an engine that takes no refits.

    Raises:
        CapabilityError: Names an activation with another result, or a key of ``config.json``.
    """
    fix = f"use another model or engine; to generate without refits, {without_refits}"
    for text in left_out_settings(model, reference):
        raise CapabilityError(
            f"{engine}'s {type(model).__name__} is not the trainer's model: {text}, so that the "
            "engine computes other log-probs with the same weights",
            fix=fix,
            capability="refit",
        )
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
                fix=fix,
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
