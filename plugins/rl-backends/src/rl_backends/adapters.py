"""Low-rank adapters through peft: a model that gets them, and their tensors by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_backends.modules import plain_name
from rl_core.errors import CapabilityError, ConfigError
from rl_core.install import install_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = ["AdapterTensor", "adapter_tensors", "add_adapters"]

#: What peft puts before the names of a model's modules in the files of an adapter.
_PREFIX = "base_model.model."


class AdapterTensor(NamedTuple):
    """A or B of one module.

    Attributes:
        module: Name of the module in the base model.
        parameter: Of peft's layer.
        scale: What a refit multiplies it by: ``alpha / r`` for B, 1 for A.
    """

    module: str
    parameter: torch.Tensor
    scale: float


def add_adapters(
    model: nn.Module, config: Mapping[str, Any], *, key: str, distribution: str, seed: int = 0
) -> Any:
    """Puts adapters into a model, which are then all that is trained.

    Args:
        model: Of transformers; its linear layers are replaced in place, but for frozen ones. It may
            be on ``meta``.
        config: The keys ``r``, ``alpha``, ``dropout`` and ``target_modules``.
        key: Of the configuration, for errors.
        distribution: The one that has peft as its extra ``lora``.
        seed: Of the adapters' initial values; the global random state is left as it was.

    Returns:
        peft's wrapper of the model.

    Raises:
        ConfigError: peft is not installed, or the target modules are not in the model.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"{key} needs peft, which is not installed",
            fix=install_command(distribution, "lora"),
            key=key,
        ) from error
    frozen = [
        name
        for name, module in model.named_modules()
        if (own := [*module.parameters(recurse=False)]) and not any(p.requires_grad for p in own)
    ]
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.get("r", 16),
        lora_alpha=config.get("alpha", 32),
        lora_dropout=config.get("dropout", 0.0),
        target_modules=config.get("target_modules"),
        exclude_modules=frozen or None,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(
            f"peft cannot put adapters into {type(model).__name__}: {error}",
            fix=f"name modules of this model in {key}.target_modules, or use 'all-linear'",
            key=f"{key}.target_modules",
        ) from error


def adapter_tensors(model: Any) -> dict[str, AdapterTensor]:
    """A and B of every module with an adapter, by their names in the files that peft saves.

    Args:
        model: What :func:`add_adapters` returned.

    Raises:
        CapabilityError: An adapter is not plain LoRA on a linear layer, which is all that engines
            serve.
    """
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = {}
    for full_name, layer in model.get_base_model().named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        module = plain_name(full_name)
        if not isinstance(layer, lora.Linear) or layer.lora_variant:
            raise CapabilityError(
                f"{module} has an adapter of the kind {type(layer).__name__}; a refit can send "
                "only plain LoRA of linear layers without merging it",
                fix='leave the module out of lora.target_modules, or set lora.refit to "merged"',
                capability="adapters",
            )
        [adapter] = layer.lora_A
        pair = ("A", layer.lora_A, 1.0), ("B", layer.lora_B, float(layer.scaling[adapter]))
        for which, parts, scale in pair:
            name = f"{_PREFIX}{module}.lora_{which}.weight"
            found[name] = AdapterTensor(module, parts[adapter].weight, scale)
    return found
