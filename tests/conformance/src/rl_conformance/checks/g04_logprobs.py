"""G4 and G11: log-probs of generated tokens."""

from __future__ import annotations

from collections import OrderedDict
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import torch
from allpairspy import AllPairs

from rl_conformance.batches import generated, generated_mask
from rl_conformance.checks.common import with_limit, with_penalty
from rl_conformance.draws import as_configured, declared_logprobs
from rl_conformance.expect import NotRun, require, same, same_tensor
from rl_conformance.models import families_of
from rl_conformance.registry import check
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from rl_conformance.context import Context
    from rl_core.interfaces import GenerationInterface


@check("G11")
def far_positions_agree_with_the_reference(ctx: Context) -> None:
    """Long prompts and long generations have the reference's log-probs to the end."""
    config, limit = with_limit(ctx)
    lengths = [3, limit - 25, limit - 9]
    data = ctx.prompts(*lengths, seed=9)
    data["seed"] = torch.arange(3)
    config |= {"max_new_tokens": limit // 2 + 9, "logprobs_mode": "raw"}
    generation = ctx.generation(eos_token_id=[], **config)
    output = generation.generate(data)
    most = torch.tensor([min(config["max_new_tokens"], limit - n) for n in lengths])
    same_tensor(output["generation_lengths"], most, "generation_lengths")
    oracle = ctx.oracle()
    inside = generated_mask(data, output)
    scored = oracle.batch_logprobs(output["output_ids"], output["unpadded_sequence_lengths"])
    ctx.measure_error(output["logprobs"][inside], scored[inside], rounding=2)


@check("G4")
def very_unlikely_tokens_keep_their_logprob(ctx: Context) -> None:
    """Nothing is floored: log-probs far below -20 come as they are.

    Below -9 only where the engine refuses the temperature at which others are drawn.
    """
    try:
        scale, least = 4.0, -20.0
        path, generation = _hot(ctx, 5.0, scale)
    except ConfigError as error:
        if "temperature" not in str(error):
            raise
        scale, least = 2.0, -9.0
        path, generation = _hot(ctx, 2.0, scale)
    data = ctx.prompts(*[5] * 32)
    data["seed"] = torch.arange(32)
    output = generation.generate(data)
    inside = generated_mask(data, output)
    expected = declared_logprobs(ctx, data, output, path=path)
    unlikely = int((expected < least).sum())
    require(unlikely >= 3, f"drawn tokens with a log-prob below {least:g}", "at least 3", unlikely)
    ctx.measure_error(output["logprobs"][inside], expected, scale=scale, rounding=5)


def _hot(ctx: Context, temperature: float, scale: float) -> tuple[Path, GenerationInterface]:
    """A model with logits that are far apart, and an engine that draws from all of them."""
    path = ctx.model("qwen2", weight_scale=scale * 7.0)
    config: dict[str, Any] = {"model_name": str(path), "max_new_tokens": 4}
    return path, ctx.generation(temperature=temperature, logprobs_mode="raw", **config)


_PROCESSED = {
    "temperature": {"how": {"temperature": 0.7}},
    "top_k": {"how": {"temperature": 1.3, "top_k": 7}},
    "top_p": {"how": {"temperature": 1.2, "top_p": 0.8}},
    "all_three": {"how": {"temperature": 1.4, "top_k": 20, "top_p": 0.9}},
    "top_p_of_the_top_k": {"how": {"temperature": 2.0, "top_k": 6, "top_p": 0.7}},
    "hot": {"how": {"temperature": 5.0}},
    "top_p_of_1_is_off": {"how": {"temperature": 1.5, "top_p": 1.0}},
}


@check("G4", cases=_PROCESSED)
def processed_logprobs_are_of_the_sampled_distribution(ctx: Context, how: dict[str, Any]) -> None:
    """Temperature, then top-k, then top-p, renormalised; the default mode."""
    data = ctx.prompts(5, 5, 5, 5)
    try:
        generation = ctx.generation(seed=1, **how)
    except ConfigError as error:  # an engine may refuse it
        if how["temperature"] <= 2 or "temperature" not in str(error):
            raise
        raise NotRun(str(error), excused=True) from error
    output = generation.generate(data)
    got = output["logprobs"][generated_mask(data, output)]
    expected = declared_logprobs(ctx, data, output, **how)
    ctx.measure_error(got, expected, scale=1 / min(1.0, how["temperature"]), rounding=1.5)


@check("G4")
def raw_logprobs_are_of_the_logits(ctx: Context) -> None:
    """In raw mode temperature and truncation do not show."""
    data = ctx.prompts(5, 5, 5, 5)
    generation = ctx.generation(seed=1, temperature=1.4, top_k=20, top_p=0.9, logprobs_mode="raw")
    output = generation.generate(data)
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, declared_logprobs(ctx, data, output), rounding=1.5)


