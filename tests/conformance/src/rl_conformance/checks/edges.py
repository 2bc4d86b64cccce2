"""G2, G4 to G7, G11, G12: the last token, the last position, and what stands at a border."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, generated_mask, random_rows
from rl_conformance.checks.calls import text_row
from rl_conformance.continuations import Continuation, find_row, is_text
from rl_conformance.draws import declared_logprobs
from rl_conformance.expect import NotRun, raises, require, same_tensor
from rl_conformance.registry import check
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import GenerationInterface

#: Steps of the rows whose text is looked at, which is all that their engine may generate.
_STEPS = 4


def _greedy_rows(
    ctx: Context, rows: Sequence[Continuation], expected: Sequence[Sequence[int]], **config: Any
) -> BatchedDataDict[Any]:
    """Greedy output of rows, which must be what is expected, as long as it is, and as likely."""
    stop_strings = config.pop("row_stops", None)
    extra = {} if stop_strings is None else {"stop_strings": stop_strings}
    data = ctx.batch([row.prompt for row in rows], **extra)
    output = ctx.generation(**config).generate(data, greedy=True)
    got, wanted = generated(data, output), [list(tokens) for tokens in expected]
    require(got == wanted, f"got {got}, expected {wanted}; stop strings {stop_strings}")
    lengths = torch.tensor([len(tokens) for tokens in wanted])
    same_tensor(output["generation_lengths"], lengths, "generation_lengths")
    scored = declared_logprobs(ctx, data, output)
    ctx.measure_error(output["logprobs"][generated_mask(data, output)], scored, rounding=1.5)
    return output


def _truncated(output: BatchedDataDict[Any], expected: list[bool]) -> None:
    got = output["truncated"].tolist()
    require(got == expected, f"truncated is {got}, expected {expected}")


# -- layout ----------------------------------------------------------------------------------------


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
    require(got == expected, f"got {got}, expected {expected}; the pad token is {pad}")
    outside = torch.arange(13) >= output["unpadded_sequence_lengths"][:, None]
    require((output["output_ids"][outside] == pad).all(), f"rows are not padded with {pad}")


# -- the length limit ------------------------------------------------------------------------------


@check("G5")
def a_stop_on_the_last_token_is_a_stop(ctx: Context) -> None:
    """A row that meets its stop with the last token it may generate is not truncated."""
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
    output = _greedy_rows(ctx, rows, expected, row_stops=stops, max_new_tokens=_STEPS)
    _truncated(output, [True, False, True, True])
    # The same with a stop token, once at the limit of tokens and once at that of the context.
    unmet = next(t for t in range(3, 250) if not any(t in row.tokens for row in rows))
    ids = [unmet, stopped.tokens[-1]]
    cut = [tokens[: (*tokens, ids[1]).index(ids[1]) + 1] for tokens in expected]
    met = [ids[1] in tokens for tokens in expected]
    output = _greedy_rows(ctx, rows, cut, max_new_tokens=_STEPS, stop_token_ids=ids)
    _truncated(output, [not one for one in met])
    data = ctx.batch([stopped.prompt])
    at_context = ctx.generation(max_model_len=5 + _STEPS, stop_token_ids=ids)
    output = at_context.generate(data, greedy=True)
    require(generated(data, output) == [stopped.tokens], f"got {generated(data, output)}")
    _truncated(output, [False])


@check("G6")
def every_token_that_is_allowed_comes(ctx: Context) -> None:
    """A row that meets no stop has exactly max_new_tokens, or what the context leaves it."""
    rows = ctx.certain(15, 9, 12, 4)
    full = random_rows([16], seed=4)[0]
    stopped, word = text_row(ctx)
    prompts = [full, *(row.prompt for row in rows), stopped.prompt, stopped.prompt, full]
    data = ctx.batch(prompts, stop_strings=[None] * 6 + [[word], None])
    generation = ctx.generation(max_model_len=16, max_new_tokens=4)
    output = generation.generate(data, greedy=True)
    own = [row.tokens for row in rows[1:]]
    expected = [[], rows[0].tokens[:1], *own, stopped.tokens, stopped.tokens[:2], []]
    require(generated(data, output) == expected, f"got {generated(data, output)}, not {expected}")
    _truncated(output, [True] * 6 + [False, True])
    alone = ctx.batch([full])
    output = generation.generate(alone, greedy=True)
    same_tensor(output["output_ids"], alone["input_ids"], "the output of a row without room")
    _truncated(output, [True])


@check("G6")
def one_token_is_a_generation(ctx: Context) -> None:
    """max_new_tokens=1: one token for each row, and a stop counts all the same."""
    rows = ctx.certain(3, 9, 5)
    stop = rows[1].tokens[0]
    ids = [[row.tokens[0]] for row in rows]
    output = _greedy_rows(ctx, rows, ids, max_new_tokens=1, stop_token_ids=[stop])
    _truncated(output, [row.tokens[0] != stop for row in rows])
    require(output["output_ids"].shape == (3, 10), f"it has shape {output['output_ids'].shape}")


@check("G6")
def the_model_s_own_context_is_the_limit(ctx: Context) -> None:
    """Prompts up to the context are taken and scored right, one token more is refused."""
    config, limit = _with_limit(ctx)
    lengths = [limit - 1, limit - 5, limit, limit - 2, limit // 2 + 3]
    data = ctx.prompts(*lengths, seed=6)
    generation = ctx.generation(max_new_tokens=4, **config)
    output = generation.generate(data, greedy=True)
    most = [min(4, limit - length) for length in lengths]
    eos = ctx.oracle().eos_token_ids
    for row, (tokens, count) in enumerate(zip(generated(data, output), most, strict=True)):
        ended = bool(tokens) and tokens[-1] in eos
        require(ended or len(tokens) == count, f"row {row} has {len(tokens)} tokens, not {count}")
        require(bool(output["truncated"][row]) != ended, f"row {row} is wrongly truncated")
    scored = declared_logprobs(ctx, data, output)
    ctx.measure_error(output["logprobs"][generated_mask(data, output)], scored, rounding=3)
    with raises(ValueError, "row 1"):
        generation.generate(ctx.prompts(5, limit + 1), greedy=True)


def _with_limit(ctx: Context) -> tuple[dict[str, Any], int]:
    """A context that is quickly filled: the model's, unless that is a large one."""
    context = ctx.oracle().context
    return ({}, context) if context <= 512 else ({"max_model_len": 256}, 256)


