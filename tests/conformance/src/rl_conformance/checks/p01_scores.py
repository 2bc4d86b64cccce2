"""P1 and P2: log-probs of a policy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.checks.common import SPLITS, strange_token
from rl_conformance.continuing import changes_no_step, oracle_of, train, trainer
from rl_conformance.expect import raises, require, same, same_tensor, within
from rl_conformance.faults import in_the_forward_pass
from rl_conformance.models import families_of
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface


_LENGTHS = (12, 3, 30, 1, 17, 8)


@check("P1", cases=families_of("P1"))
def logprobs_agree_with_the_reference(ctx: Context, family: str) -> None:
    """Log-probs of policy and reference are those of a float32 model, within the tolerance."""
    path, data = ctx.model(family), ctx.prompts(*_LENGTHS)
    with ctx.refusable(family):
        policy = ctx.policy(model_name=str(path))
    got = policy.get_logprobs(data)["logprobs"]
    expected = ctx.oracle(path).batch_logprobs(data["input_ids"], data["input_lengths"])
    title = "Log-prob error of the policy against the float32 reference"
    scored = expected != 0
    if got.shape == expected.shape:
        ctx.record_errors(title, family, got[scored], expected[scored], ctx.tolerance[1])
    ctx.measure_error(got, expected, rounding=2)
    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    ctx.measure_error(reference, expected, rounding=2)


@check("P1")
def logprobs_have_the_declared_layout(ctx: Context) -> None:
    """[B, S] float32 on the CPU; entry 0 and padding are 0, the rest is not."""
    data = ctx.prompts(*_LENGTHS)
    logprobs = ctx.policy().get_logprobs(data)["logprobs"]
    same(logprobs.shape, data["input_ids"].shape, "shape of logprobs")
    same(logprobs.dtype, torch.float32, "dtype of logprobs")
    same(logprobs.device.type, "cpu", "device of logprobs")
    positions = torch.arange(logprobs.shape[1])
    scored = (positions > 0) & (positions < data["input_lengths"][:, None])
    rest, own = logprobs[~scored], logprobs[scored]
    require((rest == 0).all(), "logprobs of entry 0 and of padding", "all 0", rest)
    require((own < 0).all(), "logprobs of the other tokens", "all below 0", own)


@check("P1")
def temperature_applies(ctx: Context) -> None:
    """At temperature 0.7 the logits are divided by it."""
    data = ctx.prompts(*_LENGTHS)
    got = ctx.policy(temperature=0.7).get_logprobs(data)["logprobs"]
    expected = ctx.oracle().batch_logprobs(data["input_ids"], data["input_lengths"], 0.7)
    ctx.measure_error(got, expected, scale=1 / 0.7)


@check("P2", cases={f"of_{size}": {"size": size} for size in (1, 4, 6)})
def micro_batch_size_does_not_show(ctx: Context, size: int) -> None:
    """Any micro_batch_size gives the same log-probs."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.policy()
    ctx.measure_error(
        policy.get_logprobs(data, micro_batch_size=size)["logprobs"],
        policy.get_logprobs(data)["logprobs"],
    )


@check("P2")
def padding_width_does_not_show(ctx: Context) -> None:
    """Wider padding gives the same log-probs, and zeros behind them."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.policy()
    ids, pad = data["input_ids"], ctx.oracle().pad_token_id
    wide = BatchedDataDict[Any](
        {
            "input_ids": torch.nn.functional.pad(ids, (0, 9), value=pad),
            "input_lengths": data["input_lengths"],
        }
    )
    got = policy.get_logprobs(wide)["logprobs"]
    width = ids.shape[1]
    ctx.measure_error(got[:, :width], policy.get_logprobs(data)["logprobs"])
    behind = got[:, width:]
    require((behind == 0).all(), "logprobs of the wider padding", "all 0", behind)


@check("P2")
def tokens_in_the_padding_do_not_matter(ctx: Context) -> None:
    """What stands on padding positions has no influence."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.policy()
    before = policy.get_logprobs(data)["logprobs"]
    past = torch.arange(data["input_ids"].shape[1]) >= data["input_lengths"][:, None]
    for filler in (ctx.oracle().eos_token_id, -100, 10**9):
        data["input_ids"] = torch.where(past, filler, data["input_ids"])
        ctx.measure_error(policy.get_logprobs(data)["logprobs"], before)


