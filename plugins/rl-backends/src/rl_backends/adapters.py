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

__all__ = ["AdapterTensor", "active_adapters", "adapter_tensors", "add_adapters"]

#: What peft puts before the names of a model's modules in the files of an adapter.
_PREFIX = "base_model.model."


class AdapterTensor(NamedTuple):
    """A or B of one module.

    Attributes:
        module: Name of the module in the base model.
        parameter: Of peft's layer.
        scale: What a refit multiplies it by: ``alpha / r`` for B and 1 for A; 0 for both where the
            model computes without an adapter.
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

    They are what the model computes with now: those of the active adapter, and zeros where it is
    disabled or of other modules alone.

    Args:
        model: What :func:`add_adapters` returned.

    Raises:
        CapabilityError: What the model adds to its base weights is not one plain LoRA of linear
            layers, which is all that engines serve.
    """
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found = {}
    for full_name, layer in model.get_base_model().named_modules():
        module, kind = plain_name(full_name), type(layer).__name__
        if isinstance(layer, AuxiliaryTrainingWrapper):
            raise _not_alone(module, f"has trained weights of its own ({kind})")
        if not isinstance(layer, BaseTunerLayer):
            continue
        plain = isinstance(layer, lora.Linear) and not layer.lora_variant
        if not plain or any(layer.lora_bias.values()):
            why = ", with a variant or a bias" if isinstance(layer, lora.Linear) else ""
            raise _not_alone(module, f"has an adapter of the kind {kind}{why}")
        if layer.merged:
            raise _not_alone(
                module,
                f"has adapters merged into its weight: {layer.merged_adapters}",
                fix="call unmerge_adapter() before the refit",
            )
        active = [] if layer.disable_adapters else active_adapters(layer)
        if len(active) > 1 or not layer.lora_A:
            raise _not_alone(
                module,
                f"has several active adapters: {active}" if active else "has no adapter left",
                fix='activate one adapter (set_adapter), or set lora.refit to "merged"',
            )
        [adapter] = active or [*layer.lora_A][:1]
        scale = float(layer.scaling[adapter])
        for which, parts, factor in (("A", layer.lora_A, 1.0), ("B", layer.lora_B, scale)):
            name = f"{_PREFIX}{module}.lora_{which}.weight"
            weight = parts[adapter].weight
            found[name] = AdapterTensor(module, weight, factor if active else 0.0)
    return found


def active_adapters(layer: Any) -> list[str]:
    """The adapters of a peft layer that are chosen, which it computes with unless disabled."""
    own = {*layer.lora_A, *layer.lora_embedding_A}
    return [adapter for adapter in layer.active_adapters if adapter in own]


def _not_alone(
    module: str,
    why: str,
    fix: str = 'leave the module out of lora.target_modules, or set lora.refit to "merged"',
) -> CapabilityError:
    return CapabilityError(
        f"{module} {why}; a refit can send only one plain LoRA of linear layers without merging it",
        fix=fix,
        capability="adapters",
    )
