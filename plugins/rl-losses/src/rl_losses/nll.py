"""Negative log-likelihood: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rl_core.interfaces import LossInputType, LossType
from rl_core.interfaces.constraints import Range
from rl_losses._base import ConfiguredLoss
from rl_losses._shares import Shares, score, to_floats

if TYPE_CHECKING:
    import torch

    from rl_core.batch import BatchedDataDict

__all__ = ["NLLLossFn"]


@dataclass(frozen=True, kw_only=True)
class NLLLossFn(ConfiguredLoss):
    r"""Maximum likelihood of the tokens that count.

    Token-level: :math:`-\frac{1}{N} \sum_i \sum_t \log \pi(y_{it})` with N valid tokens.
    Sequence-level: :math:`-\frac{1}{M} \sum_i \frac{1}{|y_i|} \sum_t \log \pi(y_{it})` with M
    valid rows. With label smoothing a token costs :math:`-(1 - \epsilon) \log \pi(y_t)
    - \frac{\epsilon}{V} \sum_v \log \pi(v)` (Szegedy et al. 2015, "Rethinking the Inception
    Architecture", section 7).

    Metrics: ``nll``, the token-level value (its exponential is the perplexity), whatever
    ``loss_type`` is, without the smoothing.

    Attributes:
        loss_type: Whether tokens or rows weigh the same.
        label_smoothing: Share of a token's target that is spread over the vocabulary. Takes the
            policy's full logits, and reads ``input_ids`` ``[b, s]``.
    """

    loss_type: LossType = LossType.TOKEN_LEVEL
    label_smoothing: Annotated[float, Range(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.label_smoothing:
            self._take_logits()

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
            inputs: ``[b, s]`` log-probs; with label smoothing ``[b, s, V]`` logits.
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
        if self.input_type is LossInputType.LOGIT:
            scores, inputs = score(inputs, data, shares, needed_by="NLLLossFn(label_smoothing)")
            spread = shares.scatter(scores.mean(dim=-1))
            targets = (1 - self.label_smoothing) * inputs + self.label_smoothing * spread
        else:
            targets = inputs
        loss = shares.mean(-targets, self.loss_type)
        return loss, to_floats({"nll": shares.token_mean(-inputs)})
