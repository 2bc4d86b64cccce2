"""One engine without the rest: model in, token ids in, token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_core.batch import BatchedDataDict
from rl_vllm.generation import VllmGeneration

if TYPE_CHECKING:
    from rl_core.interfaces import GenerationOutputSpec

__all__ = ["VllmGenerationWorker"]


class VllmGenerationWorker:
    """A vLLM engine that is awake as soon as it is there; runs as it is or as a Ray actor.

    Args:
        model_name: Directory (or hub name) of a checkpoint.
        **kwargs: Keys of :class:`~rl_vllm.config.VllmConfig`.
    """

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        config = {"backend": "vllm", "model_name": model_name, **kwargs}
        self.backend = VllmGeneration(None, config)
        self.backend.prepare_for_generation()

    def generate(
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Completes prompts.

        Args:
            input_ids: ``[B, S]`` int64, right-padded.
            **kwargs: ``greedy``, and further keys of a batch, such as ``input_lengths``; without
                lengths or an ``attention_mask`` every row is taken as a whole.
        """
        greedy = bool(kwargs.pop("greedy", False))
        data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": input_ids, **kwargs})
        if not {"input_lengths", "attention_mask"} & set(data):
            data["input_lengths"] = torch.full((len(input_ids),), input_ids.shape[1])
        return self.backend.generate(data, greedy)

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """See :meth:`GenerationInterface.prepare_refit_info`."""
        self.backend.prepare_refit_info(state_dict_info)

    def update_weights(self, weights_handle: dict[str, Any]) -> bool:
        """Takes the refit of which a policy's ``get_weights_ipc_handles`` returned the ticket."""
        return self.backend.update_weights(weights_handle)

    def shutdown(self) -> bool:
        """Ends the engine. Idempotent."""
        return self.backend.shutdown()
