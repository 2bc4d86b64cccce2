"""One optimizer step over a global batch, however it is split.

A loss is a sum of shares: every microbatch of every rank divides by the counts of the whole global
batch, so losses, metrics and gradients are sums and do not depend on the split.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_core.backends.losses import call_loss, input_type_of
from rl_core.errors import DataError, TrainingError
from rl_core.interfaces import LossInputType
from rl_hf.forward import Forward, Sequences
from rl_hf.modes import running
from rl_hf.rows import cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import LossFunction
    from rl_hf.modes import RandomStream
    from rl_hf.optimizer import Optimizer
    from rl_hf.parallel import DataParallel
    from rl_hf.rows import Microbatching

__all__ = ["StepResult", "Trainer", "add_metrics", "summary"]


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


class Trainer:
    """Computes losses, and steps.

    Args:
        forward: The model.
        microbatching: How local rows are split.
        group: The data-parallel peers.
        random: What dropout draws from.
        max_grad_norm: Gradients are scaled down to this L2 norm; None or 0 is off.
        skip_non_finite: Leave a step out, instead of raising, when it is not finite.
    """

    def __init__(
        self,
        forward: Forward,
        microbatching: Microbatching,
        group: DataParallel,
        random: RandomStream,
        *,
        max_grad_norm: float | None,
        skip_non_finite: bool,
    ) -> None:
        self._random = random
        self._forward = forward
        self._microbatching = microbatching
        self._group = group
        self._max_grad_norm = max_grad_norm or math.inf
        self._skip_non_finite = skip_non_finite

    def step(
        self,
        rows: BatchedDataDict[Any],
        loss_fn: LossFunction,
        optimizer: Optimizer,
        *,
        device: torch.device,
        size: int | None,
    ) -> StepResult:
        """Takes one optimizer step over this rank's rows of a global batch.

        Args:
            rows: Checked rows on the CPU.
            loss_fn: The loss.
            optimizer: Of the forward's model.
            device: Where the model is.
            size: Rows per microbatch; None as configured.

        Raises:
            TrainingError: A loss or gradient is not finite; nothing was changed.
        """
        lr = optimizer.lr
        try:
            local = self._counted(rows)
            with (
                self._group.together("the loss"),
                running(self._forward.model, training=True),
                self._random.drawn(),
            ):
                self._accumulate(local, rows, loss_fn, device, size, learn=True)
            total = self._total(local)
            if not (total.valid_seqs and total.valid_toks):
                return total.result(0.0, lr, skipped=True)
            norm = self._reduce(optimizer)
            finite = math.isfinite(total.loss) and math.isfinite(norm)
            if not finite and not self._skip_non_finite:
                raise _not_finite(total, norm)
            if finite:
                _clip(optimizer.gradients().values(), norm, self._max_grad_norm)
                optimizer.step()
            return total.result(norm, lr, skipped=not finite)
        finally:
            optimizer.clear()

    def evaluate(
        self,
        rows: BatchedDataDict[Any],
        loss_fn: LossFunction,
        *,
        device: torch.device,
        size: int | None,
        lr: float,
    ) -> StepResult:
        """The loss over a global batch; weights, modes and random state stay as they are."""
        local = self._counted(rows)
        with (
            self._group.together("the loss"),
            running(self._forward.model, training=False),
            self._random.kept(),
        ):
            self._accumulate(local, rows, loss_fn, device, size, learn=False)
        total = self._total(local)
        if not math.isfinite(total.loss) and not self._skip_non_finite:
            raise _not_finite(total, 0.0)
        return total.result(0.0, lr, skipped=False)

    def _accumulate(
        self,
        sums: _Sums,
        rows: BatchedDataDict[Any],
        loss_fn: LossFunction,
        device: torch.device,
        size: int | None,
        *,
        learn: bool,
    ) -> None:
        counts = {
            "global_valid_seqs": torch.tensor(sums.valid_seqs, device=device),
            "global_valid_toks": torch.tensor(sums.valid_toks, device=device),
        }
        group_size = getattr(loss_fn, "group_size", 1)
        index = _counting_rows(rows["sample_mask"], group_size)
        plan = self._microbatching.plan(
            rows["input_lengths"][index],
            "train",
            width=rows["input_ids"].shape[1],
            size=size,
            group_size=group_size,
        )
        for part in plan:
            chosen = index[part]
            batch = cut(rows, chosen)
            sequences = Sequences.of(batch["input_ids"], batch["input_lengths"], device)
            inputs = self._inputs(sequences, loss_fn)
            share, metrics = call_loss(loss_fn, inputs, batch.to(device), **counts)
            sums.add(float(share.detach()), metrics, chosen)
            if learn and share.requires_grad:
                share.backward()  # type: ignore[no-untyped-call]

    def _counted(self, rows: BatchedDataDict[Any]) -> _Sums:
        samples = rows["sample_mask"].double()
        tokens = (rows["token_mask"].double() * samples[:, None]).sum()
        counts = torch.stack([samples.sum(), tokens])
        everybody = self._group.gather(counts.tolist())
        return _Sums(sum(seqs for seqs, _ in everybody), sum(toks for _, toks in everybody))

    def _inputs(self, sequences: Sequences, loss_fn: LossFunction) -> torch.Tensor:
        if input_type_of(loss_fn) is LossInputType.LOGIT:
            return self._forward.logits(sequences)
        return self._forward.logprobs(sequences)

    def _total(self, local: _Sums) -> _Sums:
        total = _Sums(local.valid_seqs, local.valid_toks)
        for loss, metrics, bad in self._group.gather([local.loss, local.metrics, local.bad_rows]):
            total.loss += loss
            total.bad_rows = total.bad_rows or bad
            add_metrics(total.metrics, metrics)
        return total

    def _reduce(self, optimizer: Optimizer) -> float:
        """Sums the gradients over the ranks; returns their L2 norm."""
        if self._group.size > 1:
            everybody = self._group.gather(list(optimizer.gradients()))
            optimizer.set_zero_gradients({name for names in everybody for name in names})
            self._group.sum_(optimizer.gradients().values())
        gradients = list(optimizer.gradients().values())
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


class _Sums:
    """Shares added up over microbatches or ranks."""

    def __init__(self, valid_seqs: float, valid_toks: float) -> None:
        self.valid_seqs = valid_seqs
        self.valid_toks = valid_toks
        self.loss = 0.0
        self.metrics: dict[str, float] = {}
        self.bad_rows: list[int] = []

    def add(self, share: float, metrics: Mapping[str, Any], index: torch.Tensor) -> None:
        self.loss += share
        if not math.isfinite(share) and not self.bad_rows:
            self.bad_rows = index.tolist()
        add_metrics(self.metrics, {key: float(value) for key, value in metrics.items()})

    def result(self, norm: float, lr: float, *, skipped: bool) -> StepResult:
        return StepResult(
            self.loss, norm, lr, self.valid_seqs, self.valid_toks, skipped, self.metrics
        )


def add_metrics(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds shares up, key by key; keys ending in ``_min`` or ``_max`` keep the extreme."""
    for key, value in more.items():
        if key not in total:
            total[key] = value
        elif key.endswith("_min"):
            total[key] = min(total[key], value)
        elif key.endswith("_max"):
            total[key] = max(total[key], value)
        else:
            total[key] += value


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


def _counting_rows(sample_mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """Rows that are looked at: whole groups in which some row counts."""
    if group_size < 1 or len(sample_mask) % group_size:
        raise DataError(
            f"{len(sample_mask)} rows are not whole groups of {group_size}",
            fix=f"keep the {group_size} rows of a group next to each other and complete",
        )
    counts = (sample_mask != 0).view(-1, group_size).any(1)
    return counts.repeat_interleave(group_size).nonzero()[:, 0]


def _clip(gradients: Iterable[torch.Tensor], norm: float, largest: float) -> None:
    if norm > largest:
        for gradient in gradients:
            gradient.mul_(largest / norm)


def _not_finite(total: _Sums, norm: float) -> TrainingError:
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
