"""P1, P3, P4, P6, P7, P9, P10, P11, P12: what is no step, or a refused one, leaves no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.continuing import (
    changes_no_step,
    dropping_model,
    oracle_of,
    repeatable,
    train,
    trainer,
)
from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.losses import NanInARow, NanInTheGradientOfARow, RaisesInARow
from rl_conformance.observed import magnitudes, scales_by_layer
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import policy_weights, same_weights
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface, LossFunction

_LENGTHS = (11, 6, 1, 19)


# -- what only looks ---------------------------------------------------------------------------


@check("P1")
def scoring_changes_no_step(ctx: Context) -> None:
    """Log-probs before, between and after steps: the same twice, and every step as without."""
    data = training_batch(_LENGTHS, seed=9)
    changes_no_step(ctx, lambda policy: policy.get_logprobs(data, 3)["logprobs"])


@check("P3")
def the_reference_changes_no_step_and_stays(ctx: Context) -> None:
    """Bit for bit the same before and after every step, and every step as without it."""
    data = training_batch(_LENGTHS, seed=9)
    seen: list[torch.Tensor] = []

    def look(policy: ColocatablePolicyInterface) -> None:
        seen.append(policy.get_reference_policy_logprobs(data, 3)["reference_logprobs"])
        same_tensor(seen[-1], seen[0], "reference_logprobs")

    changes_no_step(ctx, look)


@check("P4")
def topk_changes_no_step(ctx: Context) -> None:
    """Top-k logits before, between and after steps: the same twice, and every step as without."""
    data = training_batch(_LENGTHS, seed=9)
    changes_no_step(ctx, lambda policy: policy.get_topk_logits(data, 3)["topk_logits"])


@check("P6")
def evaluating_changes_no_step(ctx: Context) -> None:
    """The same loss twice; every step, its rate and its dropout as without."""
    data = training_batch((7, 9, 2, 14), seed=9)

    def evaluate(policy: ColocatablePolicyInterface) -> float:
        result = policy.train(data, NegativeLogLikelihood(), eval_mode=True, gbs=2, mbs=1)
        return float(result["loss"])

    changes_no_step(ctx, evaluate)


@check("P9")
def saving_changes_no_step(ctx: Context) -> None:
    """To one path again and again, steps and reference are as if it were never saved."""
    path, data = ctx.directory() / "checkpoint", training_batch((5, 6), seed=9)
    seen: list[torch.Tensor] = []

    def save(policy: ColocatablePolicyInterface) -> None:
        policy.save_checkpoint(str(path))
        seen.append(policy.get_reference_policy_logprobs(data)["reference_logprobs"])
        same_tensor(seen[-1], seen[0], "reference_logprobs")

    changes_no_step(ctx, save)


@check("P10")
def handing_weights_over_changes_no_step(ctx: Context) -> None:
    """Describing the weights and reading them leaves them, and every step, alone."""

    def hand_over(policy: ColocatablePolicyInterface) -> None:
        policy.offload_before_refit()
        policy.prepare_refit_info()
        policy_weights(policy)
        policy.offload_after_refit()
        policy.prepare_for_training()

    changes_no_step(ctx, hand_over)


@check("P11")
def generating_changes_no_step(ctx: Context) -> None:
    """Greedy and sampled output between steps; the greedy one is the same twice."""
    data = ctx.prompts(5, 3, seed=9)

    def generate(policy: ColocatablePolicyInterface) -> torch.Tensor:
        policy.prepare_for_lp_inference()
        state = torch.get_rng_state()
        policy.generate(data)
        torch.set_rng_state(state)  # sampling may draw from it
        output: torch.Tensor = policy.generate(data, greedy=True)["output_ids"]
        return output

    changes_no_step(ctx, generate, generation={"max_new_tokens": 4})


@check("P12")
def calibrating_changes_no_step(ctx: Context) -> None:
    """Scales before, between and after steps: the same twice, and every step as without."""
    data = ctx.prompts(*_LENGTHS, seed=9)
    changes_no_step(ctx, lambda policy: policy.calibrate_qkv_fp8_scales(data, 2))


# -- what was learned shows --------------------------------------------------------------------


@check("P1")
def log_probs_are_those_of_the_weights_now(ctx: Context) -> None:
    """After every step, and without dropout, although the model has it."""
    data, policy = training_batch(_LENGTHS, seed=9), trainer(ctx)
    for seed in range(3):
        got = policy.get_logprobs(data)["logprobs"]
        oracle = oracle_of(ctx, policy)
        expected = oracle.batch_logprobs(data["input_ids"], data["input_lengths"])
        ctx.measure_error(got, expected)
        train(policy, seed)


@check("P3")
def the_reference_is_where_the_policy_started(ctx: Context) -> None:
    """After steps it has the checkpoint's log-probs at the policy's temperature, no dropout."""
    data = training_batch((*_LENGTHS, 33), seed=9)
    policy, other = trainer(ctx, temperature=0.7), ctx.fresh_policy()
    for seed in range(2):
        train(policy, seed)
        train(other, seed)
    other.get_reference_policy_logprobs(data)
    other.shutdown()
    oracle = ctx.oracle(dropping_model(ctx))
    expected = oracle.batch_logprobs(data["input_ids"], data["input_lengths"], 0.7)
    for size in (None, 1, 2, 9):
        got = policy.get_reference_policy_logprobs(data, size)["reference_logprobs"]
        ctx.measure_error(got, expected, scale=1 / 0.7)


@check("P4")
def topk_is_of_the_weights_now(ctx: Context) -> None:
    """After a step the values are those of the trained weights."""
    data, policy = training_batch((11, 6), seed=9), trainer(ctx)
    train(policy, 0)
    got = policy.get_topk_logits(data, 4)["topk_logits"]
    logits = oracle_of(ctx, policy).logits(data["input_ids"][0].tolist())[:-1]
    ctx.measure_error(got[0], logits.topk(4).values)


@check("P6")
def the_evaluated_loss_is_of_the_weights_now(ctx: Context) -> None:
    """After every step, without dropout, and whatever the microbatches."""
    data, policy = training_batch(_LENGTHS, seed=9), trainer(ctx)
    for seed in range(2):
        train(policy, seed)
        ids, lengths = data["input_ids"], data["input_lengths"]
        expected, _ = oracle_of(ctx, policy).nll(ids, lengths, data["token_mask"])
        for size in (1, 3, 4):
            result = policy.train(data, NegativeLogLikelihood(), eval_mode=True, mbs=size)
            error = abs(float(result["loss"]) - expected)
            ctx.measure("loss_error", error, ctx.tolerance[0])


@check("P12")
def scales_are_of_the_weights_now(ctx: Context) -> None:
    """After steps the scales are those of the trained weights, without dropout."""
    data, policy = ctx.prompts(*_LENGTHS, seed=9), trainer(ctx)
    train(policy, 0)
    train(policy, 1)
    got = scales_by_layer(policy.calibrate_qkv_fp8_scales(data, percentile=100.0, margin=1.0))
    seen = magnitudes(oracle_of(ctx, policy), data)
    errors = [abs(got[key] * 448 / float(seen[key].max()) - 1) for key in got]
    ctx.measure("scale_error", max(errors), 1e-2 if ctx.settings.dtype == "float32" else 6e-2)


@check("P11")
def what_is_generated_is_of_the_weights_now(ctx: Context) -> None:
    """After every step the greedy tokens' log-probs are what the policy gives them."""
    policy, prompts = trainer(ctx, generation={"max_new_tokens": 4}), ctx.prompts(5, 3, 9)
    for seed in range(3):
        policy.prepare_for_lp_inference()
        output = policy.generate(prompts, greedy=True)
        both = BatchedDataDict[Any](
            {
                "input_ids": output["output_ids"],
                "input_lengths": output["unpadded_sequence_lengths"],
            }
        )
        made = output["logprobs"] != 0
        scores = policy.get_logprobs(both)["logprobs"]
        ctx.measure_error(output["logprobs"][made], scores[made], scale=2)
        train(policy, seed)


