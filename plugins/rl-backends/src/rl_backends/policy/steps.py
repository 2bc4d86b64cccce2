"""Optimizer steps: the learning rate of each, and what its global batch gives, however it is split.

A loss is a sum of shares: every microbatch of every rank divides by the counts of the whole global
batch, so losses, metrics and gradients are sums and do not depend on the split.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_backends.policy.loop import scalars
from rl_core.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
    """Raises ConfigError if a schedule that falls has no end."""
    if schedule.get("name", "constant") != "constant" and "total_steps" not in schedule:
        raise ConfigError(
            f"the {schedule['name']!r} schedule needs total_steps",
            fix="set scheduler.total_steps to the number of optimizer steps",
            key="scheduler.total_steps",
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one global batch gave.

    Attributes:
        loss: Over the whole global batch.
        grad_norm: L2 norm of the gradient before clipping; 0 in evaluation.
        lr: Learning rate of the step.
        valid_seqs: Rows of the global batch that count.
        valid_toks: Tokens of the global batch that count.
        skipped: True if no step was taken: nothing counted, or not finite where that skips.
        metrics: The loss function's, summed up.
    """

    loss: float
    grad_norm: float
    lr: float
    valid_seqs: float
    valid_toks: float
    skipped: bool
    metrics: Mapping[str, float]


class LossSum:
    """Shares of a loss, added up over microbatches or ranks.

    Args:
        valid_seqs: Rows of the global batch that count.
        valid_toks: Tokens of the global batch that count.
    """

    def __init__(self, valid_seqs: float, valid_toks: float) -> None:
        self.valid_seqs = valid_seqs
        self.valid_toks = valid_toks
        self.loss = 0.0
        self.metrics: dict[str, float] = {}
        self.bad_rows: list[int] = []

    def add(self, share: float, metrics: Mapping[str, Any], rows: Sequence[int]) -> None:
        """Adds a share.

        Args:
            share: Of the loss.
            metrics: See :class:`~rl_core.interfaces.LossFunction`.
            rows: Its rows, for the error if it is not finite.
        """
        self.loss += share
        if not math.isfinite(share) and not self.bad_rows:
            self.bad_rows = list(rows)
        for key, given in metrics.items():
            value, before = float(given), self.metrics.get(key)
            self.metrics[key] = value if before is None else added(key, before, value)

    def result(self, norm: float, lr: float, *, skipped: bool) -> StepResult:
        """What the global batch gave."""
        return StepResult(
            self.loss, norm, lr, self.valid_seqs, self.valid_toks, skipped, self.metrics
        )


def added(key: str, total: float, value: float) -> float:
    """Two shares of a metric as one; keys ending in ``_min`` or ``_max`` keep the extreme."""
    if key.endswith("_min"):
        return min(total, value)
    return max(total, value) if key.endswith("_max") else total + value


#: Metrics that a loop averages, so that they are no parts of a sum.
_AVERAGED = ("lr", "global_valid_seqs", "global_valid_toks")


def summary(steps: Iterable[StepResult]) -> dict[str, Any]:
    """The result of ``train``: the last step's values, every step's, and parts that add up."""
    history: dict[str, list[float]] = defaultdict(list)
    last: dict[str, Any] = {}
    skipped = 0
    for step in steps:
        skipped += step.skipped
        last = {
            **step.metrics,
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            "global_valid_seqs": step.valid_seqs,
            "global_valid_toks": step.valid_toks,
        }
        for key, value in last.items():
            history[key].append(value)
    parts = {
        key: values
        if key in _AVERAGED or key.endswith(("_min", "_max"))
        else [value / len(values) for value in values]
        for key, values in history.items()
    }
    whole = {"skipped_steps": skipped, "step_metrics": dict(history), "all_mb_metrics": parts}
    return scalars({**last, **whole})


def not_finite(total: LossSum, norm: float) -> TrainingError:
    """The error for a step that would not be finite."""
    where = f" (first in rows {total.bad_rows})" if total.bad_rows else ""
    what = "loss" if not math.isfinite(total.loss) else "gradient"
    return TrainingError(
        f"the {what} is not finite: loss {total.loss}{where}, gradient norm {norm}; "
        "no step was taken, and the weights are unchanged",
        fix="look at these rows' inputs to the loss, or set non_finite='skip' to skip such steps",
        rows=total.bad_rows,
        loss=total.loss,
        grad_norm=norm,
    )
