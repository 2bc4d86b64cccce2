"""Diagnostics that users run on a model: do trainer and engine agree, does the engine hold."""

from rl_core.checks.agreement import (
    Agreement,
    LogprobConsistency,
    measure_log_probability_consistency,
    validate_log_probability_consistency,
)
from rl_core.checks.engine import (
    GenerationConsistency,
    MaxModelLen,
    random_prompts,
    test_generation_consistency,
    test_max_model_len_respected,
)

__all__ = [
    "Agreement",
    "GenerationConsistency",
    "LogprobConsistency",
    "MaxModelLen",
    "measure_log_probability_consistency",
    "random_prompts",
    "test_generation_consistency",
    "test_max_model_len_respected",
    "validate_log_probability_consistency",
]
