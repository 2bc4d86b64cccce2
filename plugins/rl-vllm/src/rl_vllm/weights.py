"""The weights of a loaded vLLM model under the names of its checkpoint, on one worker."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from rl_core.errors import CapabilityError
from rl_core.interfaces import TensorSpec
from rl_vllm.derived import check_derived
from rl_vllm.regions import Region, regions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

__all__ = ["EngineWeights"]

#: Seconds in which the workers of an engine must meet while a tensor is read back.
_MEET_S = 60.0


class EngineWeights:
    """What a refit writes to, found once and kept.

    Args:
        worker: vLLM's, with its part of the model loaded.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._size = int(worker.vllm_config.parallel_config.world_size)

    @cached_property
    def model(self) -> nn.Module:
        """The model that vLLM loaded.

        Raises:
            CapabilityError: It is quantised.
        """
        model_config = self._worker.vllm_config.model_config
        if model_config.quantization is not None:
            raise CapabilityError(
                f"an engine quantised with {model_config.quantization} takes no refit",
                fix="use a checkpoint that is not quantised, or set vllm_cfg.refit to False",
                capability="refit",
            )
        model: nn.Module = self._worker.get_model()
        return model

    @property
    def eager(self) -> bool:
        """No CUDA graphs were captured."""
        return bool(self._worker.vllm_config.model_config.enforce_eager)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @cached_property
    def specs(self) -> Sequence[TensorSpec]:
        """The tensors that a trainer of this model has, in the dtype of the engine."""
        config = self._worker.vllm_config.model_config
        with self._vllm_config():  # which vLLM asks for in classes of transformers that it runs
            return _checkpoint_specs(config.hf_config, config.dtype, config.trust_remote_code)

    def check(self) -> None:
        """Makes sure that nothing was made of the weights that a refit would leave as it was.

        Raises:
            CapabilityError: It was.
        """
        check_derived(self.model)

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
        dtype = self._worker.vllm_config.model_config.dtype
        with self._vllm_config():
            regions = regions_of(self.model, owned, dtype)
        kept = self._somewhere({name for name, found in regions.items() if found})
        for spec in owned:
            if spec.name not in kept:
                whole = torch.zeros(spec.shape, dtype=_dtype(spec)).view(1, -1)
                regions[spec.name] = [Region(whole, whole.shape[1], 0, 0)]
        _check_filled(self.model, regions)
        return regions

    def _vllm_config(self) -> AbstractContextManager[None]:
        """Makes the engine's configuration the one that vLLM's code is asked in."""
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[None] = set_current_vllm_config(self._worker.vllm_config)
        return context

    @cached_property
    def targets(self) -> Mapping[str, torch.Tensor] | None:
        """Every tensor as a view of the engine's own, if it has them whole, and in its dtype.

        Some of vLLM's kernels for CPUs keep biases of a bfloat16 model in float32.
        """
        found = {}
        for spec in self.specs:
            if spec.alias_of is not None:
                continue
            regions = self.regions[spec.name]
            if len(regions) != 1 or regions[0].target.numel() != _numel(spec):
                return None
            [region] = regions
            if not region.target.is_contiguous() or region.target.dtype != _dtype(spec):
                return None
            found[spec.name] = region.target.view(spec.shape)
        return found

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Puts whole tensors together again; all workers of an engine read at the same time."""
        by_name = {spec.name: spec for spec in self.specs}
        for name in names:
            spec = by_name[name]
            regions = self.regions[spec.alias_of or name]
            if self._size == 1 and len(regions) == 1 and regions[0].target.is_contiguous():
                yield name, regions[0].target.view(spec.shape).to(_dtype(spec))
                continue
            whole = torch.zeros(_numel(spec), dtype=_dtype(spec))
            for region in regions:
                region.read(whole)
            if self._size > 1 and whole.numel():
                # Where workers have the same elements the bytes agree; elsewhere all but one are 0.
                dist.all_reduce(whole.view(torch.uint8), dist.ReduceOp.MAX, group=self._group)
            yield name, whole.view(spec.shape)

    @cached_property
    def _group(self) -> Any:
        """All workers of the engine, on the CPU."""
        timeout = timedelta(seconds=_MEET_S)
        return dist.new_group(list(range(self._size)), timeout=timeout, backend="gloo")

    def _somewhere(self, names: set[str]) -> set[str]:
        """Names that any worker of the engine knows."""
        if self._size == 1:
            return names
        ours = [spec.name in names for spec in self.specs]
        known = torch.tensor(ours, dtype=torch.uint8)
        dist.all_reduce(known, dist.ReduceOp.MAX, group=self._group)
        return {spec.name for spec, one in zip(self.specs, known.tolist(), strict=True) if one}


def _dtype(spec: TensorSpec) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.dtype)
    return found


def _numel(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel()


def _checkpoint_specs(config: Any, dtype: torch.dtype, trust: bool) -> list[TensorSpec]:
    """What transformers calls the tensors of a model, made without any memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust, dtype=dtype)
    first: dict[int, str] = {}
    specs = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = first.setdefault(id(tensor), name)
        specs.append(
            TensorSpec(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                role="parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer",
                alias_of=None if owner == name else owner,
            )
        )
    return specs


def _check_filled(model: nn.Module, regions: Mapping[str, list[Region]]) -> None:
    """Makes sure that the tensors of a checkpoint fill every parameter but its padding."""
    filled: dict[int, int] = {}
    for found in regions.values():
        for region in found:
            storage = region.target.untyped_storage().data_ptr()
            filled[storage] = filled.get(storage, 0) + region.target.numel()
    wanting = []
    for module_name, module in model.named_modules():
        padded = hasattr(module, "org_vocab_size")
        for name, parameter in module.named_parameters(recurse=False):
            count = filled.get(parameter.untyped_storage().data_ptr(), 0)
            if count < parameter.numel() and not (padded and count):
                wanting.append(f"{module_name}.{name} ({count} of {parameter.numel()} elements)")
    if wanting:
        raise CapabilityError(
            f"{len(wanting)} parameters of vLLM's {type(model).__name__} are not filled by the "
            f"tensors that transformers has: {', '.join(wanting[:5])}",
            fix="report it to rl-vllm, with the name of the model; without refits set "
            "vllm_cfg.refit to False",
            capability="refit",
        )
