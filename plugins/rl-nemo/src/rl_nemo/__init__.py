"""NeMo RL's training loops over policies and engines of rl-core; nothing of NeMo is imported."""

from rl_nemo.batch import BatchedDataDict
from rl_nemo.configuration import Translation, generation_config, policy_config
from rl_nemo.losses import rolled_reference, wrap_loss
from rl_nemo.synchronizer import RefitSynchronizer, connect

__all__ = [
    "BatchedDataDict",
    "RefitSynchronizer",
    "Translation",
    "connect",
    "generation_config",
    "policy_config",
    "rolled_reference",
    "wrap_loss",
]
