"""G7: what ends a row."""

from __future__ import annotations

from string import ascii_letters
from typing import TYPE_CHECKING, Any

from rl_conformance.batches import generated
from rl_conformance.checks.common import Recital, greedy_rows, is_truncated, text_row
from rl_conformance.continuations import find_row, find_stop, find_stop_string, is_text
from rl_conformance.expect import NotRun, require, same
from rl_conformance.models import make_reciting_model, make_tokenizer
from rl_conformance.registry import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_conformance.context import Context


@check("G7")
def stop_token_ends_the_row_and_is_kept(ctx: Context) -> None:
    """A stop token is the last token of its row and of no other."""
    stop = find_stop(ctx.oracle(), 4, ctx.lead)
    data = ctx.batch([stop.prompt, stop.other_prompt])
    generation = ctx.generation(stop_token_ids=[stop.token], max_new_tokens=4)
    rows = generated(data, generation.generate(data, greedy=True))
    same(rows, [stop.tokens, stop.other_tokens], f"generated tokens, with stop token {stop.token}")


@check("G7")
def configured_stop_string_ends_the_row(ctx: Context) -> None:
    """A row ends at the first token that completes a configured string, which is kept."""
    stop = find_stop_string(ctx.oracle(), 8, ctx.lead)
    data = ctx.batch([stop.prompt])
    generation = ctx.generation(stop_strings=[stop.text])
    output = generation.generate(data, greedy=True)
    rows = generated(data, output)
    same(rows, [stop.tokens], f"generated tokens, with stop string {stop.text!r}")
    is_truncated(output, [False])


@check("G7")
def row_stop_strings_stay_in_their_row(ctx: Context) -> None:
    """A string of one row does not end another row that generates the same text."""
    stop = find_stop_string(ctx.oracle(), 8, ctx.lead)
    data = ctx.batch([stop.prompt, stop.prompt], stop_strings=[None, [stop.text]])
    first, second = generated(data, ctx.generation().generate(data, greedy=True))
    same(second, stop.tokens, f"tokens of row 1, with stop string {stop.text!r}")
    goes_on = len(first) > len(second)
    require(goes_on, "tokens of row 0, without stop strings", f"more than {len(second)}", first)


@check("G7")
def configured_and_row_stop_strings_are_merged(ctx: Context) -> None:
    """A row that has a stop string still ends at the configured ones."""
    stop = find_stop_string(ctx.oracle(), 8, ctx.lead)
    generation = ctx.generation(stop_strings=[stop.text])
    data = ctx.batch([stop.prompt], stop_strings=[["no text has this in it"]])
    rows = generated(data, generation.generate(data, greedy=True))
    same(rows, [stop.tokens], f"generated tokens, with configured stop string {stop.text!r}")


#: Characters of two, three and four bytes, each byte a token.
ACCENT, IDEOGRAPH, FACE = "\u00e9", "\u6f22", "\N{HUGGING FACE}"


#: Tokens of a prompt, and of what is generated.
_PROMPT, _STEPS = 6, 12


@check(
    "G7",
    cases={
        "characters": {"strings": (ACCENT, IDEOGRAPH, FACE)},
        "between_characters": {"strings": (f"t{FACE}", f"{ACCENT}o", f"p{IDEOGRAPH}")},
        "after_stray_bytes": {"strings": ("st", "\ufffdx", ".y", f"x{ACCENT}op")},
    },
)
def stop_strings_are_of_the_generated_text(ctx: Context, strings: Sequence[str]) -> None:
    """Wherever a row begins, it ends where its own tokens, decoded as a whole, hold the string.

    Some begin within the string, or within a character of it: what the prompt has of it is no part
    of the text.
    """
    recital = Recital(ctx)
    starts = range(len(recital.tokens))
    for string in strings:
        recital.check(starts, [string] * len(starts))


#: Tokens that engines generate where a check looks at the text.
_OTHER_STEPS = 4


