"""Loss functions for RL post-training, their advantages, and the batches of rollouts.

Each loss is a :class:`rl_core.interfaces.LossFunction`: its options are keywords of the
constructor, checked there, and it works with any policy backend.
"""

from rl_losses.advantages import (
    AdvantageEstimator,
    gdpo_advantages,
    groups_without_spread,
    grpo_advantages,
    opo_advantages,
    overlong_penalty,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
)
from rl_losses.distillation import TopkKLLossFn
from rl_losses.dpo import DPOLossFn
from rl_losses.grpo import GRPOLossFn
from rl_losses.kl import kl_penalty
from rl_losses.nll import NLLLossFn
from rl_losses.rollouts import Completion, completions, training_batch
from rl_losses.tokens import high_covariance, optimal_token_baseline_advantages, whiten

__all__ = [
    "AdvantageEstimator",
    "Completion",
    "DPOLossFn",
    "GRPOLossFn",
    "NLLLossFn",
    "TopkKLLossFn",
    "completions",
    "gdpo_advantages",
    "groups_without_spread",
    "grpo_advantages",
    "high_covariance",
    "kl_penalty",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "overlong_penalty",
    "pass_at_k_advantages",
    "reinforce_plus_plus_advantages",
    "training_batch",
    "whiten",
]
