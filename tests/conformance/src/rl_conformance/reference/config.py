"""Configurations of the reference backends."""

from __future__ import annotations

from typing import Literal, NotRequired

from rl_backends.engine.config import EngineLoraConfig  # noqa: TC001 - read when keys are checked
from rl_core.interfaces import GenerationConfig, PolicyConfig

__all__ = ["ReferenceGenerationConfig", "ReferencePolicyConfig"]

Dtype = Literal["float32", "bfloat16"]


class ReferenceGenerationConfig(GenerationConfig):
    """A :class:`GenerationConfig`, the device and the dtypes.

    Attributes:
        device: Of the weights. Default ``"cpu"``.
        torch_dtype: Of the weights.
        kv_cache_dtype: ``"fp8"`` rounds keys and values. Default ``"auto"``, which does not.
        lora: Serve adapters of all linear layers but the output; ``target_modules`` is not read.
    """

    device: NotRequired[str]
    torch_dtype: NotRequired[Dtype]
    kv_cache_dtype: NotRequired[Literal["auto", "fp8"]]
    lora: NotRequired[EngineLoraConfig]


class ReferencePolicyConfig(PolicyConfig):
    """A :class:`PolicyConfig`, the device, the dtype, and where to continue.

    Attributes:
        device: Of the weights. Default ``"cpu"``.
        torch_dtype: Of the weights.
        gradient_checkpointing: Recompute activations in the backward pass. Default False.
        reference: ``"copy"`` keeps the weights of the start in a second model, ``"none"`` does
            not. Default ``"copy"``.
        resume_from: A checkpoint to continue from.
    """

    device: NotRequired[str]
    torch_dtype: NotRequired[Dtype]
    gradient_checkpointing: NotRequired[bool]
    reference: NotRequired[Literal["copy", "none"]]
    resume_from: NotRequired[str]
