"""The adapters of a vLLM engine: where a refit of adapters writes, on one worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from rl_backends.engine.adapters import ADAPTERS, AdapterSink, adapted_modules
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_vllm.weights import EngineWeights

__all__ = ["LORA", "VllmAdapters", "lora_arguments", "vllm_tensors"]

#: The key of vLLM's ``additional_config`` that has ``vllm_cfg.lora`` for the workers.
LORA = "rl_lora"
#: The ranks for which vLLM has kernels; a lower one is padded with zeros.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


#: See :func:`adapted_modules`.
vllm_tensors = partial(adapted_modules, key="vllm_cfg.lora", distribution="rl-vllm")


def lora_arguments(
    model_name: str, dtype: str, lora: Mapping[str, Any], *, trust: bool
) -> dict[str, Any]:
    """The engine arguments with which vLLM serves such adapters.

    Raises:
        ConfigError: The rank is above what vLLM has kernels for, or the target modules are not in
            the model.
        CapabilityError: A target module is not a linear layer.
    """
    rank = lora.get("r", 16)
    if rank > _RANKS[-1]:
        raise ConfigError(
            f"vllm_cfg.lora.r is {rank}, but vLLM serves adapters of a rank up to {_RANKS[-1]}",
            fix="use a lower rank on both sides, or refit merged weights",
            key="vllm_cfg.lora.r",
        )
    tensors = vllm_tensors(model_name, getattr(torch, dtype), lora, trust=trust)
    return {
        "enable_lora": True,
        "max_loras": ADAPTERS,
        "max_cpu_loras": ADAPTERS,
        "max_lora_rank": next(one for one in _RANKS if one >= rank),
        # All others would compute with zeros.
        "lora_target_modules": sorted({m.rpartition(".")[2] for m, _ in tensors.values()}),
        "additional_config": {LORA: dict(lora)},
    }


class _Place(NamedTuple):
    """One slice of one of vLLM's layers."""

    layer: Any
    slice: int
    is_a: bool


class VllmAdapters(AdapterSink):
    """Loads adapters through vLLM's own manager, from memory.

    Args:
        worker: vLLM's, with its part of the model loaded.
        base: See :class:`AdapterSink`.
    """

    def __init__(self, worker: Any, base: Callable[[], EngineWeights]) -> None:
        config, model_config = worker.vllm_config, worker.vllm_config.model_config
        lora = config.additional_config[LORA]
        tensors = vllm_tensors(
            model_config.model, model_config.dtype, lora, trust=model_config.trust_remote_code
        )
        super().__init__(tensors, workers=int(config.parallel_config.world_size), base=base)
        self._manager = worker.model_runner.lora_manager._adapter_manager
        self._dtype = config.lora_config.lora_dtype
        rank = lora.get("r", 16)
        # The scale is in B, so that it is 1 here.
        self._helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules="all-linear")
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper and getattr(mapper, "get_rename_mapper", lambda: mapper)()

    def load(self, adapter: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`AdapterSink.load`."""
        self.unload(adapter)
        model = LoRAModel.from_lora_tensors(
            adapter,
            {name: tensor.clone() for name, tensor in tensors.items()},
            self._helper,
            device="cpu",
            dtype=self._dtype,
            weights_mapper=self._mapper,
        )
        self._manager.add_adapter(model)
        self._manager.activate_adapter(adapter)
        if self._manager.device.type == "cuda":
            torch.cuda.synchronize(self._manager.device)

    def unload(self, adapter: int) -> None:
        """See :meth:`AdapterSink.unload`."""
        self._manager.remove_adapter(adapter)

    def _place(self, name: str) -> _Place | None:
        module, is_a = parse_fine_tuned_lora_name(name, self._mapper)
        layer, index = self._manager.modules.get(module), 0
        for fused, names in self._manager.packed_modules.items():
            if module in names:
                layer, index = self._manager.modules[fused], names.index(module)
                if layer.n_slices != len(names):
                    return None
        if not isinstance(getattr(layer, "lora_a_stacked", None), tuple):
            return None  # not here, or a layer that keeps adapters otherwise
        return _Place(layer, index, is_a)

    def _part(self, place: _Place, whole: torch.Tensor) -> torch.Tensor:
        """What this worker keeps of a tensor, as vLLM slices it."""
        layer = place.layer
        slicing = layer.slice_lora_a if place.is_a else layer.slice_lora_b
        if layer.tp_size == 1:
            return whole
        if layer.n_slices == 1:
            return slicing(whole)  # type: ignore[no-any-return]
        given: list[torch.Tensor | None] = [None] * layer.n_slices
        given[place.slice] = whole
        return slicing(given)[place.slice]  # type: ignore[no-any-return]

    def kept(self, name: str) -> torch.Tensor:
        """See :meth:`AdapterSink.kept`."""
        spec, place = self.by_name[name], self._place(name)
        if place is None:
            return torch.empty(0, dtype=torch.int64)
        return self._part(place, torch.arange(spec.numel).view(spec.shape)).reshape(-1)

    def held(self, adapter: int, name: str) -> torch.Tensor:
        """See :meth:`AdapterSink.held`."""
        place = self._place(name)
        if place is None:
            return torch.empty(0)
        rows, columns = self._part(place, self.buffers[name]).shape
        layer = place.layer
        stacked = (layer.lora_a_stacked if place.is_a else layer.lora_b_stacked)[place.slice]
        slot = self._manager.lora_index_to_id.index(adapter)
        found: torch.Tensor = stacked[slot, 0, :rows, :columns].reshape(-1)
        return found
