"""Configurations of the reference backends."""

from __future__ import annotations

from typing import Literal, NotRequired

from rl_core.interfaces import GenerationConfig, PolicyConfig

__all__ = ["ReferenceGenerationConfig", "ReferencePolicyConfig"]

Dtype = Literal["float32", "bfloat16"]


class ReferenceGenerationConfig(GenerationConfig):
    """A :class:`GenerationConfig` and the dtypes.

    Attributes:
        torch_dtype: Of the weights.
        kv_cache_dtype: ``"fp8"`` rounds keys and values. Default ``"auto"``, which does not.
    """

    torch_dtype: NotRequired[Dtype]
    kv_cache_dtype: NotRequired[Literal["auto", "fp8"]]


class ReferencePolicyConfig(PolicyConfig):
    """A :class:`PolicyConfig`, the dtype, and where to continue.

    Attributes:
        torch_dtype: Of the weights.
        resume_from: A checkpoint to continue from.
    """

    torch_dtype: NotRequired[Dtype]
    resume_from: NotRequired[str]
