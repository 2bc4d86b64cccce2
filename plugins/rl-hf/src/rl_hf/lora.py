"""Low-rank adapters through peft: only they are trained; a refit sends them, merged or alone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_backends import adapters
from rl_backends.modules import plain_name, whole_tensors
from rl_backends.pieces import index_of, pieces_of
from rl_backends.tensors import NamedTensorSource, tensor_specs
from rl_backends.torch.reference import Reference
from rl_core.errors import CapabilityError, ConfigError
from rl_core.interfaces import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from torch import nn
    from transformers import PreTrainedModel

    from rl_core.interfaces import Box, TensorSpec

__all__ = [
    "AdapterWeightSource",
    "BaseWeights",
    "MergedWeightSource",
    "add_adapters",
    "has_adapters",
    "merged_state",
]


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
    wrapped = adapters.add_adapters(model, config, key="lora", distribution="rl-hf", seed=seed)
    base = wrapped.get_base_model()
    _check_ties(base, whole_tensors(base))
    adapted_model: nn.Module = wrapped
    return adapted_model


class AdapterWeightSource(NamedTensorSource):
    """A and B of the active adapter, by the names of peft's files, for an engine that serves them.

    B is multiplied by ``alpha / r``, so that the engine needs no scale. Where the adapter is
    disabled, both are zeros.

    Args:
        model: What :func:`add_adapters` returned.

    Raises:
        CapabilityError: See :func:`rl_backends.adapters.adapter_tensors`.
    """

    def __init__(self, model: Any) -> None:
        self._adapters = adapters.adapter_tensors(model)
        super().__init__({name: one.parameter for name, one in self._adapters.items()})

    @torch.no_grad()
    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        for name, tensor in super().tensors(names):
            scale = self._adapters[name].scale
            yield name, tensor * scale if scale else torch.zeros_like(tensor)  # not NaN * 0

    def pieces(self) -> None:
        """None: B is made when it is asked for."""


class MergedWeightSource(NamedTensorSource):
    """The full weights with the adapters added in, one tensor at a time, under base names.

    They are what the model computes with now: those of the active adapters, of modules that are
    trained whole (``modules_to_save``), and without any where adapters are disabled.
    ``weight + B A * alpha / r`` is made when it is asked for; the model is not touched. Weights
    that nothing trains are declared as frozen. Of a sharded model each rank makes what it has.

    Args:
        model: What :func:`add_adapters` or peft returned, or a module with such layers.
        sharded: Tensors may be DTensors, but not the adapters. By default all must be here.

    Raises:
        CapabilityError: Its adapters are not a sum of weights, or not of a kind that is known; or
            a tensor is not wholly here.
        ConfigError: An adapted weight is tied to another module's.
    """

    def __init__(self, model: Any, *, sharded: bool = False) -> None:
        from peft.utils.other import ModulesToSaveWrapper

        base = getattr(model, "get_base_model", lambda: model)()
        self._sharded = sharded
        every = whole_tensors(base, sharded=sharded)
        _check_ties(base, every)
        self._updates: dict[str, tuple[Any, list[str]]] = {}
        tensors: dict[str, Any] = {}
        kept: dict[str, str] = {}  # the prefix of what is read, by that of the module
        for name, layer in _adapted(base).items():
            kept[name] = f"{name}.base_layer"
            if active := _active(name, layer):
                self._updates[f"{name}.weight"] = layer, active
        for name, part in _modules(base):
            if isinstance(part, ModulesToSaveWrapper):
                trained = not part.disable_adapters and part.active_adapters
                kept[name] = (
                    f"{name}.modules_to_save.{trained[0]}" if trained else f"{name}.original_module"
                )
        for name, tensor in every.items():
            inside = next((module for module in kept if name.startswith(f"{module}.")), None)
            if inside is None:
                tensors[name] = tensor
            elif name.startswith(f"{kept[inside]}."):
                tensors[inside + name.removeprefix(kept[inside])] = tensor
        super().__init__(tensors)

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return [
            msgspec.structs.replace(spec, trainable=spec.trainable or spec.name in self._updates)
            for spec in super().specs()
        ]

    @torch.no_grad()
    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`; of a sharded model the boxes of :meth:`pieces`."""
        for name, base in super().tensors(names):
            if self._sharded:
                for box, part in pieces_of(base):
                    yield name, self._merged(name, part, box)
            else:
                yield name, self._merged(name, base)

    @torch.no_grad()
    def gathered(
        self, name: str, whole: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """A tensor of a sharded model, put together on rank 0.

        Args:
            name: Of the tensor.
            whole: Puts it together; called on all ranks.
        """
        tensor = whole(self.tensors_by_name[name])
        return None if tensor is None else self._merged(name, tensor)

    def pieces(self) -> Sequence[Piece] | None:
        """What this rank has of a sharded model; a merged weight is made when it is asked for.

        Returns:
            None if the model is not sharded: all tensors are whole then.
        """
        if not self._sharded:
            return None
        return [
            Piece(name, box, None if name in self._updates else part)
            for name, tensor in self.tensors_by_name.items()
            for box, part in pieces_of(tensor)
        ]

    def _merged(self, name: str, part: torch.Tensor, box: Box | None = None) -> torch.Tensor:
        """A weight, or a box of it, with its adapters added in."""
        layer, active = self._updates.get(name, (None, []))
        total = part
        for adapter in active:
            update = layer.get_delta_weight(adapter)
            total = total + (update if box is None else update[index_of(box)])
        return total.to(part.dtype)


def has_adapters(module: nn.Module) -> bool:
    """Whether peft has changed anything in a module."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return any(isinstance(part, kinds) for part in module.modules())


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
    """The layers with adapters, by name.

    Raises:
        CapabilityError: What they add cannot be merged into a weight.
    """
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    merges = (lora.Linear, lora.Embedding, lora.layer.Conv1d, lora.Conv2d, lora.Conv3d)
    layers = {}
    for name, part in _modules(base):
        kind = type(part).__name__
        if isinstance(part, merges):
            layers[name] = part
            if part.lora_variant or any(part.lora_bias.values()):
                kinds = {type(v).__name__ for v in part.lora_variant.values()} or {"lora_bias"}
                raise _not_merged(name, f"its adapter is not plain LoRA: {sorted(kinds)}")
        elif isinstance(part, BaseTunerLayer):
            raise _not_merged(name, f"its adapter is a {type(part).__module__}.{kind}")
        elif isinstance(part, AuxiliaryTrainingWrapper) and not isinstance(
            part, ModulesToSaveWrapper
        ):
            raise _not_merged(name, f"its trained weights are in a {kind}")
    return layers


def _modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by their plain names, as those of tensors are."""
    return ((plain_name(name), part) for name, part in base.named_modules())


def _active(name: str, layer: Any) -> list[str]:
    """The adapters that are to be added to the base weight as it is now."""
    if layer.disable_adapters and layer.merged:
        raise _not_merged(name, "its adapters are both disabled and merged into the weight")
    return [] if layer.disable_adapters or layer.merged else adapters.active_adapters(layer)


def _not_merged(name: str, why: str) -> CapabilityError:
    return CapabilityError(
        f"the adapters cannot be merged for an engine: {name}: {why}",
        fix="use plain LoRA on linear, embedding or convolution layers, or call merge_and_unload "
        "before the refit",
    )


def _check_ties(base: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """A merged weight has one value, and tied modules with one adapter between them have two."""
    adapted = _adapted(base)
    owners: dict[str, str] = {}
    for spec in tensor_specs(tensors):
        module = spec.name.rsplit(".base_layer.", 1)[0].removesuffix(".weight")
        other = owners.setdefault(spec.alias_of or spec.name, module)
        if other != module and {module, other} & adapted.keys():
            raise ConfigError(
                f"{other} and {module} share one weight, so an adapter of either cannot be merged",
                fix="leave both out of lora.target_modules, or untie them in the checkpoint",
                key="lora.target_modules",
            )
