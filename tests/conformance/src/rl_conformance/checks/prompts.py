"""G1, G2, G3, G5, G6, G7, G12: what goes in, what comes out, and where a row ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, generated_mask, pad_rows
from rl_conformance.continuations import find_stop, find_stop_string
from rl_conformance.draws import declared_logprobs
from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.registry import check
from rl_core.batch import BatchedDataDict

if TYPE_CHECKING:
    from rl_conformance.context import Context

_OUTPUT_KEYS = {
    "output_ids",
    "generation_lengths",
    "unpadded_sequence_lengths",
    "logprobs",
    "truncated",
    "weights_version",
    "weights_origin",
}


@check("G1")
def mask_replaces_lengths(ctx: Context) -> None:
    """A right-padded attention_mask says the same as input_lengths."""
    data = ctx.batch([row.prompt for row in ctx.certain(3, 9, 5)])
    by_length = ctx.generation(max_new_tokens=4).generate(data, greedy=True)
    positions = torch.arange(data["input_ids"].shape[1])
    mask = (positions < data["input_lengths"][:, None]).long()
    masked: BatchedDataDict[Any] = BatchedDataDict(
        {"input_ids": data["input_ids"], "attention_mask": mask}
    )
    by_mask = ctx.generation(max_new_tokens=4).generate(masked, greedy=True)
    same_tensor(by_mask["output_ids"], by_length["output_ids"], "output_ids")


@check("G1")
def a_prompt_may_end_with_padding_tokens(ctx: Context) -> None:
    """What the mask counts is the prompt, also where its last tokens are those that fill rows."""
    pad = ctx.oracle().pad_token_id
    data = ctx.batch([[5, 9, 12, pad], [7, 8], [pad, 6, pad, pad], [11, 12, 13, 14, 15, 16, pad]])
    lengths = data.pop("input_lengths")
    data["attention_mask"] = (torch.arange(7) < lengths[:, None]).long()
    output = ctx.generation(max_new_tokens=4).generate(data, greedy=True)
    kept = output["unpadded_sequence_lengths"] - output["generation_lengths"]
    same_tensor(kept, lengths, "unpadded_sequence_lengths - generation_lengths")
    real = torch.arange(7) < lengths[:, None]
    same_tensor(output["output_ids"][:, :7][real], data["input_ids"][real], "the prompts")


@check("G1")
def left_padding_is_refused(ctx: Context) -> None:
    """A left-padded row raises ValueError naming the row."""
    data = ctx.prompts(6, 4, 6)
    data["input_ids"][1] = data["input_ids"][1].roll(2)
    with raises(ValueError, "row 1"):
        ctx.generation().generate(data, greedy=True)


@check("G1")
def left_padded_mask_is_refused(ctx: Context) -> None:
    """A left-padded attention_mask raises ValueError naming the row."""
    data = ctx.prompts(6, 6, 6)
    mask = torch.ones(3, 6, dtype=torch.int64)
    mask[2, :2] = 0
    masked = BatchedDataDict[Any]({"input_ids": data["input_ids"], "attention_mask": mask})
    with raises(ValueError, "row 2"):
        ctx.generation().generate(masked, greedy=True)


@check(
    "G1",
    cases={
        "zero": {"lengths": [4, 0], "row": "row 1"},
        "negative": {"lengths": [-1, 4], "row": "row 0"},
        "beyond_the_width": {"lengths": [4, 5], "row": "row 1"},
    },
)
def impossible_length_is_refused(ctx: Context, lengths: list[int], row: str) -> None:
    """A length of 0, below it or above the width raises ValueError naming the row."""
    data = ctx.prompts(4, 4)
    data["input_lengths"] = torch.tensor(lengths)
    with raises(ValueError, row):
        ctx.generation().generate(data, greedy=True)


@check("G1")
def mask_and_lengths_must_agree(ctx: Context) -> None:
    """Lengths that contradict the mask raise ValueError naming the row."""
    data = ctx.prompts(4, 4)
    data["attention_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with raises(ValueError, "row 1"):
        ctx.generation().generate(data, greedy=True)


@check("G2")
def output_is_prompt_then_tokens_then_padding(ctx: Context) -> None:
    """The prompt is unchanged and padding fills the right."""
    data = ctx.prompts(3, 9, 5)
    output = ctx.generation().generate(data, greedy=True)
    ids, pad = output["output_ids"], ctx.oracle().pad_token_id
    for row, length in enumerate(data["input_lengths"].tolist()):
        end = int(output["unpadded_sequence_lengths"][row])
        same_tensor(ids[row, :length], data["input_ids"][row, :length], f"prompt of row {row}")
        require((ids[row, end:] == pad).all(), f"row {row} is not padded with {pad} after {end}")


@check("G2")
def lengths_add_up(ctx: Context) -> None:
    """unpadded = input + generated, and the width is the longest row."""
    data = ctx.prompts(3, 9, 5)
    output = ctx.generation().generate(data, greedy=True)
    ends = data["input_lengths"] + output["generation_lengths"]
    same_tensor(output["unpadded_sequence_lengths"], ends, "unpadded_sequence_lengths")
    require(output["output_ids"].shape == (3, int(ends.max())), "the width is not the longest row")
    require((output["generation_lengths"] > 0).all(), "a row with room generated nothing")


@check("G2")
def output_has_the_declared_types(ctx: Context) -> None:
    """Every key is there, on the CPU, of its dtype."""
    output = ctx.generation().generate(ctx.prompts(3, 5), greedy=True)
    require(set(output) >= _OUTPUT_KEYS, f"missing keys: {_OUTPUT_KEYS - set(output)}")
    integer = _OUTPUT_KEYS - {"logprobs", "truncated"}
    types = {
        "logprobs": torch.float32,
        "truncated": torch.bool,
        **dict.fromkeys(integer, torch.int64),
    }
    for key, dtype in types.items():
        require(output[key].dtype == dtype, f"{key} is {output[key].dtype}, not {dtype}")
        require(output[key].device.type == "cpu", f"{key} is on {output[key].device}")


@check("G3", cases={"greedy": {"greedy": True}, "sampled": {"greedy": False}})
def logprobs_are_zero_outside_and_negative_inside(ctx: Context, greedy: bool) -> None:
    """0 on prompt and padding; finite and at most 0 on generated tokens."""
    data = ctx.prompts(3, 9, 5)
    output = ctx.generation(seed=3).generate(data, greedy=greedy)
    inside, logprobs = generated_mask(data, output), output["logprobs"]
    require(logprobs.shape == output["output_ids"].shape, "logprobs and output_ids differ in shape")
    require((logprobs[~inside] == 0).all(), "a prompt or padding position is not 0")
    require(logprobs[inside].isfinite().all(), "a generated token's log-prob is not finite")
    require((logprobs[inside] <= 0).all(), "a generated token's log-prob is above 0")
    require((logprobs[inside] < 0).any(), "every log-prob is 0")


@check("G5")
def truncated_tells_length_from_stop(ctx: Context) -> None:
    """A row that ran out of tokens is truncated, one that met a stop token is not."""
    stop = find_stop(ctx.oracle(), 4, ctx.lead)
    data = ctx.batch([stop.prompt, stop.other_prompt])
    generation = ctx.generation(stop_token_ids=[stop.token], max_new_tokens=4)
    output = generation.generate(data, greedy=True)
    require(output["truncated"].tolist() == [False, True], f"truncated is {output['truncated']}")


@check("G6")
def max_new_tokens_is_kept(ctx: Context) -> None:
    """No row generates more than max_new_tokens."""
    output = ctx.generation(max_new_tokens=3).generate(ctx.prompts(2, 9, 5, 7), greedy=True)
    require((output["generation_lengths"] <= 3).all(), "a row is longer than max_new_tokens")


@check("G6")
def context_is_kept(ctx: Context) -> None:
    """A row ends, truncated, where the context does; without room it generates nothing."""
    generation = ctx.generation(max_model_len=16)
    output = generation.generate(ctx.prompts(13, 15, 16), greedy=True)
    lengths = output["generation_lengths"].tolist()
    require(lengths[2] == 0, f"a full prompt generated {lengths[2]} tokens")
    require(lengths[0] <= 3 and lengths[1] <= 1, f"the context of 16 is exceeded: {lengths}")
    require(bool(output["truncated"][2]), "a row without room is not truncated")
    require((output["unpadded_sequence_lengths"] <= 16).all(), "a row is longer than the context")


@check("G6")
def overlong_prompt_is_refused(ctx: Context) -> None:
    """A prompt longer than the context raises ValueError naming the row."""
    with raises(ValueError, "row 1"):
        ctx.generation(max_model_len=16).generate(ctx.prompts(5, 17), greedy=True)


@check("G7")
def stop_token_ends_the_row_and_is_kept(ctx: Context) -> None:
    """A stop token is the last token of its row and of no other."""
    stop = find_stop(ctx.oracle(), 4, ctx.lead)
    data = ctx.batch([stop.prompt, stop.other_prompt])
    generation = ctx.generation(stop_token_ids=[stop.token], max_new_tokens=4)
    rows = generated(data, generation.generate(data, greedy=True))
    require(rows == [stop.tokens, stop.other_tokens], f"got {rows}, the stop is {stop.token}")


@check("G7")
def configured_stop_string_ends_the_row(ctx: Context) -> None:
    """A row ends at the first token that completes a configured string, which is kept."""
    stop = find_stop_string(ctx.oracle(), 8, ctx.lead)
    data = ctx.batch([stop.prompt])
    generation = ctx.generation(stop_strings=[stop.text])
    output = generation.generate(data, greedy=True)
    rows = generated(data, output)
    require(rows == [stop.tokens], f"got {rows}, expected {stop.tokens} for {stop.text!r}")
    require(not output["truncated"][0], "a row ended by a stop string is called truncated")


@check("G7")
def row_stop_strings_stay_in_their_row(ctx: Context) -> None:
    """A string of one row does not end another row that generates the same text."""
    stop = find_stop_string(ctx.oracle(), 8, ctx.lead)
    data = ctx.batch([stop.prompt, stop.prompt], stop_strings=[None, [stop.text]])
    first, second = generated(data, ctx.generation().generate(data, greedy=True))
    require(second == stop.tokens, f"its own row got {second}, expected {stop.tokens}")
    require(len(first) > len(second), "a row without stop strings was ended by its neighbour's")


@check("G7")
def configured_and_row_stop_strings_add_up(ctx: Context) -> None:
    """A row with a string of its own still ends at the configured ones."""
    stop = find_stop_string(ctx.oracle(), 8, ctx.lead)
    generation = ctx.generation(stop_strings=[stop.text])
    data = ctx.batch([stop.prompt], stop_strings=[["no text has this in it"]])
    rows = generated(data, generation.generate(data, greedy=True))
    require(rows == [stop.tokens], f"got {rows}, expected {stop.tokens}")


@check("G12")
def one_row(ctx: Context) -> None:
    """A batch of one row."""
    output = ctx.generation().generate(ctx.prompts(5), greedy=True)
    require(output["output_ids"].shape[0] == 1, "one row did not come back as one")


@check("G12")
def many_rows(ctx: Context) -> None:
    """320 rows come back, in order, each with the log-probs that it has alone.

    More than engines compute at once: some take the place of others that were longer.
    """
    data = ctx.prompts(*[4, 6, 3, 5] * 16, *[2, 1] * 8).select_indices(list(range(80)) * 4)
    output = ctx.generation(max_new_tokens=2).generate(data, greedy=True)
    width = data["input_ids"].shape[1]
    real = torch.arange(width) < data["input_lengths"][:, None]
    got = output["output_ids"][:, :width]
    require(got.shape[0] == data.size, f"{got.shape[0]} rows came back, of {data.size}")
    require(torch.equal(got[real], data["input_ids"][real]), "rows came back out of order")
    expected = declared_logprobs(ctx, data, output)
    ctx.measure_error(output["logprobs"][generated_mask(data, output)], expected, rounding=1.5)


@check("G12")
def very_different_lengths(ctx: Context) -> None:
    """One-token prompts beside long ones get what they get alone."""
    rows = ctx.certain(1, 100, 2, 1, 61)
    data = ctx.batch([row.prompt for row in rows])
    got = generated(data, ctx.generation(max_new_tokens=4).generate(data, greedy=True))
    expected = [row.tokens for row in rows]
    require(got == expected, f"got {got}, expected {expected}")


@check("G12")
def extra_keys_are_carried_through(ctx: Context) -> None:
    """Unknown keys come back unchanged, row for row."""
    extra = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    data = ctx.prompts(3, 9, 5, score=extra, label=["a", "b", "c"])
    output = ctx.generation().generate(data, greedy=True)
    same_tensor(output["score"], extra, "the extra tensor")
    require(output["label"] == ["a", "b", "c"], f"the extra list became {output['label']}")


@check("G12")
def input_is_left_alone(ctx: Context) -> None:
    """generate does not write into its input."""
    data = ctx.prompts(3, 9, 5)
    ids, lengths = data["input_ids"].clone(), data["input_lengths"].clone()
    ctx.generation().generate(data, greedy=True)
    same_tensor(data["input_ids"], ids, "input_ids")
    same_tensor(data["input_lengths"], lengths, "input_lengths")


@check("G12")
def empty_batch(ctx: Context) -> None:
    """No rows in, no rows out, with every key."""
    output = ctx.generation().generate(pad_rows([]), greedy=True)
    require(set(output) >= _OUTPUT_KEYS, f"missing keys: {_OUTPUT_KEYS - set(output)}")
    sizes = {key: len(output[key]) for key in _OUTPUT_KEYS}
    require(not any(sizes.values()), f"an empty batch came back with rows: {sizes}")
