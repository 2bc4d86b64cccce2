"""The weights of a loaded model under the names of its checkpoint, on one worker of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from rl_core.backends.tensors import module_tensors, tensor_specs
from rl_core.errors import CapabilityError
from rl_hosting._regions import Region, regions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from rl_core.interfaces import TensorSpec

__all__ = ["LoadedWeights", "checkpoint_specs"]

#: Seconds in which the workers of an engine must meet while a tensor is read back.
_MEET_S = 60.0


class LoadedWeights(ABC):
    """What a refit writes to, found once and kept.

    An engine's subclass says what is its own.

    Args:
        model: This worker's part of it.
        dtype: Of the engine.
        workers: Of the engine, which share the model.
        without_refits: How an engine is built that takes none, for errors.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, *, workers: int, without_refits: str
    ) -> None:
        self.model = model
        self._dtype = dtype
        self._workers = workers
        self._without_refits = without_refits

    # -- what an engine says ----------------------------------------------------------------------

    @abstractmethod
    def find_specs(self) -> Sequence[TensorSpec]:
        """The tensors that a trainer of this model has, in the dtype of the engine."""

    def check(self) -> None:
        """Makes sure that nothing was made of the weights that a refit would leave as it was.

        Raises:
            CapabilityError: It was.
        """

    def loading(self) -> AbstractContextManager[None]:
        """What the engine's code wants to be asked in."""
        return nullcontext()

    def is_padded(self, module: nn.Module) -> bool:
        """Whether parameters of a module have more elements than those of its checkpoint."""
        del module
        return False

    # -- what follows from it ---------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @cached_property
    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`find_specs`."""
        with self.loading():
            return self.find_specs()

    @cached_property
    def regions(self) -> Mapping[str, list[Region]]:
        """Where the engine keeps each tensor that owns its elements, or this worker's part of it.

        What no worker keeps is kept here, so that it can be compared.

        Raises:
            CapabilityError: The model cannot be followed, or has weights that no tensor fills, or
                such as were rearranged after loading.
        """
        self.check()
        owned = [spec for spec in self.specs if spec.alias_of is None]
        with self.loading():
            regions = regions_of(
                self.model, owned, self._dtype, without_refits=self._without_refits
            )
        kept = self._somewhere({name for name, found in regions.items() if found})
        for spec in owned:
            if spec.name not in kept:
                whole = torch.zeros(spec.shape, dtype=spec.torch_dtype).view(1, -1)
                regions[spec.name] = [Region(whole, whole.shape[1], 0, 0)]
        self._check_filled(regions)
        return regions

    @cached_property
    def targets(self) -> Mapping[str, torch.Tensor] | None:
        """Every tensor as a view of the engine's own, if it has them whole, and in its dtype.

        Some kernels for CPUs keep biases of a bfloat16 model in float32.
        """
        found = {}
        for spec in self.specs:
            if spec.alias_of is not None:
                continue
            regions = self.regions[spec.name]
            if len(regions) != 1 or regions[0].target.numel() != spec.numel:
                return None
            [region] = regions
            if not region.target.is_contiguous() or region.target.dtype != spec.torch_dtype:
                return None
            found[spec.name] = region.target.view(spec.shape)
        return found

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Puts whole tensors together again; all workers of an engine read at the same time."""
        by_name = {spec.name: spec for spec in self.specs}
        for name in names:
            spec = by_name[name]
            regions = self.regions[spec.alias_of or name]
            if self._workers == 1 and len(regions) == 1 and regions[0].target.is_contiguous():
                yield name, regions[0].target.view(spec.shape).to(spec.torch_dtype)
                continue
            whole = torch.zeros(spec.numel, dtype=spec.torch_dtype)
            for region in regions:
                region.read(whole)
            if self._workers > 1 and whole.numel():
                # Where workers have the same elements the bytes agree; elsewhere all but one are 0.
                dist.all_reduce(whole.view(torch.uint8), dist.ReduceOp.MAX, group=self._group)
            yield name, whole.view(spec.shape)

    @cached_property
    def _group(self) -> Any:
        """All workers of the engine, on the CPU."""
        timeout = timedelta(seconds=_MEET_S)
        return dist.new_group(list(range(self._workers)), timeout=timeout, backend="gloo")

    def _somewhere(self, names: set[str]) -> set[str]:
        """Names that any worker of the engine knows."""
        if self._workers == 1:
            return names
        ours = [spec.name in names for spec in self.specs]
        known = torch.tensor(ours, dtype=torch.uint8)
        dist.all_reduce(known, dist.ReduceOp.MAX, group=self._group)
        return {spec.name for spec, one in zip(self.specs, known.tolist(), strict=True) if one}

    def _check_filled(self, regions: Mapping[str, list[Region]]) -> None:
        """Makes sure that the tensors of a checkpoint fill every parameter but its padding."""
        filled: dict[int, int] = {}
        for found in regions.values():
            for region in found:
                storage = region.target.untyped_storage().data_ptr()
                filled[storage] = filled.get(storage, 0) + region.target.numel()
        wanting = []
        for module_name, module in self.model.named_modules():
            padded = self.is_padded(module)
            for name, parameter in module.named_parameters(recurse=False):
                count = filled.get(parameter.untyped_storage().data_ptr(), 0)
                if count < parameter.numel() and not (padded and count):
                    where = f"{module_name}.{name}"
                    wanting.append(f"{where} ({count} of {parameter.numel()} elements)")
        if wanting:
            raise CapabilityError(
                f"{len(wanting)} parameters of the engine's {type(self.model).__name__} are not "
                f"filled by the tensors that transformers has: {', '.join(wanting[:5])}",
                fix=f"report it, with the name of the model; without refits {self._without_refits}",
                capability="refit",
            )


def checkpoint_specs(config: Any, dtype: torch.dtype, *, trust: bool) -> list[TensorSpec]:
    """What transformers calls the tensors of a model, made without any memory.

    Args:
        config: Of transformers.
        dtype: Of the tensors.
        trust: Run code of the checkpoint.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust, dtype=dtype)
    return tensor_specs(module_tensors(model))
