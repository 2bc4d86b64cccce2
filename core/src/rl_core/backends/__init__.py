"""Base classes that turn an engine or a trainer into a backend with few methods."""

from rl_core.backends.generation import GenerationBackend
from rl_core.backends.policy import PolicyBackend
from rl_core.backends.prompts import Completion, ModelFacts, PromptBatch, SamplingParams

__all__ = [
    "Completion",
    "GenerationBackend",
    "ModelFacts",
    "PolicyBackend",
    "PromptBatch",
    "SamplingParams",
]
