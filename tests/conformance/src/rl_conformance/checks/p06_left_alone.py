"""P6 and P10: what changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_conformance.checks.common import scores_after, trained_policy
from rl_conformance.continuing import changes_no_step, oracle_of, repeatable, train, trainer
from rl_conformance.expect import same_tensor
from rl_conformance.registry import check, refusal
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import policy_weights, same_weights

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface


_LENGTHS = (12, 3, 30, 2, 17, 8, 21, 5)


@check("P6")
def eval_mode_leaves_weights_and_rng(ctx: Context) -> None:
    """Weights and the global random state are bit for bit as before."""
    policy, data = trained_policy(ctx), training_batch(_LENGTHS)
    weights, state = policy_weights(policy), torch.get_rng_state()
    policy.train(data, NegativeLogLikelihood(), eval_mode=True)
    same_weights(policy_weights(policy), weights, "weights")
    same_tensor(torch.get_rng_state(), state, "the global random state")


@check("P6")
def eval_mode_leaves_the_optimizer(ctx: Context) -> None:
    """The step after an evaluation is the step that came without one."""
    data = training_batch(_LENGTHS)
    evaluated, plain = trained_policy(ctx), trained_policy(ctx)
    with repeatable(ctx):
        for policy in (evaluated, plain):
            policy.train(data, NegativeLogLikelihood())
        evaluated.train(training_batch((9, 9), seed=3), NegativeLogLikelihood(), eval_mode=True)
        for policy in (evaluated, plain):
            policy.prepare_for_training()
            policy.train(data, NegativeLogLikelihood())
    same_weights(policy_weights(evaluated), policy_weights(plain), "weights")


@check("P6")
def eval_mode_returns_the_loss(ctx: Context) -> None:
    """The loss is the reference's."""
    data = training_batch(_LENGTHS)
    result = trained_policy(ctx).train(data, NegativeLogLikelihood(), eval_mode=True)
    loss, _ = ctx.oracle().nll(data["input_ids"], data["input_lengths"], data["token_mask"])
    ctx.measure_near("loss_error", result["loss"], loss, ctx.tolerance[0])


_CALLS = (
    "prepare_for_training",
    "finish_training",
    "prepare_for_lp_inference",
    "offload_before_refit",
    "offload_after_refit",
)


@check("P10", cases={name: {"name": name} for name in _CALLS})
def lifecycle_calls_are_idempotent(ctx: Context, name: str) -> None:
    """Called twice in a row, it changes no result."""
    data, policy = training_batch(_LENGTHS), ctx.fresh_policy()
    before = scores_after(policy, data)
    for _ in range(2):
        getattr(policy, name)()
    same_tensor(scores_after(policy, data), before, "logprobs")


@check("P10")
def lifecycle_calls_do_not_change_training(ctx: Context) -> None:
    """A loop with every call in it trains as one without."""
    data = training_batch(_LENGTHS)
    plain, busy = trained_policy(ctx), ctx.fresh_policy()
    with repeatable(ctx):
        for _ in range(2):
            plain.train(data, NegativeLogLikelihood())
            for name in ("offload_before_refit", "offload_after_refit", "prepare_for_lp_inference"):
                getattr(busy, name)()
            busy.get_logprobs(data)
            busy.prepare_for_training()
            busy.train(data, NegativeLogLikelihood())
            busy.finish_training()
    same_weights(policy_weights(busy), policy_weights(plain), "weights")


@check("P10", capability="offload", device="cuda")
def offloading_releases_device_memory(ctx: Context) -> None:
    """The declared fraction of weights and optimizer is free after offload_after_refit."""
    policy = ctx.fresh_policy(model_name=str(ctx.large_model(512 << 20)))
    policy.prepare_for_training()
    policy.train(training_batch((9, 6)), NegativeLogLikelihood())
    before = torch.cuda.memory_allocated()
    policy.offload_before_refit()
    policy.offload_after_refit()
    kept = torch.cuda.memory_allocated() / before
    ctx.measure("kept_fraction", kept, 1 - ctx.manifest.released_fraction)


@refusal("policy", "offload")
def without_offload_the_calls_still_hold(ctx: Context) -> None:
    """Without offload there is nothing to refuse: the calls change nothing."""
    policy = ctx.fresh_policy()
    before = policy_weights(policy)
    policy.offload_before_refit()
    policy.offload_after_refit()
    same_weights(policy_weights(policy), before, "weights")


_OTHER_LENGTHS = (11, 6, 1, 19)


@check("P6")
def evaluating_changes_no_step(ctx: Context) -> None:
    """The same loss twice; every step, its rate and its dropout as without."""
    data = training_batch((7, 9, 2, 14), seed=9)

    def evaluate(policy: ColocatablePolicyInterface) -> float:
        result = policy.train(data, NegativeLogLikelihood(), eval_mode=True, gbs=2, mbs=1)
        return float(result["loss"])

    changes_no_step(ctx, evaluate)


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


@check("P6")
def the_evaluated_loss_is_of_the_weights_now(ctx: Context) -> None:
    """After every step, without dropout, and whatever the microbatches."""
    data, policy = training_batch(_OTHER_LENGTHS, seed=9), trainer(ctx)
    for seed in range(2):
        train(policy, seed)
        ids, lengths = data["input_ids"], data["input_lengths"]
        expected, _ = oracle_of(ctx, policy).nll(ids, lengths, data["token_mask"])
        for size in (1, 3, 4):
            result = policy.train(data, NegativeLogLikelihood(), eval_mode=True, mbs=size)
            ctx.measure_near("loss_error", result["loss"], expected, ctx.tolerance[0])


@check("P10")
def lifecycle_calls_are_legal_in_any_order(ctx: Context) -> None:
    """Every call after every other: steps, log-probs and reference are as without them."""
    pairs = [(first, second) for first in _CALLS for second in _CALLS]
    data = training_batch(_OTHER_LENGTHS, seed=9)
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