@check("G11")
def far_positions_agree_with_the_reference(ctx: Context) -> None:
    """Long prompts and long generations have the reference's log-probs to the end."""
    config, limit = _with_limit(ctx)
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
    require((expected < least).sum() >= 3, "no token is unlikely enough; the tokens are not drawn")
    ctx.measure_error(output["logprobs"][inside], expected, scale=scale, rounding=5)


def _hot(ctx: Context, temperature: float, scale: float) -> tuple[Path, GenerationInterface]:
    """A model whose logits are far apart, and an engine that draws from all of them."""
    path = ctx.model("qwen2", weight_scale=scale * 7.0)
    config: dict[str, Any] = {"model_name": str(path), "max_new_tokens": 4}
    return path, ctx.generation(temperature=temperature, logprobs_mode="raw", **config)


# -- stops -----------------------------------------------------------------------------------------


@check("G7")
def any_of_several_stop_tokens_ends_a_row(ctx: Context) -> None:
    """The second and the third stop token end rows as the first does, repeated ones too."""
    rows = ctx.certain(3, 9, 5)
    ids = [rows[0].tokens[3], rows[1].tokens[2], rows[2].tokens[0], rows[1].tokens[2]]
    expected = [_until(row.tokens, ids) for row in rows]
    output = _greedy_rows(ctx, rows, expected, max_new_tokens=4, stop_token_ids=ids)
    _truncated(output, [False] * 3)


def _until(tokens: Sequence[int], ids: Sequence[int]) -> list[int]:
    """The tokens up to the first that is one of the ids."""
    end = next((n for n, token in enumerate(tokens, 1) if token in ids), len(tokens))
    return list(tokens[:end])


@check("G7")
def a_stop_token_of_the_prompt_stops_nothing(ctx: Context) -> None:
    """Prompts may hold and end with stop tokens, the model's own included."""
    oracle, lead = ctx.oracle(), ctx.lead
    plain = ctx.certain(5)[0]
    special = (oracle.eos_token_id, plain.tokens[-1])
    rows = [plain]
    for token in (*special, oracle.pad_token_id, oracle.vocab_size - 1, 0):
        row = find_row(
            oracle,
            6,
            steps=4,
            lead=lead,
            edit=lambda ids, token=token: [ids[0], token, *ids[2:5], token],  # type: ignore[misc]
            accept=lambda tokens, _: not set(tokens) & set(special),
        )
        rows.append(row)
    expected = [_until(plain.tokens, special), *(row.tokens for row in rows[1:])]
    output = _greedy_rows(ctx, rows, expected, max_new_tokens=4, stop_token_ids=[special[1]])
    _truncated(output, [False, *[True] * 5])


@check("G7", cases={"model": {"of_model": True}, "config": {"of_model": False}})
def every_end_of_sequence_token_ends_a_row(ctx: Context, of_model: bool) -> None:
    """All of the model's own, or those of eos_token_id in their place."""
    rows = ctx.certain(3, 9, 5)
    ids = [ctx.oracle().eos_token_id, rows[0].tokens[1], rows[2].tokens[2]]
    config: dict[str, Any] = {"eos_token_id": ids}
    if of_model:
        if ctx.settings.model is not None:
            raise NotRun("the model is given, and with it its tokens", excused=True)
        config = {"model_name": str(ctx.model("qwen2", eos_token_id=ids))}
    expected = [_until(row.tokens, ids) for row in rows]
    output = _greedy_rows(ctx, rows, expected, max_new_tokens=4, **config)
    _truncated(output, [set(ids).isdisjoint(tokens) for tokens in expected])