@check("G7")
def any_of_several_stop_tokens_ends_a_row(ctx: Context) -> None:
    """The second and the third stop token end rows as the first does, repeated ones too."""
    rows = ctx.certain(3, 9, 5)
    ids = [rows[0].tokens[3], rows[1].tokens[2], rows[2].tokens[0], rows[1].tokens[2]]
    expected = [_until(row.tokens, ids) for row in rows]
    output = greedy_rows(ctx, rows, expected, max_new_tokens=4, stop_token_ids=ids)
    is_truncated(output, [False] * 3)


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
    output = greedy_rows(ctx, rows, expected, max_new_tokens=4, stop_token_ids=[special[1]])
    is_truncated(output, [False, *[True] * 5])


@check("G7", cases={"model": {"of_model": True}, "config": {"of_model": False}})
def every_end_of_sequence_token_ends_a_row(ctx: Context, of_model: bool) -> None:
    """All of the model's own, or those of eos_token_id in their place."""
    rows = ctx.certain(3, 9, 5)
    ids = [ctx.oracle().eos_token_id, rows[0].tokens[1], rows[2].tokens[2]]
    config: dict[str, Any] = {"eos_token_id": ids}
    if of_model:
        if ctx.settings.model is not None:
            raise NotRun(
                "with --model, the suite cannot choose the end-of-sequence token", excused=True
            )
        config = {"model_name": str(ctx.model("qwen2", eos_token_id=ids))}
    expected = [_until(row.tokens, ids) for row in rows]
    output = greedy_rows(ctx, rows, expected, max_new_tokens=4, **config)
    is_truncated(output, [set(ids).isdisjoint(tokens) for tokens in expected])


@check("G7")
def empty_stop_strings_stop_nothing(ctx: Context) -> None:
    """Empty lists, None and no column mean the same."""
    rows = ctx.certain(3, 9, 5)
    expected = [row.tokens for row in rows]
    config: dict[str, Any] = {"max_new_tokens": 4, "stop_strings": [], "stop_token_ids": []}
    ways: tuple[list[Any] | None, ...] = ([[], None, []], [None] * 3, None)
    for stops in ways:
        is_truncated(greedy_rows(ctx, rows, expected, row_stops=stops, **config), [True] * 3)


@check("G7")
def each_row_ends_at_the_first_of_its_strings(ctx: Context) -> None:
    """A row ends at the earliest match of any string in its list."""
    oracle = ctx.oracle()

    def all_text(tokens: list[int], words: list[str]) -> bool:
        texts = ["".join(words[:n]) for n in range(4)]
        return is_text(words[1:]) and all(w not in t for w, t in zip(words, texts, strict=True))

    row = find_row(oracle, 5, steps=_OTHER_STEPS, lead=ctx.lead, accept=all_text)
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
    output = greedy_rows(
        ctx,
        [row] * len(stops_and_lengths),
        [row.tokens[:length] for _, length in stops_and_lengths],
        row_stops=[stops for stops, _ in stops_and_lengths],
        max_new_tokens=_OTHER_STEPS,
    )
    at_the_end = words[1] + words[2] + words[3]
    is_truncated(output, [n == 4 and at_the_end not in (s or ()) for s, n in stops_and_lengths])


@check("G7")
def a_match_within_a_token_ends_the_row(ctx: Context) -> None:
    """A string in the middle or at the start of a token ends the row; the token is kept whole."""
    oracle = ctx.oracle()

    def accept(_: list[int], words: list[str]) -> bool:
        return is_text(words[2:3]) and len(words[2]) > 1 and words[2][0] not in words[0] + words[1]

    row = find_row(oracle, 5, steps=_OTHER_STEPS, lead=ctx.lead, accept=accept)
    first = oracle.tokenizer.decode(row.tokens[2:3])[0]
    expected = [row.tokens[:3], row.tokens]
    output = greedy_rows(
        ctx, [row] * 2, expected, row_stops=[[first], None], max_new_tokens=_OTHER_STEPS
    )
    is_truncated(output, [False, True])


