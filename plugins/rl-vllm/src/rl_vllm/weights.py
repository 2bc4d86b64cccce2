"""The weights of a loaded vLLM model: where a refit writes, on one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_backends.engine.derived_weights import check_derived
from rl_backends.engine.weights import CheckpointModel, LoadedSink, LoadedWeights
from rl_core.errors import CapabilityError, ConfigError
from rl_vllm.cpu_weights import check_packed, pack_again

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch

__all__ = ["EngineWeights", "ModelSink"]

#: How to build an engine that takes no refits.
WITHOUT_REFITS = "set vllm_cfg.refit to False"


class EngineWeights(LoadedWeights):
    """Where vLLM's loader puts the tensors of a checkpoint.

    Args:
        worker: vLLM's, with its part of the model loaded.

    Raises:
        CapabilityError: The model is quantised.
    """

    def __init__(self, worker: Any) -> None:
        self._config = worker.vllm_config
        model_config = self._config.model_config
        if model_config.quantization is not None:
            raise CapabilityError(
                f"an engine quantised with {model_config.quantization} takes no refit",
                fix="use a checkpoint that is not quantised; to generate without refits, "
                f"{WITHOUT_REFITS}",
                capability="refit",
            )
        super().__init__(
            worker.get_model(),
            CheckpointModel(
                model_config.model, model_config.dtype, trust=model_config.trust_remote_code
            ),
            workers=int(self._config.parallel_config.world_size),
            without_refits=WITHOUT_REFITS,
        )

    @property
    def eager(self) -> bool:
        """No CUDA graphs were captured."""
        return bool(self._config.model_config.enforce_eager)

    def check(self) -> None:
        """See :meth:`LoadedWeights.check`."""
        check_derived(
            self.model,
            "vLLM",
            fix="use a model without such layers; for experts on CUDA, set "
            'vllm_cfg.engine_args.moe_backend to "triton", which keeps their layout',
            without_refits=WITHOUT_REFITS,
        )

    def loading(self) -> AbstractContextManager[None]:
        """The configuration of the engine is set, which vLLM's code asks for."""
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[None] = set_current_vllm_config(self._config)
        return context


class ModelSink(LoadedSink):
    """Writes to vLLM's own parameters, and renews what vLLM makes of them.

    Args:
        weights: Of the worker.
    """

    def __init__(self, weights: EngineWeights) -> None:
        super().__init__(weights)
        self._weights = weights
        self._checked = False

    def finish(self, version: int) -> None:
        """Packs the new weights where vLLM computes with packed ones."""
        super().finish(version)
        pack_again(self._weights.model)
        self._checked = False

    def fail(self) -> None:
        """Packs the weights as they are: torn, but those that :meth:`read` gives."""
        super().fail()
        pack_again(self._weights.model)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSink.read`."""
        if not self._checked:
            check_packed(self._weights.model)
            self._checked = True
        return super().read(names)

    def scale_kv(self, scales: Mapping[str, float]) -> None:
        """See :meth:`WeightSink.scale_kv`; names are such as ``layer_0.k_scale``.

        Raises:
            CapabilityError: The engine has no FP8 cache, or its CUDA graphs have the scales in
                them.
            ConfigError: A scale is of no layer of the model.
        """
        layers = {n: m for n, m in self._weights.model.named_modules() if hasattr(m, "_k_scale")}
        if not all(str(m.kv_cache_dtype).startswith("fp8") for m in layers.values()):
            raise CapabilityError(
                "the engine has no FP8 key/value cache",
                fix='set vllm_cfg.kv_cache_dtype to "fp8", or refit without kv_scales',
                capability="kv_scales",
            )
        for name, scale in scales.items():
            layer, _, which = name.partition(".")
            found = [m for n, m in layers.items() if f".{layer.replace('_', 's.')}." in n]
            if not found or which not in ("q_scale", "k_scale", "v_scale"):
                text = f"kv_scales has {name!r}, which is not a scale of a layer of the model"
                raise ConfigError(text, fix='use names such as "layer_0.k_scale"', key=name)
            for module in found:
                impl: Any = getattr(module, "impl", None)
                if hasattr(impl, "bmm1_scale"):
                    if not self._weights.eager:
                        raise CapabilityError(
                            f"{type(impl).__name__} has the scales of the cache in CUDA graphs, "
                            "which a refit cannot change",
                            fix="set vllm_cfg.enforce_eager to True, or "
                            "vllm_cfg.engine_args.attention_backend to another one, such as "
                            "FLASH_ATTN",
                            capability="kv_scales",
                        )
                    impl.bmm1_scale = impl.bmm2_scale = None  # made of the scales when next used
                getattr(module, f"_{which}").fill_(float(scale))
                setattr(module, f"_{which}_float", float(scale))
