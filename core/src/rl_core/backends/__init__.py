"""Base classes that turn an engine or a trainer into a backend with few methods."""

from rl_core.backends._receivers import Receiver
from rl_core.backends.generation import GenerationBackend
from rl_core.backends.inputs import TAGS
from rl_core.backends.policy import PolicyBackend
from rl_core.backends.policy_refits import PolicyRefits
from rl_core.backends.policy_rows import RowLimits
from rl_core.backends.prompts import Completion, ModelFacts, PromptBatch, SamplingParams
from rl_core.backends.rows import FailedRow, Row, RowEngine

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