@check("G7")
def stop_strings_ignore_the_prompt(ctx: Context) -> None:
    """A string of the prompt, or across its end, does not end a row."""
    oracle = ctx.oracle()
    decode = oracle.tokenizer.decode
    letter = oracle.tokenizer.convert_tokens_to_ids("Q")

    def clear(tokens: list[int], words: list[str]) -> bool:
        return is_text(words[:1]) and "Q" not in decode(tokens)

    row = find_row(
        oracle,
        6,
        steps=_OTHER_STEPS,
        lead=ctx.lead,
        edit=lambda ids: [*ids[:4], letter, letter],
        accept=clear,
    )
    across = "Q" + decode(row.tokens[:1])
    output = greedy_rows(
        ctx,
        [row] * 3,
        [row.tokens] * 3,
        row_stops=[["Q"], [across], ["QQ", "Q" + across]],
        max_new_tokens=_OTHER_STEPS,
    )
    is_truncated(output, [True] * 3)


@check("G7")
def row_stop_strings_do_not_change_the_configuration(ctx: Context) -> None:
    """Stop strings of rows do not find their way into the configured ones."""
    row, word = text_row(ctx)
    strings, ids = ["no text has this in it"], [ctx.oracle().eos_token_id]
    generation = ctx.fresh_generation(max_new_tokens=4, stop_strings=strings, stop_token_ids=ids)
    generation.prepare_for_generation()
    for stops, length in (([word], 2), (None, 4), ([], 4), ([word], 2), (None, 4)):
        data = ctx.batch([row.prompt], stop_strings=[stops])
        got = generated(data, generation.generate(data, greedy=True))[0]
        same(got, row.tokens[:length], f"generated tokens, with stop strings {stops}")
    same(strings, ["no text has this in it"], "the configuration's stop_strings after the calls")
    same(ids, [ctx.oracle().eos_token_id], "the configuration's stop_token_ids after the calls")


@check("G7")
def end_of_sequence_can_be_switched_off(ctx: Context) -> None:
    """With no eos_token_id the model's own token ends no row; with that one alone it does."""
    if ctx.settings.model is not None:
        raise NotRun(
            "with --model, the suite cannot choose the end-of-sequence token", excused=True
        )
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows])
    token = rows[1].tokens[1]
    path = ctx.model("qwen2", eos_token_id=token)
    ways: tuple[tuple[list[int] | int, bool], ...] = (([], False), (token, True))
    for eos, stops in ways:
        generation = ctx.generation(model_name=str(path), eos_token_id=eos, max_new_tokens=4)
        output = generation.generate(data, greedy=True)
        expected = rows[1].tokens
        if stops:
            expected = expected[: expected.index(token) + 1]
        got = generated(data, output)[1]
        same(got, expected, f"tokens of row 1, with eos_token_id={eos}")
        same(
            bool(output["truncated"][1]), not stops, f"truncated of row 1, with eos_token_id={eos}"
        )


@check("G7")
def a_long_string_beside_a_short_one_ends_a_row(ctx: Context) -> None:
    """A match that begins 25 tokens back is found, wherever in the list its string is."""
    tokens = make_tokenizer().encode(ascii_letters)
    path = ctx.workshop.once("letters", lambda: make_reciting_model(ctx.directory(), tokens))
    generation = ctx.generation(model_name=str(path), max_new_tokens=40)
    long, end = ascii_letters[10:35], 34
    stops = [[long], ["!", long], [long, "!"], ["!", long, "??"], ["!"]]
    data = ctx.batch([tokens[:1]] * 5, stop_strings=stops)
    output = generation.generate(data, greedy=True)
    expected = [tokens[1 : end + 1]] * 4 + [tokens[1:41]]
    same(generated(data, output), expected, f"tokens of rows with stop strings {stops}")
    is_truncated(output, [False] * 4 + [True])
