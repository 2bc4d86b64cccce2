"""P1, P2, P4, P12, P13: every position, every row and every option of the calls that score."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.models import make_reward_model
from rl_conformance.observed import magnitudes, scales_by_layer
from rl_conformance.oracle import reward_scores
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict

#: Ties, ascents, descents and single tokens: no order by length is the order of the rows.
_MIXED = (4, 19, 1, 7, 19, 2, 33, 5, 1, 12, 7, 28, 3)
_TOKENS = {"enabled": True, "train_mb_tokens": 40}
_SPLITS: dict[str, dict[str, Any]] = {
    "of_5": {"config": {}, "size": 5},
    "of_more_than_there_are": {"config": {}, "size": 99},
    "configured": {"config": {"logprob_batch_size": 3, "train_micro_batch_size": 8}, "size": None},
    "dynamic": {
        "config": {"dynamic_batching": {**_TOKENS, "sequence_length_round": 4}},
        "size": None,
    },
    "packed": {"config": {"sequence_packing": _TOKENS}, "size": None},
    "packed_on_multiples": {
        "config": {
            "sequence_packing": {
                **_TOKENS,
                "algorithm": "first_fit_shuffle",
                "sequence_length_pad_multiple": 4,
                "logprob_mb_tokens": 60,
            }
        },
        "size": None,
    },
}


@check("P1")
def long_rows_are_scored_to_their_ends(ctx: Context) -> None:
    """Rows around powers of two and up to the whole context agree with the reference."""
    whole = min(ctx.oracle().context, 256)
    data = ctx.prompts(whole, 129, 1, 128, 127, 2, 65, whole - 1)
    got = ctx.policy().get_logprobs(data)["logprobs"]
    expected = ctx.oracle().batch_logprobs(data["input_ids"], data["input_lengths"])
    ctx.measure_error(got, expected, rounding=2)
    ends = torch.arange(8), data["input_lengths"] - 1
    ctx.measure_error(got[ends], expected[ends], scale=2)


@check("P1")
def special_tokens_are_tokens(ctx: Context) -> None:
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
def many_rows_score_as_few(ctx: Context) -> None:
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


@check("P2", cases=_SPLITS)
def rows_come_back_in_their_order(ctx: Context, config: dict[str, Any], size: int | None) -> None:
    """However rows are dealt, each has its own log-probs, also under the reference."""
    data, policy = ctx.prompts(*_MIXED), ctx.policy(**config)
    expected = ctx.oracle().batch_logprobs(data["input_ids"], data["input_lengths"])
    got = policy.get_logprobs(data, size)["logprobs"]
    ctx.measure_error(got, expected)
    reference = policy.get_reference_policy_logprobs(data, size)["reference_logprobs"]
    ctx.measure_error(reference, expected)
    back = data.select_indices(list(range(len(_MIXED)))[::-1])
    ctx.measure_error(policy.get_logprobs(back, size)["logprobs"], expected.flip(0))


@check("P4", cases={name: _SPLITS[name] for name in ("of_5", "configured", "dynamic", "packed")})
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
        ctx.not_run("the vocabulary is large", excused=True)
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
    require(values.shape == shape and indices.shape == shape, f"shapes are not {shape}")
    ours, theirs, named = [], [], []
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, :length].tolist()
        logits = ctx.oracle().logits(ids)[:-1] / temperature
        own = indices[row, : length - 1]
        ours.append(logits.topk(k).values)
        theirs.append(values[row, : length - 1])
        named.append(logits.gather(1, own))
        repeated = (own.sort(-1).values.diff(dim=-1) == 0).any()
        require(not repeated, f"row {row}: a token is among the {k} largest twice")
        require((theirs[-1].diff(dim=-1) <= 0).all(), f"row {row} is not sorted descending")
    if any(len(each) for each in ours):
        # Logits are larger than the log-probs that the tolerance is of.
        scale = 2 / min(1.0, temperature)
        ctx.measure_error(torch.cat(theirs), torch.cat(ours), scale=scale)
        ctx.measure_error(torch.cat(theirs), torch.cat(named), scale=scale)


_CALIBRATIONS: dict[str, dict[str, Any]] = {
    "largest": {"percentile": 100.0, "margin": 1.0},
    "with_a_margin": {"percentile": 100.0, "margin": 1.7, "micro_batch_size": 2},
    "most": {"percentile": 90.0, "margin": 1.0},
    "half": {"percentile": 50.0, "margin": 1.0},
    "with_queries": {"percentile": 95.0, "margin": 1.2, "include_q": True},
    "one_row_at_a_time": {"percentile": 80.0, "margin": 1.0, "micro_batch_size": 1},
}


@check("P12", cases={name: {"options": options} for name, options in _CALIBRATIONS.items()})
def scales_are_of_what_a_cache_holds(ctx: Context, options: dict[str, Any]) -> None:
    """That percentile of all magnitudes of real tokens, times the margin, is 448 of the scale."""
    data, policy = ctx.prompts(*_MIXED), ctx.policy()
    seen = magnitudes(ctx.oracle(), data)
    wide = torch.nn.functional.pad(data["input_ids"], (0, 20), value=7)
    data["input_ids"] = wide  # filler is nobody's key
    kinds = "qkv" if options.get("include_q") else "kv"
    expected = {}
    for (layer, kind), values in seen.items():
        if kind in kinds:
            rank = max(1, math.ceil(len(values) * options["percentile"] / 100))
            largest = float(values.sort().values[rank - 1])
            expected[layer, kind] = largest * options["margin"] / 448
    got = scales_by_layer(policy.calibrate_qkv_fp8_scales(data, **options))
    require(got.keys() == expected.keys(), f"scales of {sorted(got)}, not {sorted(expected)}")
    errors = [abs(got[key] / expected[key] - 1) for key in expected]
    ctx.measure("scale_error", max(errors), 1e-2 if ctx.settings.dtype == "float32" else 6e-2)


@check("P12")
def scales_have_their_defaults(ctx: Context) -> None:
    """Without a word: 99.9 percent, a margin of 1.05, no queries. Twice the same."""
    data, policy = ctx.prompts(*_MIXED), ctx.policy()
    got = policy.calibrate_qkv_fp8_scales(data)
    said = policy.calibrate_qkv_fp8_scales(data, None, 99.9, 1.05, False)
    again = policy.calibrate_qkv_fp8_scales(data)
    require(got == said, f"the defaults give {got}, and said aloud {said}")
    require(got == again, f"a second call gives {again} after {got}")


_NO_CALIBRATIONS: dict[str, dict[str, Any]] = {
    "no_margin": {"margin": 0.0},
    "a_margin_below_0": {"margin": -1.0},
    "no_number_as_margin": {"margin": math.nan},
    "no_percentile": {"percentile": 0.0},
    "more_than_all": {"percentile": 100.1},
}


@check("P12", cases={name: {"options": options} for name, options in _NO_CALIBRATIONS.items()})
def what_scales_no_cache_is_refused(ctx: Context, options: dict[str, Any]) -> None:
    """A margin or percentile that makes no scale raises ValueError."""
    with raises(ValueError, *options):
        ctx.policy().calibrate_qkv_fp8_scales(ctx.prompts(5, 3), **options)


_SCORED: dict[str, dict[str, Any]] = {name: _SPLITS[name] for name in ("of_5", "packed")}


@check("P13", cases=_SCORED)
def scores_belong_to_their_rows(ctx: Context, config: dict[str, Any], size: int | None) -> None:
    """Twice the same, of each row's own last token whatever it is, without the model's dropout."""
    path = make_reward_model(ctx.directory(), attention_dropout=0.5)
    oracle = ctx.oracle()
    policy = ctx.fresh_policy(model_name=str(path), **config)
    data = ctx.prompts(*_MIXED)
    ids, lengths = data["input_ids"], data["input_lengths"]
    ids[1, 5:9], ids[3, 6], ids[4, 18] = oracle.pad_token_id, oracle.pad_token_id, 1
    expected = reward_scores(path, ids, lengths, ctx.settings.dtype)
    # What stands behind a row is nobody's.
    past = torch.arange(ids.shape[1]) >= lengths[:, None]
    data["input_ids"] = torch.where(past, 9, ids)
    first = policy.score(data, size)["scores"]
    ctx.measure_error(first, expected)
    same_tensor(policy.score(data, size)["scores"], first, "scores")
    ctx.measure_error(policy.score(data.slice(3, 4), size)["scores"], expected[3:4], scale=2)


@check("P2")
def splitting_goes_on_working(ctx: Context) -> None:
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