# -- what is refused ---------------------------------------------------------------------------


def _marked(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """With a column that is 1 in the last row alone."""
    data["marked"] = (torch.arange(data.size) == data.size - 1).float()
    return data


def _strange_token(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    data["input_ids"][-1, 2] = 10**6
    return data


def _no_ids(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    del data["input_ids"]
    return data


def _none(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    return data.slice(0, 0)


_REFUSED: dict[str, dict[str, Any]] = {
    "nan_in_a_later_microbatch": {"make": _marked, "loss": NanInARow},
    "nan_in_the_gradient_of_a_row": {"make": _marked, "loss": NanInTheGradientOfARow},
    "a_loss_that_raises": {"make": _marked, "loss": RaisesInARow},
    "a_token_outside_the_vocabulary": {"make": _strange_token, "loss": NegativeLogLikelihood},
    "no_ids": {"make": _no_ids, "loss": NegativeLogLikelihood},
    "no_rows": {"make": _none, "loss": NegativeLogLikelihood},
}


@check("P7", cases=_REFUSED)
def a_refused_step_leaves_no_trace(
    ctx: Context, make: Callable[[Any], Any], loss: type[LossFunction]
) -> None:
    """It raises, before and after steps, and every step is the one without the call."""

    def refused(policy: ColocatablePolicyInterface) -> None:
        with raises(Exception):
            policy.train(make(training_batch((7, 9, 4), seed=9)), loss(), mbs=1)

    changes_no_step(ctx, refused, dropout=False)


@check("P7")
def a_bad_global_batch_spares_the_one_before(ctx: Context) -> None:
    """The first of two batches is a step, the second with its NaN is none."""
    plain, hurt = (trainer(ctx, dropout=False) for _ in range(2))
    data = _marked(training_batch((7, 9, 4, 6), seed=9))
    with repeatable(ctx):
        plain.train(data.slice(0, 2), NegativeLogLikelihood())
        with raises(TrainingError):
            hurt.train(data, NanInARow(), gbs=2)
        same_weights(policy_weights(hurt), policy_weights(plain), "weights")
        for policy in (plain, hurt):
            train(policy, 1)
    same_weights(policy_weights(hurt), policy_weights(plain), "weights a step later")


@check("P7", cases={key: {"key": key} for key in ("sample_mask", "token_mask")})
def a_masked_batch_is_no_step(ctx: Context, key: str) -> None:
    """Nothing in it counts: neither momentum nor decay moves a weight, and no rate is used up."""
    data = training_batch((7, 9), seed=9)
    data[key][:] = 0

    def masked(policy: ColocatablePolicyInterface) -> None:
        policy.prepare_for_training()
        try:
            result = policy.train(data, NegativeLogLikelihood())
        except (DataError, TrainingError):
            return
        require(float(result["loss"]) == 0, f"the loss is {result['loss']}")

    changes_no_step(ctx, masked, dropout=False)


@check("P3")
def a_failing_reference_call_changes_no_step(ctx: Context) -> None:
    """Before and after steps, the next ones and the reference are as without the call."""
    data = training_batch((5, 6), seed=9)
    broken = _strange_token(training_batch((5, 6), seed=9))
    seen: list[torch.Tensor] = []

    def fail(policy: ColocatablePolicyInterface) -> None:
        with raises(Exception):
            policy.get_reference_policy_logprobs(broken, 1)
        seen.append(policy.get_reference_policy_logprobs(data)["reference_logprobs"])
        same_tensor(seen[-1], seen[0], "reference_logprobs")

    changes_no_step(ctx, fail)


@check("P1")
def a_failing_call_changes_no_step(ctx: Context) -> None:
    """Scoring that raises, at once or midway, leaves the next steps and log-probs alone."""
    data = training_batch((5, 6), seed=9)
    broken = _strange_token(training_batch((5, 6), seed=9))

    def fail(policy: ColocatablePolicyInterface) -> torch.Tensor:
        with raises(Exception):
            policy.get_logprobs(broken, 1)
        scores: torch.Tensor = policy.get_logprobs(data)["logprobs"]
        return scores

    changes_no_step(ctx, fail)


# -- the lifecycle -----------------------------------------------------------------------------

_CALLS = (
    "prepare_for_training",
    "finish_training",
    "prepare_for_lp_inference",
    "offload_before_refit",
    "offload_after_refit",
)


@check("P10")
def lifecycle_calls_are_legal_in_any_order(ctx: Context) -> None:
    """Every call after every other: steps, log-probs and reference are as without them."""
    pairs = [(first, second) for first in _CALLS for second in _CALLS]
    data = training_batch(_LENGTHS, seed=9)
    seen: list[torch.Tensor] = []

    def wander(policy: ColocatablePolicyInterface) -> torch.Tensor:
        for pair in pairs:
            for name in pair:
                getattr(policy, name)()
        policy.prepare_for_lp_inference()
        seen.append(policy.get_reference_policy_logprobs(data)["reference_logprobs"])
        same_tensor(seen[-1], seen[0], "reference_logprobs")
        scores: torch.Tensor = policy.get_logprobs(data)["logprobs"]
        policy.offload_after_refit()
        return scores

    changes_no_step(ctx, wander)
