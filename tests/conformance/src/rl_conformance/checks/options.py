"""G4, G7, G8, G10: every key of the configuration has its effect, at its extremes too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_conformance.batches import generated, generated_mask
from rl_conformance.draws import declared_logprobs
from rl_conformance.expect import NotRun, require
from rl_conformance.oracle import penalised
from rl_conformance.registry import check
from rl_core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.interfaces import GenerationInterface

_ONE_CANDIDATE: dict[str, dict[str, Any]] = {
    "top_k_1": {"top_k": 1, "temperature": 1.5},
    "tiny_top_p": {"top_p": 1e-6, "temperature": 1.5},
    "top_k_1_and_top_p": {"top_k": 1, "top_p": 0.5},
    "tiny_top_p_of_the_top_k": {"top_k": 9, "top_p": 1e-6},
}


@check("G10", cases={name: {"how": how} for name, how in _ONE_CANDIDATE.items()})
def the_only_candidate_is_taken(ctx: Context, how: dict[str, Any]) -> None:
    """Where truncation leaves one token, that is the argmax, and it is certain."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows])
    output = ctx.generation(max_new_tokens=4, **how).generate(data)
    expected = [row.tokens for row in rows]
    require(generated(data, output) == expected, f"got {generated(data, output)}, not {expected}")
    logprobs = output["logprobs"][generated_mask(data, output)]
    require((logprobs > -1e-4).all(), f"the only candidate has log-prob {logprobs.min():.4g}")


@check("G10")
def almost_no_temperature_is_the_argmax(ctx: Context) -> None:
    """At a temperature of 0.01 the likeliest token comes, and its raw log-prob is the logits'."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows])
    config: dict[str, Any] = {
        "temperature": 0.01,
        "max_new_tokens": 4,
        "logprobs_mode": "raw",
        "seed": 5,
    }
    output = ctx.generation(**config).generate(data)
    expected = [row.tokens for row in rows]
    require(generated(data, output) == expected, f"got {generated(data, output)}, not {expected}")
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, declared_logprobs(ctx, data, output))


@check("G4", cases={"top_k": {"top_p": 1.0}, "top_k_and_top_p": {"top_p": 0.9}})
def more_candidates_than_tokens_are_all_of_them(ctx: Context, top_p: float) -> None:
    """top_k above the vocabulary is off."""
    data = ctx.prompts(5, 5, 5, 5)
    how: dict[str, Any] = {"temperature": 1.5, "top_p": top_p}
    top_k = 100 * ctx.oracle().vocab_size
    output = ctx.generation(seed=1, top_k=top_k, max_new_tokens=4, **how).generate(data)
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, declared_logprobs(ctx, data, output, **how))


@check("G4", cases={"raw": {"mode": "raw"}, "processed": {"mode": "processed"}})
def the_mode_is_that_of_the_configuration(ctx: Context, mode: str) -> None:
    """Named or not, the mode decides between the logits and the distribution sampled from."""
    how: dict[str, Any] = {"temperature": 0.6, "top_k": 12}
    data = ctx.prompts(5, 7, 5, 3)
    output = ctx.generation(seed=4, logprobs_mode=mode, max_new_tokens=4, **how).generate(data)
    got = output["logprobs"][generated_mask(data, output)]
    expected = declared_logprobs(ctx, data, output, **({} if mode == "raw" else how))
    scale = 1.0 if mode == "raw" else 1 / how["temperature"]
    ctx.measure_error(got, expected, scale=scale, rounding=1.5)


# -- repetition_penalty ----------------------------------------------------------------------------


def _with_penalty(ctx: Context, **config: Any) -> GenerationInterface:
    """An engine that takes a repetition penalty; one that refuses the key has none to check."""
    try:
        return ctx.generation(max_new_tokens=6, **config)
    except (ConfigError, CapabilityError) as error:
        if "repetition_penalty" not in str(error):
            raise
        raise NotRun("the backend refuses repetition_penalty", excused=True) from error


_PENALTY = 1.8


@check("G10")
def a_repetition_penalty_moves_the_argmax(ctx: Context) -> None:
    """Greedy takes the largest logit after those of the prompt and the completion were lowered."""
    generation = _with_penalty(ctx, repetition_penalty=_PENALTY, temperature=1.3)
    data = ctx.prompts(120, 110, 100, 12)
    output, oracle = generation.generate(data, greedy=True), ctx.oracle()
    lengths = data["input_lengths"].tolist()
    gaps, moved = [], 0
    for row, length in enumerate(lengths):
        ids = output["output_ids"][row, : int(output["unpadded_sequence_lengths"][row])].tolist()
        for end, logits in enumerate(oracle.logits(ids)[length - 1 : -1], length):
            scores = penalised(logits, ids[:end], _PENALTY)
            moved += logits.argmax().item() != scores.argmax().item()
            gaps.append(float(scores.max() - scores[ids[end]]))
    require(moved, "the penalty moves no argmax of these rows; take others")
    ctx.measure("gap_to_argmax", max(gaps), 2 * _PENALTY * ctx.tolerance[1])


@check("G4", cases={"raw": {"mode": "raw"}, "processed": {"mode": "processed"}})
def a_repetition_penalty_shows_in_processed_logprobs(ctx: Context, mode: str) -> None:
    """Processed log-probs are of the lowered logits, raw ones of the logits as they were."""
    how: dict[str, Any] = {"repetition_penalty": _PENALTY, "temperature": 1.3}
    generation = _with_penalty(ctx, logprobs_mode=mode, seed=2, **how)
    data = ctx.prompts(40, 9, 5, 12)
    output = generation.generate(data)
    expected = declared_logprobs(ctx, data, output, **({} if mode == "raw" else how))
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, expected, scale=_PENALTY)


# -- do_sample -------------------------------------------------------------------------------------


@check("G8")
def without_do_sample_every_call_is_greedy(ctx: Context) -> None:
    """do_sample=False takes the argmax, whatever the temperature; so the log-prob is raw."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows])
    generation = ctx.generation(do_sample=False, temperature=1.5, top_k=40, max_new_tokens=4)
    for greedy in (False, True):
        output = generation.generate(data, greedy=greedy)
        got = generated(data, output)
        require(got == [row.tokens for row in rows], f"got {got}, which is not the argmax")
        logprobs = output["logprobs"][generated_mask(data, output)]
        ctx.measure_error(logprobs, declared_logprobs(ctx, data, output))


@check("G7")
def end_of_sequence_can_be_switched_off(ctx: Context) -> None:
    """With no eos_token_id the model's own token ends no row."""
    if ctx.settings.model is not None:
        raise NotRun("the model is given, and with it its tokens", excused=True)
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows])
    path = ctx.model("qwen2", eos_token_id=rows[1].tokens[1])
    ways: tuple[tuple[list[int] | None, bool], ...] = (([], False), (None, True))
    for eos, met in ways:
        generation = ctx.generation(model_name=str(path), eos_token_id=eos, max_new_tokens=4)
        output = generation.generate(data, greedy=True)
        expected = rows[1].tokens
        if met:
            expected = expected[: expected.index(rows[1].tokens[1]) + 1]
        got = generated(data, output)[1]
        require(got == expected, f"with eos_token_id={eos}: got {got}, expected {expected}")
        require(bool(output["truncated"][1]) != met, "truncated does not tell length from stop")
