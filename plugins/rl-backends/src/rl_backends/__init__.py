"""Base classes that turn an engine or a trainer into a backend with few methods."""

from rl_backends.generation.base import GenerationBackend
from rl_backends.generation.prompts import Completion, ModelFacts, PromptBatch, SamplingParams
from rl_backends.generation.rows import FailedRow, Row, RowEngine
from rl_backends.inputs import TAGS
from rl_backends.policy.base import PolicyBackend
from rl_backends.policy.refits import PolicyRefits
from rl_backends.policy.rows import RowLimits
from rl_core.weights.spellings import Receiver

__all__ = [
    "TAGS",
    "Completion",
    "FailedRow",
    "GenerationBackend",
    "ModelFacts",
    "PolicyBackend",
    "PolicyRefits",
    "PromptBatch",
    "Receiver",
    "Row",
    "RowEngine",
    "RowLimits",
    "SamplingParams",
]