_SPLITS: dict[str, dict[str, Any]] = {
    "dynamic": {
        "key": "dynamic_batching",
        "value": {"enabled": True, "train_mb_tokens": 64, "sequence_length_round": 8},
    },
    "packed": {"key": "sequence_packing", "value": {"enabled": True, "train_mb_tokens": 64}},
}


@check("P2", cases=_SPLITS)
def splitting_does_not_show(ctx: Context, key: str, value: dict[str, Any]) -> None:
    """Dynamic batching and sequence packing give the same log-probs."""
    data = ctx.prompts(*_LENGTHS)
    got = ctx.policy(dtype=None, **{key: value}).get_logprobs(data)["logprobs"]
    ctx.measure_error(got, ctx.policy().get_logprobs(data)["logprobs"])


_OTHER_LENGTHS = (11, 6, 1, 19)


@check("P1")
def scoring_changes_no_step(ctx: Context) -> None:
    """Log-probs before, between and after steps: the same twice, and every step as without."""
    data = training_batch(_OTHER_LENGTHS, seed=9)
    changes_no_step(ctx, lambda policy: policy.get_logprobs(data, 3)["logprobs"])


@check("P1")
def log_probs_are_those_of_the_weights_now(ctx: Context) -> None:
    """After every step, and without dropout, although the model has it."""
    data, policy = training_batch(_OTHER_LENGTHS, seed=9), trainer(ctx)
    for seed in range(3):
        got = policy.get_logprobs(data)["logprobs"]
        oracle = oracle_of(ctx, policy)
        expected = oracle.batch_logprobs(data["input_ids"], data["input_lengths"])
        ctx.measure_error(got, expected)
        train(policy, seed)


@check("P1")
def a_failing_call_changes_no_step(ctx: Context) -> None:
    """Scoring that raises, at once or midway, leaves the next steps and log-probs alone."""
    data = training_batch((5, 6), seed=9)
    broken = strange_token(training_batch((5, 6), seed=9))

    def fail(policy: ColocatablePolicyInterface) -> torch.Tensor:
        with raises(Exception):
            policy.get_logprobs(broken, 1)
        with raises(Exception), in_the_forward_pass():
            policy.get_logprobs(data)
        scores: torch.Tensor = policy.get_logprobs(data)["logprobs"]
        return scores

    changes_no_step(ctx, fail)


#: Ties, ascents, descents and single tokens: no order by length is the order of the rows.
_MIXED = (4, 19, 1, 7, 19, 2, 33, 5, 1, 12, 7, 28, 3)


_TOKENS = {"enabled": True, "train_mb_tokens": 40}


@check("P1")
def long_rows_are_scored_completely(ctx: Context) -> None:
    """Rows around powers of two and up to the whole context agree with the reference."""
    whole = min(ctx.oracle().context, 256)
    data = ctx.prompts(whole, 129, 1, 128, 127, 2, 65, whole - 1)
    got = ctx.policy().get_logprobs(data)["logprobs"]
    expected = ctx.oracle().batch_logprobs(data["input_ids"], data["input_lengths"])
    ctx.measure_error(got, expected, rounding=2)
    ends = torch.arange(8), data["input_lengths"] - 1
    ctx.measure_error(got[ends], expected[ends], scale=2)


@check("P1")
def special_tokens_are_scored_like_others(ctx: Context) -> None:
    """Pad, end and begin tokens, and the vocabulary's last, wherever they stand in a row."""
    oracle = ctx.oracle()
    pad, end, last = oracle.pad_token_id, oracle.eos_token_id, oracle.vocab_size - 1
    rows = [
        [5, pad, 9, pad, pad],
        [pad, pad, 9, 7],
        [4, end, 9, 12, end],
        [end, 8, 8, 8, 8, 8, end, pad],
        [last, 3, last, last],
        [pad],
        [2, 2, pad, end, 0, 1],
    ]
    data = ctx.batch(rows)
    expected = oracle.batch_logprobs(data["input_ids"], data["input_lengths"])
    for _ in range(2):
        got = ctx.policy().get_logprobs(data)["logprobs"]
        ctx.measure_error(got, expected)
        # Of another filler, too.
        past = torch.arange(8) >= data["input_lengths"][:, None]
        data["input_ids"] = torch.where(past, last, data["input_ids"])


