"""Whether the trainer scores what the engine generated as the engine did: clause A1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rl_backends import SamplingParams
    from rl_core.interfaces import GenerationInterface, PolicyInterface

__all__ = [
    "Agreement",
    "LogprobConsistency",
    "measure_log_probability_consistency",
    "validate_log_probability_consistency",
]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two sets of log-probs of the same tokens.

    With ``d`` the absolute difference in nats, and only generated tokens counted:

    Attributes:
        error: Mean of ``exp(d)``; 1 is perfect.
        mean: Mean of ``d``.
        max: Largest ``d``.
        tokens: How many tokens were compared.
        row_errors: For each row its mean of ``exp(d)``; 1 for a row without tokens.
    """

    error: float
    mean: float
    max: float
    tokens: int
    row_errors: tuple[float, ...]

    @property
    def worst_row(self) -> int:
        """The row with the largest error; one that is not a number counts as the largest."""
        return int(torch.tensor(self.row_errors).nan_to_num(torch.inf).argmax())

    @classmethod
    def between(cls, one: torch.Tensor, other: torch.Tensor, counted: torch.Tensor) -> Agreement:
        """Compares log-probs.

        Args:
            one: ``[B, W]`` log-probs.
            other: ``[B, W]`` log-probs.
            counted: ``[B, W]`` bool: the tokens that count.

        Raises:
            DataError: No token counts.
        """
        tokens = int(counted.sum())
        if not tokens:
            raise DataError(
                "there is nothing to compare: no row has a generated token",
                fix="give prompts that leave room in the context, and max_new_tokens >= 1",
            )
        distance = (one.double() - other.double()).abs().where(counted, 0.0)
        ratio = distance.exp().where(counted, 0.0)
        counts = counted.sum(1)
        rows = torch.where(counts > 0, ratio.sum(1) / counts.clamp(min=1), 1.0)
        return cls(
            error=float(ratio.sum()) / tokens,
            mean=float(distance.sum()) / tokens,
            max=float(distance.max()),
            tokens=tokens,
            row_errors=tuple(rows.tolist()),
        )


@dataclass(frozen=True, slots=True)
class LogprobConsistency:
    """What :func:`measure_log_probability_consistency` found.

    Attributes:
        greedy: Agreement on greedy rows; None if the policy's temperature is not 1, because greedy
            log-probs are those of temperature 1.
        sampled: Agreement on sampled rows; None if the engine is configured to be greedy.
        threshold: The error must stay below it.
    """

    greedy: Agreement | None
    sampled: Agreement | None
    threshold: float

    @property
    def error(self) -> float:
        """The mean of the errors of the modes that were measured."""
        errors = [mode.error for mode in (self.greedy, self.sampled) if mode is not None]
        return sum(errors) / len(errors)

    @property
    def passed(self) -> bool:
        """True if the error is a number below the threshold."""
        return self.error < self.threshold

    def __bool__(self) -> bool:
        return self.passed


def validate_log_probability_consistency(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict[Any],
    threshold: float = 1.05,
) -> bool:
    """Whether trainer and engine give generated tokens the same log-probs.

    The mean over generated tokens of ``exp(|engine - trainer|)``, averaged over greedy and
    sampled, must be below the threshold. Arguments and errors are those of
    :func:`measure_log_probability_consistency`, which returns the figures.
    """
    return measure_log_probability_consistency(
        training_backend, inference_backend, test_data, threshold
    ).passed


def measure_log_probability_consistency(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict[Any],
    threshold: float = 1.05,
) -> LogprobConsistency:
    """Generates, greedy and sampled, scores the result with the trainer and compares.

    Args:
        training_backend: The policy.
        inference_backend: The engine, with the same weights; it is woken up and left awake.
        test_data: Prompts, see :class:`~rl_core.interfaces.GenerationDatumSpec`.
        threshold: The error must stay below it.

    Raises:
        ConfigError: The two are configured for different distributions (temperature, top-k, top-p,
            repetition penalty), so that they cannot agree.
        DataError: No token was generated.
    """
    sampling: SamplingParams | None = getattr(inference_backend, "sampling", None)
    config = getattr(training_backend, "config", {})
    temperature = float(config.get("temperature", 1.0))
    never_samples = sampling is not None and sampling.greedy
    if sampling is not None:
        _check_comparable(sampling, temperature)
    inference_backend.prepare_for_generation()

    def agreement(greedy: bool) -> Agreement:
        output = inference_backend.generate(test_data, greedy=greedy)
        ids, ends = output["output_ids"], output["unpadded_sequence_lengths"]
        rows = BatchedDataDict[Any]({"input_ids": ids, "input_lengths": ends})
        positions = torch.arange(ids.shape[1])
        starts = (ends - output["generation_lengths"])[:, None]
        generated = (positions >= starts) & (positions < ends[:, None])
        scores = training_backend.get_logprobs(rows)["logprobs"]
        return Agreement.between(output["logprobs"], scores, generated)

    return LogprobConsistency(
        greedy=agreement(greedy=True) if temperature == 1.0 else None,
        sampled=None if never_samples else agreement(greedy=False),
        threshold=threshold,
    )


def _check_comparable(sampling: SamplingParams, temperature: float) -> None:
    """The engine's log-probs must be of the distribution that the policy scores with."""
    processed = not sampling.greedy and sampling.logprobs_mode == "processed"
    engine_temperature = sampling.temperature if processed else 1.0
    wrong = []
    if engine_temperature != temperature:
        wrong.append(
            f"the engine's log-probs are of temperature {engine_temperature:g}, "
            f"the policy's of {temperature:g}"
        )
    if processed and (sampling.top_k or sampling.top_p < 1.0):
        wrong.append(
            f"the engine's log-probs are renormalised over top_k={sampling.top_k}, "
            f"top_p={sampling.top_p:g}"
        )
    if sampling.repetition_penalty != 1.0:
        wrong.append(f"the engine has repetition_penalty={sampling.repetition_penalty:g}")
    if wrong:
        raise ConfigError(
            f"trainer and engine cannot agree: {'; '.join(wrong)}",
            fix="build an engine for the check with the policy's temperature, top_k=None, "
            "top_p=1.0 and repetition_penalty=1.0",
            key="temperature" if engine_temperature != temperature else "top_p",
        )
