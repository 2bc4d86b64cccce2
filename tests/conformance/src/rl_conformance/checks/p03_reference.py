"""P3 and P4: the reference policy, and top-k logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch

from rl_conformance.checks.common import SPLITS
from rl_conformance.continuing import changes_no_step, dropping_model, oracle_of, train, trainer
from rl_conformance.expect import raises, require, same, same_tensor
from rl_conformance.faults import in_the_forward_pass
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import policy_weights, same_weights
from rl_core.errors import CapabilityError
from rl_core.plugins.discovery import load_object

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import ColocatablePolicyInterface


_LENGTHS = (12, 3, 30, 1, 17, 8)


@check("P3")
def reference_starts_as_the_policy(ctx: Context) -> None:
    """Before training both give the same log-probs."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.fresh_policy()
    got = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    ctx.measure_error(got, policy.get_logprobs(data)["logprobs"])


@check("P3")
def training_does_not_change_the_reference(ctx: Context) -> None:
    """After training its log-probs are bit for bit what they were, also at a temperature."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.fresh_policy(temperature=0.7)
    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    before = policy.get_logprobs(data)["logprobs"]
    _train_once(policy)
    after = policy.get_logprobs(data)["logprobs"]
    moved = not torch.equal(after, before)
    require(moved, "the policy's logprobs after a step", "others than before", "the same")
    again = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    same_tensor(again, reference, "reference_logprobs")


@check("P3")
def the_reference_does_not_change_the_policy(ctx: Context) -> None:
    """Scoring with the reference leaves the trained weights as they were."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.fresh_policy()
    _train_once(policy)
    before, scores = policy_weights(policy), policy.get_logprobs(data)["logprobs"]
    policy.get_reference_policy_logprobs(data)
    same_weights(policy_weights(policy), before, "weights")
    same_tensor(policy.get_logprobs(data)["logprobs"], scores, "logprobs")


@check("P3")
def policy_survives_a_failing_reference_call(ctx: Context) -> None:
    """A reference call that raises midway leaves the trained weights as they were."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.fresh_policy()
    _train_once(policy)
    before, scores = policy_weights(policy), policy.get_logprobs(data)["logprobs"]
    with raises(Exception), in_the_forward_pass():
        policy.get_reference_policy_logprobs(data)
    same_weights(policy_weights(policy), before, "weights")
    same_tensor(policy.get_logprobs(data)["logprobs"], scores, "logprobs")


@check("P3")
def reference_has_two_names(ctx: Context) -> None:
    """get_reference_logprobs is get_reference_policy_logprobs."""
    data, policy = ctx.prompts(5, 3), ctx.policy()
    same_tensor(
        policy.get_reference_logprobs(data)["reference_logprobs"],
        policy.get_reference_policy_logprobs(data)["reference_logprobs"],
        "reference_logprobs",
    )


def _train_once(policy: ColocatablePolicyInterface) -> None:
    policy.prepare_for_training()
    policy.train(training_batch((9, 6, 12, 4), seed=4), NegativeLogLikelihood())


@check("P4")
def topk_logits_belong_to_the_next_token(ctx: Context) -> None:
    """Position t holds the reference's k largest logits for token t+1, largest first."""
    data, k = ctx.prompts(12, 3, 20), 5
    got = ctx.policy().get_topk_logits(data, k)
    values, indices = got["topk_logits"], got["topk_indices"]
    shape = (3, data["input_ids"].shape[1] - 1, k)
    same((values.shape, indices.shape), (shape, shape), "shapes of topk_logits, topk_indices")
    same(values.dtype, torch.float32, "dtype of topk_logits")
    same(indices.dtype, torch.int64, "dtype of topk_indices")
    ours, theirs = [], []
    for row, length in enumerate(data["input_lengths"].tolist()):
        logits = ctx.oracle().logits(data["input_ids"][row, :length].tolist())[:-1]
        ours.append(logits.topk(k).values)
        theirs.append(values[row, : length - 1])
        looked_up = logits.gather(1, indices[row, : length - 1])
        ctx.measure_error(looked_up, values[row, : length - 1], rounding=1.5)
        falling = (theirs[-1].diff(dim=-1) <= 0).all()
        require(falling, f"topk_logits of row {row}", "sorted, the largest first", theirs[-1])
    ctx.measure_error(torch.cat(theirs), torch.cat(ours), rounding=1.5)


_OTHER_LENGTHS = (11, 6, 1, 19)


@check("P3")
def the_reference_changes_no_step_and_stays(ctx: Context) -> None:
    """Bit for bit the same before and after every step, and every step as without it."""
    data = training_batch(_OTHER_LENGTHS, seed=9)
    seen: list[torch.Tensor] = []

    def look(policy: ColocatablePolicyInterface) -> None:
        seen.append(policy.get_reference_policy_logprobs(data, 3)["reference_logprobs"])
        same_tensor(seen[-1], seen[0], "reference_logprobs")

    changes_no_step(ctx, look)


@check("P4")
def topk_changes_no_step(ctx: Context) -> None:
    """Top-k logits before, between and after steps: the same twice, and every step as without."""
    data = training_batch(_OTHER_LENGTHS, seed=9)
    changes_no_step(ctx, lambda policy: policy.get_topk_logits(data, 3)["topk_logits"])


@check("P3")
def the_reference_is_where_the_policy_started(ctx: Context) -> None:
    """After steps it has the checkpoint's log-probs at the policy's temperature, no dropout."""
    data = training_batch((*_OTHER_LENGTHS, 33), seed=9)
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


