"""Direct preference optimisation on pairs of neighbouring rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import LossType
from rl_core.interfaces.constraints import AlsoCalled, Range
from rl_losses._base import ConfiguredLoss, check_logprobs, read_tensor
from rl_losses._shares import Shares, score, to_floats
from rl_losses.preferences import PREFERENCES, SMOOTHED

if TYPE_CHECKING:
    from rl_core.batch import BatchedDataDict

__all__ = ["DPOLossFn"]


@dataclass(frozen=True, kw_only=True)
class DPOLossFn(ConfiguredLoss):
    r"""Raises the chosen answer above the rejected one, relative to a reference policy.

    Rows come in pairs: chosen at even places, rejected right after. With the implicit reward
    :math:`r(y) = \beta \sum_t \log \frac{\pi(y_t)}{\pi_{ref}(y_t)}` and the margin
    :math:`m = r(y_w) - r(y_l)` a pair costs

    .. math:: -(1 - \epsilon) \log \sigma(m) - \epsilon \log \sigma(-m)

    (Rafailov et al. 2023, "Direct Preference Optimization", eq. 7; the label smoothing
    :math:`\epsilon` is conservative DPO, Mitchell 2023), or what another ``preference_loss`` makes
    of the rewards (formulas and sources are in :mod:`rl_losses.preferences`). To it
    ``sft_loss_weight`` times the chosen answer's negative log-likelihood is added (Pang et al.
    2024, "Iterative Reasoning Preference Optimization", eq. 1). Everything is averaged over pairs:
    there are ``global_valid_seqs / 2`` of them.

    ``length_desensitization`` is LD-DPO (Liu et al. 2024, arXiv 2409.06411), ``weighted`` WPO (Zhou
    et al. 2024, arXiv 2406.11827, eq. 2).

    Metrics, averaged over pairs: ``preference_loss``, ``sft_loss`` (both before weighting),
    ``accuracy`` (share of pairs with a positive margin), ``rewards_chosen``, ``rewards_rejected``
    and ``rewards_margin``.

    Attributes:
        beta: Strength of the pull towards the reference.
        preference_loss: Loss of a pair; the names are TRL's. For TRL's ``"ipo"``, also set
            ``preference_average_log_probs``; with it, ``"sigmoid"`` is TRL's ``sigmoid_norm``.
        preference_loss_weight: Factor on the preference term.
        preference_average_log_probs: Rewards are means over tokens, not sums, so that length has
            no effect.
        length_desensitization: Factor on the log-ratios of those tokens of the longer answer that
            are beyond the length of the shorter. 1 is off.
        weighted: Whether the preference term of a pair is multiplied by how likely the policy is to
            generate it: for both answers, the exponential of the mean log-prob, relative to the
            mean that the policy would have there. Takes full logits.
        label_smoothing: Probability that a preference is wrong (chosen and rejected exchanged);
            for ``"sigmoid"``, ``"robust"`` and ``"exo_pair"``, which needs one above 0.
        sft_loss_weight: Factor on the chosen answer's negative log-likelihood.
        sft_average_log_probs: That term is a mean over tokens, not a sum.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    group_size: ClassVar[int] = 2
    row_order: ClassVar[str] = "chosen, rejected, chosen, rejected, ..."

    beta: Annotated[float, Range(gt=0, lt=math.inf), AlsoCalled("reference_policy_kl_penalty")] = (
        0.1
    )
    preference_loss: Annotated[
        Literal[
            "sigmoid",
            "robust",
            "exo_pair",
            "hinge",
            "ipo",
            "nca_pair",
            "bco_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "discopop",
        ],
        AlsoCalled("loss_type"),
    ] = "sigmoid"
    preference_loss_weight: Annotated[float, Range(ge=0, lt=math.inf)] = 1.0
    preference_average_log_probs: bool = False
    length_desensitization: Annotated[float, Range(ge=0, le=1), AlsoCalled("ld_alpha")] = 1.0
    weighted: Annotated[bool, AlsoCalled("use_weighting")] = False
    label_smoothing: Annotated[float, Range(ge=0, lt=0.5)] = 0.0
    sft_loss_weight: Annotated[float, Range(ge=0, lt=math.inf)] = 0.0
    sft_average_log_probs: bool = False

    def __post_init__(self) -> None:
        smoothed = self.preference_loss in SMOOTHED
        self._needs(
            "preference_loss='sigmoid', 'robust' or 'exo_pair'", smoothed, "label_smoothing"
        )
        if self.preference_loss == "exo_pair" and not self.label_smoothing:
            raise ConfigError(
                "DPOLossFn: preference_loss='exo_pair' needs a 'label_smoothing' above 0",
                fix="set label_smoothing=1e-3, as its authors do",
                key="label_smoothing",
            )
        if self.weighted:
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
            inputs: ``[b, s]`` log-probs, b even; with ``weighted`` ``[b, s, V]`` logits.
            data: ``token_mask`` ``[b, s]`` (1 on the answers), ``sample_mask`` ``[b]`` (equal
                within a pair), ``reference_policy_logprobs`` ``[b, s]``; ``input_ids`` ``[b, s]``
                with ``weighted``.
            global_valid_seqs: 0-d count of valid rows, two for each pair.
            global_valid_toks: 0-d count of valid tokens; not used.

        Raises:
            DataError: A pair is split: the number of rows is odd, or one row of a pair is masked.
                Or a key is missing or malformed, or the reference's log-probs are rolled by one.
        """
        shares = Shares.of(
            inputs,
            data,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            needed_by="DPOLossFn",
        )
        if len(inputs) % 2:
            raise DataError(
                f"DPOLossFn needs pairs of a chosen and a rejected row, but the number of rows is "
                f"{len(inputs)}",
                fix="put the rows of a pair next to each other, and use batch sizes that are even",
                rows=len(inputs),
            )
        valid = shares.rows[0::2]
        half = valid != shares.rows[1::2]
        if half.any():
            row = 2 * int(half.nonzero()[0, 0])
            raise DataError(
                f"DPOLossFn: rows {row} and {row + 1} are a pair, but 'sample_mask' is 1 for one "
                "of them and 0 for the other",
                fix="mask both rows of a pair, or neither",
                key="sample_mask",
                row=row,
            )
        expected = None
        if self.weighted:
            scores, inputs = score(inputs, data, shares, needed_by="DPOLossFn(weighted)")
            # The logarithm of the mean probability of a token that the policy itself draws.
            expected = shares.scatter((2 * scores.detach()).logsumexp(dim=-1))
        key = "reference_policy_logprobs"
        reference = read_tensor(data, key, [tuple(inputs.shape)], needed_by="DPOLossFn").to(inputs)
        check_logprobs(reference, shares.tokens, key, needed_by="DPOLossFn", strict=True)
        reduce = shares.row_mean if self.preference_average_log_probs else shares.row_sum
        places = shares.tokens.cumsum(dim=1)
        shorter = places[:, -1].view(-1, 2).amin(dim=1).repeat_interleave(2)[:, None]
        factors = torch.where(places > shorter, self.length_desensitization, 1.0).to(inputs)
        ratios = reduce((inputs - reference) * factors)
        chosen, rejected = self.beta * ratios[0::2], self.beta * ratios[1::2]
        margin = chosen - rejected
        cost = PREFERENCES[self.preference_loss]
        preference = cost(ratios[0::2], ratios[1::2], self.beta, self.label_smoothing)
        if expected is not None:
            likely = shares.row_mean(inputs.detach() - expected).exp()
            preference = preference * likely[0::2] * likely[1::2]
        nll = shares.row_mean if self.sft_average_log_probs else shares.row_sum
        sft = -nll(inputs)[0::2]
        loss = self.preference_loss_weight * preference + self.sft_loss_weight * sft
        per_pair = {
            "preference_loss": preference,
            "sft_loss": sft,
            "accuracy": (margin > 0).to(margin.dtype),
            "rewards_chosen": chosen,
            "rewards_rejected": rejected,
            "rewards_margin": margin,
        }
        metrics = {name: shares.row_share(x, valid, size=2) for name, x in per_pair.items()}
        return shares.row_share(loss, valid, size=2), to_floats(metrics)