@check("G4")
def parts_of_a_batch_know_their_distribution(ctx: Context) -> None:
    """What `train` compares with the policy's own stays with slices, selections and joins."""
    rows = ctx.generation(temperature=0.7, seed=1).generate(ctx.prompts(5, 9))
    if rows.provenance is None:
        ctx.not_run("the backend does not say how rows were drawn", excused=True)
    joined = BatchedDataDict[Any].from_batches([rows, rows])
    for part in (rows.slice(0, 1), rows.select_indices([1]), joined):
        same(part.provenance, rows.provenance, "provenance")


@check("G4")
def greedy_ignores_temperature_and_truncation(ctx: Context) -> None:
    """With greedy=True the log-prob is raw and the token the argmax."""
    rows = ctx.certain(5, 5, 5, 5)
    data = ctx.batch([row.prompt for row in rows])
    generation = ctx.generation(temperature=1.4, top_k=20, top_p=0.9, seed=1, max_new_tokens=4)
    output = generation.generate(data, greedy=True)
    expected = [row.tokens for row in rows]
    same(generated(data, output), expected, "greedy tokens")
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, declared_logprobs(ctx, data, output))


#: Beyond the first context of models that have two; some engines' default is only that one.
_LONGEST = 64


@check("G11", cases=families_of("G11"))
def greedy_agrees_with_the_reference(ctx: Context, family: str) -> None:
    """Tokens are the reference's argmax and log-probs lie within the dtype's tolerance."""
    path = ctx.model(family)
    oracle, data = ctx.oracle(path), ctx.prompts(4, 17, 9, 1, 30)
    with ctx.refusable(family):
        generation = ctx.generation(model_name=str(path), max_new_tokens=12, max_model_len=_LONGEST)
    output = generation.generate(data, greedy=True)
    ends = output["unpadded_sequence_lengths"]
    expected = oracle.batch_logprobs(output["output_ids"], ends)
    inside = generated_mask(data, output)
    got, expected = output["logprobs"][inside], expected[inside]
    title = "Log-prob error of generation against the float32 reference"
    ctx.record_errors(title, family, got, expected, ctx.tolerance[1])
    ctx.measure_error(got, expected)
    gaps = []
    for row, end in enumerate(ends.tolist()):
        ids, start = output["output_ids"][row, :end], int(data["input_lengths"][row])
        scores = oracle.logits(ids.tolist()).log_softmax(-1)[start - 1 : end - 1]
        gaps.append(scores.amax(-1) - scores.gather(1, ids[start:, None])[:, 0])
    gap, below = float(torch.cat(gaps).max()), "a greedy token's log-prob below the largest"
    ctx.measure("gap_to_argmax", gap, 2 * ctx.tolerance[1], detail=below)


@check("G4", cases={"top_k": {"top_p": 1.0}, "top_k_and_top_p": {"top_p": 0.9}})
def top_k_above_the_vocabulary_is_off(ctx: Context, top_p: float) -> None:
    """top_k above the vocabulary is off."""
    data = ctx.prompts(5, 5, 5, 5)
    how: dict[str, Any] = {"temperature": 1.5, "top_p": top_p}
    top_k = 100 * ctx.oracle().vocab_size
    output = ctx.generation(seed=1, top_k=top_k, max_new_tokens=4, **how).generate(data)
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, declared_logprobs(ctx, data, output, **how))


