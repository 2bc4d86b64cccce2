"""Runs of GRPO, DPO and SFT: ``rl train CONFIG.yaml key=value ...``, or :class:`GRPOTrainer`."""

from rl_train.episodes import Environment, Turn
from rl_train.run import Outcome, train
from rl_train.trainer import GRPOTrainer

__all__ = ["Environment", "GRPOTrainer", "Outcome", "Turn", "train"]
