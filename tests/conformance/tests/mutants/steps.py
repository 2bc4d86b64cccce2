"""Mutants whose steps go wrong: later ones, configured ones, those over several microbatches."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from mutants.mutant import breaks
from rl_backends.policy import base as policy
from rl_backends.policy import steps
from rl_backends.policy.randomness import RandomStream
from rl_backends.policy.steps import LossSum, StepResult, learning_rate
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.batch import BatchedDataDict
from rl_core.errors import TrainingError

_ADAM = "P5 and (plain or blunt or betas or no_clipping) or P8"
_RATES = "P5 and rate or P8"

# -- later steps -------------------------------------------------------------------------------


@breaks("P5", checks=_ADAM)
class TheStepIsCountedTwice(ReferencePolicy):
    """AdamW's own counter runs ahead from the second step on."""

    def take_step(self, lr: float, scale: float) -> None:
        super().take_step(lr, scale)
        for state in self.optimizer.state.values():
            state["step"] += 1


@breaks("P5", checks=_ADAM)
class GradientsOfTheStepBeforeStay(ReferencePolicy):
    """From the second call on gradients are added to the ones before."""

    def clear_gradients(self) -> None:
        pass


@breaks("P5", checks=_ADAM)
class MomentaAreForgottenAfterTwoSteps(ReferencePolicy):
    """The third step starts the optimizer anew."""

    def take_step(self, lr: float, scale: float) -> None:
        if self.steps == 2:
            self.optimizer.state.clear()
        super().take_step(lr, scale)


@breaks("P6", "P5", checks="P6 and (evaluating or returns) or P5 and linear")
class EvaluatingUsesUpAStep(ReferencePolicy):
    """The schedule moves on with every evaluation."""

    def train(
        self, data: Any, loss_fn: Any, eval_mode: bool = False, **sizes: Any
    ) -> dict[str, Any]:
        result = super().train(data, loss_fn, eval_mode, **sizes)
        self.steps += eval_mode
        return result


