"""Configurations of the reference backends."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from rl_core.interfaces import GenerationConfig, PolicyConfig
from rl_core.interfaces.constraints import Range

__all__ = ["ReferenceGenerationConfig", "ReferencePolicyConfig"]

Dtype = Literal["float32", "bfloat16"]


class ReferenceGenerationConfig(GenerationConfig):
    """A :class:`GenerationConfig` and the dtype.

    Attributes:
        torch_dtype: Of the weights.
    """

    torch_dtype: NotRequired[Dtype]


class ReferencePolicyConfig(PolicyConfig):
    """A :class:`PolicyConfig` and what training needs.

    Attributes:
        torch_dtype: Of the weights.
        temperature: Divides the logits, > 0.
        optimizer: ``lr`` of AdamW; ``weight_decay``.
        max_grad_norm: The gradient is scaled down to it.
        train_micro_batch_size: Rows per forward pass.
        resume_from: A checkpoint to continue from.
    """

    torch_dtype: NotRequired[Dtype]
    temperature: NotRequired[Annotated[float, Range(gt=0)]]
    optimizer: NotRequired[dict[str, float]]
    max_grad_norm: NotRequired[Annotated[float, Range(gt=0)]]
    train_micro_batch_size: NotRequired[Annotated[int, Range(ge=1)]]
    resume_from: NotRequired[str]
