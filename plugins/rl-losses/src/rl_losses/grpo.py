"""Clipped policy gradient: GRPO and its relatives."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from rl_core.errors import ConfigError, LoopWarning
from rl_core.interfaces import LossInputType, LossType
from rl_core.interfaces.constraints import AlsoCalled, Range
from rl_losses._base import ConfiguredLoss, check_logprobs, read_tensor
from rl_losses._shares import Shares, score, to_floats
from rl_losses.importance import importance_weights, over_row
from rl_losses.kl import kl_penalty
from rl_losses.surrogates import SURROGATES, Step, exp

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.batch import BatchedDataDict

__all__ = ["GRPOLossFn"]


#: One option for both elsewhere.
_BOTH_CLIPS = AlsoCalled("epsilon clip_eps clip_ratio cliprange")


@dataclass(frozen=True, kw_only=True)
class GRPOLossFn(ConfiguredLoss):
    r"""Policy gradient with a surrogate for the ratio, and a KL penalty to the reference policy.

    With the ratio :math:`\rho_t = \pi(y_t) / \pi_{prev}(y_t)` and the advantage A, a token costs

    .. math:: -w_t \min\bigl(\rho_t A,\;
        \mathrm{clip}(\rho_t, 1 - \epsilon_{min}, 1 + \epsilon_{max}) A\bigr)
        + \lambda\, \mathrm{KL}_t

    or what another ``surrogate`` has in place of the minimum:

    - ``"cispo"``: :math:`-\mathrm{sg}(\mathrm{clip}(\rho_t)) A \log \pi(y_t)`. No token loses
      its gradient. MiniMax 2025, "MiniMax-M1", eq. 4.
    - ``"sapo"``: :math:`-\frac{4}{\tau} \sigma(\tau (\rho_t - 1)) A`, with a temperature for A > 0
      and one for the others. Gao et al. 2025, "Soft Adaptive Policy Optimization".
    - ``"gmpo"``: :math:`-A \exp(\frac{1}{|y|} \sum_t \log \rho_t)`, where each log-ratio is
      clipped to :math:`[-\epsilon_{min}, \epsilon_{max}]` on the side it gains on. Zhao et al.
      2025, "Geometric-Mean Policy Optimization", eq. 4.
    - ``"dppo"``: :math:`-\mathrm{sg}(\min(\rho_t, c)) A \log \pi(y_t)` for tokens whose probability
      rose by at most :math:`\epsilon_{max}` (A > 0) or fell by at most :math:`\epsilon_{min}`; the
      others cost 0. 2026, arXiv 2602.04879 (binary total variation).

    Sources: the surrogate and its clip, Schulman et al. 2017, "Proximal Policy Optimization
    Algorithms", eq. 7; the group's advantages and the KL inside the loss, Shao et al. 2024,
    "DeepSeekMath", eq. 3; the asymmetric clip and the token-level mean, Yu et al. 2025, "DAPO",
    eq. 8; the constant length, Liu et al. 2025, "Understanding R1-Zero-Like Training"; the dual
    clip, Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement
    Learning" (dual-clip PPO); the sequence's ratio
    :math:`\rho = \exp(\frac{1}{|y|} \sum_t \log \rho_t)`, Zheng et al. 2025, "Group Sequence Policy
    Optimization", eq. 7; the truncated weight :math:`w_t = \min(\pi_{prev} / \pi_{gen}, C)` for an
    engine that disagrees with the trainer, Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"; a weight of 0 outside the bounds, 2025, "IcePop"; the
    off-policy mask, DeepSeek-AI 2025, "DeepSeek-V3.2"; the likelihood of correct rows, Yue et al.
    2025, "VAPO", eq. 10. Log-ratios are cut off at +-20.

    Reads ``token_mask``, ``sample_mask`` and ``advantages`` (``[b]`` or ``[b, s]``), and, all
    ``[b, s]``: ``prev_logprobs`` unless ``on_policy``; ``reference_policy_logprobs`` if
    ``reference_policy_kl_penalty`` is not 0; ``generation_logprobs`` if
    ``importance_sampling_cap`` is set, or ``kl_gradient="generation"``. The last two also feed
    metrics when they are there. ``rewards`` ``[b]`` if ``positive_nll_weight`` is not 0, and
    ``input_ids`` ``[b, s]`` with the options of the entropy.

    Metrics, averaged over valid tokens: ``probs_ratio`` and its ``_min`` and ``_max``;
    ``clip_fraction`` (tokens that the surrogate's bounds change); ``approx_entropy`` (minus the
    mean log-prob of the sampled tokens); with a reference, ``kl`` (before any weighting); with
    ``generation_logprobs``, ``token_mult_prob_error`` (mean of ``exp(|generation - prev|)``, 1 for
    perfect agreement) and its ``_max``, and ``gen_kl_error`` (the engine's KL from the trainer, as
    ``kl_estimator`` has it); with the correction, ``importance_weight`` (as applied) and
    ``importance_capped_fraction`` (of weights outside the bounds); ``off_policy_fraction``,
    ``entropy``, ``low_entropy_fraction`` and ``positive_nll`` with their options; and
    ``impossible_fraction``, of tokens whose ``generation_logprobs`` is -inf: they are left out of
    the loss and of all else, with a :class:`~rl_core.errors.LoopWarning`. Without a valid token a
    ``_min`` is inf and a ``_max`` -inf.

    Attributes:
        loss_type: Token-level (DAPO) or the mean of each row's mean (GRPO, GSPO).
        length_norm: Rows are sums divided by this, such as ``max_new_tokens`` (Dr.GRPO), and not by
            their own length; 1 is LUSPO. Sequence-level only. None is off.
        surrogate: What stands for the clipped ratio, see above.
        ratio_clip_min: The ratio is clipped below 1 minus this.
        ratio_clip_max: The ratio is clipped above 1 plus this; inf is off.
        ratio_clip_c: Dual clip, > 1: where A < 0 a token costs at most ``c |A|``. With ``"dppo"``
            the largest weight. None is off.
        sapo_temperature_pos: How sharply ``"sapo"`` gates tokens with A > 0.
        sapo_temperature_neg: The same for the others.
        reference_policy_kl_penalty: Factor on the KL; 0 is off.
        kl_estimator: See :func:`kl_penalty`.
        kl_gradient: What the estimate is weighted by: ``"estimate"`` 1; ``"ratio"`` the ratio, so
            that samples of the previous policy estimate the KL of this one; ``"sampling"`` a
            factor of value 1 with the gradient of the log-prob (Tang and Munos 2025, arXiv
            2506.09477); ``"generation"`` the policy's probability over the engine's.
        kl_input_clamp: Log-ratios to the reference are cut off here. None is off (k3: 20).
        kl_output_clamp: Estimates are cut off here. None is off.
        importance_ratio: One ratio for each token, or one for the whole sequence.
        importance_sampling_cap: Weighs tokens by ``prev / generation`` probability, at most this.
            inf does not cap, None is off.
        importance_sampling_floor: The least of these weights.
        importance_sampling_outside: What becomes of a weight outside of cap and floor:
            ``"truncate"`` sets it to the bound, ``"mask"`` to 0 (IcePop); ``"mask_rows"`` leaves
            weights as they are, and drops rows whose geometric mean of them is outside.
        importance_sampling_weight: One weight for each token, or for each row the product over its
            tokens. None is as ``importance_ratio``.
        off_policy_mask_threshold: Rows with A < 0 cost nothing where the mean over tokens of
            ``generation - policy`` log-probs (without ``generation_logprobs``, of
            ``prev - policy``) is above this. None is off.
        entropy_bonus: Factor on the mean entropy of tokens, which is subtracted. This and the
            next option take the policy's full logits.
        entropy_min: Tokens of less entropy, in nats, do not count towards surrogate and bonus. (A
            quantile of the batch would depend on how it is split.)
        positive_nll_weight: Factor on the negative log-likelihood of rows with a reward above 0,
            averaged as the loss is.
        on_policy: The policy has not moved since generation: ratios are 1, gradients flow, and the
            policy's own log-probs stand in for ``prev_logprobs``.
    """

    loss_type: Annotated[LossType, AlsoCalled("loss_agg_mode token_level_loss")] = (
        LossType.TOKEN_LEVEL
    )
    length_norm: Annotated[float | None, Range(gt=0, lt=math.inf)] = None
    surrogate: Annotated[
        Literal["clip", "cispo", "sapo", "gmpo", "dppo"], AlsoCalled("use_cispo", "cispo")
    ] = "clip"
    ratio_clip_min: Annotated[
        float, Range(ge=0, le=1), _BOTH_CLIPS, AlsoCalled("epsilon_low clip_ratio_low")
    ] = 0.2
    ratio_clip_max: Annotated[
        float, Range(ge=0), _BOTH_CLIPS, AlsoCalled("epsilon_high clip_ratio_high")
    ] = 0.2
    ratio_clip_c: Annotated[float | None, Range(gt=1), AlsoCalled("delta clip_ratio_c")] = None
    sapo_temperature_pos: Annotated[float, Range(gt=0, lt=math.inf), AlsoCalled("tau_pos")] = 1.0
    sapo_temperature_neg: Annotated[float, Range(gt=0, lt=math.inf), AlsoCalled("tau_neg")] = 1.05
    reference_policy_kl_penalty: Annotated[
        float, Range(ge=0, lt=math.inf), AlsoCalled("beta kl_loss_coef kl_coef kl_penalty")
    ] = 0.01
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"], AlsoCalled("kl_loss_type reference_policy_kl_type kl_type")
    ] = "k3"
    kl_gradient: Annotated[
        Literal["estimate", "ratio", "sampling", "generation"],
        AlsoCalled("use_bias_correction_kl use_on_policy_kl_approximation"),
    ] = "estimate"
    kl_input_clamp: Annotated[float | None, Range(gt=0), AlsoCalled("kl_input_clamp_value")] = None
    kl_output_clamp: Annotated[float | None, Range(gt=0), AlsoCalled("kl_output_clamp_value")] = (
        None
    )
    importance_ratio: Annotated[
        Literal["token", "sequence"],
        AlsoCalled("importance_sampling_level sequence_level_importance_ratios"),
    ] = "token"
    importance_sampling_cap: Annotated[
        float | None,
        Range(gt=0),
        AlsoCalled("truncated_importance_sampling_ratio vllm_importance_sampling_clip_max"),
        AlsoCalled("use_importance_sampling_correction", "2.0"),
    ] = None
    importance_sampling_floor: Annotated[
        float,
        Range(ge=0, lt=math.inf),
        AlsoCalled("truncated_importance_sampling_ratio_min vllm_importance_sampling_clip_min"),
    ] = 0.0
    importance_sampling_outside: Annotated[
        Literal["truncate", "mask", "mask_rows"],
        AlsoCalled("truncated_importance_sampling_type vllm_importance_sampling_mode"),
    ] = "truncate"
    importance_sampling_weight: Literal["token", "sequence"] | None = None
    off_policy_mask_threshold: float | None = None
    entropy_bonus: Annotated[
        float, Range(ge=0, lt=math.inf), AlsoCalled("entropy_coef entropy_coeff")
    ] = 0.0
    entropy_min: Annotated[float, Range(ge=0, lt=math.inf), AlsoCalled("top_entropy_quantile")] = (
        0.0
    )
    positive_nll_weight: Annotated[
        float, Range(ge=0, lt=math.inf), AlsoCalled("positive_example_nll_weight")
    ] = 0.0
    on_policy: Annotated[bool, AlsoCalled("force_on_policy_ratio disable_ppo_ratio")] = False

    def __post_init__(self) -> None:
        sequences = self.loss_type is LossType.SEQUENCE_LEVEL
        corrects = self.importance_sampling_cap is not None
        self._needs("loss_type=LossType.SEQUENCE_LEVEL", sequences, "length_norm")
        bounded = self.surrogate in ("clip", "dppo")
        self._needs("surrogate='clip' or 'dppo'", bounded, "ratio_clip_c")
        gates = ("sapo_temperature_pos", "sapo_temperature_neg")
        self._needs("surrogate='sapo'", self.surrogate == "sapo", *gates)
        weights = ("floor", "outside", "weight")
        names = [f"importance_sampling_{name}" for name in weights]
        self._needs("importance_sampling_cap", corrects, *names)
        needed = "importance_ratio='token' with surrogate='gmpo'"
        self._needs(needed, self.surrogate != "gmpo", "importance_ratio")
        if corrects and self.importance_sampling_floor >= (self.importance_sampling_cap or 0):
            raise ConfigError(
                f"GRPOLossFn: 'importance_sampling_floor' is {self.importance_sampling_floor:g}, "
                f"'importance_sampling_cap' {self.importance_sampling_cap:g}",
                fix="set a floor below the cap",
                key="importance_sampling_floor",
            )
        if self.entropy_bonus or self.entropy_min:
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
            inputs: ``[b, s]`` log-probs; with the options of the entropy ``[b, s, V]`` logits.
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
        metrics: dict[str, torch.Tensor] = {}
        entropy = None
        if self.input_type is LossInputType.LOGIT:
            scores, inputs = score(inputs, data, shares, needed_by="GRPOLossFn(entropy)")
            # A log-prob of -inf adds nothing: its probability of 0 is exact.
            entropy = shares.scatter(-(scores.exp() * scores.clamp(min=-1e4)).sum(dim=-1))
        batch = _Batch(data, shares, shares.keep(inputs))
        step = self._step(batch)
        previous, ratio = step.previous, step.ratio
        cost, changed = SURROGATES[self.surrogate](step)
        metrics |= {
            "probs_ratio": shares.token_mean(ratio),
            "probs_ratio_min": shares.token_min(ratio),
            "probs_ratio_max": shares.token_max(ratio),
            "clip_fraction": shares.token_mean(changed.to(ratio.dtype)),
            "approx_entropy": shares.token_mean(-batch.logprobs),
        }
        cap = self.importance_sampling_cap
        generated = None
        if cap is not None or self.kl_gradient == "generation" or "generation_logprobs" in data:
            option = f"kl_gradient={self.kl_gradient!r}"
            if cap is not None:
                option = f"importance_sampling_cap={cap}"
            generated = batch.values("generation_logprobs", option)
            error = exp((generated - previous).abs())
            metrics["token_mult_prob_error"] = shares.token_mean(error)
            metrics["token_mult_prob_error_max"] = shares.token_max(error)
            apart = kl_penalty(generated, previous, self.kl_estimator)
            metrics["gen_kl_error"] = shares.token_mean(apart)
            dropped = (every.tokens & ~shares.tokens).to(ratio.dtype)
            metrics["impossible_fraction"] = every.token_mean(dropped)
            if cap is not None:
                weights, outside = importance_weights(
                    shares,
                    previous - generated,
                    cap=cap,
                    floor=self.importance_sampling_floor,
                    outside=self.importance_sampling_outside,
                    level=self.importance_sampling_weight or self.importance_ratio,
                )
                cost = cost * weights
                metrics["importance_weight"] = shares.token_mean(weights)
                metrics["importance_capped_fraction"] = shares.token_mean(outside)
        if self.off_policy_mask_threshold is not None:
            start = previous if generated is None else generated
            drift = shares.row_mean(start - batch.logprobs.detach())[:, None]
            off = (step.advantages < 0) & (drift > self.off_policy_mask_threshold)
            cost = torch.where(off, 0.0, cost)
            metrics["off_policy_fraction"] = shares.token_mean(off.to(cost.dtype))
        if entropy is not None:
            low = entropy.detach() < self.entropy_min
            cost = torch.where(low, 0.0, cost)
            metrics["entropy"] = shares.token_mean(entropy)
            metrics["low_entropy_fraction"] = shares.token_mean(low.to(cost.dtype))
        penalty = self.reference_policy_kl_penalty
        if penalty or "reference_policy_logprobs" in data:
            option = f"reference_policy_kl_penalty={penalty:g}"
            reference = batch.values("reference_policy_logprobs", option)
            kl = kl_penalty(batch.logprobs, reference, self.kl_estimator)
            metrics["kl"] = shares.token_mean(kl)
            if penalty:
                logprobs = step.logprobs
                kl_weights: dict[str, Callable[[], torch.Tensor | None]] = {
                    "estimate": lambda: None,
                    "ratio": lambda: ratio,
                    "sampling": lambda: exp(logprobs - logprobs.detach()),
                    "generation": lambda: None if generated is None else exp(logprobs - generated),
                }
                cost = cost + penalty * kl_penalty(
                    logprobs,
                    reference,
                    self.kl_estimator,
                    input_clamp=self.kl_input_clamp,
                    output_clamp=self.kl_output_clamp,
                    weight=kl_weights[self.kl_gradient](),
                )
        if self.positive_nll_weight:
            positive = batch.rewards() > 0
            nll = torch.where(positive[:, None], -batch.logprobs, 0.0)
            metrics["positive_nll"] = shares.token_mean(nll)
            cost = cost + self.positive_nll_weight * nll
        loss = shares.mean(cost, self.loss_type, self.length_norm)
        if entropy is not None and self.entropy_bonus:
            counted = torch.where(low, 0.0, entropy)
            loss = loss - self.entropy_bonus * shares.token_mean(counted)
        return loss, to_floats(metrics)

    def _step(self, batch: _Batch) -> Step:
        """The ratios and advantages of a call, with the bounds of the surrogate."""
        shares = batch.shares
        previous = (
            batch.logprobs.detach()
            if self.on_policy
            else batch.values("prev_logprobs", "on_policy=False")
        )
        log_ratio = over_row(batch.logprobs - previous, self.importance_ratio, shares.row_mean)
        return Step(
            shares=shares,
            logprobs=batch.logprobs,
            previous=previous,
            log_ratio=log_ratio,
            ratio=exp(log_ratio),
            advantages=batch.advantages(),
            low=self.ratio_clip_min,
            high=self.ratio_clip_max,
            most=self.ratio_clip_c,
            temperatures=(self.sapo_temperature_pos, self.sapo_temperature_neg),
        )


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

    def rewards(self) -> torch.Tensor:
        """``[b]`` rewards."""
        needed_by = "GRPOLossFn(positive_nll_weight)"
        return read_tensor(self.data, "rewards", [(len(self.logprobs),)], needed_by=needed_by).to(
            self.logprobs
        )


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
