"""The Hugging Face generation backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_backends import GenerationBackend
from rl_backends.model_files import check_stop_strings
from rl_backends.tensors import NamedTensorSink, module_tensors
from rl_backends.torch.checkpoints import load_tokenizer
from rl_backends.torch.decoding import DEFAULT_MAX_BATCH_SIZE
from rl_core.config import check_config
from rl_core.errors import ConfigError
from rl_hf.config import HuggingFaceGenerationConfig
from rl_hf.decoders import decoding_engine
from rl_hf.modeling import load_model, model_device, model_facts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_backends import RowEngine
    from rl_backends.torch.decoding import DecodingEngine
    from rl_core.interfaces import WeightSink

__all__ = ["HuggingFaceGeneration"]


class HuggingFaceGeneration(GenerationBackend):
    """Generates with a transformers model in this process, on the CPU or on CUDA.

    Rows are decoded together by continuous batching over a key/value cache that is written in
    place; see :mod:`rl_backends.torch.decoding`. Between calls nothing is kept but the weights.

    Args:
        model_name: Directory (or hub name) of a checkpoint.
        **kwargs: Keys of :class:`~rl_hf.config.HuggingFaceGenerationConfig`.

    Raises:
        ConfigError: A key or the checkpoint is wrong; keys are checked before anything is loaded.
    """

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        config = check_config(
            HuggingFaceGenerationConfig,
            {"backend": "hf", "model_name": model_name, **kwargs},
            what=type(self).__name__,
        )
        tokenizer = load_tokenizer(model_name, config.get("trust_remote_code", False))
        check_stop_strings(config, tokenizer)
        model = load_model(config, for_training=False)
        if not model.can_generate():
            raise ConfigError(
                f"{type(model).__name__} of {model_name} is not a generative language model",
                fix="point model_name at a causal language model",
                key="model_name",
            )
        super().__init__(config, model_facts(model, tokenizer, config))
        self._model: PreTrainedModel | None = model
        self._home = model_device(model)
        # Weights that transformers itself placed or quantised stay where they are.
        self._movable = not hasattr(model, "hf_device_map")
        self._engine: DecodingEngine | None = decoding_engine(
            model,
            tokenizer,
            max_batch_size=config.get("max_batch_size", DEFAULT_MAX_BATCH_SIZE),
        )

    @property
    def placement(self) -> str:
        """See :meth:`GenerationBackend.placement`."""
        model = self._model
        return "" if model is None else f"{str(model.dtype).removeprefix('torch.')}, {model.device}"

    def row_engine(self) -> RowEngine:
        """See :meth:`GenerationBackend.row_engine`."""
        assert self._engine is not None
        return self._engine

    def weight_sink(self) -> WeightSink:
        """See :meth:`GenerationBackend.weight_sink`."""
        assert self._model is not None
        return NamedTensorSink(module_tensors(self._model))

    def on_wake(self, tags: frozenset[str]) -> None:
        """Brings the weights back to their device."""
        if "weights" in tags:
            self._place(self._home)

    def on_sleep(self, tags: frozenset[str]) -> None:
        """Moves the weights to host memory; the cache of a call went with the call."""
        if "weights" in tags:
            self._place(torch.device("cpu"))
        self._give_back()

    def on_shutdown(self) -> None:
        """Lets go of the model."""
        self._model = self._engine = None
        self._give_back()

    def _place(self, device: torch.device) -> None:
        if self._movable and self._model is not None:
            self._model.to(device)

    def _give_back(self) -> None:
        if self._home.type == "cuda":
            torch.cuda.empty_cache()