@check("G7")
def no_stop_strings_are_no_stop_strings(ctx: Context) -> None:
    """Empty lists, None and no column mean the same."""
    rows = ctx.certain(3, 9, 5)
    expected = [row.tokens for row in rows]
    config: dict[str, Any] = {"max_new_tokens": 4, "stop_strings": [], "stop_token_ids": []}
    ways: tuple[list[Any] | None, ...] = ([[], None, []], [None] * 3, None)
    for stops in ways:
        _truncated(_greedy_rows(ctx, rows, expected, row_stops=stops, **config), [True] * 3)


@check("G7")
def each_row_ends_at_the_first_of_its_strings(ctx: Context) -> None:
    """Rows with lists of their own end where these say: by any entry, at the earliest match."""
    oracle = ctx.oracle()

    def all_text(tokens: list[int], words: list[str]) -> bool:
        texts = ["".join(words[:n]) for n in range(4)]
        return is_text(words[1:]) and all(w not in t for w, t in zip(words, texts, strict=True))

    row = find_row(oracle, 5, steps=_STEPS, lead=ctx.lead, accept=all_text)
    words = [oracle.tokenizer.decode([token]) for token in row.tokens]
    none = "no text has this in it"
    stops_and_lengths: list[tuple[list[str] | None, int]] = [
        ([none, words[2]], 3),
        (None, 4),
        ([words[3], words[1]], 2),
        ([words[1], words[3]], 2),
        ([none], 4),
        ([none, none + "!", words[1] + words[2] + words[3]], 4),
        ([words[1] + words[2]], 3),
        ([], 4),
    ]
    output = _greedy_rows(
        ctx,
        [row] * len(stops_and_lengths),
        [row.tokens[:length] for _, length in stops_and_lengths],
        row_stops=[stops for stops, _ in stops_and_lengths],
        max_new_tokens=_STEPS,
    )
    at_the_end = words[1] + words[2] + words[3]
    _truncated(output, [n == 4 and at_the_end not in (s or ()) for s, n in stops_and_lengths])


@check("G7")
def a_match_within_a_token_ends_the_row(ctx: Context) -> None:
    """A string that a token holds in its midst or at its start ends the row; the token is whole."""
    oracle = ctx.oracle()

    def accept(_: list[int], words: list[str]) -> bool:
        return is_text(words[2:3]) and len(words[2]) > 1 and words[2][0] not in words[0] + words[1]

    row = find_row(oracle, 5, steps=_STEPS, lead=ctx.lead, accept=accept)
    first = oracle.tokenizer.decode(row.tokens[2:3])[0]
    expected = [row.tokens[:3], row.tokens]
    output = _greedy_rows(
        ctx, [row] * 2, expected, row_stops=[[first], None], max_new_tokens=_STEPS
    )
    _truncated(output, [False, True])


@check("G7")
def the_prompt_s_text_completes_no_match(ctx: Context) -> None:
    """A string of the prompt, or across its end, does not end a row."""
    oracle = ctx.oracle()
    decode = oracle.tokenizer.decode
    letter = oracle.tokenizer.convert_tokens_to_ids("Q")

    def clear(tokens: list[int], words: list[str]) -> bool:
        return is_text(words[:1]) and "Q" not in decode(tokens)

    row = find_row(
        oracle,
        6,
        steps=_STEPS,
        lead=ctx.lead,
        edit=lambda ids: [*ids[:4], letter, letter],
        accept=clear,
    )
    across = "Q" + decode(row.tokens[:1])
    output = _greedy_rows(
        ctx,
        [row] * 3,
        [row.tokens] * 3,
        row_stops=[["Q"], [across], ["QQ", "Q" + across]],
        max_new_tokens=_STEPS,
    )
    _truncated(output, [True] * 3)


# -- refused ---------------------------------------------------------------------------------------


@check(
    "G1",
    cases={"last_id_plus_one": {"beyond": 0}, "far_above": {"beyond": 1000}, "negative": {}},
)
def a_token_that_does_not_exist_is_refused(ctx: Context, beyond: int | None = None) -> None:
    """An id outside the vocabulary raises ValueError naming the row."""
    data = ctx.prompts(4, 4, 4)
    data["input_ids"][1, 2] = -1 if beyond is None else ctx.oracle().vocab_size + beyond
    with raises(ValueError, "row 1"):
        ctx.generation().generate(data, greedy=True)


@check("G1")
def a_mask_with_a_hole_is_refused(ctx: Context) -> None:
    """Zeros between ones raise ValueError naming the row, with lengths beside them and without."""
    data = ctx.prompts(6, 6, 6)
    data["attention_mask"] = torch.ones(3, 6, dtype=torch.int64)
    data["attention_mask"][2, 3] = 0
    with raises(ValueError, "row 2"):
        ctx.generation().generate(data, greedy=True)
    del data["input_lengths"]
    with raises(ValueError, "row 2"):
        ctx.generation().generate(data, greedy=True)