@check("P1")
def rows_out_of_range_are_refused(ctx: Context) -> None:
    """Token ids, lengths and rows that the model does not have: a DataError that names the row."""
    policy, oracle = ctx.policy(), ctx.oracle()
    wrong = {
        "a token after the vocabulary's last": ("input_ids", 4, oracle.vocab_size),
        "a negative token": ("input_ids", 0, -1),
        "no token": ("input_lengths", None, 0),
        "a negative length": ("input_lengths", None, -2),
        "a length above the width": ("input_lengths", None, 10),
        "a row above the context": ("input_lengths", None, oracle.context + 1),
    }
    for what, (key, column, value) in wrong.items():
        long = value if value == oracle.context + 1 else 5
        data = training_batch((9, long, 7))
        data[key][(1,) if column is None else (1, column)] = value
        for call in (
            policy.get_logprobs,
            policy.get_reference_policy_logprobs,
            partial(policy.train, loss_fn=NegativeLogLikelihood(), eval_mode=True),
        ):
            with within(what), raises(DataError, "row 1"):
                call(data)


@check("P1")
def any_batch_is_scored(ctx: Context) -> None:
    """One row, one token, rows of one token only, one after another; none is written to."""
    policy = ctx.policy()
    for lengths in ((9,), (1,), (1, 1, 1), (2,), (40, 1), (9,)):
        data = ctx.prompts(*lengths)
        before = data["input_ids"].clone()
        got = policy.get_logprobs(data)["logprobs"]
        expected = ctx.oracle().batch_logprobs(data["input_ids"], data["input_lengths"])
        ctx.measure_error(got, expected, scale=2)
        same_tensor(data["input_ids"], before, "input_ids")


@check("P2")
def many_rows_are_scored_as_few_are(ctx: Context) -> None:
    """In one microbatch of 300 rows, each has the reference's log-probs."""
    few = ctx.prompts(*[4, 6, 3, 5, 2] * 10)
    expected = ctx.oracle().batch_logprobs(few["input_ids"], few["input_lengths"])
    data = few.repeat_interleave(6)
    got = ctx.policy().get_logprobs(data, data.size)["logprobs"]
    ctx.measure_error(got, expected.repeat_interleave(6, 0))


@check("P1", cases={"cold": {"temperature": 0.3}, "hot": {"temperature": 2.5}})
def temperature_applies_to_every_call(ctx: Context, temperature: float) -> None:
    """To the reference's log-probs as to the policy's; the next policy has its own."""
    data = ctx.prompts(*_MIXED)
    policy = ctx.policy(temperature=temperature)
    expected = ctx.oracle().batch_logprobs(data["input_ids"], data["input_lengths"], temperature)
    scale = max(1.0, 1 / temperature)
    for size in (None, 2):
        ctx.measure_error(policy.get_logprobs(data, size)["logprobs"], expected, scale=scale)
    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    ctx.measure_error(reference, expected, scale=scale)
    plain = ctx.oracle().batch_logprobs(data["input_ids"], data["input_lengths"])
    ctx.measure_error(ctx.policy().get_logprobs(data)["logprobs"], plain)


@check("P2", cases=SPLITS)
def scored_rows_keep_their_order(ctx: Context, config: dict[str, Any], size: int | None) -> None:
    """However rows are dealt, each has its own log-probs, also under the reference."""
    data, policy = ctx.prompts(*_MIXED), ctx.policy(**config)
    expected = ctx.oracle().batch_logprobs(data["input_ids"], data["input_lengths"])
    got = policy.get_logprobs(data, size)["logprobs"]
    ctx.measure_error(got, expected)
    reference = policy.get_reference_policy_logprobs(data, size)["reference_logprobs"]
    ctx.measure_error(reference, expected)
    back = data.select_indices(list(range(len(_MIXED)))[::-1])
    ctx.measure_error(policy.get_logprobs(back, size)["logprobs"], expected.flip(0))


@check("P2")
def splitting_works_after_training(ctx: Context) -> None:
    """Packed policies score the trained weights, before and after a step, as plain ones do."""
    plain, packed = ctx.fresh_policy(), ctx.fresh_policy(sequence_packing=_TOKENS)
    data = training_batch(_MIXED, seed=9)
    for _ in range(2):
        scores = []
        for policy in (plain, packed):
            policy.prepare_for_training()
            policy.train(data, NegativeLogLikelihood())
            policy.prepare_for_lp_inference()
            scores.append(policy.get_logprobs(data)["logprobs"])
        ctx.measure_error(scores[1], scores[0], scale=2)
