"""What a global batch gives, however it is split.

A loss is a sum of shares: every microbatch of every rank divides by the counts of the whole global
batch, so losses, metrics and gradients are sums and do not depend on the split.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["LossSum", "StepResult", "added", "not_finite", "summary"]


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
            rows: Whose it is, to be named if it is not finite.
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


def summary(steps: Iterable[StepResult]) -> dict[str, Any]:
    """The result of ``train``: the last step's values, and every step's in ``all_mb_metrics``."""
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
    return {**last, "skipped_steps": skipped, "all_mb_metrics": dict(history)}


def not_finite(total: LossSum, norm: float) -> TrainingError:
    """The error for a step that would not be finite."""
    where = f" (first in rows {total.bad_rows})" if total.bad_rows else ""
    what = "loss" if not math.isfinite(total.loss) else "gradient"
    return TrainingError(
        f"the {what} is not finite: loss {total.loss}{where}, gradient norm {norm}; "
        "no step was taken and the weights are as before",
        fix="look at these rows' inputs to the loss, or set non_finite='skip' to leave such "
        "steps out",
        rows=total.bad_rows,
        loss=total.loss,
        grad_norm=norm,
    )
