"""P1 to P4, P11 to P13: what a policy says of given tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.models import make_tiny_model
from rl_conformance.policy_generation import GenerationView
from rl_conformance.registry import check, checks_of, refusal
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import policy_weights, same_weights
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface

_LENGTHS = (12, 3, 30, 1, 17, 8)


@check("P1", cases={family: {"family": family} for family in ("llama", "qwen2", "qwen3")})
def logprobs_agree_with_the_reference(ctx: Context, family: str) -> None:
    """Every log-prob lies within the dtype's tolerance of the float32 reference."""
    path, data = ctx.model(family), ctx.prompts(*_LENGTHS)
    got = ctx.policy(model_name=str(path)).get_logprobs(data)["logprobs"]
    expected = ctx.oracle(path).batch_logprobs(data["input_ids"], data["input_lengths"])
    title = "Log-prob error of the policy against the float32 reference"
    scored = expected != 0
    if got.shape == expected.shape:
        ctx.record_errors(title, family, got[scored], expected[scored], ctx.tolerance[1])
    ctx.measure_error(got, expected)


#: What a faster way of attention, or a pass of several rows, may leave out. Rows cross the numbers.
_OPTIONS: dict[str, dict[str, Any]] = {
    "soft_cap": {
        "model_type": "gemma2",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 1.0,
        "query_pre_attn_scalar": 1,
        "sliding_window": 7,
    },
    "window": {"model_type": "mistral", "sliding_window": 7},
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + 0.5 * step for step in range(16)],
            "factor": 16.0,
        },
    },
}


@check("P1", cases={name: {"name": name} for name in _OPTIONS})
def options_of_the_model_apply(ctx: Context, name: str) -> None:
    """With the default settings, whatever else is in the batch; or the model is refused."""
    path = make_tiny_model(ctx.directory() / name, "llama", weight_scale=4.0, **_OPTIONS[name])
    try:
        policy = ctx.policy(model_name=str(path))
    except (CapabilityError, ConfigError):
        return
    data = ctx.prompts(*_LENGTHS)
    expected = ctx.oracle(path).batch_logprobs(data["input_ids"], data["input_lengths"])
    ctx.measure_error(policy.get_logprobs(data)["logprobs"], expected, rounding=2)


@check("P1")
def logprobs_have_the_declared_layout(ctx: Context) -> None:
    """[B, S] float32 on the CPU; entry 0 and padding are 0, the rest is not."""
    data = ctx.prompts(*_LENGTHS)
    logprobs = ctx.policy().get_logprobs(data)["logprobs"]
    require(logprobs.shape == data["input_ids"].shape, f"the shape is {list(logprobs.shape)}")
    require(logprobs.dtype == torch.float32, f"the dtype is {logprobs.dtype}")
    require(logprobs.device.type == "cpu", f"it is on {logprobs.device}")
    positions = torch.arange(logprobs.shape[1])
    scored = (positions > 0) & (positions < data["input_lengths"][:, None])
    require((logprobs[~scored] == 0).all(), "entry 0 or padding is not 0")
    require((logprobs[scored] < 0).all(), "a token's log-prob is not below 0")


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
    require((got[:, width:] == 0).all(), "the added padding is scored")


@check("P2")
def filler_behind_a_row_does_not_show(ctx: Context) -> None:
    """What stands on padding positions has no influence."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.policy()
    before = policy.get_logprobs(data)["logprobs"]
    past = torch.arange(data["input_ids"].shape[1]) >= data["input_lengths"][:, None]
    data["input_ids"] = torch.where(past, ctx.oracle().eos_token_id, data["input_ids"])
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


@check("P3")
def reference_starts_as_the_policy(ctx: Context) -> None:
    """Before training both give the same log-probs."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.fresh_policy()
    got = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    ctx.measure_error(got, policy.get_logprobs(data)["logprobs"])


