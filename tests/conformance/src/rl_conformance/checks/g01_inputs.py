"""G1 and G12: prompts, and how many and how long they are."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, generated_mask, pad_rows
from rl_conformance.checks.common import OUTPUT_KEYS, Witness
from rl_conformance.draws import declared_logprobs
from rl_conformance.expect import raises, same, same_tensor
from rl_conformance.registry import check
from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError, RLError

if TYPE_CHECKING:
    from rl_conformance.context import Context


@check("G1")
def mask_replaces_lengths(ctx: Context) -> None:
    """A right-padded attention_mask has the effect of input_lengths."""
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


@check("G12")
def one_row(ctx: Context) -> None:
    """A batch of one row."""
    output = ctx.generation().generate(ctx.prompts(5), greedy=True)
    same(output["output_ids"].shape[0], 1, "rows of output_ids")


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
    same(got.shape[0], data.size, "rows of output_ids")
    same(got[real].tolist(), data["input_ids"][real].tolist(), "the prompts in output_ids")
    expected = declared_logprobs(ctx, data, output)
    ctx.measure_error(output["logprobs"][generated_mask(data, output)], expected, rounding=1.5)


@check("G12")
def very_different_lengths(ctx: Context) -> None:
    """One-token prompts beside long ones get what they get alone."""
    rows = ctx.certain(1, 100, 2, 1, 61)
    data = ctx.batch([row.prompt for row in rows])
    got = generated(data, ctx.generation(max_new_tokens=4).generate(data, greedy=True))
    expected = [row.tokens for row in rows]
    same(got, expected, "greedy tokens")


@check("G12")
def extra_keys_are_carried_through(ctx: Context) -> None:
    """Unknown keys come back unchanged, row for row."""
    extra = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    data = ctx.prompts(3, 9, 5, score=extra, label=["a", "b", "c"])
    output = ctx.generation().generate(data, greedy=True)
    same_tensor(output["score"], extra, "the extra tensor")
    same(output["label"], ["a", "b", "c"], "column label of the output")


@check("G12")
def input_is_not_modified(ctx: Context) -> None:
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
    same(sorted(OUTPUT_KEYS - set(output)), [], "keys missing in the output")
    sizes = {key: len(output[key]) for key in OUTPUT_KEYS}
    same(sizes, dict.fromkeys(sizes, 0), "rows of each key, for an empty batch")


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


#: Of the engine that the calls of this module go to. Nothing ends a row by chance.
_CONFIG: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.5, "eos_token_id": []}


@check("G1", timeout_s=240.0)
def a_refused_batch_changes_nothing(ctx: Context) -> None:
    """After a batch with one wrong row, again and again, every call gives what it gave before."""
    generation = ctx.generation(**_CONFIG)
    witness = Witness(ctx, generation)
    left, empty, foreign, long = (ctx.prompts(6, 4, 6) for _ in range(4))
    left["input_ids"][2] = left["input_ids"][2].roll(3)
    left["input_lengths"][2] = 3
    empty["input_lengths"][2] = 0
    foreign["input_ids"][2, 0] = ctx.oracle().vocab_size
    long["input_lengths"][2] = 7
    wrong = {"left_padded": left, "empty": empty, "foreign": foreign, "beyond_its_width": long}
    for what, data in wrong.items():
        for greedy in (True, False):
            with raises(ValueError, "row 2"):
                generation.generate(data, greedy=greedy)
        witness.testify(f"a refused batch ({what})")
    column = ctx.prompts(6, 4)
    column["stop_strings"] = [["e"], [""]]  # an empty string is in every text
    with raises((RLError, ValueError, TypeError)):
        generation.generate(column, greedy=True)
    with raises(ConfigError):
        other = ctx.fresh_generation(max_model_len=ctx.oracle().context + 1)
        other.prepare_for_generation()
        other.generate(ctx.prompts(5), greedy=True)  # a policy may look at its keys only here
    witness.testify("a refused column and a refused configuration")


@check("G12")
def no_input_column_is_modified(ctx: Context) -> None:
    """generate writes into no column of its input, adds none and shares none of its output."""
    generation = ctx.generation(**_CONFIG)
    data = ctx.prompts(3, 9, 5, stop_strings=[["e"], None, []], label=["a", "b", "c"])
    data["attention_mask"] = (torch.arange(9) < data["input_lengths"][:, None]).long()
    data["seed"], data["score"] = torch.arange(3), torch.rand(3, 2)
    before = copy.deepcopy(dict(data))
    for greedy in (True, False):
        output = generation.generate(data, greedy=greedy)
        for key in ("output_ids", "logprobs", "generation_lengths", "unpadded_sequence_lengths"):
            output[key].fill_(3)
        same(sorted(data), sorted(before), "columns of the input after the call")
        for key, value in before.items():
            if isinstance(value, torch.Tensor):
                same_tensor(data[key], value, key)
            else:
                same(data[key], value, f"column {key} of the input after the call")


@check("G12")
def later_calls_do_not_change_an_output(ctx: Context) -> None:
    """Later calls write into no earlier output."""
    generation = ctx.generation(**_CONFIG)
    first = generation.generate(ctx.prompts(3, 9, 5), greedy=True)
    kept = copy.deepcopy(dict(first))
    for seed in (1, 2, 3):
        generation.generate(ctx.prompts(9, 5, 3, seed=seed), greedy=bool(seed % 2))
    for key, value in kept.items():
        if isinstance(value, torch.Tensor):
            same_tensor(first[key], value, key)


@check("G12")
def an_output_can_be_the_next_prompts(ctx: Context) -> None:
    """Columns of an earlier turn that come along make room for those of this one."""
    row = ctx.certain(5)[0]
    generation = ctx.generation(**_CONFIG)
    first = generation.generate(ctx.batch([row.prompt[:3]] * 2), greedy=True)
    again = BatchedDataDict[Any]({**first, **ctx.batch([row.prompt] * 2)})
    output = generation.generate(again, greedy=True)
    same(generated(again, output), [row.tokens] * 2, "greedy tokens")
    alone = generation.generate(ctx.batch([row.prompt] * 2), greedy=True)
    for key in ("logprobs", "truncated", "generation_lengths", "weights_version", "weights_origin"):
        same(output[key].shape, alone[key].shape, f"shape of {key}, without the earlier turn's")
    ctx.measure_error(output["logprobs"], alone["logprobs"])
