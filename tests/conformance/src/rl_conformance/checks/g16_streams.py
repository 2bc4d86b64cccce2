"""G16: rows that come as they finish."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, pad_rows, random_rows
from rl_conformance.checks.common import Witness, read_stream, text_row
from rl_conformance.continuations import find_stop
from rl_conformance.draws import same_draws
from rl_conformance.expect import NotRun, raises, same, same_tensor
from rl_conformance.registry import check
from rl_conformance.served import greedy, same_output

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import GenerationInterface


#: Of the engine that the calls of this module go to. Nothing ends a row by chance.
_CONFIG: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.5, "eos_token_id": []}


async def _collect(
    generation: GenerationInterface, data: BatchedDataDict[Any], greedy: bool = True
) -> list[tuple[int, BatchedDataDict[Any], dict[str, Any]]]:
    """Rows as they were yielded, and copies of them from that moment."""
    return [
        (index, row, copy.deepcopy(dict(row)))
        async for index, row in generation.generate_async(data, greedy)
    ]


def _same_rows(
    ctx: Context,
    data: BatchedDataDict[Any],
    rows: list[tuple[int, BatchedDataDict[Any], dict[str, Any]]],
    whole: BatchedDataDict[Any],
) -> None:
    """Fails unless streamed rows are the rows of a batch, in every column."""
    indices = sorted(index for index, _, _ in rows)
    same(indices, list(range(data.size)), "indices of the yielded rows")
    for index, row, at_once in rows:
        end = int(whole["unpadded_sequence_lengths"][index])
        same(sorted(row), sorted(whole), f"columns of row {index}")
        for key in whole:
            expected = whole[key][index : index + 1]
            if key == "logprobs":
                ctx.measure_error(row[key], expected[:, :end])
            elif key == "output_ids":
                same_tensor(row[key], expected[:, :end], f"{key} of row {index}")
            elif isinstance(expected, torch.Tensor):
                same_tensor(row[key], expected, f"{key} of row {index}")
            else:
                same(row[key], expected, f"{key} of row {index}")
            if isinstance(row[key], torch.Tensor):
                same_tensor(row[key], at_once[key], f"{key} of row {index}, later")


@check("G16")
def every_column_is_streamed(ctx: Context) -> None:
    """Rows with stops of their own, without room and with further columns, as generate has them."""
    row, word = text_row(ctx)
    rows = [each.prompt for each in ctx.certain(3, 9, 5)]
    full = random_rows([16], seed=4)[0]
    data = ctx.batch([full, rows[0], row.prompt, full, rows[1], row.prompt, rows[2]])
    data["stop_strings"] = [None, None, [word], ["e"], [], None, ["no text has this in it"]]
    data["label"], data["score"] = list("abcdefg"), torch.arange(7.0)
    generation = ctx.generation(max_model_len=16, max_new_tokens=4)
    whole = generation.generate(data, greedy=True)
    _same_rows(ctx, data, asyncio.run(_collect(generation, data)), whole)
    for nothing in (pad_rows([full]), pad_rows([])):
        whole = generation.generate(nothing, greedy=True)
        _same_rows(ctx, nothing, asyncio.run(_collect(generation, nothing)), whole)


@check("G16")
def seeded_rows_are_streamed_as_they_are_drawn(ctx: Context) -> None:
    """A row that is streamed draws what it draws in generate."""
    generation, data = ctx.generation(**_CONFIG), ctx.prompts(*[6, 4, 9, 5] * 4)
    data["seed"] = torch.arange(16) * 1000
    drawn = generated(data, generation.generate(data))
    streamed = {i: row for i, row, _ in asyncio.run(_collect(generation, data, greedy=False))}
    lengths = enumerate(data["input_lengths"].tolist())
    rows = [streamed[i]["output_ids"][0, length:].tolist() for i, length in lengths]
    same_draws(ctx, rows, drawn, data["seed"])


@check("G16")
def samples_are_streamed(ctx: Context) -> None:
    """Each sample is a row, with the index that it has in generate."""
    if ctx.manifest.capabilities["generation"]["multi_sample"].level != "full":
        raise NotRun("the backend has no multi_sample", excused=True)
    rows = [row.prompt for row in ctx.certain(3, 9, 5)]
    data = ctx.batch(rows, label=["a", "b", "c"])
    generation = ctx.generation(num_generations=3, max_new_tokens=4)
    whole = generation.generate(data, greedy=True)
    streamed = asyncio.run(_collect(generation, data))
    _same_rows(ctx, data.repeat_interleave(3), streamed, whole)


@check("G16")
def concurrent_streams_do_not_mix_their_rows(ctx: Context) -> None:
    """Two streams that are read in turns have each what generate returns for it."""
    generation = ctx.generation(**_CONFIG)
    batches = [ctx.batch([row.prompt for row in ctx.certain(*n)]) for n in ((3, 9, 5), (4, 60))]
    whole = [generation.generate(data, greedy=True) for data in batches]

    async def both() -> list[Any]:
        return list(await asyncio.gather(*(_collect(generation, data) for data in batches)))

    for data, rows, expected in zip(batches, asyncio.run(both()), whole, strict=True):
        _same_rows(ctx, data, rows, expected)


@check("G16")
def abandoned_streams_leave_nothing_behind(ctx: Context) -> None:
    """Streams that were closed, cancelled or dropped with most rows on their way are forgotten."""
    generation = ctx.generation(**_CONFIG)
    witness = Witness(ctx, generation)
    row, word = text_row(ctx)
    prompts = [row.prompt, *random_rows([5, 20, 9] * 21, seed=5)]
    data = ctx.batch(prompts, stop_strings=[[word], *[None] * (len(prompts) - 1)])

    async def first_row(*, close: bool) -> None:
        stream: Any = generation.generate_async(data, greedy=True)
        async for index, _ in stream:
            if ctx.settings.url is None:  # rows reach a server one after another
                same(index, 0, "index of the first row, which alone has a stop string")
            break
        if close:
            await stream.aclose()

    async def cancelled() -> None:
        task = asyncio.ensure_future(_collect(generation, data, greedy=False))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def never_read() -> None:
        stream: Any = generation.generate_async(data, greedy=True)
        await stream.aclose()

    async def refused() -> None:
        wrong = ctx.prompts(6, 4)
        wrong["input_lengths"][1] = 7
        with raises(ValueError, "row 1"):
            await _collect(generation, wrong)

    for _ in range(2):
        asyncio.run(first_row(close=True))
        asyncio.run(first_row(close=False))
        asyncio.run(cancelled())
    asyncio.run(never_read())
    asyncio.run(refused())
    witness.testify("streams that were not read to their end")


@check("G16")
def streamed_rows_equal_generate(ctx: Context) -> None:
    """The union of the streamed rows is what generate returns."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows], label=["a", "b", "c"])
    generation = ctx.generation(max_new_tokens=4)
    whole = generation.generate(data, greedy=True)
    streamed = dict(read_stream(generation, data))
    same(sorted(streamed), [0, 1, 2], "indices of the yielded rows")
    for index, row in streamed.items():
        end = int(whole["unpadded_sequence_lengths"][index])
        same_tensor(row["output_ids"][0], whole["output_ids"][index, :end], f"row {index}")
        ctx.measure_error(row["logprobs"][0], whole["logprobs"][index, :end])
        same(row["label"], [data["label"][index]], f"label of row {index}")


@check("G16")
def rows_are_yielded_as_they_finish(ctx: Context) -> None:
    """A short row comes before a long one that stands before it."""
    stop = find_stop(ctx.oracle(), 8, ctx.lead)
    generation = ctx.generation(stop_token_ids=[stop.token])
    data = ctx.batch([stop.other_prompt, stop.prompt])
    for _ in range(5):  # rows that reach a server one after another may begin late
        order = [index for index, _ in read_stream(generation, data)]
        if order == [1, 0]:
            break
    same(order, [1, 0], "order of the yielded rows, of which row 1 is the shorter")


@check("G16")
def after_an_abandoned_stream_the_engine_works(ctx: Context) -> None:
    """After a caller stops reading midway, generate works again."""
    generation, data = ctx.generation(), ctx.prompts(3, 9, 5)
    before = greedy(ctx, generation)

    async def first_row_only() -> None:
        stream: Any = generation.generate_async(data, greedy=True)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(first_row_only())
    same_output(ctx, greedy(ctx, generation), before)
