"""The weights of a loaded SGLang model: where a refit writes, in one scheduler."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_backends.engine.weights import CheckpointModel, LoadedSink, LoadedWeights
from rl_core.errors import CapabilityError, ConfigError
from rl_sglang.loading import find_derived

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

__all__ = ["EngineWeights", "ModelSink", "check_same", "checkpoint_of"]

#: How to build an engine that takes no refits.
WITHOUT_REFITS = "set sglang_cfg.refit to False"


def checkpoint_of(runner: Any) -> CheckpointModel:
    """The trainer's model of the checkpoint that SGLang loaded."""
    config, trust = runner.model_config, bool(runner.server_args.trust_remote_code)
    return CheckpointModel(config.model_path, config.dtype, trust=trust)


def check_same(model: nn.Module, different: Sequence[str]) -> None:
    """Makes sure that SGLang's model is the trainer's.

    Args:
        model: SGLang's.
        different: What it computes differently, in words.

    Raises:
        CapabilityError: There is something.
    """
    if different:
        raise CapabilityError(
            f"SGLang's {type(model).__name__} is not the trainer's model: {'; '.join(different)}",
            fix="use another engine (vllm, hf), or another model; to generate without refits, "
            f"{WITHOUT_REFITS}",
            capability="refit",
        )


class EngineWeights(LoadedWeights):
    """Where SGLang's loader puts the tensors of a checkpoint.

    Args:
        runner: SGLang's, with its part of the model loaded.
        checkpoint: See :func:`checkpoint_of`.
        different: What SGLang's model computes differently from that of the trainer, in words.

    Raises:
        CapabilityError: The model is quantised.
    """

    def __init__(
        self, runner: Any, checkpoint: CheckpointModel, different: Sequence[str] = ()
    ) -> None:
        self._config = runner.model_config
        if self._config.quantization is not None:
            raise CapabilityError(
                f"an engine quantised with {self._config.quantization} takes no refit",
                fix="use a checkpoint that is not quantised; to generate without refits, "
                f"{WITHOUT_REFITS}",
                capability="refit",
            )
        super().__init__(
            runner.model,
            checkpoint,
            workers=int(runner.server_args.tp_size),
            without_refits=WITHOUT_REFITS,
        )
        self._load_format = str(runner.server_args.load_format)
        self._different = different
        self._checked = False

    def check_loaded(self) -> None:
        """Makes sure, once, that SGLang found all weights: it says nothing of those that it lacks.

        Raises:
            ConfigError: The files lack tensors.
        """
        if not self._checked and self._load_format != "dummy":
            self.check_files(Path(self._config.model_path))
        self._checked = True

    def check_same(self) -> None:
        """See :meth:`LoadedWeights.check_same`."""
        check_same(self.model, self._different)

    def check(self) -> None:
        """See :meth:`LoadedWeights.check`."""
        self.check_derived("SGLang", fix="use a model without such layers")

    def hook(self, module: nn.Module) -> Callable[[], None] | None:
        """See :meth:`LoadedWeights.hook`: kernels of a GPU, or of AMX, want weights rearranged."""
        from sglang.srt.layers.quantization.base_config import QuantizeMethodBase

        method = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            return None
        return partial(method.process_weights_after_loading, module)

    def renew(self) -> None:
        """See :meth:`LoadedWeights.renew`; also what SGLang itself computes of weights."""
        super().renew()
        if (derived := find_derived(self.model)) is not None:
            derived.renew()


class ModelSink(LoadedSink):
    """Writes to SGLang's own parameters.

    Args:
        weights: Of the scheduler.
    """

    def __init__(self, weights: EngineWeights) -> None:
        super().__init__(weights)
        self._weights = weights

    def begin(self, version: int) -> None:
        """See :meth:`LoadedSink.begin`; for the first one, the weights came from files.

        What a loader makes of several tensors looks as if files lacked them: it is refused before
        they are looked at.
        """
        super().begin(version)
        if version == 0:
            self._weights.check_loaded()

    def finish(self, version: int) -> None:
        """See :meth:`WeightSink.finish`: norms of Gemma's kind keep their weight plus one."""
        super().finish(version)
        modules: list[Any] = list(self._weights.model.modules())
        for module in modules:
            if hasattr(module, "gemma_weight"):
                module.refresh_gemma_weight()

    def scale_kv(self, scales: Mapping[str, float]) -> None:
        """See :meth:`WeightSink.scale_kv`; names are such as ``layer_0.k_scale``.

        Raises:
            CapabilityError: The engine has no FP8 cache, or would not scale queries.
            ConfigError: A scale is of no layer of the model.
        """
        found: list[Any] = list(self._weights.model.modules())
        layers = {module.layer_id: module for module in found if hasattr(module, "k_scale_float")}
        if any(module.k_scale is None for module in layers.values()):
            raise CapabilityError(
                "the engine has no FP8 key/value cache",
                fix='set sglang_cfg.kv_cache_dtype to "fp8_e4m3", or refit without kv_scales',
                capability="kv_scales",
            )
        for name, scale in scales.items():
            layer, _, which = name.partition(".")
            number = layer.removeprefix("layer_")
            if not number.isdigit() or int(number) not in layers:
                text = f"kv_scales has {name!r}, which is not a scale of a layer of the model"
                raise ConfigError(text, fix='use names such as "layer_0.k_scale"', key=name)
            if which not in ("k_scale", "v_scale"):
                raise CapabilityError(
                    f"kv_scales has {name!r}, but SGLang has scales only for keys and values",
                    fix="calibrate without include_q",
                    capability="kv_scales",
                )
            module = layers[int(number)]
            getattr(module, which).fill_(float(scale))
            setattr(module, f"{which}_float", float(scale))
