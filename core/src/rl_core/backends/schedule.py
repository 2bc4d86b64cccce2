"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_schedule", "learning_rate"]

DEFAULT_LR = 1e-5


def learning_rate(step: int, config: Mapping[str, Any]) -> float:
    """The learning rate of optimizer step ``step``, counted from 0.

    Args:
        step: Steps taken before this one.
        config: A checked :class:`~rl_core.interfaces.PolicyConfig`.
    """
    base = float(config.get("optimizer", {}).get("lr", DEFAULT_LR))
    schedule = config.get("scheduler", {})
    name, warmup = schedule.get("name", "constant"), int(schedule.get("warmup_steps", 0))
    if step < warmup:
        return base * (step + 1) / warmup
    if name == "constant":
        return base
    span = max(1, schedule["total_steps"] - warmup)
    done = min(1.0, (step - warmup) / span)
    left = 1 - done if name == "linear" else (1 + math.cos(math.pi * done)) / 2
    lowest: float = schedule.get("min_lr_ratio", 0.0)
    return base * (lowest + (1 - lowest) * left)


def check_schedule(schedule: Mapping[str, Any]) -> None:
    """Raises ConfigError if a schedule that falls does not say when it ends."""
    if schedule.get("name", "constant") != "constant" and "total_steps" not in schedule:
        raise ConfigError(
            f"the {schedule['name']} schedule does not say when it ends",
            fix="set scheduler.total_steps to the number of optimizer steps",
            key="scheduler.total_steps",
        )
