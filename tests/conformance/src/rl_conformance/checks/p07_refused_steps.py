"""P7: steps that are refused or fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.checks.common import (
    refuses_until_a_load,
    scores_after,
    strange_token,
    trained_policy,
)
from rl_conformance.continuing import changes_no_step, repeatable, train, trainer
from rl_conformance.expect import raises, same, same_tensor
from rl_conformance.losses import NanInARow, NanInTheGradientOfARow, RaisesInARow
from rl_conformance.registry import check
from rl_conformance.training import (
    InfiniteGradientLoss,
    NanLoss,
    NegativeLogLikelihood,
    training_batch,
)
from rl_conformance.weights import policy_weights, same_weights
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface, LossFunction


_LENGTHS = (12, 3, 30, 2, 17, 8, 21, 5)


@check(
    "P7",
    cases={"nan_loss": {"loss": NanLoss}, "infinite_gradient": {"loss": InfiniteGradientLoss}},
)
def what_is_not_finite_raises(ctx: Context, loss: type[LossFunction]) -> None:
    """TrainingError, the weights untouched, and the next good step is a good step."""
    data = training_batch(_LENGTHS)
    hurt, plain = trained_policy(ctx), trained_policy(ctx)
    before = policy_weights(hurt)
    with raises(TrainingError):
        hurt.train(data, loss())
    same_weights(policy_weights(hurt), before, "weights")
    with repeatable(ctx):
        for policy in (hurt, plain):
            policy.prepare_for_training()
            policy.train(data, NegativeLogLikelihood())
    same_weights(policy_weights(hurt), policy_weights(plain), "weights of the next step")


@check("P7")
def masked_rows_have_no_influence(ctx: Context) -> None:
    """What stands in a row with sample_mask 0 changes neither loss nor weights."""
    lengths, other = (9, 14, 6), (9, 5, 6)
    data, changed = training_batch(lengths), training_batch(lengths)
    changed["input_ids"][1] = training_batch(lengths, seed=7)["input_ids"][1]
    changed["input_lengths"] = torch.tensor(other)
    changed["input_ids"][1, 5:] = ctx.oracle().pad_token_id
    _compare_masked(ctx, data, changed, rows=[1])


@check("P7")
def masked_tokens_have_no_influence(ctx: Context) -> None:
    """The last tokens of a row with token_mask 0 change neither loss nor weights."""
    data, changed = training_batch((9, 14, 6)), training_batch((9, 14, 6))
    for batch in (data, changed):
        batch["token_mask"][1, 10:] = 0
    changed["input_ids"][1, 10:14] = training_batch((9, 14, 6), seed=7)["input_ids"][1, 10:14]
    _compare_masked(ctx, data, changed)


def _compare_masked(
    ctx: Context, data: BatchedDataDict[Any], changed: BatchedDataDict[Any], rows: Any = ()
) -> None:
    probe, results, scores = training_batch((11, 6, 19), seed=9), [], []
    for batch in (data, changed):
        batch["sample_mask"][list(rows)] = 0
        policy = trained_policy(ctx)
        results.append(policy.train(batch, NegativeLogLikelihood(), mbs=3))
        scores.append(scores_after(policy, probe))
    for key in ("loss", "grad_norm"):
        first, second = (float(result[key]) for result in results)
        allowed = max(ctx.tolerance[0] / 10, 1e-5)
        ctx.measure_near(f"{key}_relative_difference", second, first, allowed, abs(first))
    ctx.measure_error(scores[1], scores[0])


@check("P7")
def a_fully_masked_batch_changes_nothing(ctx: Context) -> None:
    """Without one valid token the loss is 0 and the log-probs stay."""
    data, policy = (
        training_batch((9, 6)),
        trained_policy(ctx, optimizer={"lr": 1e-3, "weight_decay": 0.0}),
    )
    before = scores_after(policy, data)
    data["sample_mask"][:] = 0
    policy.prepare_for_training()
    result = policy.train(data, NegativeLogLikelihood())
    same(float(result["loss"]), 0.0, "loss of a batch in which nothing counts")
    same_tensor(scores_after(policy, data), before, "logprobs")


_OTHER_LENGTHS = (12, 3, 30, 1, 17, 8, 2)


def _mask(key: str, *rows: int) -> Callable[[Any], None]:
    def apply(data: Any) -> None:
        data[key][list(rows)] = 0

    return apply


def _only(rows: Any, tokens: Any) -> Callable[[Any], None]:
    def apply(data: Any) -> None:
        data["token_mask"][:] = 0
        data["token_mask"][rows, tokens] = 1

    return apply


def _as_numbers(dtype: torch.dtype) -> Callable[[Any], None]:
    def apply(data: Any) -> None:
        _mask("sample_mask", 2)(data)
        _mask("token_mask", 4)(data)
        data.update({key: data[key].to(dtype) for key in ("sample_mask", "token_mask")})

    return apply


_MASKS: dict[str, Callable[[Any], None]] = {
    "bools": _as_numbers(torch.bool),
    "integers": _as_numbers(torch.int64),
    "the_first_and_the_last_row": _mask("sample_mask", 0, 6),
    "a_microbatch": _mask("sample_mask", 2, 3),
    "the_first_microbatch": _mask("sample_mask", 0, 1),
    "the_longest_row": _mask("sample_mask", 2),
    "the_tokens_of_a_row": _mask("token_mask", 4),
    "the_tokens_of_a_microbatch": _mask("token_mask", 4, 5),
    "all_but_one_token": _only(4, 16),
    "all_but_the_last_tokens": _only(torch.arange(7), torch.tensor(_OTHER_LENGTHS) - 1),
}


@check("P7", cases={name: {"mask": mask} for name, mask in _MASKS.items()})
def masked_data_has_no_influence_on_a_step(ctx: Context, mask: Callable[[Any], None]) -> None:
    """In microbatches of two, loss and gradient are those of what is left."""
    data = training_batch(_OTHER_LENGTHS)
    mask(data)
    _trains_on_the_rest(ctx, data, data)


@check("P7")
def a_mask_that_is_left_out_is_all_ones(ctx: Context) -> None:
    """Without masks, loss and gradient are those of all tokens but the first of each row."""
    data = training_batch(_OTHER_LENGTHS)
    bare = BatchedDataDict[Any]({key: data[key] for key in ("input_ids", "input_lengths")})
    _trains_on_the_rest(ctx, data, bare)


def _trains_on_the_rest(
    ctx: Context, data: BatchedDataDict[Any], passed: BatchedDataDict[Any]
) -> None:
    """Fails unless a policy that is trained on what is passed learns from what counts in data."""
    left = data["token_mask"] * data["sample_mask"][:, None]
    left[:, 0] = 0
    result = trained_policy(ctx).train(passed, NegativeLogLikelihood(), mbs=2)
    loss, norm = ctx.oracle().nll(data["input_ids"], data["input_lengths"], left)
    same(float(result["global_valid_toks"]), float(left.sum()), "global_valid_toks")
    same(float(result["global_valid_seqs"]), float(data["sample_mask"].sum()), "global_valid_seqs")
    # Of few tokens none evens out the error of another.
    allowed = ctx.tolerance[0] if left.sum() > 20 else ctx.tolerance[1]
    ctx.measure_near("loss_error", result["loss"], loss, allowed)
    got, allowed = result["grad_norm"], max(allowed, 1e-4)
    ctx.measure_near("grad_norm_relative_error", got, norm, allowed, norm)


def _marked(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """With a column that is 1 in the last row alone."""
    data["marked"] = (torch.arange(data.size) == data.size - 1).float()
    return data


_REFUSED: dict[str, dict[str, Any]] = {
    "nan_in_a_later_microbatch": {"make": _marked, "loss": NanInARow},
    "nan_in_the_gradient_of_a_row": {"make": _marked, "loss": NanInTheGradientOfARow},
    "a_loss_that_raises": {"make": _marked, "loss": RaisesInARow},
    "a_token_outside_the_vocabulary": {"make": strange_token, "loss": NegativeLogLikelihood},
    "no_ids": {
        "make": lambda data: BatchedDataDict({k: v for k, v in data.items() if k != "input_ids"}),
        "loss": NegativeLogLikelihood,
    },
    "no_rows": {"make": lambda data: data.slice(0, 0), "loss": NegativeLogLikelihood},
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


@check("P7", cases={case: {"loss": _REFUSED[case]["loss"]} for case in [*_REFUSED][:2]})
def a_skipped_step_leaves_no_trace(ctx: Context, loss: type[LossFunction]) -> None:
    """With non_finite="skip" nothing is raised, and every step is the one without the call."""

    def skipped(policy: ColocatablePolicyInterface) -> None:
        policy.train(_marked(training_batch((7, 9, 4), seed=9)), loss(), mbs=1)

    changes_no_step(ctx, skipped, dropout=False, non_finite="skip")


@check("P7")
def a_bad_global_batch_keeps_the_step_before(ctx: Context) -> None:
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
        same(float(result["loss"]), 0.0, "loss of a batch in which nothing counts")

    changes_no_step(ctx, masked, dropout=False)


_MORE_LENGTHS = (12, 3, 30, 17)


_ERRORS = {error.__name__: {"error": error} for error in (MemoryError, KeyboardInterrupt)}


@check("P7", cases=_ERRORS)
def what_fails_midway_is_refused_until_a_load(ctx: Context, error: type[BaseException]) -> None:
    """The optimizer raises once it has written: nothing is done with the weights until a load."""
    refuses_until_a_load(ctx, ctx.fresh_policy(dtype="float32"), error)
