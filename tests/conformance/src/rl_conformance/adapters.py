"""Adapters of the suite's own, without peft: those of a trainer, and what a model computes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_conformance.doubles import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_conformance.context import Context
    from rl_conformance.oracle import Oracle
    from rl_core.interfaces import GenerationInterface

__all__ = [
    "LORA",
    "adapted_layers",
    "adapter_trainer",
    "change_adapters",
    "new_engine_for_adapters",
    "serving_adapters",
    "with_adapters",
]

#: What an engine of these checks has under its key ``lora``.
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}


def adapted_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers but the output, by what precedes ``lora_A`` in the files of peft."""
    return {
        f"base_model.model.{name}": layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name != "lm_head"
    }


def adapter_trainer(ctx: Context, *, rank: int = LORA["r"]) -> Trainer:
    """A trainer whose tensors are A and B of all layers of the tiny model of seed 0."""
    tensors = {}
    for name, layer in adapted_layers(ctx.oracle(ctx.model("qwen2", seed=0)).model).items():
        tensors[f"{name}.lora_A.weight"] = torch.zeros(rank, layer.in_features)
        tensors[f"{name}.lora_B.weight"] = torch.zeros(layer.out_features, rank)
    trainer: Trainer = ctx.closing(Trainer(tensors))
    return trainer


def change_adapters(trainer: Trainer, seed: int, only: str = "") -> None:
    """Other adapters, large enough to show: of all layers, or B of one, with all others 0.

    Args:
        trainer: Of :func:`adapter_trainer`.
        seed: Of the values.
        only: Of which layer B is not 0.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in trainer.tensors.items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
        if "lora_B" in name and not name.startswith(only):
            tensor.zero_()


def serving_adapters(ctx: Context, **sampling: Any) -> GenerationInterface:
    """An engine, awake, with the tiny model of seed 0, that serves :data:`LORA`.

    Checks with the same sampling share it: it serves the adapters of the one before.
    """
    return ctx.refit_generation(**_serving(ctx), **sampling)


def new_engine_for_adapters(ctx: Context) -> GenerationInterface:
    """An engine, awake, that had no refit yet."""
    generation = ctx.fresh_generation(model_name=str(ctx.model("qwen2", seed=0)), **_serving(ctx))
    generation.prepare_for_generation()
    return generation


def _serving(ctx: Context) -> Mapping[str, Any]:
    own = ctx.target.tiny.get(ctx.settings.device, {}).get("adapters")
    known = "lora" in ctx.target.config_keys.get("generation", ())
    return own if own is not None else {"lora": LORA} if known else {}


def with_adapters(oracle: Oracle, tensors: Mapping[str, torch.Tensor], dtype: str) -> Oracle:
    """An oracle of the model with adapters, rounded to that dtype, added to its weights."""
    found = copy.copy(oracle)
    found.model = copy.deepcopy(oracle.model)
    rounded = {n: t.to(getattr(torch, dtype)).float() for n, t in tensors.items()}
    with torch.no_grad():
        for name, layer in adapted_layers(found.model).items():
            layer.weight += rounded[f"{name}.lora_B.weight"] @ rounded[f"{name}.lora_A.weight"]
    return found
