"""Runs of GRPO, DPO and SFT: ``rl train CONFIG.yaml key=value ...``, or :class:`GRPOTrainer`.

Modules are imported at the first use of a name, so that processes of reward functions do not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_train.episodes import Environment, Turn
    from rl_train.run import Outcome, train
    from rl_train.trainer import GRPOTrainer

__all__ = ["Environment", "GRPOTrainer", "Outcome", "Turn", "train"]

_HOME = {
    "Environment": "rl_train.episodes",
    "GRPOTrainer": "rl_train.trainer",
    "Outcome": "rl_train.run",
    "Turn": "rl_train.episodes",
    "train": "rl_train.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
