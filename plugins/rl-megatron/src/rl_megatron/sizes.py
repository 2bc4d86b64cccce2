"""How a model is spread over ranks, and where each rank is.

Ranks are numbered as megatron-core numbers them by default: tensor-parallel ranks are neighbours,
then data-parallel ones, then stages. Experts are dealt to neighbouring data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_core.errors import CapabilityError, ConfigError
from rl_core.interfaces import DataParallelRank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_megatron.architectures import Architecture

__all__ = ["Coordinates", "Sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How one model is spread.

    Attributes:
        tensor: Ranks that share every layer.
        pipeline: Stages.
        data: Copies of the model.
        expert: Data-parallel ranks that the experts are dealt to.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any], world: int, architecture: Architecture) -> Sizes:
        """Checks the configured sizes against the ranks there are and the model.

        Args:
            config: A checked :class:`~rl_megatron.config.MegatronPolicyConfig`.
            world: Ranks.
            architecture: Of the model.

        Raises:
            ConfigError: Something does not divide; names the numbers.
            CapabilityError: A size is above 1 that is not implemented.
        """
        tensor = config.get("tensor_model_parallel_size", 1)
        pipeline = config.get("pipeline_model_parallel_size", 1)
        expert = config.get("expert_model_parallel_size", 1)
        if (context := config.get("context_parallel_size", 1)) != 1:
            raise CapabilityError(
                f"context_parallel_size is {context}, but rl-megatron does not split sequences "
                "over ranks yet",
                fix="set it to 1; tensor_model_parallel_size with sequence_parallel also saves "
                "activation memory",
                key="context_parallel_size",
            )
        if world % (tensor * pipeline):
            need = tensor * pipeline
            raise ConfigError(
                f"world size {world} is not a multiple of {need} (tensor {tensor} x pipeline "
                f"{pipeline})",
                fix=f"start {need} workers: create_policy(config, LocalCluster({need})), or set "
                f"sizes whose product divides {world}",
                key="tensor_model_parallel_size",
            )
        data = world // (tensor * pipeline)
        divided = [
            ("tensor_model_parallel_size", tensor, "attention heads", architecture.heads),
            ("tensor_model_parallel_size", tensor, "key/value heads", architecture.groups),
            ("tensor_model_parallel_size", tensor, "hidden features", architecture.hidden),
            ("tensor_model_parallel_size", tensor, "features of the MLP", architecture.ffn),
            ("pipeline_model_parallel_size", pipeline, "layers", architecture.layers),
            ("expert_model_parallel_size", expert, "experts", architecture.experts),
        ]
        for key, size, what, number in divided:
            if number % size:
                raise ConfigError(
                    f"{key} is {size}, which does not divide the model's {number} {what}",
                    fix=f"set {key} to a divisor of {number}",
                    key=key,
                )
        if expert > 1 and not architecture.experts:
            raise ConfigError(
                f"expert_model_parallel_size is {expert}, but the model has no experts",
                fix="leave it out",
                key="expert_model_parallel_size",
            )
        if data % expert:
            raise ConfigError(
                f"expert_model_parallel_size is {expert}, which does not divide the data-parallel "
                f"size {data} (world size {world})",
                fix=f"set it to a divisor of {data}, or start more workers",
                key="expert_model_parallel_size",
            )
        if config.get("sequence_parallel") and tensor == 1:
            raise ConfigError(
                "sequence_parallel is set, but tensor_model_parallel_size is 1",
                fix="set tensor_model_parallel_size to 2 or more, or leave sequence_parallel out",
                key="sequence_parallel",
            )
        if architecture.experts and tensor > 1 and not config.get("sequence_parallel"):
            raise ConfigError(
                "megatron-core trains experts with tensor parallelism only if sequence_parallel is "
                "set",
                fix="set sequence_parallel=True",
                key="sequence_parallel",
            )
        return cls(tensor, pipeline, data, expert)

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tensor * self.pipeline * self.data

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank is."""
        rest, tensor = divmod(rank, self.tensor)
        stage, data = divmod(rest, self.data)
        return Coordinates(tensor, stage, data, data % self.expert, self)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank is.

    Attributes:
        tensor: Among those that share its layers.
        stage: Of the pipeline.
        data: Which copy of the model.
        expert: Among those that share the experts.
        sizes: Of the whole.
    """

    tensor: int
    stage: int
    data: int
    expert: int
    sizes: Sizes

    @property
    def first(self) -> bool:
        """Whether this is the first stage, with the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage, with the logits."""
        return self.stage == self.sizes.pipeline - 1

    @property
    def rank(self) -> int:
        """The rank."""
        sizes = self.sizes
        return self.tensor + sizes.tensor * (self.data + sizes.data * self.stage)

    @property
    def data_parallel(self) -> DataParallelRank:
        """Which rows this rank gets; the first one of the last stage reports for its copy."""
        return DataParallelRank(self.data, self.sizes.data, self.last and self.tensor == 0)
