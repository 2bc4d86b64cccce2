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
from rl_losses.importance import importance_weights, over_row, rejected
from rl_losses.kl import kl_penalty
from rl_losses.surrogates import SURROGATES, Step, exp

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.batch import BatchedDataDict

__all__ = ["GRPOLossFn"]


#: Surrogates, and the options that only they have.
_OPTIONS_OF = {
    ("clip", "cispo", "gmpo", "dppo", "dppo_kl"): ("ratio_clip_min", "ratio_clip_max"),
    ("clip", "dppo", "dppo_kl"): ("ratio_clip_c",),
    ("sapo",): ("sapo_temperature_pos", "sapo_temperature_neg"),
    ("vespo",): ("vespo_pos", "vespo_neg"),
}
#: One option for both elsewhere.
_BOTH_CLIPS = AlsoCalled("epsilon clip_eps clip_ratio cliprange")


@dataclass(frozen=True, kw_only=True)
class GRPOLossFn(ConfiguredLoss):
    r"""Policy gradient with a surrogate for the ratio, and a KL penalty to the reference policy.

    With the ratio :math:`\rho_t = \pi(y_t) / \pi_{prev}(y_t)` and the advantage A, a token costs

    .. math:: -w_t \min\bigl(\rho_t A,\;
        \mathrm{clip}(\rho_t, 1 - \epsilon_{min}, 1 + \epsilon_{max}) A\bigr)
        + \lambda\, \mathrm{KL}_t

    or what another ``surrogate`` has in place of the minimum (formulas and sources are in
    :mod:`rl_losses.surrogates`). Sources of the rest: the group's advantages and the KL inside the
    loss, Shao et al. 2024, "DeepSeekMath", eq. 3; the asymmetric clip and the token-level mean, Yu
    et al. 2025, "DAPO", eq. 8; the constant length, Liu et al. 2025, "Understanding R1-Zero-Like
    Training"; the sequence's ratio :math:`\rho = \exp(\frac{1}{|y|} \sum_t \log \rho_t)`, Zheng et
    al. 2025, "Group Sequence Policy Optimization", eq. 7; the truncated weight
    :math:`w_t = \min(\pi_{prev} / \pi_{gen}, C)` for an engine that disagrees with the trainer, Yao
    et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; a weight
    of 0 outside the bounds, 2025, "IcePop"; rejection, the statistics of verl 0.9.1; the off-policy
    mask, DeepSeek-AI 2025, "DeepSeek-V3.2"; the squared log-ratio, 2026, "Kimi K2.5", arXiv
    2602.02276; the penalty of tokens of high covariance, Cui et al. 2025, "The Entropy Mechanism of
    RL", KL-Cov; the likelihood of correct rows, Yue et al. 2025, "VAPO", eq. 10. Log-ratios are cut
    off at +-20.

    Reads ``token_mask``, ``sample_mask`` and ``advantages`` (``[b]`` or ``[b, s]``), and, all
    ``[b, s]``: ``prev_logprobs`` unless ``on_policy``; ``reference_policy_logprobs`` if
    ``reference_policy_kl_penalty`` is not 0; ``generation_logprobs`` if
    ``importance_sampling_cap``, ``rejection``, ``kl_gradient`` or ``ratio_denominator`` need them.
    The last two also feed metrics when they are there. ``rewards`` ``[b]`` if
    ``positive_nll_weight`` is not 0, ``high_covariance`` ``[b, s]`` if ``kl_cov_penalty`` is not,
    and ``input_ids`` ``[b, s]`` with the options of the entropy.

    Metrics, averaged over valid tokens: ``probs_ratio`` and its ``_min`` and ``_max``;
    ``clip_fraction`` (tokens that the surrogate's bounds change); ``approx_entropy`` (minus the
    mean log-prob of the sampled tokens); with a reference, ``kl`` (before any weighting); with
    ``generation_logprobs``, ``token_mult_prob_error`` (mean of ``exp(|generation - prev|)``, 1 for
    perfect agreement) and its ``_max``, and ``gen_kl_error`` (the engine's KL from the trainer, as
    ``kl_estimator`` has it; the trainer's log-probs are ``prev_logprobs``, or the policy's own with
    ``on_policy`` or another ``ratio_denominator``); with the correction, ``importance_weight`` (as
    applied) and ``importance_capped_fraction`` (of weights outside the bounds);
    ``rejected_fraction``, ``off_policy_fraction``, ``log_ratio_squared``, ``entropy``,
    ``low_entropy_fraction`` and ``positive_nll`` with their options; and ``impossible_fraction``,
    of tokens whose ``generation_logprobs`` is -inf: they are left out of the loss and of all else,
    with a :class:`~rl_core.errors.LoopWarning`. Without a valid token a ``_min`` is inf and a
    ``_max`` -inf.

    Attributes:
        loss_type: Token-level (DAPO) or the mean of each row's mean (GRPO, GSPO).
        length_norm: Divides the sum of each row, such as ``max_new_tokens`` (Dr.GRPO), instead of
            the row's length; 1 is LUSPO. Sequence-level only. None is off.
        surrogate: The function of the ratio; ``"clip"`` is PPO's. The docstring of the class has
            the formulas.
        ratio_denominator: Log-probs that the ratio divides by. With ``"generation_logprobs"``, the
            engine's, the log-probs of the previous policy are not needed, and weights and rejection
            compare the engine with the current policy.
        ratio_clip_min: The ratio is clipped below 1 minus this. With ``"gmpo"`` this bounds the
            log-ratio, with ``"dppo"`` the change of the probability, with ``"dppo_kl"`` the KL.
        ratio_clip_max: The ratio is clipped above 1 plus this; inf is off.
        ratio_clip_c: Dual clip: if A < 0, a token costs at most ``c |A|``. With ``"dppo"`` and
            ``"dppo_kl"`` the largest weight. None is off.
        log_ratio_penalty: Factor on the squared log-ratio of tokens.
        kl_cov_penalty: Factor on the absolute log-ratio of tokens with ``high_covariance`` true,
            see :func:`~rl_losses.tokens.high_covariance`.
        sapo_temperature_pos: Temperature of ``"sapo"`` for tokens with A > 0.
        sapo_temperature_neg: The same for other tokens.
        vespo_pos: k and lambda of ``"vespo"`` for tokens with A >= 0: how fast the weight falls
            below a ratio of 1, and above.
        vespo_neg: The same for other tokens.
        reference_policy_kl_penalty: Factor on the KL to the reference; 0 is off.
        kl_estimator: Estimator of the KL for a token, see :func:`kl_penalty`.
        kl_gradient: Weight of the estimate: ``"estimate"``: 1; ``"ratio"``: the ratio, so that
            samples of the previous policy estimate the KL of this one; ``"sampling"``: a factor of
            value 1 with the gradient of the log-prob (Tang and Munos 2025, arXiv 2506.09477);
            ``"generation"``: the policy's probability divided by the engine's.
        kl_input_clamp: Largest absolute log-ratio to the reference. None is off (k3: 20).
        kl_output_clamp: Largest absolute estimate. None is off.
        importance_ratio: One ratio for each token, or one for the whole sequence.
        importance_sampling_cap: Weights tokens by the probability ``prev / generation``, at most
            this. inf does not cap, None is off.
        importance_sampling_floor: The smallest of these weights.
        importance_sampling_outside: What happens to a weight outside of cap and floor:
            ``"truncate"`` sets it to the bound, ``"mask"`` to 0 (IcePop).
        importance_sampling_weight: One weight for each token, or for each row the product over its
            tokens. None: the same as ``importance_ratio``.
        rejection: Tokens, or rows, cost nothing if this statistic of trainer and engine is out of
            bounds: k1, k2 or k3 of :func:`kl_penalty` at each token, or its sum, mean or maximum
            over the row. None is off.
        rejection_max: Upper bound of the statistic. For k1 the bounds are those of the ratio of
            trainer to engine (with ``"seq_mean_k1"`` of its geometric mean).
        rejection_min: Lower bound. None is ``1 / rejection_max`` for k1, otherwise 0.
        off_policy_mask_threshold: Rows with A < 0 cost nothing if the mean over tokens of
            ``generation - policy`` log-probs (without ``generation_logprobs``, of
            ``prev - policy``) is above this. None is off.
        entropy_bonus: Factor on the mean entropy of tokens, which is subtracted. This and the
            next option need the policy's full logits.
        entropy_min: Tokens with less entropy, in nats, do not count in surrogate and bonus. (A
            quantile of the batch would depend on how it is split.)
        positive_nll_weight: Factor on the negative log-likelihood of rows with a reward above 0,
            averaged as the loss is.
        on_policy: The policy has not changed since generation: ratios are 1 but have gradients, and
            the policy's own log-probs replace ``prev_logprobs``.
    """

    loss_type: Annotated[LossType, AlsoCalled("loss_agg_mode token_level_loss")] = (
        LossType.TOKEN_LEVEL
    )
    length_norm: Annotated[
        float | None, Range(gt=0, lt=math.inf), AlsoCalled("loss_scale_factor")
    ] = None
    surrogate: Annotated[
        Literal["clip", "cispo", "sapo", "gmpo", "dppo", "dppo_kl", "vespo", "reinforce"],
        AlsoCalled("use_cispo", "cispo"),
        AlsoCalled("disable_ppo_ratio", "reinforce"),
        AlsoCalled("loss_mode policy_loss"),
    ] = "clip"
    ratio_denominator: Annotated[
        Literal["prev_logprobs", "generation_logprobs"],
        AlsoCalled("bypass_mode", "generation_logprobs"),
    ] = "prev_logprobs"
    ratio_clip_min: Annotated[
        float,
        Range(ge=0, le=1),
        _BOTH_CLIPS,
        AlsoCalled("epsilon_low clip_ratio_low dppo_mask_low"),
    ] = 0.2
    ratio_clip_max: Annotated[
        float, Range(ge=0), _BOTH_CLIPS, AlsoCalled("epsilon_high clip_ratio_high dppo_mask_high")
    ] = 0.2
    ratio_clip_c: Annotated[float | None, Range(gt=1), AlsoCalled("delta clip_ratio_c")] = None
    log_ratio_penalty: Annotated[
        float, Range(ge=0, lt=math.inf), AlsoCalled("kl_tau"), AlsoCalled("dro_beta", "half of it")
    ] = 0.0
    kl_cov_penalty: Annotated[float, Range(ge=0, lt=math.inf), AlsoCalled("ppo_kl_coef")] = 0.0
    sapo_temperature_pos: Annotated[float, Range(gt=0, lt=math.inf), AlsoCalled("tau_pos")] = 1.0
    sapo_temperature_neg: Annotated[float, Range(gt=0, lt=math.inf), AlsoCalled("tau_neg")] = 1.05
    vespo_pos: Annotated[
        tuple[float, float], AlsoCalled("vespo_k_pos vespo_lambda_pos", "[k, lambda]")
    ] = (2.0, 3.0)
    vespo_neg: Annotated[
        tuple[float, float], AlsoCalled("vespo_k_neg vespo_lambda_neg", "[k, lambda]")
    ] = (3.0, 2.0)
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
        AlsoCalled("rollout_is_threshold"),
        AlsoCalled("use_importance_sampling_correction", "2.0"),
    ] = None
    importance_sampling_floor: Annotated[
        float,
        Range(ge=0, lt=math.inf),
        AlsoCalled("truncated_importance_sampling_ratio_min vllm_importance_sampling_clip_min"),
    ] = 0.0
    importance_sampling_outside: Annotated[
        Literal["truncate", "mask"],
        AlsoCalled("truncated_importance_sampling_type vllm_importance_sampling_mode"),
    ] = "truncate"
    importance_sampling_weight: Annotated[
        Literal["token", "sequence"] | None, AlsoCalled("rollout_is")
    ] = None
    rejection: Annotated[
        Literal[
            "token_k1",
            "token_k2",
            "token_k3",
            "seq_sum_k1",
            "seq_sum_k2",
            "seq_sum_k3",
            "seq_mean_k1",
            "seq_mean_k2",
            "seq_mean_k3",
            "seq_max_k2",
            "seq_max_k3",
        ]
        | None,
        AlsoCalled("rollout_rs"),
    ] = None
    rejection_max: Annotated[float, Range(gt=0), AlsoCalled("rollout_rs_threshold")] = math.inf
    rejection_min: Annotated[float | None, Range(ge=0)] = None
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
    on_policy: Annotated[bool, AlsoCalled("force_on_policy_ratio")] = False

    def __post_init__(self) -> None:
        sequences = self.loss_type is LossType.SEQUENCE_LEVEL
        corrects = self.importance_sampling_cap is not None
        self._needs("loss_type=LossType.SEQUENCE_LEVEL", sequences, "length_norm")
        for names, options in _OPTIONS_OF.items():
            needed = "surrogate=" + " or ".join(map(repr, names))
            self._needs(needed, self.surrogate in names, *options)
        moves = ("ratio_denominator", "log_ratio_penalty", "kl_cov_penalty")
        self._needs("on_policy=False", not self.on_policy, *moves)
        same = self.ratio_denominator == "generation_logprobs" and self.surrogate != "reinforce"
        needed = "ratio_denominator='prev_logprobs' or surrogate='reinforce'"
        self._needs(needed, not same, "importance_sampling_cap")
        self._needs("rejection", self.rejection is not None, "rejection_max", "rejection_min")
        weighing = [f"importance_sampling_{name}" for name in ("floor", "outside", "weight")]
        self._needs("importance_sampling_cap", corrects, *weighing)
        rows = self.surrogate in ("gmpo", "vespo")
        level = ("importance_ratio", "importance_sampling_weight")
        self._needs("a surrogate other than 'gmpo' and 'vespo'", not rows, *level)
        if self.rejection and (self.rejection_max, self.rejection_min) == (math.inf, None):
            raise ConfigError(
                "GRPOLossFn: 'rejection' needs bounds",
                fix="set 'rejection_max'; 'rejection_min' follows from it unless you set it",
                key="rejection_max",
            )
        bounds = [
            ("importance_sampling_floor", "importance_sampling_cap"),
            ("rejection_min", "rejection_max"),
        ]
        for low, high in bounds:
            least, most = getattr(self, low) or 0.0, getattr(self, high)
            if most is not None and least >= most:
                raise ConfigError(
                    f"GRPOLossFn: {low!r} is {least:g}, but {high!r} is {most:g}",
                    fix=f"set {low!r} below {high!r}",
                    key=low,
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
        generated = None
        if self._engine_option or "generation_logprobs" in data:
            generated = batch.values("generation_logprobs", self._engine_option)
        if self.on_policy:
            previous = batch.logprobs.detach()
        else:
            previous = batch.values(self.ratio_denominator, "on_policy=False")
        weights, far = None, torch.zeros_like(shares.tokens)
        if generated is not None:
            moves = self.ratio_denominator == "generation_logprobs"
            trainer = batch.logprobs.detach() if moves else previous
            error = exp((generated - trainer).abs())
            metrics["token_mult_prob_error"] = shares.token_mean(error)
            metrics["token_mult_prob_error_max"] = shares.token_max(error)
            apart = kl_penalty(generated, trainer, self.kl_estimator)
            metrics["gen_kl_error"] = shares.token_mean(apart)
            dropped = (every.tokens & ~shares.tokens).to(error.dtype)
            metrics["impossible_fraction"] = every.token_mean(dropped)
            if self.importance_sampling_cap is not None:
                weights, outside = importance_weights(
                    shares,
                    trainer - generated,
                    cap=self.importance_sampling_cap,
                    floor=self.importance_sampling_floor,
                    outside=self.importance_sampling_outside,
                    level=self.importance_sampling_weight or self.importance_ratio,
                )
                metrics["importance_weight"] = shares.token_mean(weights)
                metrics["importance_capped_fraction"] = shares.token_mean(outside)
            if self.rejection is not None:
                bounds = (self.rejection_min, self.rejection_max)
                far = rejected(shares, trainer - generated, self.rejection, *bounds)
                metrics["rejected_fraction"] = shares.token_mean(far.to(error.dtype))
        log_ratio = batch.logprobs - previous
        of_level = over_row(log_ratio, self.importance_ratio, shares.row_mean)
        step = Step(
            options=self,
            shares=shares,
            logprobs=batch.logprobs,
            previous=previous,
            log_ratio=of_level,
            ratio=exp(of_level),
            advantages=batch.advantages(),
            weights=weights,
        )
        ratio = step.ratio
        cost, changed = SURROGATES[self.surrogate](step)
        metrics |= {
            "probs_ratio": shares.token_mean(ratio),
            "probs_ratio_min": shares.token_min(ratio),
            "probs_ratio_max": shares.token_max(ratio),
            "clip_fraction": shares.token_mean(changed.to(ratio.dtype)),
            "approx_entropy": shares.token_mean(-batch.logprobs),
        }
        if weights is not None and self.surrogate != "vespo":
            cost = cost * weights
        cost = torch.where(far, 0.0, cost)
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
        if self.log_ratio_penalty:
            squared = log_ratio.square()
            metrics["log_ratio_squared"] = shares.token_mean(squared)
            cost = cost + self.log_ratio_penalty * squared
        if self.kl_cov_penalty:
            high = batch.read("high_covariance", "kl_cov_penalty").bool()
            cost = cost + self.kl_cov_penalty * torch.where(high, log_ratio.abs(), 0.0)
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

    @property
    def _engine_option(self) -> str:
        """The first option that needs ``generation_logprobs``, or ``""``."""
        needing = {
            f"importance_sampling_cap={self.importance_sampling_cap}": self.importance_sampling_cap,
            f"rejection={self.rejection!r}": self.rejection,
            "ratio_denominator": self.ratio_denominator == "generation_logprobs",
            f"kl_gradient={self.kl_gradient!r}": self.kl_gradient == "generation",
        }
        return next((option for option, needs in needing.items() if needs), "")


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
        """``[b, s]`` log-probs; 0 where masked. ``option`` is what needs them."""
        values = self.read(key, option)
        check_logprobs(values, self.shares.tokens, key, needed_by=f"GRPOLossFn({option})")
        return self.shares.keep(values)

    def read(self, key: str, option: str) -> torch.Tensor:
        """``[b, s]`` of the policy's type and device; ``option`` is what needs them."""
        shape = tuple(self.logprobs.shape)
        needed_by = f"GRPOLossFn({option})" if option else "GRPOLossFn"
        return read_tensor(self.data, key, [shape], needed_by=needed_by).to(self.logprobs)

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
        f"GRPOLossFn: '{key}' is -inf at sampled tokens: they are left out of the loss, and the "
        "metric impossible_fraction counts them. Compare the sampling options of the engine with "
        "the policy's (top_k and top_p), and the dtypes: float16 rounds such log-probs to -inf.",
        LoopWarning,
        stacklevel=3,
    )
    return replace(shares, tokens=shares.tokens & ~impossible)