@check("G4", cases={"raw": {"mode": "raw"}, "processed": {"mode": "processed"}})
def the_configured_logprobs_mode_applies(ctx: Context, mode: str) -> None:
    """Named or not, the mode decides between the logits and the distribution sampled from."""
    how: dict[str, Any] = {"temperature": 0.6, "top_k": 12}
    data = ctx.prompts(5, 7, 5, 3)
    output = ctx.generation(seed=4, logprobs_mode=mode, max_new_tokens=4, **how).generate(data)
    got = output["logprobs"][generated_mask(data, output)]
    expected = declared_logprobs(ctx, data, output, **({} if mode == "raw" else how))
    scale = 1.0 if mode == "raw" else 1 / how["temperature"]
    ctx.measure_error(got, expected, scale=scale, rounding=1.5)


_PENALTY = 1.8


@check("G4", cases={"raw": {"mode": "raw"}, "processed": {"mode": "processed"}})
def a_repetition_penalty_shows_in_processed_logprobs(ctx: Context, mode: str) -> None:
    """Processed log-probs are of the lowered logits, raw ones of the logits as they were."""
    how: dict[str, Any] = {"repetition_penalty": _PENALTY, "temperature": 1.3}
    generation = with_penalty(ctx, logprobs_mode=mode, seed=2, **how)
    data = ctx.prompts(40, 9, 5, 12)
    output = generation.generate(data)
    expected = declared_logprobs(ctx, data, output, **({} if mode == "raw" else how))
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, expected, scale=_PENALTY)


#: The default of each key, and another value. Tokens and letters are so many that rows end by them.
_VALUES: dict[str, list[Any]] = {
    "temperature": [1.0, 1.5],
    "top_k": [None, 7],
    "top_p": [1.0, 0.8],
    "repetition_penalty": [1.0, 1.4],
    "logprobs_mode": ["processed", "raw"],
    "do_sample": [True, False],
    "eos_token_id": [None, list(range(200, 230))],
    "stop_token_ids": [None, list(range(100, 140))],
    "stop_strings": [None, list(ascii_lowercase)],
    "num_generations": [1, 3],
    "max_model_len": [None, 24],
    "max_new_tokens": [4, 9],
    "pad_token_id": [None, 77],
    "seed": [None, 2**63],
    "call_deadline_s": [None, 600.0],
}
_PAIRS = {
    str(number): {"config": row._asdict()}
    for number, row in enumerate(AllPairs(OrderedDict(_VALUES)))
}


@check("G4", cases=_PAIRS)
def every_pair_of_options_applies(ctx: Context, config: dict[str, Any]) -> None:
    """Ends, padding, tokens and log-probs of rows are as configured, greedy and sampled."""
    if ctx.manifest.capabilities["generation"]["multi_sample"].level != "full":
        config = config | {"num_generations": 1}
    try:
        generation = ctx.generation(**config)
    except (CapabilityError, ConfigError) as error:
        if config["repetition_penalty"] == 1 or "repetition_penalty" not in str(error):
            raise
        config = config | {"repetition_penalty": 1.0}  # the backend refuses it
        generation = ctx.generation(**config)
    data = ctx.prompts(3, 9, 20, 24, 23, 5, seed=5)
    data["stop_strings"] = [None, list("AEIOU"), [], None, list("012345"), ["e"]]
    seeded: BatchedDataDict[Any] = BatchedDataDict({**data, "seed": torch.arange(6) * 1000})
    for batch, greedy in ((data, True), (seeded, False), (data, False)):
        output = generation.generate(batch, greedy=greedy)
        rows = batch.repeat_interleave(config["num_generations"])
        sampled = config["do_sample"] and not greedy
        as_configured(ctx, rows, output, config | {"do_sample": sampled})
