"""The weights of a loaded vLLM model: where a refit writes, on one worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rl_backends.engine.operations import check_operations
from rl_backends.engine.weights import CheckpointModel, LoadedSink, LoadedWeights
from rl_core.errors import CapabilityError, ConfigError
from rl_vllm.cpu_weights import check_packed, pack_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

__all__ = ["EngineWeights", "ModelSink"]

#: How to build an engine that takes no refits.
WITHOUT_REFITS = "set vllm_cfg.refit to False"
#: Seconds by which two limits of time steps may differ.
_NEAR = 1e-6


class EngineWeights(LoadedWeights):
    """Where vLLM's loader puts the tensors of a checkpoint.

    Args:
        worker: vLLM's, with its part of the model loaded.

    Raises:
        CapabilityError: The checkpoint is quantised.
    """

    def __init__(self, worker: Any) -> None:
        self._config = worker.vllm_config
        model_config = self._config.model_config
        if getattr(model_config.hf_config, "quantization_config", None) is not None:
            raise CapabilityError(
                f"the checkpoint is quantised ({model_config.quantization}): the tensors of a "
                "trainer do not have its names and dtypes",
                fix="use the checkpoint that it was made of, and have vLLM quantise that: set "
                'vllm_cfg.engine_args.quantization, for example to "fp8_per_block"; to generate '
                f"without refits, {WITHOUT_REFITS}",
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
        self.check_derived(
            "vLLM",
            fix="use a model without such layers; for experts on CUDA, set "
            'vllm_cfg.engine_args.moe_backend to "triton", which keeps their layout',
        )

    def hook(self, module: nn.Module) -> Callable[[], None] | None:
        """See :meth:`LoadedWeights.hook`; in the order in which vLLM itself has them run."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.utils.torch_utils import set_default_torch_dtype

        method = getattr(module, "quant_method", None)
        own: Any = getattr(module, "process_weights_after_loading", None)
        if isinstance(method, QuantizeMethodBase):
            process = partial(method.process_weights_after_loading, module)
        elif own is not None:
            process = own if module is self.model else partial(own, self.checkpoint.dtype)
        else:
            return None

        def run() -> None:
            with self.loading(), set_default_torch_dtype(self.checkpoint.dtype), self.device:
                process()

        return run

    def prepare_plain(self, parameter: torch.Tensor) -> None:
        """See :meth:`LoadedWeights.prepare_plain`: vLLM waits for the last tensor of a layer."""
        held = vars(parameter)
        for key in ("weight_loader", "_weight_loader"):
            while getattr(held.get(key), "__name__", "") == "online_process_loader":
                held[key] = held[key].__wrapped__

    def check_same(self) -> None:
        """See :meth:`LoadedWeights.check_same`: operations without weights are compared."""
        with self.loading():
            reference = self.checkpoint.model
            check_operations(self.model, reference, engine="vLLM", without_refits=WITHOUT_REFITS)
            check_time_steps(self.model, reference)

    def loading(self) -> AbstractContextManager[None]:
        """The configuration of the engine is set, which vLLM's code asks for."""
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[None] = set_current_vllm_config(self._config)
        return context


def check_time_steps(model: nn.Module, reference: nn.Module) -> None:
    """Makes sure that Mamba 2 layers limit their time steps as those of transformers do.

    Args:
        model: vLLM's.
        reference: That of transformers.

    Raises:
        CapabilityError: Those of transformers have a limit, and vLLM's have none.
    """
    limits: list[Any] = [
        m.time_step_limit for m in reference.modules() if hasattr(m, "time_step_limit")
    ]
    mixers = [m for m in model.modules() if type(m).__name__ == "MambaMixer2"]
    for mixer in mixers:
        ours = tuple(getattr(mixer, "time_step_limit", (0.0, float("inf"))))
        if other := [
            limit
            for limit in limits
            if any(abs(x - y) > _NEAR for x, y in zip(limit, ours, strict=True))
        ]:
            raise CapabilityError(
                f"vLLM's {type(model).__name__} does not limit the time steps of its Mamba 2 "
                f"layers, and transformers does: they are at least {other[0][0]:g} and at most "
                f"{other[0][1]:g}",
                fix="set time_step_min in config.json to 1e-9 (time_step_limit to [0.0, Infinity] "
                "if it is there), for the trainer and the engine: then transformers does not limit "
                f"them either; to generate without refits, {WITHOUT_REFITS}",
                capability="refit",
            )


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

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
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
                setattr(module, f"_{which}_float", float(scale))
                for kept in (f"_{which}", f"_{which}_cpu"):
                    if (tensor := getattr(module, kept, None)) is not None:  # no copy of q_scale
                        tensor.fill_(float(scale))
