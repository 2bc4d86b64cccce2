"""Engines and verified refits of rl-core in TRL's ``GRPOTrainer``."""

from __future__ import annotations

from rl_trl.agreement import DisagreementError
from rl_trl.rollout import Rollout, rollout

__all__ = ["DisagreementError", "Rollout", "rollout"]
