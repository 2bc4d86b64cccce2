"""Generation with a policy's own weights: the frontend of every engine over the policy's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_core.backends import GenerationBackend
from rl_core.errors import CapabilityError
from rl_core.refit import DEFAULT_DEADLINE_S
from rl_core.refit.turns import exclusively
from rl_hf.decoding import DEFAULT_MAX_BATCH_SIZE, DecodingEngine
from rl_hf.modeling import model_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel

    from rl_core.backends import RowEngine
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import GenerationOutputSpec, WeightSink

__all__ = ["PolicyGeneration"]


class PolicyGeneration(GenerationBackend):
    """Decodes with a model that somebody else owns, trains and places.

    Args:
        model: The policy's model, adapters included.
        tokenizer: For stop strings.
        config: A checked :class:`~rl_hf.config.HuggingFaceGenerationConfig`.
        version: The version of the policy's weights.

    Raises:
        ConfigError: The model has no pad token, and ``pad_token_id`` is not set.
    """

    borrows_weights = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: Mapping[str, Any],
        version: Callable[[], int],
    ) -> None:
        super().__init__(config, model_facts(model, tokenizer, config))
        rows = config.get("max_batch_size", DEFAULT_MAX_BATCH_SIZE)
        self._engine = DecodingEngine(model, tokenizer, max_batch_size=rows)
        self._version = version
        self.prepare_for_generation()

    @property
    def weights_version(self) -> int:
        """The last version that the policy sent."""
        return self._version()

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """See :meth:`GenerationInterface.generate`; once it is over the model is the policy's."""
        try:
            return super().generate(data, greedy)
        except BaseException:
            with exclusively(self._lock, DEFAULT_DEADLINE_S, "the policy's generate"):
                pass  # the step that was going on has ended
            raise

    def row_engine(self) -> RowEngine:
        """See :meth:`GenerationBackend.row_engine`."""
        return self._engine

    def weight_sink(self) -> WeightSink:
        """Refused: the weights are the policy's."""
        raise CapabilityError(
            "a policy generates with its own weights and takes no refit",
            fix="refit a generation backend",
        )

    def on_wake(self, tags: frozenset[str]) -> None:
        """The policy places its model."""

    def on_sleep(self, tags: frozenset[str]) -> None:
        """The policy places its model."""

    def on_shutdown(self) -> None:
        """The policy lets go of its model."""
