"""Masked sums, as shares of a mean over the whole global batch.

Every loss here reduces through :class:`Shares`, so that two promises are kept in one place. Shares
of microbatches add up to the same value however the rows were split. And what is masked has no
influence, be it NaN or infinite: values are *selected*, never multiplied by a mask (0 x NaN is
NaN), both before a formula (:meth:`Shares.keep`), so that no NaN arises inside its gradient, and
after it, in the sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from rl_core.errors import DataError
from rl_core.interfaces import LossType
from rl_losses._base import read_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Shares", "score", "to_floats"]


@dataclass(frozen=True)
class Shares:
    """The masks of a microbatch, and the counts of the global batch it is part of.

    Attributes:
        tokens: ``[b, s]`` bool; tokens that count. Position 0 never does: nothing predicts it.
        rows: ``[b]`` bool; rows that count.
        valid_toks: 0-d; tokens that count in the global batch.
        valid_seqs: 0-d; rows that count in the global batch.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    valid_toks: torch.Tensor
    valid_seqs: torch.Tensor

    @classmethod
    def of(
        cls,
        inputs: torch.Tensor,
        data: Mapping[str, Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        needed_by: str,
    ) -> Shares:
        """Reads ``token_mask`` ``[b, s]`` and ``sample_mask`` ``[b]``.

        Args:
            inputs: ``[b, s, ...]`` what the policy computed; gives shape and device.
            data: The rows.
            global_valid_seqs: 0-d count, as :class:`rl_core.interfaces.LossFunction` says.
            global_valid_toks: 0-d count, as :class:`rl_core.interfaces.LossFunction` says.
            needed_by: Name of the loss, for messages.

        Raises:
            DataError: A mask is missing, of the wrong shape, or neither 0 nor 1 somewhere.
        """
        batch, width = inputs.shape[:2]
        tokens = _read_mask(data, "token_mask", (batch, width), inputs.device, needed_by)
        rows = _read_mask(data, "sample_mask", (batch,), inputs.device, needed_by)
        tokens = tokens & rows[:, None]
        tokens[:, :1] = False
        return cls(
            tokens,
            rows,
            global_valid_toks.to(inputs.device),
            global_valid_seqs.to(inputs.device),
        )

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` values where the mask is 1, and 0 elsewhere."""
        return torch.where(self.tokens, values, 0.0)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` with these ``[n]`` values at the tokens that count, 0 elsewhere."""
        return values.new_zeros(self.tokens.shape).masked_scatter(self.tokens, values)

    def row_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of ``[b, s]`` values over the tokens of each row that count: ``[b]``."""
        return self.keep(values).sum(dim=1)

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of ``[b, s]`` values over the tokens of each row that count, 0 without any."""
        return self.row_sum(values) / self.tokens.sum(dim=1).clamp(min=1)

    def token_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Share of the mean of ``[b, s]`` values over all tokens."""
        return _share(self.keep(values).sum(), self.valid_toks)

    def row_share(self, values: torch.Tensor, rows: torch.Tensor, size: int = 1) -> torch.Tensor:
        """Share of the mean over all rows, or over all groups of ``size`` rows.

        Args:
            values: ``[n]`` one value for each row or group.
            rows: ``[n]`` bool; the ones that count.
            size: Rows per group.
        """
        return _share(torch.where(rows, values, 0.0).sum(), self.valid_seqs / size)

    def mean(
        self, values: torch.Tensor, loss_type: LossType, length: float | None = None
    ) -> torch.Tensor:
        """Share of the mean of ``[b, s]`` values, token by token or row by row.

        Token-level: ``sum_i sum_t x_it / valid_toks``: long rows weigh more. Sequence-level:
        ``sum_i (sum_t x_it / n_i) / valid_seqs``: every row weighs the same, unless ``length``
        stands in for every n_i.
        """
        if loss_type is LossType.TOKEN_LEVEL:
            return self.token_mean(values)
        if length is not None:
            return self.row_share(self.row_sum(values) / length, self.rows)
        return self.row_share(self.row_mean(values), self.rows)

    def token_min(self, values: torch.Tensor) -> torch.Tensor:
        """Least of ``[b, s]`` values over the tokens that count; ``inf`` without any."""
        chosen = torch.where(self.tokens, values, math.inf)
        return functional.pad(chosen.flatten(), (0, 1), value=math.inf).amin()

    def token_max(self, values: torch.Tensor) -> torch.Tensor:
        """Greatest of ``[b, s]`` values over the tokens that count; ``-inf`` without any."""
        return -self.token_min(-values)


def score(
    inputs: torch.Tensor, data: Mapping[str, Any], shares: Shares, *, needed_by: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of full logits where tokens count, and where they stand.

    Args:
        inputs: ``[b, s, V]`` logits; position t predicts token t+1.
        data: ``input_ids`` ``[b, s]``.
        shares: The masks.
        needed_by: The loss and the option that ask for logits, for messages.

    Returns:
        ``[n, V]`` log-probs of the n tokens that count, and ``[b, s]`` those of the tokens
        themselves, 0 where masked.
    """
    chosen = shares.tokens[:, 1:]
    scores = inputs[:, :-1][chosen].log_softmax(dim=-1)
    ids = read_tensor(data, "input_ids", [tuple(shares.tokens.shape)], needed_by=needed_by)
    taken = ids.to(inputs.device)[:, 1:][chosen].long()
    return scores, shares.scatter(scores.gather(1, taken[:, None])[:, 0])


def to_floats(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """0-d tensors as floats, with one copy off the device for all of them."""
    values = torch.stack([value.detach().double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def _share(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """``total / count``, and 0 (with a gradient of 0) where nothing counts."""
    count = count.to(total.dtype)
    return torch.where(count > 0, total, 0.0) / torch.where(count > 0, count, 1.0)


def _read_mask(
    data: Mapping[str, Any],
    key: str,
    shape: tuple[int, ...],
    device: torch.device,
    needed_by: str,
) -> torch.Tensor:
    values = read_tensor(data, key, [shape], needed_by=needed_by).to(device)
    mask: torch.Tensor = values == 1
    wrong = ~(mask | (values == 0))
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise DataError(
            f"{needed_by}: '{key}' is {values[tuple(place)].item()} at {place}, but masks are 0 or "
            "1",
            fix="use masks of 0 and 1; multiply weights into the advantages",
            key=key,
            row=place[0],
        )
    return mask
