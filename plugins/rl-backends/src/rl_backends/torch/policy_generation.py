"""Generation with a policy's own weights: the frontend of every engine over the policy's model."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import torch

from rl_backends import GenerationBackend
from rl_core.errors import CapabilityError
from rl_core.weights import DEFAULT_DEADLINE_S
from rl_core.weights.engine_lock import exclusively

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_backends import ModelFacts, PolicyRefits, RowEngine
    from rl_backends.policy.ranks import RankGroup
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import GenerationOutputSpec, WeightSink

__all__ = ["PolicyGeneration"]


class PolicyGeneration(GenerationBackend):
    """Generates with the model that a policy owns, trains and moves between devices.

    Args:
        engine: Decodes with the policy's model, such as a
            :class:`~rl_backends.torch.decoding.DecodingEngine`.
        config: A checked :class:`~rl_core.interfaces.GenerationConfig`.
        facts: Of the model, see :func:`rl_backends.torch.checkpoints.model_facts`.
        policy: Owner of the model; its version and origin are those of the rows.
    """

    def __init__(
        self,
        engine: RowEngine,
        config: Mapping[str, Any],
        facts: ModelFacts,
        policy: PolicyRefits,
    ) -> None:
        super().__init__(config, facts)
        self._engine = engine
        self._policy = policy
        self.prepare_for_generation()

    @property
    def weights_version(self) -> int:
        """The last version that the policy sent."""
        return self._policy.weights_version

    @property
    def weights_origin(self) -> int:
        """The policy's, also before it sent any."""
        return self._policy.weights_origin

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

    def drawn_alike(
        self, data: BatchedDataDict[Any], ranks: RankGroup, *, greedy: bool
    ) -> BatchedDataDict[Any]:
        """Rows that get the same tokens on all ranks, which compute them together.

        Rows that nothing else seeds get seeds of rank 0. Called on all ranks.
        """
        seeded = "seed" in data or self.config.get("seed") is not None
        if ranks.size == 1 or greedy or seeded:
            return data
        first = ranks.gather(secrets.randbits(48))[0]
        count = len(next(iter(data.values()), ()))
        return data | {"seed": torch.arange(first, first + count)}

    def row_engine(self) -> RowEngine:
        """See :meth:`GenerationBackend.row_engine`."""
        return self._engine

    def weight_sink(self) -> WeightSink:
        """Refused: the weights are the policy's."""
        raise CapabilityError(
            "the generation of a policy takes no refit: it has the policy's own weights",
            fix="refit a generation backend",
        )

    def on_wake(self, tags: frozenset[str]) -> None:
        """The policy places its model."""

    def on_sleep(self, tags: frozenset[str]) -> None:
        """The policy places its model."""

    def on_shutdown(self) -> None:
        """The policy lets go of its model."""
