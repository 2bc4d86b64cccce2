"""Whole batches through the model, microbatch by microbatch, without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import DataError
from rl_hf.calibration import Calibration
from rl_hf.forward import Sequences
from rl_hf.modes import running
from rl_hf.reward import reward_scores
from rl_hf.rows import scoring_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from rl_core.batch import BatchedDataDict
    from rl_hf.forward import Forward
    from rl_hf.rows import Limits, Microbatching

__all__ = ["Scorer"]


class Scorer:
    """What a policy computes without learning from it.

    Args:
        forward: The model.
        microbatching: How rows are split where a call does not say.
        limits: The model's.
        device: Where it is.
    """

    def __init__(
        self, forward: Forward, microbatching: Microbatching, limits: Limits, device: torch.device
    ) -> None:
        self._forward = forward
        self._microbatching = microbatching
        self._limits = limits
        self._device = device

    def logprobs(
        self, model: nn.Module, data: BatchedDataDict[Any], size: int | None
    ) -> torch.Tensor:
        """``[B, S]`` float32 on the CPU, under ``model``: the policy's or its reference."""
        ids, lengths = scoring_rows(data, self._limits)
        forward = self._forward.over(model)
        result = torch.zeros(ids.shape)
        with running(model, training=False):
            for rows, part in self._parts(ids, lengths, size):
                scores = forward.logprobs(part)
                result[rows, : scores.shape[1]] = scores.cpu()
        return result

    def topk(
        self, data: BatchedDataDict[Any], k: int, size: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, S-1, k]`` float32 logits and int64 indices on the CPU."""
        if not 1 <= k <= self._limits.vocab_size:
            raise DataError(
                f"k is {k}, the vocabulary has {self._limits.vocab_size} tokens",
                fix="ask for at least 1 and at most all of them",
                key="k",
            )
        ids, lengths = scoring_rows(data, self._limits)
        shape = (*ids[:, 1:].shape, k)
        values, indices = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
        with running(self._forward.model, training=False):
            for rows, part in self._parts(ids, lengths, size):
                top, index = self._forward.topk(part, k)
                values[rows, : top.shape[1]] = top.cpu()
                indices[rows, : top.shape[1]] = index.cpu()
        return values, indices

    def rewards(self, data: BatchedDataDict[Any], size: int | None) -> torch.Tensor:
        """``[B]`` float32 on the CPU, from a sequence classifier's head."""
        ids, lengths = scoring_rows(data, self._limits)
        scores = torch.zeros(len(ids))
        with running(self._forward.model, training=False):
            for rows, part in self._parts(ids, lengths, size):
                scores[rows] = reward_scores(self._forward.model, part).cpu()
        return scores

    def calibrate(
        self,
        data: BatchedDataDict[Any],
        size: int | None,
        *,
        percentile: float,
        margin: float,
        include_q: bool,
    ) -> dict[str, Any]:
        """FP8 scales per layer, see :mod:`rl_hf.calibration`."""
        if not (0 < percentile <= 100 and margin > 0):
            raise DataError(
                f"percentile {percentile} is not in (0, 100], or margin {margin} not above 0",
                fix="use a percentile such as 99.9 and a margin such as 1.05",
            )
        ids, lengths = scoring_rows(data, self._limits)
        if not len(ids):
            raise DataError("there are no rows to observe", fix="pass at least one row")
        calibration = Calibration(include_q=include_q)
        with running(self._forward.model, training=False):
            for _, part in self._parts(ids, lengths, size):
                self._forward.observed(part, calibration)
        return calibration.scales(percentile, margin)

    def _parts(
        self, ids: torch.Tensor, lengths: torch.Tensor, size: int | None
    ) -> Iterator[tuple[torch.Tensor, Sequences]]:
        """Microbatches: their rows, and the sequences on the device."""
        plan = self._microbatching.plan(lengths, "logprob", width=ids.shape[1], size=size)
        for rows in plan:
            yield rows, Sequences.of(ids[rows], lengths[rows], self._device)
