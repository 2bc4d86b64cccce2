"""Losses that report what they were given, and one of each kind there is."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from rl_conformance.training import NegativeLogLikelihood, without_finite_gradient
from rl_core.interfaces import LossFunction, LossInputType, LossType

if TYPE_CHECKING:
    from pathlib import Path

    from rl_core.batch import BatchedDataDict

__all__ = [
    "FailsInTheStep",
    "LogitLikelihood",
    "NanInARow",
    "NanInTheGradientOfARow",
    "PairLoss",
    "RaisesInARow",
    "ReportingLoss",
    "RowsLoss",
    "SequenceLikelihood",
]


class ReportingLoss(NegativeLogLikelihood):
    """Tells in its metrics what a call was given.

    Reads ``row`` ``[B]`` and ``echo`` ``[B, S]``, a copy of ``input_ids``.
    """

    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        loss, _ = super().__call__(
            inputs,
            data,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
        )
        counts = data["sample_mask"] != 0
        lengths = data["input_lengths"][counts].cpu()
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        real = positions < data["input_lengths"][:, None].to(inputs.device)
        unscored = ~real | (positions == 0)
        strangers = (data["echo"] != data["input_ids"]).to(real.device) & real
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        widths = [inputs.shape[1] - data[key].shape[1] for key in ("input_ids", "token_mask")]
        seen = {
            "seen_rows": float(counts.sum()),
            "seen_row_numbers": float((data["row"] * counts).sum()),
            "seen_tokens": float(tokens),
            "seen_all_tokens_min": float(global_valid_toks),
            "seen_all_tokens_max": float(global_valid_toks),
            "seen_all_rows_min": float(global_valid_seqs),
            "seen_all_rows_max": float(global_valid_seqs),
            "seen_strangers_max": float(strangers.sum()),
            "seen_unscored_max": float((inputs.detach() * unscored).abs().max()),
            "seen_widths_max": float(max(map(abs, widths))),
            "seen_likelihood": -float(loss.detach()),
        }
        if len(lengths):
            seen["seen_shortest_min"] = float(lengths.min())
            seen["seen_longest_max"] = float(lengths.max())
        return loss, seen


class RowsLoss(NegativeLogLikelihood):
    """Reports which process computes the loss of each row, its log-prob, and what it was given.

    Args:
        batch: The batch that ``train`` is given. Its column ``row`` has the number of each row.
    """

    def __init__(self, batch: BatchedDataDict[Any]) -> None:
        self.batch = batch

    def __call__(
        self, inputs: torch.Tensor, data: BatchedDataDict[Any], **counts: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        loss, metrics = super().__call__(inputs, data, **counts)
        for index, row in enumerate(data["row"].tolist()):
            if not data["sample_mask"][index]:
                continue
            metrics[f"process_of_row_{row}_max"] = float(os.getpid())
            metrics[f"likelihood_of_row_{row}"] = float(inputs[index].detach().sum())
            for key, column in self.batch.items():
                got, passed = data[key][index].cpu(), column[row]
                if column.dim() > 1:  # what is first or padding does not count
                    real = slice(1, int(self.batch["input_lengths"][row]))
                    got, passed = got[real], passed[real]
                alike = key.endswith("_mask") or got.dtype == passed.dtype
                if not alike or not torch.equal(got.to(passed.dtype), passed):
                    metrics[f"changes_of_{key}"] = metrics.get(f"changes_of_{key}", 0) + 1
        return loss, metrics


class SequenceLikelihood(LossFunction):
    """Mean over valid rows of minus a row's summed log-prob, divided by the row's length."""

    loss_type = LossType.SEQUENCE_LEVEL

    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        per_row = _summed(inputs, data) / data["input_lengths"].to(inputs.device)
        return -per_row.sum() / global_valid_seqs.to(inputs.device), {}


class PairLoss(LossFunction):
    """Minus the log-sigmoid of by how much the first row of a pair is likelier than the second."""

    loss_type = LossType.SEQUENCE_LEVEL
    group_size = 2

    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        per_row = _summed(inputs, data) / data["input_lengths"].to(inputs.device)
        leads = per_row[::2] - per_row[1::2]
        counts = data["sample_mask"][::2].to(inputs.device)
        total = (torch.nn.functional.logsigmoid(leads) * counts).sum()
        return -2 * total / global_valid_seqs.to(inputs.device), {}


class LogitLikelihood(LossFunction):
    """The same as :class:`NegativeLogLikelihood`, from logits."""

    input_type = LossInputType.LOGIT

    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        following = data["input_ids"][:, 1 : inputs.shape[1], None].to(inputs.device)
        chosen = inputs[:, :-1].log_softmax(-1).gather(2, following)[..., 0]
        scores = torch.cat([torch.zeros_like(chosen[:, :1]), chosen], dim=1)
        if not scores.shape[1]:
            scores = inputs.new_zeros(inputs.shape[:2])
        return -_summed(scores, data).sum() / global_valid_toks.to(inputs.device), {}


class RaisesInARow(NegativeLogLikelihood):
    """Fault: the loss raises in the microbatch of the last row, which alone has ``marked`` 1."""

    def __call__(
        self, inputs: torch.Tensor, data: BatchedDataDict[Any], **counts: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        if data["marked"].any():
            raise ArithmeticError("the loss of the marked row cannot be computed")
        return super().__call__(inputs, data, **counts)


class FailsInTheStep(NegativeLogLikelihood):
    """Fault: in the first process that computes it, the next step raises once weights are written.

    Steps of torch's optimizers do; ``claim`` exists once one was chosen.

    Args:
        claim: A file that is not there yet.
        error: The class of what is raised.
    """

    def __init__(self, claim: Path, error: type[BaseException] = MemoryError) -> None:
        self.claim = claim
        self.error = error

    def __call__(
        self, inputs: torch.Tensor, data: BatchedDataDict[Any], **counts: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        with suppress(FileExistsError), self.claim.open("x"):

            def fail(*_: Any) -> None:
                hook.remove()
                raise self.error("the optimizer step has no memory left")

            hook = register_optimizer_step_post_hook(fail)
        return super().__call__(inputs, data, **counts)


class NanInARow(NegativeLogLikelihood):
    """Fault: the loss of the row with ``marked`` 1 is not a number."""

    def __call__(
        self, inputs: torch.Tensor, data: BatchedDataDict[Any], **counts: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        loss, metrics = super().__call__(inputs, data, **counts)
        return (loss * float("nan") if data["marked"].any() else loss), metrics


class NanInTheGradientOfARow(NegativeLogLikelihood):
    """Fault: the gradient of the row with ``marked`` 1 is not finite, the loss is."""

    def __call__(
        self, inputs: torch.Tensor, data: BatchedDataDict[Any], **counts: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`."""
        loss, metrics = super().__call__(inputs, data, **counts)
        if data["marked"].any():
            loss = without_finite_gradient(loss, inputs)
        return loss, metrics


def _summed(inputs: torch.Tensor, data: BatchedDataDict[Any]) -> torch.Tensor:
    """``[b]`` log-probs of a row's valid tokens, added up."""
    weights = (data["token_mask"] * data["sample_mask"][:, None])[:, : inputs.shape[1]]
    weights = weights.to(inputs.device).clone()
    weights[:, 0] = 0
    summed: torch.Tensor = (inputs * weights).sum(1)
    return summed
