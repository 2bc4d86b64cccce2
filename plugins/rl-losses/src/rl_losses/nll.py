"""Negative log-likelihood: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_core.interfaces import LossType
from rl_losses._base import ConfiguredLoss
from rl_losses._shares import Shares, to_floats

if TYPE_CHECKING:
    import torch

    from rl_core.batch import BatchedDataDict

__all__ = ["NLLLossFn"]


@dataclass(frozen=True, kw_only=True)
class NLLLossFn(ConfiguredLoss):
    r"""Maximum likelihood of the tokens that count.

    Token-level: :math:`-\frac{1}{N} \sum_i \sum_t \log \pi(y_{it})` with N valid tokens.
    Sequence-level: :math:`-\frac{1}{M} \sum_i \frac{1}{|y_i|} \sum_t \log \pi(y_{it})` with M
    valid rows.

    Metrics: ``nll``, the token-level value (its exponential is the perplexity), whatever
    ``loss_type`` is.

    Attributes:
        loss_type: Whether tokens or rows weigh the same.
    """

    loss_type: LossType = LossType.TOKEN_LEVEL

    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`; ``inputs`` are log-probs ``[b, s]``.

        Args:
            inputs: ``[b, s]`` log-probs.
            data: ``token_mask`` ``[b, s]``, ``sample_mask`` ``[b]``.
            global_valid_seqs: 0-d count of valid rows.
            global_valid_toks: 0-d count of valid tokens.

        Raises:
            DataError: A key is missing, of the wrong shape, or a mask is not 0 or 1.
        """
        shares = Shares.of(
            inputs,
            data,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            needed_by="NLLLossFn",
        )
        loss = shares.mean(-inputs, self.loss_type)
        return loss, to_floats({"nll": shares.token_mean(-inputs)})
