"""Clipped policy gradient: GRPO and its relatives."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from rl_core.errors import LoopWarning
from rl_core.interfaces import LossType
from rl_core.interfaces.constraints import Range
from rl_losses._base import ConfiguredLoss, check_logprobs, read_tensor
from rl_losses._shares import Shares, to_floats

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.batch import BatchedDataDict

__all__ = ["GRPOLossFn", "kl_penalty"]

#: Log-ratios beyond this are cut off, so that their exponential stays finite.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class GRPOLossFn(ConfiguredLoss):
    r"""Clipped surrogate with a KL penalty to the reference policy.

    With the ratio :math:`\rho_t = \pi(y_t) / \pi_{prev}(y_t)` and the advantage A, a token costs

    .. math:: -w_t \min\bigl(\rho_t A,\;
        \mathrm{clip}(\rho_t, 1 - \epsilon_{min}, 1 + \epsilon_{max}) A\bigr)
        + \lambda\, \mathrm{KL}_t

    Sources: the surrogate and its clip, Schulman et al. 2017, "Proximal Policy Optimization
    Algorithms", eq. 7; the group's advantages and the KL inside the loss, Shao et al. 2024,
    "DeepSeekMath", eq. 3; the asymmetric clip and the token-level mean, Yu et al. 2025, "DAPO",
    eq. 8; the dual clip, Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning" (dual-clip PPO); the sequence's ratio
    :math:`\rho = \exp(\frac{1}{|y|} \sum_t \log \rho_t)`, Zheng et al. 2025, "Group Sequence Policy
    Optimization", eq. 7; the truncated weight :math:`w_t = \min(\pi_{prev} / \pi_{gen}, C)` for an
    engine that disagrees with the trainer, Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training". Log-ratios are cut off at +-20.

    Reads ``token_mask``, ``sample_mask`` and ``advantages`` (``[b]`` or ``[b, s]``), and, all
    ``[b, s]``: ``prev_logprobs`` unless ``on_policy``; ``reference_policy_logprobs`` if
    ``reference_policy_kl_penalty`` is not 0; ``generation_logprobs`` if
    ``importance_sampling_cap`` is set. The last two also feed metrics when they are there.

    Metrics, averaged over valid tokens: ``probs_ratio`` and its ``_min`` and ``_max``;
    ``clip_fraction`` (tokens that a clip silences); ``approx_entropy`` (minus the mean log-prob of
    the sampled tokens); with a reference, ``kl`` (before weighting); with ``generation_logprobs``,
    ``token_mult_prob_error`` (mean of ``exp(|generation - prev|)``, 1 for perfect agreement) and
    its ``_max``, and ``gen_kl_error`` (the engine's KL from the trainer, as ``kl_estimator`` has
    it); with the correction, ``importance_weight`` (after the cap) and
    ``importance_capped_fraction``; and ``impossible_fraction``, of tokens whose
    ``generation_logprobs`` is -inf: they are left out of the loss and of all else, with a
    :class:`~rl_core.errors.LoopWarning`. Without a valid token a ``_min`` is inf and a ``_max``
    -inf.

    Attributes:
        loss_type: Token-level (DAPO) or the mean of each row's mean (GRPO, GSPO).
        ratio_clip_min: The ratio is clipped below 1 minus this.
        ratio_clip_max: The ratio is clipped above 1 plus this; inf is off.
        ratio_clip_c: Dual clip, > 1: where A < 0 a token costs at most ``c |A|``. None is off.
        reference_policy_kl_penalty: Factor on the KL; 0 is off.
        kl_estimator: See :func:`kl_penalty`.
        importance_ratio: One ratio for each token, or one for the whole sequence.
        importance_sampling_cap: Weighs tokens by ``prev / generation`` probability, at most this;
            with sequence ratios it is one weight per row, the product over its tokens. inf does not
            cap, None is off.
        on_policy: The policy has not moved since generation: ratios are 1, gradients flow, and the
            policy's own log-probs stand in for ``prev_logprobs``.
    """

    loss_type: LossType = LossType.TOKEN_LEVEL
    ratio_clip_min: Annotated[float, Range(ge=0, le=1)] = 0.2
    ratio_clip_max: Annotated[float, Range(ge=0)] = 0.2
    ratio_clip_c: Annotated[float | None, Range(gt=1)] = None
    reference_policy_kl_penalty: Annotated[float, Range(ge=0, lt=math.inf)] = 0.01
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    importance_ratio: Literal["token", "sequence"] = "token"
    importance_sampling_cap: Annotated[float | None, Range(gt=0)] = None
    on_policy: bool = False

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
            data: The keys named above.
            global_valid_seqs: 0-d count of valid rows.
            global_valid_toks: 0-d count of valid tokens.

        Raises:
            DataError: A key is missing (the option that needs it is named), of the wrong shape, a
                mask is not 0 or 1, or log-probs are shifted or infinite (row and position are).
        """
        shares = Shares.of(
            inputs,
            data,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            needed_by="GRPOLossFn",
        )
        every, shares = shares, _without_impossible(shares, data)
        batch = _Batch(data, shares, shares.keep(inputs))
        advantages = batch.advantages()
        previous = (
            batch.logprobs.detach()
            if self.on_policy
            else batch.values("prev_logprobs", "on_policy=False")
        )
        ratio = _exp(self._over_row(batch.logprobs - previous, shares.row_mean))
        plain = -advantages * ratio
        clipped = ratio.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        cost = torch.maximum(plain, -advantages * clipped)
        if self.ratio_clip_c is not None:
            bounded = torch.minimum(cost, -self.ratio_clip_c * advantages)
            cost = torch.where(advantages < 0, bounded, cost)
        metrics = {
            "probs_ratio": shares.token_mean(ratio),
            "probs_ratio_min": shares.token_min(ratio),
            "probs_ratio_max": shares.token_max(ratio),
            "clip_fraction": shares.token_mean((cost != plain).to(ratio.dtype)),
            "approx_entropy": shares.token_mean(-batch.logprobs),
        }
        cap = self.importance_sampling_cap
        if cap is not None or "generation_logprobs" in data:
            generated = batch.values("generation_logprobs", f"importance_sampling_cap={cap}")
            error = _exp((generated - previous).abs())
            metrics["token_mult_prob_error"] = shares.token_mean(error)
            metrics["token_mult_prob_error_max"] = shares.token_max(error)
            apart = kl_penalty(generated, previous, self.kl_estimator)
            metrics["gen_kl_error"] = shares.token_mean(apart)
            dropped = (every.tokens & ~shares.tokens).to(ratio.dtype)
            metrics["impossible_fraction"] = every.token_mean(dropped)
            if cap is not None:
                raw = _exp(self._over_row(previous - generated, shares.row_sum))
                weights = raw.clamp(max=cap)
                cost = cost * weights
                capped = (raw > cap).to(raw.dtype)
                metrics["importance_weight"] = shares.token_mean(weights)
                metrics["importance_capped_fraction"] = shares.token_mean(capped)
        penalty = self.reference_policy_kl_penalty
        if penalty or "reference_policy_logprobs" in data:
            option = f"reference_policy_kl_penalty={penalty:g}"
            reference = batch.values("reference_policy_logprobs", option)
            kl = kl_penalty(batch.logprobs, reference, self.kl_estimator)
            metrics["kl"] = shares.token_mean(kl)
            if penalty:
                cost = cost + penalty * kl
        return shares.mean(cost, self.loss_type), to_floats(metrics)

    def _over_row(
        self, values: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """``[b, s]`` values as they are, or each row's one value where ratios are sequences'."""
        if self.importance_ratio == "token":
            return values
        return reduce(values)[:, None].expand_as(values)


@dataclass(frozen=True)
class _Batch:
    """The rows of a call, with what is masked taken out as it is read.

    Attributes:
        data: The rows.
        shares: Their masks.
        logprobs: ``[b, s]`` of the policy; 0 where masked.
    """

    data: BatchedDataDict[Any]
    shares: Shares
    logprobs: torch.Tensor

    def values(self, key: str, option: str) -> torch.Tensor:
        """``[b, s]`` values; 0 where masked. ``option`` is what needs them."""
        shape = tuple(self.logprobs.shape)
        needed_by = f"GRPOLossFn({option})"
        values = read_tensor(self.data, key, [shape], needed_by=needed_by).to(self.logprobs)
        check_logprobs(values, self.shares.tokens, key, needed_by=needed_by)
        return self.shares.keep(values)

    def advantages(self) -> torch.Tensor:
        """``[b, s]`` advantages; 0 where masked."""
        rows, width = self.logprobs.shape
        shapes = [(rows,), (rows, width)]
        values = read_tensor(self.data, "advantages", shapes, needed_by="GRPOLossFn")
        values = values.to(self.logprobs)
        return self.shares.keep(values if values.dim() == 2 else values[:, None])


def _without_impossible(shares: Shares, data: BatchedDataDict[Any]) -> Shares:
    """The masks without tokens that the engine says it cannot have sampled."""
    key = "generation_logprobs"
    if key not in data or data[key].shape != shares.tokens.shape:
        return shares
    impossible = shares.tokens & (data[key].to(shares.tokens.device) == -math.inf)
    if not impossible.any():
        return shares
    warnings.warn(
        f"GRPOLossFn: '{key}' is -inf at tokens that were sampled: they are left out of the loss, "
        "and counted in the metric impossible_fraction. Find out why the engine gives them no "
        "probability (such as truncation that differs, or log-probs rounded to float16).",
        LoopWarning,
        stacklevel=3,
    )
    return replace(shares, tokens=shares.tokens & ~impossible)


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def kl_penalty(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> torch.Tensor:
    """Estimates ``KL(policy || reference)`` from the log-probs of sampled tokens.

    With ``d = reference - policy``: k1 is ``-d`` (unbiased, may be negative; as a penalty its
    gradient has mean zero on samples of the policy itself, so it is for measuring), k2 is
    ``d^2 / 2`` (biased; its gradient is that of the KL on samples of the policy itself), k3 is
    ``exp(d) - 1 - d`` (unbiased, never negative; d is cut off at +-20). Source: Schulman 2020,
    "Approximating KL Divergence".

    Args:
        logprobs: Of the policy, any shape.
        reference_logprobs: Of the reference, same shape.
        estimator: Which of the three.

    Returns:
        Estimates of the same shape.
    """
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    difference = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(difference) - difference
