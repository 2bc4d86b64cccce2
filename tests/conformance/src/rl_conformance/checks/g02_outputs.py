"""G2, G3, G5 and G6: the shape of an output, and how long it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, generated_mask, random_rows
from rl_conformance.checks.common import (
    OUTPUT_KEYS,
    greedy_rows,
    is_truncated,
    text_row,
    with_limit,
)
from rl_conformance.continuations import find_row, find_stop, is_text
from rl_conformance.draws import declared_logprobs
from rl_conformance.expect import raises, require, same, same_tensor
from rl_conformance.refits import run_refit
from rl_conformance.registry import check
from rl_conformance.ways import exact, settable_trainer
from rl_core.errors import RLError

if TYPE_CHECKING:
    from rl_conformance.context import Context


@check("G2")
def output_is_prompt_then_tokens_then_padding(ctx: Context) -> None:
    """The prompt is unchanged and padding fills the right."""
    data = ctx.prompts(3, 9, 5)
    output = ctx.generation().generate(data, greedy=True)
    ids, pad = output["output_ids"], ctx.oracle().pad_token_id
    for row, length in enumerate(data["input_lengths"].tolist()):
        end = int(output["unpadded_sequence_lengths"][row])
        same_tensor(ids[row, :length], data["input_ids"][row, :length], f"prompt of row {row}")
        padded = (ids[row, end:] == pad).all()
        require(
            padded, f"output_ids of row {row} from position {end} on", f"only {pad}", ids[row, end:]
        )


@check("G2")
def lengths_add_up(ctx: Context) -> None:
    """unpadded = input + generated, and the width is the longest row."""
    data = ctx.prompts(3, 9, 5)
    output = ctx.generation().generate(data, greedy=True)
    ends = data["input_lengths"] + output["generation_lengths"]
    same_tensor(output["unpadded_sequence_lengths"], ends, "unpadded_sequence_lengths")
    same(output["output_ids"].shape, (3, int(ends.max())), "shape of output_ids")
    made = output["generation_lengths"]
    require((made > 0).all(), "generation_lengths of rows with room", "all above 0", made)


@check("G2")
def output_has_the_declared_types(ctx: Context) -> None:
    """Every key is there, on the CPU, of its dtype."""
    output = ctx.generation().generate(ctx.prompts(3, 5), greedy=True)
    same(sorted(OUTPUT_KEYS - set(output)), [], "keys missing in the output")
    integer = OUTPUT_KEYS - {"logprobs", "truncated"}
    types = {
        "logprobs": torch.float32,
        "truncated": torch.bool,
        **dict.fromkeys(integer, torch.int64),
    }
    for key, dtype in types.items():
        same(output[key].dtype, dtype, f"dtype of {key}")
        same(output[key].device.type, "cpu", f"device of {key}")


@check("G3", cases={"greedy": {"greedy": True}, "sampled": {"greedy": False}})
def logprobs_are_zero_outside_and_negative_inside(ctx: Context, greedy: bool) -> None:
    """0 on prompt and padding; finite and at most 0 on generated tokens."""
    data = ctx.prompts(3, 9, 5)
    output = ctx.generation(seed=3).generate(data, greedy=greedy)
    inside, logprobs = generated_mask(data, output), output["logprobs"]
    same(logprobs.shape, output["output_ids"].shape, "shape of logprobs, as of output_ids")
    outside, own = logprobs[~inside], logprobs[inside]
    require((outside == 0).all(), "logprobs of prompts and padding", "all 0", outside)
    require(own.isfinite().all(), "logprobs of generated tokens", "all finite", own)
    require((own <= 0).all(), "logprobs of generated tokens", "none above 0", own)
    require((own < 0).any(), "logprobs of generated tokens", "some below 0", own)


@check("G5")
def truncated_tells_length_from_stop(ctx: Context) -> None:
    """A row that ran out of tokens is truncated, one that generated a stop token is not."""
    stop = find_stop(ctx.oracle(), 4, ctx.lead)
    data = ctx.batch([stop.prompt, stop.other_prompt])
    generation = ctx.generation(stop_token_ids=[stop.token], max_new_tokens=4)
    output = generation.generate(data, greedy=True)
    is_truncated(output, [False, True])


@check("G6")
def max_new_tokens_is_kept(ctx: Context) -> None:
    """No row generates more than max_new_tokens."""
    output = ctx.generation(max_new_tokens=3).generate(ctx.prompts(2, 9, 5, 7), greedy=True)
    made = output["generation_lengths"]
    require((made <= 3).all(), "generation_lengths with max_new_tokens=3", "at most 3", made)


@check("G6")
def context_is_kept(ctx: Context) -> None:
    """A row ends, truncated, where the context does; without room it generates nothing."""
    generation = ctx.generation(max_model_len=16)
    output = generation.generate(ctx.prompts(13, 15, 16), greedy=True)
    lengths = output["generation_lengths"].tolist()
    same(lengths[2], 0, "generated tokens of a prompt that fills the context of 16")
    fits = lengths[0] <= 3 and lengths[1] <= 1
    require(fits, "generated tokens of prompts of 13 and 15", "at most 3 and 1", lengths[:2])
    same(bool(output["truncated"][2]), True, "truncated of a row without room")
    ends = output["unpadded_sequence_lengths"]
    require((ends <= 16).all(), "unpadded_sequence_lengths", "at most the context, 16", ends)


@check("G6")
def overlong_prompt_is_refused(ctx: Context) -> None:
    """A prompt longer than the context raises ValueError naming the row."""
    with raises(ValueError, "row 1"):
        ctx.generation(max_model_len=16).generate(ctx.prompts(5, 17), greedy=True)


#: Tokens that engines generate where a check looks at the text.
_STEPS = 4


@check("G2")
def output_is_as_wide_as_its_longest_row(ctx: Context) -> None:
    """Columns of padding that no row needs, strides and narrower integers change nothing."""
    rows = ctx.certain(3, 9, 5)
    data, generation = ctx.batch([row.prompt for row in rows]), ctx.generation(max_new_tokens=4)
    usual = generation.generate(data, greedy=True)
    wide = ctx.batch([*(row.prompt for row in rows), [5] * 30]).slice(0, 3)
    wide["input_ids"] = wide["input_ids"].t().contiguous().t().to(torch.int32)
    wide["input_lengths"] = wide["input_lengths"].to(torch.int32)
    output = generation.generate(wide, greedy=True)
    for key in ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "truncated"):
        same_tensor(output[key], usual[key], key)


@check("G2")
def the_configured_padding_is_used(ctx: Context) -> None:
    """pad_token_id fills the output, also where it ends rows and stands in prompts."""
    oracle = ctx.oracle()
    short, long = ctx.certain(5, 9)
    pad = short.tokens[1]
    first = short.tokens.index(pad)
    if pad in long.tokens:
        long = find_row(
            oracle, 9, steps=4, lead=ctx.lead, accept=lambda tokens, _: pad not in tokens
        )
    padded = find_row(
        oracle,
        5,
        steps=4,
        lead=ctx.lead,
        edit=lambda row: [pad, *row[1:3], pad, pad],
        accept=lambda tokens, _: pad not in tokens,
    )
    rows = [short, long, padded]
    data = ctx.batch([row.prompt for row in rows])
    past = torch.arange(9) >= data["input_lengths"][:, None]
    data["input_ids"] = torch.where(past, pad, data["input_ids"])
    config: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": pad, "stop_token_ids": [pad]}
    output = ctx.generation(**config).generate(data, greedy=True)
    got = generated(data, output)
    expected = [short.tokens[: first + 1], long.tokens, padded.tokens]
    same(got, expected, f"greedy tokens, with {pad} as padding and as stop token")
    outside = torch.arange(13) >= output["unpadded_sequence_lengths"][:, None]
    filled = output["output_ids"][outside]
    require((filled == pad).all(), "output_ids after the rows' ends", f"only {pad}", filled)


@check("G5")
def a_stop_on_the_last_token_is_a_stop(ctx: Context) -> None:
    """A row with its stop at the last token that it may generate is not truncated."""
    oracle = ctx.oracle()

    def ends_in_text(tokens: list[int], words: list[str]) -> bool:
        text = oracle.tokenizer.decode(tokens[:-1])
        return is_text(words[-1:]) and words[-1] not in text

    stopped = find_row(oracle, 5, steps=_STEPS, lead=ctx.lead, accept=ends_in_text)
    other, third = ctx.certain(5, 9)
    word = oracle.tokenizer.decode(stopped.tokens[-1:])
    rows = [other, stopped, third, stopped]
    stops = [None, [word], [], None]
    expected = [row.tokens for row in rows]
    output = greedy_rows(ctx, rows, expected, row_stops=stops, max_new_tokens=_STEPS)
    is_truncated(output, [True, False, True, True])
    # The same with a stop token, once at the limit of tokens and once at that of the context.
    unused = next(t for t in range(3, 250) if not any(t in row.tokens for row in rows))
    ids = [unused, stopped.tokens[-1]]
    cut = [tokens[: (*tokens, ids[1]).index(ids[1]) + 1] for tokens in expected]
    stops_at = [ids[1] in tokens for tokens in expected]
    output = greedy_rows(ctx, rows, cut, max_new_tokens=_STEPS, stop_token_ids=ids)
    is_truncated(output, [not one for one in stops_at])
    data = ctx.batch([stopped.prompt])
    at_context = ctx.generation(max_model_len=5 + _STEPS, stop_token_ids=ids)
    output = at_context.generate(data, greedy=True)
    same(generated(data, output), [stopped.tokens], "greedy tokens, up to the context")
    is_truncated(output, [False])


@check("G6")
def rows_use_all_of_max_new_tokens(ctx: Context) -> None:
    """A row without a stop has exactly max_new_tokens, or what the context leaves it."""
    rows = ctx.certain(15, 9, 12, 4)
    full = random_rows([16], seed=4)[0]
    stopped, word = text_row(ctx)
    prompts = [full, *(row.prompt for row in rows), stopped.prompt, stopped.prompt, full]
    data = ctx.batch(prompts, stop_strings=[None] * 6 + [[word], None])
    generation = ctx.generation(max_model_len=16, max_new_tokens=4)
    output = generation.generate(data, greedy=True)
    own = [row.tokens for row in rows[1:]]
    expected = [[], rows[0].tokens[:1], *own, stopped.tokens, stopped.tokens[:2], []]
    same(generated(data, output), expected, "greedy tokens")
    is_truncated(output, [True] * 6 + [False, True])
    alone = ctx.batch([full])
    output = generation.generate(alone, greedy=True)
    same_tensor(output["output_ids"], alone["input_ids"], "the output of a row without room")
    is_truncated(output, [True])


@check("G6")
def max_new_tokens_may_be_1(ctx: Context) -> None:
    """max_new_tokens=1: one token for each row, and a stop counts all the same."""
    rows = ctx.certain(3, 9, 5)
    stop = rows[1].tokens[0]
    ids = [[row.tokens[0]] for row in rows]
    output = greedy_rows(ctx, rows, ids, max_new_tokens=1, stop_token_ids=[stop])
    is_truncated(output, [row.tokens[0] != stop for row in rows])
    same(output["output_ids"].shape, (3, 10), "shape of output_ids")


@check("G6")
def prompts_up_to_the_context_are_accepted(ctx: Context) -> None:
    """Prompts up to the context are taken and scored right, one token more is refused."""
    config, limit = with_limit(ctx)
    lengths = [limit - 1, limit - 5, limit, limit - 2, limit // 2 + 3]
    data = ctx.prompts(*lengths, seed=6)
    generation = ctx.generation(max_new_tokens=4, **config)
    output = generation.generate(data, greedy=True)
    most = [min(4, limit - length) for length in lengths]
    eos = ctx.oracle().eos_token_ids
    for row, (tokens, count) in enumerate(zip(generated(data, output), most, strict=True)):
        ended = bool(tokens) and tokens[-1] in eos
        require(ended or len(tokens) == count, f"generated tokens of row {row}", count, len(tokens))
        same(bool(output["truncated"][row]), not ended, f"truncated of row {row}")
    scored = declared_logprobs(ctx, data, output)
    ctx.measure_error(output["logprobs"][generated_mask(data, output)], scored, rounding=3)
    with raises(ValueError, "row 1"):
        generation.generate(ctx.prompts(5, limit + 1), greedy=True)


@check("G3", needs=("generation",))
def a_row_without_finite_logprobs_is_named(ctx: Context) -> None:
    """With NaN in keys and values a call's error names a row and the version; a refit ends this."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    weight = policy.model.model.layers[0].input_layernorm.weight
    kept = weight.detach().clone()
    weight.data[0] = torch.nan
    run_refit(policy, engine)
    for greedy in (True, False):
        with raises(RLError, "row", f"version {engine.weights_version}"):
            engine.generate(ctx.prompts(5, 9, 40), greedy=greedy)
    weight.data.copy_(kept)
    run_refit(policy, engine)
    exact(ctx, policy, engine, "finite weights after those", engine.weights_version)
