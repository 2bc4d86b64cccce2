"""The weights of a loaded vLLM model under the names of its checkpoint, on one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_core.errors import CapabilityError
from rl_hosting.weights import LoadedWeights, checkpoint_specs
from rl_vllm.loading import check_derived

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from rl_core.interfaces import TensorSpec

__all__ = ["WITHOUT_REFITS", "EngineWeights"]

WITHOUT_REFITS = "set vllm_cfg.refit to False"


class EngineWeights(LoadedWeights):
    """What a refit writes to.

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
                fix=f"use a checkpoint that is not quantised, or {WITHOUT_REFITS}",
                capability="refit",
            )
        super().__init__(
            worker.get_model(),
            model_config.dtype,
            workers=int(self._config.parallel_config.world_size),
            without_refits=WITHOUT_REFITS,
        )

    @property
    def eager(self) -> bool:
        """No CUDA graphs were captured."""
        return bool(self._config.model_config.enforce_eager)

    def find_specs(self) -> Sequence[TensorSpec]:
        """See :meth:`LoadedWeights.find_specs`."""
        config = self._config.model_config
        return checkpoint_specs(config.hf_config, config.dtype, trust=config.trust_remote_code)

    def check(self) -> None:
        """See :meth:`LoadedWeights.check`."""
        check_derived(self.model)

    def loading(self) -> AbstractContextManager[None]:
        """The engine's configuration is the one that vLLM's code is asked in."""
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[None] = set_current_vllm_config(self._config)
        return context

    def is_padded(self, module: nn.Module) -> bool:
        """See :meth:`LoadedWeights.is_padded`."""
        return hasattr(module, "org_vocab_size")
