"""Low-rank adapters through peft: only they are trained, and a refit sends merged weights."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_core.backends.tensors import NamedTensorSource, module_tensors, tensor_specs
from rl_core.errors import ConfigError
from rl_torch.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from torch import nn
    from transformers import PreTrainedModel

    from rl_core.interfaces import TensorSpec

__all__ = ["BaseWeights", "MergedWeightSource", "add_adapters", "merged_state"]

ADAPTER = "default"


def add_adapters(model: PreTrainedModel, config: Mapping[str, Any], *, seed: int) -> nn.Module:
    """Wraps a model so that its adapters are trained and its weights are not.

    Args:
        model: A loaded model; its linear layers are replaced in place.
        config: A checked :class:`~rl_hf.config.LoraConfig`.
        seed: Of the adapters' initial values; the global random state is left as it was.

    Raises:
        ConfigError: peft is not installed, or the target modules are not in the model
            or share their weight with another module.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "lora needs peft, which is not installed",
            fix='pip install "./plugins/rl-hf[lora]"',
            key="lora",
        ) from error
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.get("r", 16),
        lora_alpha=config.get("alpha", 32),
        lora_dropout=config.get("dropout", 0.0),
        target_modules=config.get("target_modules"),
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            wrapped: Any = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(
            f"peft cannot put adapters into {type(model).__name__}: {error}",
            fix="name modules of this model in lora.target_modules, or use 'all-linear'",
            key="lora.target_modules",
        ) from error
    # A merged weight has one value, and tied modules with one adapter between them have two.
    base = wrapped.get_base_model()
    adapted = _adapted(base)
    owners: dict[str, str] = {}
    for spec in tensor_specs(module_tensors(base)):
        module = spec.name.rsplit(".base_layer.", 1)[0].removesuffix(".weight")
        other = owners.setdefault(spec.alias_of or spec.name, module)
        if other != module and {module, other} & adapted.keys():
            raise ConfigError(
                f"{other} and {module} share one weight, so an adapter of either cannot be merged",
                fix="leave both out of lora.target_modules, or untie them in the checkpoint",
                key="lora.target_modules",
            )
    adapted_model: nn.Module = wrapped
    return adapted_model


class MergedWeightSource(NamedTensorSource):
    """The full weights with the adapters added in, one tensor at a time, under base names.

    ``weight + B A * alpha / r`` is made when it is asked for; the model is not touched. Weights
    without an adapter are given as they are and declared as frozen.

    Args:
        model: What :func:`add_adapters` returned.
    """

    def __init__(self, model: Any) -> None:
        base = model.get_base_model()
        layers = _adapted(base)
        self._layers = {f"{name}.weight": layer for name, layer in layers.items()}
        inside = tuple(f"{name}." for name in layers)
        super().__init__(
            {
                name.replace(".base_layer.", ".") if name.startswith(inside) else name: tensor
                for name, tensor in module_tensors(base).items()
                if ".base_layer." in name or not name.startswith(inside)
            }
        )

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return [
            msgspec.structs.replace(spec, trainable=spec.name in self._layers)
            for spec in super().specs()
        ]

    @torch.no_grad()
    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        for name, base in super().tensors(names):
            tensor = base
            if name in self._layers:
                update = self._layers[name].get_delta_weight(ADAPTER)
                tensor = (base + update).to(base.dtype)
            yield name, tensor

    def persistent(self) -> None:
        """None: what is merged is made when it is asked for."""


class BaseWeights(Reference):
    """The reference of a model with adapters: the weights that they leave as they were."""

    def keep(self, model: nn.Module) -> None:
        """Nothing: training does not change them."""

    @contextmanager
    def using(self, model: nn.Module) -> Generator[nn.Module]:
        """See :meth:`Reference.using`."""
        with model.disable_adapter():  # type: ignore[operator]
            yield model


def merged_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """All merged weights at once, on the CPU, aliases left out."""
    source = MergedWeightSource(model)
    names = [spec.name for spec in source.specs() if spec.alias_of is None]
    return {name: tensor.cpu() for name, tensor in source.tensors(names)}


def _adapted(base: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
