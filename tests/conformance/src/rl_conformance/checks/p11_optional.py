"""P11, P12 and P13: policies that generate, calibrate FP8 scales, and score."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated_mask
from rl_conformance.checks.common import SPLITS
from rl_conformance.continuing import changes_no_step, oracle_of, train, trainer
from rl_conformance.draws import declared_logprobs
from rl_conformance.expect import raises, require, same, same_tensor
from rl_conformance.fast import FAST
from rl_conformance.models import make_reward_model
from rl_conformance.observed import magnitudes, scales_by_layer
from rl_conformance.oracle import reward_scores
from rl_conformance.policy_generation import GenerationView
from rl_conformance.registry import check, checks_of, refusal
from rl_conformance.training import training_batch
from rl_conformance.weights import policy_weights, same_weights
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface


_LENGTHS = (12, 3, 30, 1, 17, 8)


@check("P11", timeout_s=600.0)
def policy_generates_like_an_engine(ctx: Context) -> None:
    """The quickest checks of G1 to G12 hold for policy.generate."""
    clauses = [f"G{number}" for number in range(1, 13)]
    failures, ran = [], 0
    for each in checks_of("generation"):
        if each.clause.id not in clauses or each.capability or each.id not in FAST:
            continue
        ran += 1
        with GenerationView.of(ctx) as view:
            try:
                each(view)
            except Exception as error:
                failures.append(f"{each.id}: {error}")
    require(ran > 20, "checks of policy.generate", "more than 20", ran)
    require(not failures, "checks of policy.generate", "all pass", "\n".join(failures))


@check("P11")
def generation_has_its_own_temperature(ctx: Context) -> None:
    """Tokens are drawn at the temperature of the key `generation`, not at the policy's."""
    data, own = ctx.prompts(5, 9, 3), {"temperature": 0.5, "max_new_tokens": 4, "seed": 1}
    output = ctx.policy(temperature=1.0, generation=own).generate(data, False)
    expected = declared_logprobs(ctx, data, output, temperature=0.5)
    ctx.measure_error(output["logprobs"][generated_mask(data, output)], expected, scale=2)


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
    same(twice.keys(), once.keys(), "names of the scales, with margin=2.0 and 1.0")
    require(once, "scales of calibrate_qkv_fp8_scales", "at least one", once)
    flat = torch.tensor(_numbers(once)), torch.tensor(_numbers(twice))
    require((flat[0] > 0).all(), "scales", "all above 0", flat[0])
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
    same((scores.shape, scores.dtype), ((32,), torch.float32), "shape and dtype of scores")
    ids, lengths = data["input_ids"], data["input_lengths"]
    ctx.measure_error(scores, reward_scores(path, ids, lengths, ctx.settings.dtype))


_OTHER_LENGTHS = (11, 6, 1, 19)


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
    data = ctx.prompts(*_OTHER_LENGTHS, seed=9)
    changes_no_step(ctx, lambda policy: policy.calibrate_qkv_fp8_scales(data, 2))


@check("P12")
def scales_are_of_the_weights_now(ctx: Context) -> None:
    """After steps the scales are those of the trained weights, without dropout."""
    data, policy = ctx.prompts(*_OTHER_LENGTHS, seed=9), trainer(ctx)
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


#: Ties, ascents, descents and single tokens: no order by length is the order of the rows.
_MIXED = (4, 19, 1, 7, 19, 2, 33, 5, 1, 12, 7, 28, 3)


_TOKENS = {"enabled": True, "train_mb_tokens": 40}


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
    same(sorted(got), sorted(expected), "layers and kinds with a scale")
    errors = [abs(got[key] / expected[key] - 1) for key in expected]
    ctx.measure("scale_error", max(errors), 1e-2 if ctx.settings.dtype == "float32" else 6e-2)


@check("P12")
def scales_have_their_defaults(ctx: Context) -> None:
    """The defaults are 99.9 percent, a margin of 1.05, no queries. Two calls agree."""
    data, policy = ctx.prompts(*_MIXED), ctx.policy()
    got = policy.calibrate_qkv_fp8_scales(data)
    explicit = policy.calibrate_qkv_fp8_scales(data, None, 99.9, 1.05, False)
    again = policy.calibrate_qkv_fp8_scales(data)
    same(got, explicit, "scales by default, as with 99.9, 1.05 and False")
    same(again, got, "scales of a second call")


_NO_CALIBRATIONS: dict[str, dict[str, Any]] = {
    "no_margin": {"margin": 0.0},
    "a_margin_below_0": {"margin": -1.0},
    "no_number_as_margin": {"margin": math.nan},
    "no_percentile": {"percentile": 0.0},
    "more_than_all": {"percentile": 100.1},
}


@check("P12", cases={name: {"options": options} for name, options in _NO_CALIBRATIONS.items()})
def impossible_scale_arguments_are_refused(ctx: Context, options: dict[str, Any]) -> None:
    """A margin or percentile that makes no scale raises ValueError."""
    with raises(ValueError, *options):
        ctx.policy().calibrate_qkv_fp8_scales(ctx.prompts(5, 3), **options)


_SCORED: dict[str, dict[str, Any]] = {name: SPLITS[name] for name in ("of_5", "packed")}


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