@check("P3")
def reference_does_not_train_along(ctx: Context) -> None:
    """After training its log-probs are bit for bit what they were, also at a temperature."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.fresh_policy(temperature=0.7)
    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    before = policy.get_logprobs(data)["logprobs"]
    _train_once(policy)
    after = policy.get_logprobs(data)["logprobs"]
    require(not torch.equal(after, before), "training did not change the policy")
    again = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    same_tensor(again, reference, "reference_logprobs")


@check("P3")
def policy_survives_its_reference(ctx: Context) -> None:
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
    broken = ctx.prompts(5, 5)
    # Passes every check of shape and length, and fails in the forward pass.
    broken["input_ids"][1, 2] = ctx.oracle().vocab_size + 1000
    with raises(Exception):
        policy.get_reference_policy_logprobs(broken)
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
    require(values.shape == shape and indices.shape == shape, f"shapes are not {shape}")
    require(values.dtype == torch.float32, f"topk_logits is {values.dtype}")
    require(indices.dtype == torch.int64, f"topk_indices is {indices.dtype}")
    ours, theirs = [], []
    for row, length in enumerate(data["input_lengths"].tolist()):
        logits = ctx.oracle().logits(data["input_ids"][row, :length].tolist())[:-1]
        ours.append(logits.topk(k).values)
        theirs.append(values[row, : length - 1])
        looked_up = logits.gather(1, indices[row, : length - 1])
        ctx.measure_error(looked_up, values[row, : length - 1], rounding=1.5)
        require((theirs[-1].diff(dim=-1) <= 0).all(), f"row {row} is not sorted descending")
    ctx.measure_error(torch.cat(theirs), torch.cat(ours), rounding=1.5)


@check("P11", timeout_s=600.0)
def policy_generates_like_an_engine(ctx: Context) -> None:
    """Every check of G1 to G12 that the policy can be configured for holds for policy.generate."""
    clauses = [f"G{number}" for number in range(1, 13)]
    failures, ran = [], 0
    for each in checks_of("generation"):
        if each.clause.id not in clauses or each.capability or each.name in _OF_ENGINES:
            continue
        ran += 1
        with GenerationView.of(ctx) as view:
            try:
                each(view)
            except Exception as error:
                failures.append(f"{each.id}: {error}")
    require(ran > 20, f"only {ran} checks applied")
    require(not failures, "\n".join(failures))


#: Left out of P11: what a policy that generates has not (a sleep, a refit), and what takes long.
_OF_ENGINES = ("no_stream_starts_over_for_a_sleep_or_a_refit", "many_rows")


def _refuses(call: Callable[[ColocatablePolicyInterface], Any]) -> Callable[[Context], None]:
    """A refusal: the call raises CapabilityError and the weights are as before."""

    def refused(ctx: Context) -> None:
        policy = ctx.fresh_policy()
        before = policy_weights(policy)
        with raises(CapabilityError):
            call(policy)
        same_weights(policy_weights(policy), before, "weights")

    return refused


refusal("policy", "topk_logits")(_refuses(lambda p: p.get_topk_logits(training_batch((5,)), 2)))
refusal("policy", "policy_generate")(_refuses(lambda p: p.generate(training_batch((5,)))))
refusal("policy", "fp8_kv_scales")(
    _refuses(lambda p: p.calibrate_qkv_fp8_scales(training_batch((5,))))
)
refusal("policy", "score")(_refuses(lambda p: p.score(training_batch((5,)))))
refusal("policy", "collective")(_refuses(lambda p: p.init_collective("127.0.0.1", 1, 2)))


@check("P12")
def scales_come_from_observed_magnitudes(ctx: Context) -> None:
    """Every layer gets positive scales, which the margin multiplies."""
    data, policy = ctx.prompts(*_LENGTHS), ctx.policy()
    once = policy.calibrate_qkv_fp8_scales(data, margin=1.0)
    twice = policy.calibrate_qkv_fp8_scales(data, margin=2.0)
    require(once and once.keys() == twice.keys(), "the margin changes which scales there are")
    flat = torch.tensor(_numbers(once)), torch.tensor(_numbers(twice))
    require((flat[0] > 0).all(), "a scale is not above 0")
    ctx.measure("margin_error", float((flat[1] / flat[0] - 2).abs().max()), 1e-3)


def _numbers(scales: Any) -> list[float]:
    if isinstance(scales, dict):
        return [number for value in scales.values() for number in _numbers(value)]
    return [float(scales)] if isinstance(scales, int | float) else []


@check("P13")
def score_gives_one_float_per_row(ctx: Context) -> None:
    """scores [B] float32, equal to the scoring head's output in float32."""
    from rl_conformance.models import make_reward_model
    from rl_conformance.oracle import reward_scores

    path = make_reward_model(ctx.directory())
    data = ctx.prompts(*range(3, 35))
    scores = ctx.fresh_policy(model_name=str(path)).score(data)["scores"]
    require(scores.shape == (32,) and scores.dtype == torch.float32, "scores is not [B] float32")
    ids, lengths = data["input_ids"], data["input_lengths"]
    ctx.measure_error(scores, reward_scores(path, ids, lengths, ctx.settings.dtype))
