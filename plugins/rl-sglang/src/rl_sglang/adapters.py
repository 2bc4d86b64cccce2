"""The adapters of an SGLang engine: where a refit of adapters writes, in one scheduler."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.utils import get_layer_id
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.utils import get_target_module_name

from rl_backends.engine.adapters import ADAPTERS, AdapterSink, adapted_modules
from rl_core.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_sglang.weights import EngineWeights

__all__ = ["ADAPTER_NAMES", "SglangAdapters", "adapter_reference", "lora_arguments"]

#: How requests name the adapters, by their numbers.
ADAPTER_NAMES = {number: f"policy-{number}" for number in range(1, ADAPTERS + 1)}


def adapter_reference(number: int) -> LoRARef:
    """How SGLang calls an adapter of refits."""
    name = ADAPTER_NAMES[number]
    return LoRARef(lora_id=name, lora_name=name, lora_path="refit", pinned=False)


#: See :func:`adapted_modules`.
sglang_tensors = partial(adapted_modules, key="sglang_cfg.lora", distribution="rl-sglang")


def lora_arguments(
    model_name: str, dtype: str, lora: Mapping[str, Any], *, trust: bool
) -> dict[str, Any]:
    """The arguments of SGLang's ``ServerArgs`` with which it serves such adapters.

    Raises:
        ConfigError: The target modules are not in the model.
        CapabilityError: A target module is not a linear layer.
    """
    tensors = sglang_tensors(model_name, getattr(torch, dtype), lora, trust=trust)
    return {
        "enable_lora": True,
        "max_lora_rank": lora.get("r", 16),
        "lora_target_modules": sorted({m.rpartition(".")[2] for m, _ in tensors.values()}),
        "max_loras_per_batch": ADAPTERS + 1,  # and the base
        "lora_strict_loading": True,
        **({} if torch.cuda.is_available() else {"lora_backend": "torch_native"}),
    }


class SglangAdapters(AdapterSink):
    """Loads adapters through SGLang's own manager, from memory.

    Args:
        runner: SGLang's, with its part of the model loaded.
        lora: The engine's key ``lora``.
        base: See :class:`AdapterSink`.
    """

    def __init__(
        self, runner: Any, lora: Mapping[str, Any], base: Callable[[], EngineWeights]
    ) -> None:
        config, arguments = runner.model_config, runner.server_args
        tensors = sglang_tensors(
            config.model_path, config.dtype, lora, trust=bool(arguments.trust_remote_code)
        )
        super().__init__(tensors, workers=int(arguments.tp_size), base=base)
        self._manager = runner.lora_manager
        rank = lora.get("r", 16)
        modules = sorted({module.rpartition(".")[2] for module, _ in tensors.values()})
        # The scale is in B, so that it is 1 here.
        self._config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": modules,
        }
        self._places = lru_cache(maxsize=1)(self.places)

    def load(self, adapter: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`AdapterSink.load`.

        Raises:
            PluginError: SGLang refused it.
        """
        self.unload(adapter)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        reference = adapter_reference(adapter)
        done = self._manager.load_lora_adapter_from_tensors(reference, copies, self._config)
        if not done.success:
            raise PluginError(
                f"SGLang did not load the adapter of a refit: {done.error_message}",
                fix="look at the end of the engine's log",
            )
        others = set(self._manager.memory_pool.uid_to_buffer_id)
        self._manager.fetch_new_loras({reference.lora_id}, others)
        if self._manager.device.type == "cuda":
            torch.cuda.synchronize(self._manager.device)

    def unload(self, adapter: int) -> None:
        """See :meth:`AdapterSink.unload`."""
        self._manager.unload_lora_adapter(adapter_reference(adapter))

    def places(self, layer: int | None) -> dict[str, tuple[torch.Tensor, Any, torch.Tensor]]:
        """Where SGLang keeps the tensors of a layer: buffer, places in it, elements there.

        SGLang itself joins and slices tensors that have the numbers of their elements.
        """
        if layer is None:
            return {}
        manager, pool = self._manager, self._manager.memory_pool
        numbers, ends = {}, [1]  # 0 is what SGLang fills up with
        for name, spec in self.by_name.items():
            if get_layer_id(name) == layer:
                ends.append(ends[-1] + spec.numel)
                numbers[name] = torch.arange(ends[-2], ends[-1]).view(spec.shape)
        probe = LoRAAdapter(
            "probe",
            LoRAConfig.from_dict(self._config),
            manager.base_hf_config,
            manager.load_config,
            manager.lora_backend,
            base_model=manager.base_model,
        )
        probe.initialize_weights_from_tensors(numbers)
        found = {}
        for module_name, module in manager.lora_modules[layer].items():
            target = get_target_module_name(module_name, pool.target_modules)
            for kind, buffers, slicing in (
                ("lora_A", pool.A_buffer, module.slice_lora_a_weights),
                ("lora_B", pool.B_buffer, module.slice_lora_b_weights),
            ):
                for joined_name, joined in probe.layers[layer].weights.items():
                    joined_target = get_target_module_name(joined_name, pool.target_modules)
                    if kind not in joined_name or joined_target != target:
                        continue
                    part = slicing(joined)
                    for name, begin, end in zip(numbers, ends, ends[1:], strict=False):
                        places = (part >= begin) & (part < end)
                        if places.any():
                            found[name] = buffers[target][layer], places, part[places] - begin
        return found

    def kept(self, name: str) -> torch.Tensor:
        """See :meth:`AdapterSink.kept`."""
        place = self._places(get_layer_id(name)).get(name)
        return torch.empty(0, dtype=torch.int64) if place is None else place[2]

    def held(self, adapter: int, name: str) -> torch.Tensor:
        """See :meth:`AdapterSink.held`."""
        place = self._places(get_layer_id(name)).get(name)
        if place is None:
            return torch.empty(0)
        buffer, places, _ = place
        slot = self._manager.memory_pool.uid_to_buffer_id[adapter_reference(adapter).lora_id]
        rows, columns = places.shape
        found: torch.Tensor = buffer[slot, :rows, :columns][places.to(buffer.device)]
        return found