@check("P3", cases={kind: {"kind": kind} for kind in ("copy", "swap", "none")})
def the_reference_may_be_kept_anywhere(ctx: Context, kind: str) -> None:
    """With every value of the key: the start's log-probs at the temperature, and steps as without.

    Calls that fail are among them. A policy that keeps no reference refuses, and trains as well.
    """
    types = get_type_hints(load_object(ctx.manifest.configs["policy"]))
    if kind not in get_args(types.get("reference")):
        ctx.not_run(f"the policy has no reference={kind!r}", excused=True)
    data = training_batch(_OTHER_LENGTHS, seed=9)
    oracle = ctx.oracle(dropping_model(ctx))
    expected = oracle.batch_logprobs(data["input_ids"], data["input_lengths"], 0.7)

    def look(policy: ColocatablePolicyInterface) -> torch.Tensor | None:
        if kind == "none":
            with raises(CapabilityError):
                policy.get_reference_policy_logprobs(data)
            return None
        got: torch.Tensor = policy.get_reference_policy_logprobs(data, 3)["reference_logprobs"]
        ctx.measure_error(got, expected, scale=1 / 0.7)
        with raises(Exception), in_the_forward_pass():
            policy.get_reference_policy_logprobs(data)
        return got

    changes_no_step(ctx, look, temperature=0.7, reference=kind)


@check("P4")
def topk_is_of_the_weights_now(ctx: Context) -> None:
    """After a step the values are those of the trained weights."""
    data, policy = training_batch((11, 6), seed=9), trainer(ctx)
    train(policy, 0)
    got = policy.get_topk_logits(data, 4)["topk_logits"]
    logits = oracle_of(ctx, policy).logits(data["input_ids"][0].tolist())[:-1]
    ctx.measure_error(got[0], logits.topk(4).values)


@check("P3")
def a_failing_reference_call_changes_no_step(ctx: Context) -> None:
    """Before and after steps, the next ones and the reference are as without the call."""
    data = training_batch((5, 6), seed=9)
    seen: list[torch.Tensor] = []

    def fail(policy: ColocatablePolicyInterface) -> None:
        with raises(Exception), in_the_forward_pass():
            policy.get_reference_policy_logprobs(data)
        seen.append(policy.get_reference_policy_logprobs(data)["reference_logprobs"])
        same_tensor(seen[-1], seen[0], "reference_logprobs")

    changes_no_step(ctx, fail)


#: Ties, ascents, descents and single tokens: no order by length is the order of the rows.
_MIXED = (4, 19, 1, 7, 19, 2, 33, 5, 1, 12, 7, 28, 3)


_TOKENS = {"enabled": True, "train_mb_tokens": 40}


@check("P4", cases={name: SPLITS[name] for name in ("of_5", "configured", "dynamic", "packed")})
def topk_rows_come_back_in_their_order(
    ctx: Context, config: dict[str, Any], size: int | None
) -> None:
    """However rows are dealt, each has its own values, at its last position too."""
    data, k = ctx.prompts(*_MIXED), 3
    got = ctx.policy(**config).get_topk_logits(data, k, size)
    _topk_agrees(ctx, data, got, k)


@check("P4", cases={"one": {"k": 1}, "all": {"k": None}})
def topk_takes_any_k(ctx: Context, k: int | None) -> None:
    """From one to the whole vocabulary, no token twice, for rows of one token and long ones."""
    size = ctx.oracle().vocab_size if k is None else k
    if size > 2048:
        ctx.not_run("the vocabulary of the given model has more than 2048 entries", excused=True)
    for lengths in ((7, 1, 3), (140,), (1,)):
        data = ctx.prompts(*lengths)
        got = ctx.policy().get_topk_logits(data, size)
        _topk_agrees(ctx, data, got, size)


@check("P4", cases={"cold": {"temperature": 0.4}, "hot": {"temperature": 2.5}})
def topk_logits_have_the_temperature(ctx: Context, temperature: float) -> None:
    """They are divided by it, as those that the log-probs are of."""
    data = ctx.prompts(9, 4, 17)
    got = ctx.policy(temperature=temperature).get_topk_logits(data, 4)
    _topk_agrees(ctx, data, got, 4, temperature)


def _topk_agrees(
    ctx: Context,
    data: BatchedDataDict[Any],
    got: BatchedDataDict[Any],
    k: int,
    temperature: float = 1.0,
) -> None:
    values, indices = got["topk_logits"], got["topk_indices"]
    shape = (data.size, data["input_ids"].shape[1] - 1, k)
    same((values.shape, indices.shape), (shape, shape), "shapes of topk_logits, topk_indices")
    ours, theirs, named = [], [], []
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, :length].tolist()
        logits = ctx.oracle().logits(ids)[:-1] / temperature
        own = indices[row, : length - 1]
        ours.append(logits.topk(k).values)
        theirs.append(values[row, : length - 1])
        named.append(logits.gather(1, own))
        repeated = (own.sort(-1).values.diff(dim=-1) == 0).any()
        require(not repeated, f"topk_indices of row {row}", f"{k} different tokens", own)
        falling = (theirs[-1].diff(dim=-1) <= 0).all()
        require(falling, f"topk_logits of row {row}", "sorted, the largest first", theirs[-1])
    if any(len(each) for each in ours):
        # Logits are larger than the log-probs that the tolerance is of.
        scale = 2 / min(1.0, temperature)
        ctx.measure_error(torch.cat(theirs), torch.cat(ours), scale=scale)
        ctx.measure_error(torch.cat(theirs), torch.cat(named), scale=scale)