@breaks("P5", checks="P5 and every_global_batch")
class PartsDoNotAddUp(ReferencePolicy):
    """Every step's values are also what a loop adds up, so that two steps count double."""

    def train(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        result = super().train(*args, **kwargs)
        return {**result, "all_mb_metrics": result["step_metrics"]}


# -- options -----------------------------------------------------------------------------------


@breaks("P5", checks=_ADAM)
class BetasAreIgnored(ReferencePolicy):
    """The moments decay as they do by default."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)


@breaks("P5", checks=_ADAM)
class EpsIsIgnored(ReferencePolicy):
    """The denominator has the usual eps."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        for group in self.optimizer.param_groups:
            group["eps"] = 1e-8


@breaks("P5", checks="P5 and (plain or weight_decay or family)")
class NormsAndBiasesDecay(ReferencePolicy):
    """Every parameter decays."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        matrices, others = self.optimizer.param_groups
        others["weight_decay"] = matrices["weight_decay"]


@breaks("P5", checks="P5 and (plain or weight_decay)")
class TheEmbeddingDoesNotDecay(ReferencePolicy):
    """The largest matrix is left out of the decay."""

    def take_step(self, lr: float, scale: float) -> None:
        embedding = self.model.get_input_embeddings().weight
        kept = 1 - lr * self.optimizer.param_groups[0]["weight_decay"]
        with torch.no_grad():
            embedding /= kept
        super().take_step(lr, scale)


@breaks("P5", checks="P5 and (plain or clipping)")
class EachTensorIsClippedAlone(ReferencePolicy):
    """The norm that is bounded is that of a tensor, not of all together."""

    def take_step(self, lr: float, scale: float) -> None:
        largest = self.config.get("max_grad_norm", 1.0) or float("inf")
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, largest / max(float(parameter.grad.norm()), 1e-9)))
        super().take_step(lr, 1.0)


@breaks("P5", checks="P5 and (plain or clipping)")
class TheNormIsReportedAsClipped(ReferencePolicy):
    """grad_norm is never above max_grad_norm."""

    def _step(self, *args: Any) -> StepResult:
        result = super()._step(*args)
        largest = self.config.get("max_grad_norm", 1.0) or float("inf")
        return replace(result, grad_norm=min(result.grad_norm, largest))


@breaks("P5", checks="P5 and (plain or clipping)")
class SmallGradientsAreScaledUp(ReferencePolicy):
    """Every gradient is brought to max_grad_norm, from below too."""

    def take_step(self, lr: float, scale: float) -> None:
        largest = self.config.get("max_grad_norm", 1.0)
        super().take_step(lr, largest / self.gradient_norm() if largest else scale)


def _schedule(change: Any) -> AbstractContextManager[Any]:
    def changed(step: int, config: Any) -> float:
        step, schedule = change(step, dict(config.get("scheduler") or {}))
        return learning_rate(step, {**config, "scheduler": schedule})

    return mock.patch.object(policy, "learning_rate", changed)


@breaks("P5", checks=_RATES)
def the_rate_never_reaches_its_floor() -> AbstractContextManager[Any]:
    """min_lr_ratio is taken and not used."""
    return _schedule(lambda step, schedule: (step, {**schedule, "min_lr_ratio": 0.0}))


@breaks("P5", checks=_RATES)
def the_warm_up_is_a_step_longer() -> AbstractContextManager[Any]:
    """The full rate comes a step late."""
    return _schedule(
        lambda step, schedule: (
            step,
            {**schedule, "warmup_steps": schedule.get("warmup_steps", -1) + 1},
        )
    )


@breaks("P5", checks=_RATES)
def the_rate_rises_again() -> AbstractContextManager[Any]:
    """Beyond total_steps the schedule starts over."""
    return _schedule(
        lambda step, schedule: (step % (schedule.get("total_steps", 99) + 1), schedule)
    )


@breaks("P5", checks="P5 and (plain or temperature or same_data) or P1 and temperature")
class TrainsAtATemperatureOfOne(ReferencePolicy):
    """Log-probs in the loss do not have the policy's temperature."""

    def accumulate(self, *args: Any, **kwargs: Any) -> None:
        temperature, self.temperature = self.temperature, 1.0
        try:
            super().accumulate(*args, **kwargs)
        finally:
            self.temperature = temperature


# -- randomness --------------------------------------------------------------------------------


@breaks("P6", checks="P6")
class EvaluationDrops(ReferencePolicy):
    """Dropout is on while a loss is evaluated."""

    def accumulate(self, *args: Any, learn: bool) -> None:
        self.model.train()
        super().accumulate(*args, learn=learn)


@breaks("P6", checks="P6")
class EvaluationSeeds(ReferencePolicy):
    """An evaluation sets the random state, to be reproducible."""

    def _evaluate(self, *args: Any) -> StepResult:
        torch.manual_seed(0)
        return super()._evaluate(*args)


@breaks("P5", checks="P5 and (drawn or plain)")
class EveryStepDropsTheSame(ReferencePolicy):
    """Dropout starts from the seed in every step."""

    def _step(self, *args: Any) -> StepResult:
        self.random = RandomStream(self.config.get("seed", 0), torch.device("cpu"))
        return super()._step(*args)


@breaks("P5", checks="P5 and (drawn or plain)")
class NothingIsDropped(ReferencePolicy):
    """The model trains in evaluation mode."""

    def accumulate(self, *args: Any, learn: bool) -> None:
        self.model.eval()
        super().accumulate(*args, learn=learn)


# -- several microbatches, several steps -------------------------------------------------------


@breaks("P5", checks="P5 and (same_data or declared) or P7 and masked_data")
class MetricsOfTheLastMicrobatch(ReferencePolicy):
    """Metrics are not added up."""

    def _step(self, *args: Any) -> StepResult:
        with mock.patch.object(steps, "added", lambda key, total, value: value):
            return super()._step(*args)


@breaks("P5", checks="P5 and (same_data or declared)")
class ExtremesAreAddedUp(ReferencePolicy):
    """Metrics ending in _min and _max are sums, too."""

    def _step(self, *args: Any) -> StepResult:
        with mock.patch.object(steps, "added", lambda key, total, value: total + value):
            return super()._step(*args)


@breaks("P5", checks="P5 and (same_data or declared)")
class MasksAreZeroedInPlace(ReferencePolicy):
    """Training zeroes the masks in the caller's own batch."""

    def train(self, data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        data["token_mask"][:, 0] = 0
        return super().train(data, *args, **kwargs)


@breaks("P5", checks="P5 and (global_batch or plain)")
class AllStepsShareTheCountsOfTheCall(ReferencePolicy):
    """Several global batches in a call are normalised as if they were one."""

    def train(self, data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.everything = data
        return super().train(data, *args, **kwargs)

    def _step(self, batch: Any, loss_fn: Any, *rest: Any) -> StepResult:
        weights = self.everything["token_mask"][:, 1:] * self.everything["sample_mask"][:, None]
        counts = self.everything["sample_mask"].sum(), weights.sum()

        def diluted(inputs: Any, data: Any, **_: Any) -> Any:
            return loss_fn(inputs, data, global_valid_seqs=counts[0], global_valid_toks=counts[1])

        diluted.group_size, diluted.input_type = loss_fn.group_size, loss_fn.input_type  # type: ignore[attr-defined]
        return super()._step(batch, diluted, *rest)  # type: ignore[arg-type]


@breaks("P7", "P5", checks="P7 and masked_data or P5 and plain")
class AMaskedMicrobatchIsNotANumber(ReferencePolicy):
    """What a masked row brings is divided by its own count of nothing."""

    def _loss(self, rows: Any, *args: Any, learn: bool) -> LossSum:
        total = super()._loss(rows, *args, learn=learn)
        if not rows["sample_mask"].all():
            total.loss = float("nan")
        return total


@breaks("P7", checks="P7 and masked_data or P5 and plain")
class TheLastRowIsAlwaysLearned(ReferencePolicy):
    """The mask of the last row of a batch is not looked at."""

    def _step(self, batch: Any, *rest: Any) -> StepResult:
        batch = batch.copy()
        batch["sample_mask"] = batch["sample_mask"].clone()
        batch["sample_mask"][-1] = 1
        return super()._step(batch, *rest)


@breaks("P7", checks="P7 and (masked_data or no_step)")
class AMaskedBatchIsAStep(ReferencePolicy):
    """Momentum and decay go on where nothing counts."""

    def _step(self, *args: Any) -> StepResult:
        result = super()._step(*args)
        if not result.valid_toks:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.take_step(result.lr, 1.0)
            self.steps += 1
        return result


@breaks("P7", checks="P7 and masked_data")
class BoolsAreNoMasks(ReferencePolicy):
    """Masks of bools are taken for all ones."""

    def train(self, data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        numbers = {k: v for k, v in data.items() if "mask" not in k or v.dtype != torch.bool}
        return super().train(BatchedDataDict(numbers), *args, **kwargs)


@breaks("P7", checks="P7 and left_out")
class AMissingMaskIsAllZeros(ReferencePolicy):
    """Without a token_mask no token counts."""

    def train(self, data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        zeros = torch.zeros(data["input_ids"].shape)
        data = BatchedDataDict({"token_mask": zeros, **data})
        return super().train(data, *args, **kwargs)


# -- what reaches a loss, and which parameters learn -------------------------------------------


@breaks("P5", checks="P5 and a_loss_sees")
class ColumnsAreRounded(ReferencePolicy):
    """Advantages and old log-probs come to the loss in the precision of the weights."""

    def _loss(self, rows: Any, *args: Any, learn: bool) -> LossSum:
        kept = ("advantages", "prev_logprobs")
        rows = rows | {key: rows[key].bfloat16().float() for key in kept if key in rows}
        return super()._loss(rows, *args, learn=learn)


@breaks("P5", checks="P5 and (saves_memory or plain)")
class WhatIsRecomputedDropsOthers(ReferencePolicy):
    """The second pass of gradient checkpointing draws its dropout anew."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        if config.get("gradient_checkpointing"):
            anew = {"use_reentrant": False, "preserve_rng_state": False}
            self.model.gradient_checkpointing_enable(anew)


@breaks("P5", checks="P5 and (frozen or weight_decay)")
class FrozenParametersDecay(ReferencePolicy):
    """Weight decay does not ask what is trained."""

    def take_step(self, lr: float, scale: float) -> None:
        super().take_step(lr, scale)
        decay = self.optimizer.param_groups[0]["weight_decay"]
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                parameter.mul_(1 - lr * decay)


@breaks("P5", checks="P5 and family")
class RoutersDoNotLearn(ReferencePolicy):
    """The weights that choose experts have no gradient."""

    def gradient_norm(self) -> float:
        for name, parameter in self.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.grad = None
        return super().gradient_norm()


@breaks("P5", checks="P5 and (go_together or dynamic or temperature)")
class DynamicBatchesAreOfTemperatureOne(ReferencePolicy):
    """Where microbatches are bounded by tokens, the temperature is not applied."""

    def forward(self, *args: Any) -> torch.Tensor:
        own = self.temperature
        self.temperature = 1.0 if self.config.get("dynamic_batching") else own
        try:
            return super().forward(*args)
        finally:
            self.temperature = own


# -- what is refused, and who shares -----------------------------------------------------------


@breaks("P7", checks="P7 and (trace or keeps_the_step) or P5 and plain")
class ARefusedStepCounts(ReferencePolicy):
    """The schedule moves on although the step was not taken."""

    def _step(self, *args: Any) -> StepResult:
        try:
            return super()._step(*args)
        except TrainingError:
            self.steps += 1
            raise


@breaks("P7", checks="P7 and (trace or keeps_the_step) or P5 and plain")
class ASkippedStepCounts(ReferencePolicy):
    """The schedule moves on where a step was skipped."""

    def _step(self, *args: Any) -> StepResult:
        result = super()._step(*args)
        self.steps += result.skipped and result.valid_toks > 0
        return result


@breaks("P7", checks="P7 and (trace or keeps_the_step) or P5 and plain")
class ALaterNanIsNotSeen(ReferencePolicy):
    """What is not finite is left out of the gradient in silence."""

    def gradient_norm(self) -> float:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        return super().gradient_norm()


@breaks("P7", checks="P7 and (trace or keeps_the_step) or P5 and plain")
class ALossThatRaisesLeavesHalfAStep(ReferencePolicy):
    """If the loss raises midway, the gradient so far is stepped with."""

    def _loss(self, *args: Any, learn: bool) -> LossSum:
        try:
            return super()._loss(*args, learn=learn)
        except ArithmeticError:
            self.take_step(self.lr, 1.0)
            raise


@breaks("P5", checks="P5 and (share or plain)")
class SettingsAreSharedByAll(ReferencePolicy):
    """The last policy that was built says how fast all of them learn."""

    latest: ReferencePolicy | None = None

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        type(self).latest = self

    @property
    def lr(self) -> float:
        assert self.latest is not None
        return learning_rate(self.steps, self.latest.config)


@breaks("P10", checks="P10")
class OffloadingStartsTheDropoutAnew(ReferencePolicy):
    """Random numbers of the policy do not survive offload_after_refit."""

    def offload_after_refit(self) -> None:
        self.random = RandomStream(0, torch.device("cpu"))


@breaks("P10", checks="P10")
class WhatWasOffloadedComesBackOld(ReferencePolicy):
    """A second offload finds a copy on the host and does not refresh it."""

    host: Any = None
    away = False

    def offload_after_refit(self) -> None:
        if self.host is None:
            self.host = copy.deepcopy(self.model.state_dict())
        self.away = True

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        if self.away:
            self.model.load_state_dict(self.host)
        self.away = False
