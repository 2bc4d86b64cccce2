"""Distillation from a teacher's top-k logits: a loss over full logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch

from rl_core.errors import DataError
from rl_core.interfaces import LossInputType, LossType
from rl_core.interfaces.constraints import AlsoCalled, Range
from rl_losses._base import ConfiguredLoss, read_tensor
from rl_losses._shares import Shares, to_floats

if TYPE_CHECKING:
    from rl_core.batch import BatchedDataDict

__all__ = ["TopkKLLossFn", "jsd"]


@dataclass(frozen=True, kw_only=True)
class TopkKLLossFn(ConfiguredLoss):
    r"""KL divergence between a teacher, known by its top-k logits, and the policy.

    The teacher p is the softmax of its k logits. Forward: :math:`\sum_{v \in top_k} p_v \log
    \frac{p_v}{q_v}` with the policy's q over the whole vocabulary, so that mass outside the top-k
    costs too (with k = 1 it is the negative log-likelihood of the teacher's best token). Reverse:
    :math:`\sum_{v \in top_k} q_v \log \frac{q_v}{p_v}` with q renormalised over the top-k, since p
    is unknown elsewhere. Mixed: ``mixing`` times the forward plus ``1 - mixing`` times the reverse
    divergence. JSD: :math:`\beta\, \mathrm{KL}(p, m) + (1 - \beta)\, \mathrm{KL}(q, m)` with
    :math:`m = \beta p + (1 - \beta) q`, q renormalised and :math:`\beta` the ``mixing``. Sources:
    Hinton et al. 2015, "Distilling the Knowledge in a Neural Network"; Gu et al. 2024, "MiniLLM",
    eq. 1, for the reverse direction; Agarwal et al. 2024, "GKD", eq. 1, for the JSD.

    Metrics, averaged over valid tokens: ``kl``, and ``teacher_mass``, the policy's probability of
    the teacher's top-k.

    Attributes:
        loss_type: Whether tokens or rows weigh the same.
        direction: Which divergence: ``"forward"``: KL(teacher, policy), ``"reverse"``: KL(policy,
            teacher), ``"mixed"``: a mixture of both, ``"jsd"``: Jensen-Shannon.
        renormalize: In which directions the policy's probabilities are divided by their sum over
            the top-k: only in the reverse one, in both, or in none. With ``"none"`` the reverse
            divergence is over the whole vocabulary, and the teacher's log-prob of other tokens is
            -100 (NeMo RL's ``zero_outside_topk``). Not for ``"jsd"``.
        mixing: The share of the forward direction in ``"mixed"``; of the teacher in ``"jsd"``.
        teacher_temperature: Divides the teacher's logits again. ``get_topk_logits`` has already
            divided them by the teacher's configured temperature: leave this at 1 if the policy has
            the same temperature.
    """

    input_type: ClassVar[LossInputType] = LossInputType.LOGIT

    loss_type: Annotated[LossType, AlsoCalled("loss_agg_mode token_level_loss")] = (
        LossType.TOKEN_LEVEL
    )
    direction: Annotated[
        Literal["forward", "reverse", "mixed", "jsd"], AlsoCalled("kl_type f_divergence_type")
    ] = "forward"
    renormalize: Annotated[
        Literal["reverse", "both", "none"], AlsoCalled("zero_outside_topk", "none (true) or both")
    ] = "reverse"
    mixing: Annotated[float, Range(gt=0, lt=1), AlsoCalled("mixed_kl_weight")] = 0.5
    teacher_temperature: Annotated[float, Range(gt=0), AlsoCalled("temperature")] = 1.0

    def __post_init__(self) -> None:
        both = self.direction in ("mixed", "jsd")
        self._needs("direction='mixed' or 'jsd'", both, "mixing")
        other = self.direction != "jsd"
        self._needs("direction='forward', 'reverse' or 'mixed'", other, "renormalize")

    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`rl_core.interfaces.LossFunction`; ``inputs`` are logits ``[b, s, V]``.

        Args:
            inputs: ``[b, s, V]`` logits; position t predicts token t+1.
            data: ``token_mask`` ``[b, s]``, ``sample_mask`` ``[b]``, ``teacher_topk_logits`` and
                ``teacher_topk_indices`` ``[b, s-1, K]`` as ``get_topk_logits`` returns them (wider
                is cut).
            global_valid_seqs: 0-d count of valid rows.
            global_valid_toks: 0-d count of valid tokens.

        Raises:
            DataError: A key is missing or of the wrong shape, a mask is not 0 or 1, or the teacher
                names tokens that the policy does not have or gives no distribution over its own.
        """
        shares = Shares.of(
            inputs,
            data,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            needed_by="TopkKLLossFn",
        )
        # Only what counts is computed, and nothing else gets even a zero times NaN of gradient.
        chosen = shares.tokens[:, 1:]
        student = inputs[:, :-1][chosen].log_softmax(dim=-1)
        logits = _read_teacher(data, "teacher_topk_logits", chosen).to(student)
        indices = _read_teacher(data, "teacher_topk_indices", chosen).to(student.device)
        self._check_teacher(logits, indices, chosen, vocabulary=inputs.shape[2])
        teacher = (logits / self.teacher_temperature).log_softmax(dim=-1)
        topk = student.gather(-1, indices.long())
        zeros = inputs.new_zeros(shares.tokens.shape)
        of_topk = topk.log_softmax(dim=-1)
        forward = _kl(teacher, of_topk if self.renormalize == "both" else topk)
        reverse = _kl(of_topk, teacher)
        if self.renormalize == "none":
            # A log-prob of -inf adds nothing: its probability of 0 is exact.
            every = (student.exp() * student.clamp(min=-1e4)).sum(dim=-1)
            p = topk.exp()
            rest = every - (p * topk.clamp(min=-1e4)).sum(dim=-1) + 100 * (1 - p.sum(dim=-1))
            reverse = _kl(topk, teacher) + rest
        divergence = {
            "forward": lambda: forward,
            "reverse": lambda: reverse,
            "mixed": lambda: self.mixing * forward + (1 - self.mixing) * reverse,
            "jsd": lambda: jsd(teacher, of_topk, self.mixing),
        }[self.direction]()
        kl = zeros.masked_scatter(shares.tokens, divergence)
        mass = zeros.masked_scatter(shares.tokens, topk.detach().exp().sum(dim=-1))
        metrics = {"kl": shares.token_mean(kl), "teacher_mass": shares.token_mean(mass)}
        return shares.mean(kl, self.loss_type), to_floats(metrics)

    def _check_teacher(
        self, logits: torch.Tensor, indices: torch.Tensor, chosen: torch.Tensor, *, vocabulary: int
    ) -> None:
        """Refuses ``[n, K]`` logits and indices that are not those of a distribution."""
        if logits.shape != indices.shape:
            raise DataError(
                f"TopkKLLossFn: 'teacher_topk_logits' has {logits.shape[1]} entries at a position, "
                f"'teacher_topk_indices' has {indices.shape[1]}",
                fix="take both from one call: teacher.get_topk_logits(data, k)",
                key="teacher_topk_indices",
            )
        if indices.dtype == torch.bool or indices.is_floating_point() or indices.is_complex():
            raise DataError(
                f"TopkKLLossFn: 'teacher_topk_indices' is {indices.dtype}, not token ids",
                fix="give the integers that teacher.get_topk_logits(data, k) returns",
                key="teacher_topk_indices",
            )
        outside = ((indices < 0) | (indices >= vocabulary)).any(dim=1)
        if outside.any():
            row, position = chosen.nonzero()[outside][0].tolist()
            raise DataError(
                f"TopkKLLossFn: 'teacher_topk_indices' at row {row}, position {position} names a "
                f"token outside of the policy's vocabulary of {vocabulary}",
                fix="use a teacher with the policy's vocabulary, or map its token ids",
                key="teacher_topk_indices",
                row=row,
            )
        # A token of probability 0 is fine for p log p, and infinitely far for q log(q / 0).
        absent = logits.isneginf()
        reverse = self.direction in ("reverse", "mixed")
        none = absent.any(dim=1) if reverse else absent.all(dim=1)
        wrong = none | logits.isnan().any(dim=1) | logits.isposinf().any(dim=1)
        if wrong.any():
            row, position = chosen.nonzero()[wrong][0].tolist()
            raise DataError(
                f"TopkKLLossFn: 'teacher_topk_logits' at row {row}, position {position} are "
                f"{logits[wrong][0].tolist()}, which are not a distribution for "
                f"direction={self.direction!r}",
                fix="correct the teacher's logits, or mask the token with 'token_mask'",
                key="teacher_topk_logits",
                row=row,
            )


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``[n]`` KL of ``[n, K]`` log-probs; what is impossible in the first adds nothing."""
    p = first.exp()
    return torch.where(p > 0, p * (first - second), 0.0).sum(dim=-1)


def jsd(teacher: torch.Tensor, policy: torch.Tensor, mixing: float) -> torch.Tensor:
    """``[n]`` divergences from the mixture of the two."""
    mixture = torch.logaddexp(teacher + math.log(mixing), policy + math.log1p(-mixing))
    return mixing * _kl(teacher, mixture) + (1 - mixing) * _kl(policy, mixture)


def _read_teacher(data: BatchedDataDict[Any], key: str, chosen: torch.Tensor) -> torch.Tensor:
    """``[n, K]`` values at the positions that count."""
    rows, width = chosen.shape
    values = read_tensor(data, key, [(rows, -1, -1)], needed_by="TopkKLLossFn").to(chosen.device)
    if not values.shape[2]:
        raise DataError(
            f"TopkKLLossFn: '{key}' has no entries (k is 0)",
            fix="use k >= 1: teacher.get_topk_logits(data, k)",
            key=key,
        )
    if values.shape[1] < width:
        raise DataError(
            f"TopkKLLossFn: '{key}' has {values.shape[1]} positions, expected {width}",
            fix="call teacher.get_topk_logits with the batch that is trained on",
            key=key,
        )
    return values[:, :width][chosen]
