"""P14: a copy on several ranks takes the steps that it takes on one, and keeps P3 and P7."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.losses import (
    LogitLikelihood,
    NanInARow,
    NanInTheGradientOfARow,
    PairLoss,
    RaisesInARow,
    SequenceLikelihood,
    TellingLoss,
)
from rl_conformance.registry import check
from rl_conformance.several_ranks import beside, layouts_of, moved_alike, same_step
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.training_oracle import TrainingOracle
from rl_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_conformance.context import Context
    from rl_conformance.training_oracle import Step
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import LossFunction

#: Of the rows of a step; how many come together differs from one microbatch to the next.
_LENGTHS = (12, 3, 30, 2, 17, 8, 21, 5)


def step_batch(seed: int, lengths: Sequence[int] = _LENGTHS) -> BatchedDataDict[Any]:
    """Rows of which one is masked, and tokens in the middle of another."""
    data = training_batch(lengths, seed=seed)
    data["sample_mask"][seed % len(lengths)] = 0
    data["token_mask"][2, 4:9] = 0
    data["row"], data["echo"] = torch.arange(len(lengths)), data["input_ids"].clone()
    data["marked"] = torch.zeros(len(lengths))
    return data


_STEPS: tuple[tuple[LossFunction, int, int | None], ...] = (
    (TellingLoss(), 7, 2),  # rows that copies do not share evenly
    (TellingLoss(), 8, None),
    (SequenceLikelihood(), 7, 3),
    (LogitLikelihood(), 8, 1),
    (PairLoss(), 8, 2),
)


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def steps_are_those_of_one_rank(ctx: Context) -> None:
    """Losses of every kind, norms, metrics, log-probs, and how far each tensor moved.

    With clipping, decay and a schedule, and rows that lie end to end.
    """
    take_steps(ctx, "untied")


def take_steps(ctx: Context, kind: str) -> None:
    """See the checks; the kind is one of :class:`~rl_conformance.several_ranks.Beside`."""
    probe = training_batch((11, 6, 19), seed=9)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, kind, "float32", untrained=True) as pair:
            oracle = TrainingOracle(pair.path, pair.config) if kind == "untied" else None
            for seed, (loss_fn, rows, mbs) in enumerate(_STEPS):
                data = step_batch(seed, _LENGTHS[:rows])
                one, many = pair.train(data, loss_fn, mbs=mbs)
                same_step(ctx, one, many)
                if oracle is not None and isinstance(loss_fn, TellingLoss):
                    _as_written_out(ctx, many, oracle.step(data))
            same_step(ctx, *pair.train(step_batch(5), TellingLoss(), gbs=4, mbs=3))
            moved_alike(ctx, pair)
            one_scores, scores = pair.scores(probe)
            ctx.measure_error(scores, one_scores, "float32")


def _as_written_out(ctx: Context, result: dict[str, Any], step: Step) -> None:
    mean, largest = ctx.tolerance_of("float32")
    ctx.measure("loss_error_from_oracle", abs(float(result["loss"]) - step.loss), largest)
    norm = abs(float(result["grad_norm"]) - step.grad_norm) / step.grad_norm
    ctx.measure("grad_norm_relative_error_from_oracle", norm, max(mean, 1e-3))
    require(abs(float(result["lr"]) / step.lr - 1) < 1e-5, f"lr is {result['lr']}, not {step.lr}")


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def the_reference_stays(ctx: Context) -> None:
    """A step leaves its log-probs bit for bit, and they leave the policy's."""
    data = training_batch(_LENGTHS[:7], seed=8)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, dtype="float32") as pair:
            before = pair.many.get_reference_policy_logprobs(data)["reference_logprobs"]
            pair.train(step_batch(1), NegativeLogLikelihood())
            _, scores = pair.scores(data)
            require(not torch.equal(scores, before), "training did not change the policy")
            after = pair.many.get_reference_policy_logprobs(data)["reference_logprobs"]
            same_tensor(after, before, "reference_logprobs")
            same_tensor(pair.scores(data)[1], scores, "logprobs")


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def what_is_refused_reaches_no_rank(ctx: Context) -> None:
    """A loss that raises or is not finite in one row leaves the weights and the next step."""
    data = step_batch(4)
    marked = step_batch(4)
    marked["marked"][-1] = 1
    for layout in layouts_of(ctx):
        with beside(ctx, layout, dtype="float32") as pair:
            _, scores = pair.scores(data)
            faults: dict[LossFunction, type[Exception]] = {
                NanInARow(): TrainingError,
                NanInTheGradientOfARow(): TrainingError,
                RaisesInARow(): Exception,
            }
            for loss_fn, expected in faults.items():
                pair.many.prepare_for_training()
                with raises(expected):
                    pair.many.train(marked, loss_fn, mbs=2)
                same_tensor(pair.scores(data)[1], scores, "logprobs")
            same_step(ctx, *pair.train(data, TellingLoss(), mbs=2))


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def what_is_masked_reaches_no_rank(ctx: Context) -> None:
    """Rows of which none counts are no step; what stands in a masked row does not matter."""
    data, other, nothing = step_batch(6), step_batch(6), step_batch(7)
    other["input_ids"][6, :21] = training_batch(_LENGTHS, seed=9)["input_ids"][6, :21]
    other["echo"] = other["input_ids"].clone()
    nothing["sample_mask"][:] = 0
    for layout in layouts_of(ctx):
        with beside(ctx, layout, dtype="float32") as pair:
            _, scores = pair.scores(data)
            pair.many.prepare_for_training()
            loss = float(pair.many.train(nothing, NegativeLogLikelihood(), mbs=2)["loss"])
            require(loss == 0, f"the loss of no rows is {loss}")
            same_tensor(pair.scores(data)[1], scores, "logprobs")
            pair.steps += 1
            pair.one.prepare_for_training()
            pair.many.prepare_for_training()
            many = pair.many.train(other, TellingLoss(), mbs=2)
            same_step(ctx, pair.one.train(data, TellingLoss(), mbs=2), many)
