"""Where a refit writes: vLLM's own parameters, in place, on one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import CapabilityError, ConfigError
from rl_core.interfaces import TensorSpec, WeightSink
from rl_vllm.cpu_weights import check_packed, pack_again

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rl_vllm.weights import EngineWeights

__all__ = ["ModelSink"]


class ModelSink(WeightSink):
    """Writes the tensors of a checkpoint to where vLLM's loader would.

    Storages stay what they are, so CUDA graphs do, too.

    Args:
        weights: Of the worker.
    """

    casts = True

    def __init__(self, weights: EngineWeights) -> None:
        self._weights = weights
        self.device = str(weights.device)
        self._checked = False

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return self._weights.specs

    def begin(self, version: int) -> None:
        """Finds out where everything goes, before anything is written."""
        assert self._weights.regions is not None
        self._weights.check()  # layers that computed since may have kept something

    @torch.no_grad()
    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        for region in self._weights.regions[name]:
            region.write(offset, data)

    def targets(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSink.targets`."""
        return self._weights.targets

    def finish(self, version: int) -> None:
        """Refreshes what vLLM derived from the weights."""
        pack_again(self._weights.model)
        self._checked = False

    def fail(self) -> None:
        """Torn as they may be, the packed weights are those that can be read."""
        pack_again(self._weights.model)

    @torch.no_grad()
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSink.read`."""
        if not self._checked:
            check_packed(self._weights.model)
            self._checked = True
        return self._weights.read(names)

    def scale_kv(self, scales: Mapping[str, float]) -> None:
        """See :meth:`WeightSink.scale_kv`; names are such as ``layer_0.k_scale``.

        Raises:
            CapabilityError: The engine has no FP8 cache.
            ConfigError: A scale is of no layer of the model.
        """
        layers = {n: m for n, m in self._weights.model.named_modules() if hasattr(m, "_k_scale")}
        if not all(str(m.kv_cache_dtype).startswith("fp8") for m in layers.values()):
            raise CapabilityError(
                "the engine has no FP8 key/value cache",
                fix='set vllm_cfg.kv_cache_dtype="fp8", or refit without kv_scales',
                capability="kv_scales",
            )
        for name, scale in scales.items():
            layer, _, which = name.partition(".")
            found = [m for n, m in layers.items() if f".{layer.replace('_', 's.')}." in n]
            if not found or which not in ("q_scale", "k_scale", "v_scale"):
                raise ConfigError(f"{name} is no scale of a layer of the model", key=name)
            for module in found:
                _scale(module, which, float(scale), eager=self._weights.eager)


def _scale(module: Any, which: str, scale: float, *, eager: bool) -> None:
    """Sets one scale of a layer, also where vLLM keeps it as a number."""
    impl: Any = getattr(module, "impl", None)
    if hasattr(impl, "bmm1_scale"):
        if not eager:
            raise CapabilityError(
                f"{type(impl).__name__} keeps the scales of the cache in its CUDA graphs",
                fix="set vllm_cfg.enforce_eager, or another attention backend, such as FLASH_ATTN",
                capability="kv_scales",
            )
        impl.bmm1_scale = impl.bmm2_scale = None  # computed anew from the scales below
    getattr(module, f"_{which}").fill_(scale)
    setattr(module, f"_{which}_float", scale)
